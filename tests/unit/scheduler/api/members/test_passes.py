"""Stage servers have a pass before they need it, and never an old one; whoever is revoked has none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

from scheduler.api.members.passes import LOOK_S, PASS_LIFE_S, RENEW_S, Issuer, Passes
from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.registry import JobRegistry
from swarm.pki.passes import PassKey
from swarm.process.logs import get_logger
from swarm.rpc.passes import read
from swarm.types import PROTOCOL_VERSION, JobId, PeerId
from swarm.wire.messages import Command, CutOff, Hello, LoadStage, Pass, Release, TakePass
from tests.support.acts import played
from tests.support.sim import loop as sim

KEY, JOB = PassKey.new(), JobId("job")
P, Q = PeerId("p"), PeerId("q")
UNIX_S = 1.8e9


class Side:
    """Passes of a scheduler with one job of three stages on its timeline 4, and the peers p and q."""

    def __init__(self, *revoked: CutOff, islands: int = 1) -> None:
        self.connections, self.membership = Connections(get_logger("test")), Membership()
        spec = SimpleNamespace(split=(1, 1, 1), island_count=islands)
        peers = {Q: 4} if islands > 1 else {}
        job = SimpleNamespace(record=SimpleNamespace(id=JOB, timeline=4, peers=peers), spec=spec, brain=None)
        registry = SimpleNamespace(get=lambda id: job if id == JOB else None)
        self.wall_s = UNIX_S
        self.passes = Passes(
            Issuer(KEY, "cluster", revoked),
            cast(JobRegistry, registry),
            self.membership,
            self.connections,
            lambda: self.wall_s,
        )
        for peer in (P, Q):
            self.membership.hello(Hello(peer, 7, PROTOCOL_VERSION, "0", "at p", "", "cpu", 1, 0, -1), 0.0)
            self.connections.open(peer, 7)

    def told(self, peer: PeerId) -> list[Command | None]:
        session = self.connections.get(peer)
        assert session is not None
        return [session.commands.get_nowait() for _ in range(session.commands.qsize())]

    def passes_of(self, peer: PeerId) -> list[Pass]:
        return [read(cast(TakePass, command).token, KEY.public) for command in self.told(peer)]


def play(story: Callable[[Side], Awaitable[None]], *revoked: CutOff) -> None:
    async def main() -> None:
        await story(Side(*revoked))

    sim.run(main(), seed=1, limit_s=10_000.0)


at_desk = played(lambda story: play(story))


def load(stage: int) -> LoadStage:
    return LoadStage(JOB, 4, stage, (1, 1, 1), 0, "")


@at_desk
async def test_a_pass_comes_before_the_stage_that_it_is_for(side: Side) -> None:
    release = Release(JOB, "another takes it")
    side.membership.assign(Q, JobId("ended"), 0, 0.0)
    for peer in (P, Q, PeerId("nobody")):
        side.passes.renew(peer)
    side.passes.send(P, release)
    assert (side.told(P), side.told(Q)) == ([release], []), "whoever serves nothing has no pass"
    side.membership.assign(P, JOB, 2, 0.0)
    side.passes.send(P, load(2))
    first, second = side.told(P)
    assert second == load(2)
    assert isinstance(first, TakePass)
    issued = UNIX_S
    assert read(first.token, KEY.public) == Pass("cluster", JOB, 4, P, 7, 2, 3, issued, issued + PASS_LIFE_S)


@at_desk
async def test_passes_are_renewed_long_before_they_end_whatever_the_wall_clock_does(side: Side) -> None:
    keeping = asyncio.ensure_future(side.passes.keep())
    for stage, peer in enumerate((P, Q)):
        side.membership.assign(peer, JOB, stage, 0.0)
        side.passes.send(peer, load(stage))
        side.told(peer)
    await asyncio.sleep(RENEW_S / 2)
    side.wall_s -= 86_400.0  # it was set right
    assert side.told(P) == []
    session = side.connections.get(Q)
    assert session is not None
    side.connections.close(Q, session)
    await asyncio.sleep(RENEW_S / 2 + 2 * LOOK_S)
    (renewed,) = side.passes_of(P)
    assert RENEW_S <= renewed.issued_unix_s - UNIX_S <= RENEW_S + 2 * LOOK_S
    keeping.cancel()


def test_a_revocation_is_told_to_all_others_and_for_a_while_to_those_who_attach() -> None:
    async def story(side: Side) -> None:
        for stage, peer in enumerate((P, Q)):
            side.membership.assign(peer, JOB, stage, 0.0)
        welcome = side.passes.welcome(P, 1.0)
        assert (welcome.pass_key, welcome.unix_s, welcome.cut_off) == (KEY.public, UNIX_S, (recent,))
        side.passes.cut_off(P)
        (order,) = side.told(Q)
        assert order == CutOff(P, UNIX_S)
        assert side.told(P) == []
        assert side.passes.welcome(Q, 1.0).cut_off == (recent, order)
        await asyncio.sleep(2 * PASS_LIFE_S)
        assert side.passes.welcome(Q, 1.0).cut_off == ()

    recent = CutOff(PeerId("r"), UNIX_S - PASS_LIFE_S)
    play(story, recent, CutOff(PeerId("old"), UNIX_S - 86_400.0))


def test_a_pass_names_the_timeline_of_the_island() -> None:
    async def story() -> None:
        side = Side(islands=2)
        side.membership.assign(Q, JOB, 1, 0.0)
        side.passes.send(Q, load(1))
        (shown,) = [read(command.token, KEY.public) for command in side.told(Q) if isinstance(command, TakePass)]
        assert (shown.timeline, shown.stage, shown.stages) == (4 * 2 + 1, 1, 3)

    sim.run(story(), seed=1, limit_s=10.0)
