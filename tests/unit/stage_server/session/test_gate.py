"""How long who is let in may stay, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from stage_server.brain.passes import GRACE_S, PassSlot
from stage_server.session.gate import REFUSAL, PassGate, place_of
from swarm.errors import NoPass, Revoked, StaleMessage, SwarmError
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import parse_job
from swarm.pki.authority import Authority
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.pki.passes import PassKey
from swarm.rpc.passes import issue
from swarm.types import JobId, PeerId
from swarm.wire.messages import CutOff, LoadStage, Pass, Welcome
from tests.support.members import identity_of
from tests.support.sim import loop as sim

KEY = PassKey.new()
OURS = identity_of(Authority.new(1.8e9), Role.STAGE_SERVER, "me")
START = 2.0e9  # the scheduler's clock is ahead of any other
JOB, P = JobId("job"), PeerId("p")
AT = PassSlot(JOB, 0, 1, 2, is_tied=False)
SHOWN = Pass(OURS.cluster, JOB, 0, P, 1, 0, 2, START, START + 600)


def within(story: Callable[[PassGate], Awaitable[None]]) -> list[tuple[str, str]]:
    """What happens at a gate; gives who was turned away, and the codes."""
    denied: list[tuple[str, str]] = []

    async def main() -> None:
        gate = PassGate(Wallet(OURS), lambda: AT, lambda who, error: denied.append((who, error.code)))
        gate.welcomed(Welcome(PeerId("me"), 1.0, KEY.public, START, (CutOff(PeerId("gone"), START),)))
        await story(gate)

    sim.run(main(), seed=1, limit_s=10_000.0)
    return denied


async def stays(gate: PassGate, shown: Pass = SHOWN, key: PassKey = KEY) -> tuple[float, SwarmError | None]:
    """For how many seconds somebody may stay who never leaves, and why no longer."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with gate.enter(issue(key, shown), shown.peer, pulls=False) as entered:
            assert entered == shown
            await asyncio.sleep(5000.0)
    except SwarmError as error:
        return loop.time() - began_s, error
    return loop.time() - began_s, None


def test_a_stream_ends_a_while_after_its_pass_and_none_begins_with_it() -> None:
    async def story(gate: PassGate) -> None:
        stayed_s, error = await stays(gate)
        assert stayed_s == pytest.approx(600 + GRACE_S, abs=0.1)
        assert isinstance(error, NoPass)
        again_s, error = await stays(gate)
        assert (again_s, type(error)) == (0.0, NoPass)
        later = replace(SHOWN, issued_unix_s=START + 700, expires_unix_s=START + 1300)
        assert (await stays(gate, later))[0] == pytest.approx(1300 - 660 + GRACE_S, abs=0.1)

    assert {code for _, code in within(story)} == {"E0508"}


def test_whoever_is_revoked_leaves_at_once_and_comes_back_with_a_newer_pass_only() -> None:
    async def story(gate: PassGate) -> None:
        loop = asyncio.get_running_loop()
        q = replace(SHOWN, peer=PeerId("q"))
        inside, other = asyncio.ensure_future(stays(gate)), asyncio.ensure_future(stays(gate, q))
        await asyncio.sleep(10.0)
        for _ in range(2):  # told twice is told once
            gate.cut_off(CutOff(P, START + 10))
        stayed_s, error = await inside
        assert stayed_s == pytest.approx(10.0, abs=0.1)
        assert isinstance(error, Revoked)
        assert (error.message, error.hint) == (REFUSAL, "")
        assert isinstance((await stays(gate))[1], Revoked)
        newer = asyncio.ensure_future(stays(gate, replace(SHOWN, issued_unix_s=START + 11)))
        await asyncio.sleep(10.0)
        assert not newer.done()
        assert not other.done()
        gate.cut_off(CutOff(P, START + 10))  # of old
        await asyncio.sleep(1.0)
        assert not newer.done()
        for task in (newer, other):
            task.cancel()
        assert loop.time() < 30.0

    assert [code for _, code in within(story)] == ["E0504", "E0504"]


def test_who_was_revoked_before_this_session_is_not_let_in() -> None:
    async def story(gate: PassGate) -> None:
        assert isinstance((await stays(gate, replace(SHOWN, peer=PeerId("gone"))))[1], Revoked)

    within(story)


def test_a_pass_of_another_scheduler_or_place_lets_nobody_in_and_tells_nothing() -> None:
    async def story(gate: PassGate) -> None:
        for shown, key, expected in (
            (SHOWN, PassKey.new(), NoPass),
            (replace(SHOWN, cluster="z" * 16), KEY, NoPass),
            (replace(SHOWN, stages=3), KEY, NoPass),
            (replace(SHOWN, job=JobId("other")), KEY, StaleMessage),
        ):
            stayed_s, error = await stays(gate, shown, key)
            assert (stayed_s, type(error)) == (0.0, expected)
            assert error is not None
            assert error.message == REFUSAL

    assert [who for who, _ in within(story)] == ["p", "p", "p"], "honest ones that come late are no failures"


def test_before_the_first_welcome_nobody_is_let_in() -> None:
    async def main() -> None:
        gate = PassGate(Wallet(OURS), lambda: AT)
        assert isinstance((await stays(gate))[1], NoPass)

    sim.run(main(), seed=1, limit_s=10.0)


def test_what_is_served_is_what_the_scheduler_said_to_load() -> None:
    values = {"name": "t", "model": {"config": {"num_hidden_layers": 2}}, "data": {"source": "x"}}
    for is_tied in (False, True):
        values["model"] = {"config": {"num_hidden_layers": 2, "tie_word_embeddings": is_tied}}
        spec = resolve(parse_job(values), Basis(257, stages=2))
        load = LoadStage(JOB, 3, 1, (1, 1), 0, spec.model_dump_json())
        assert place_of(load) == PassSlot(JOB, 3, 1, 2, is_tied)
    diloco = parse_job(values | {"averaging": {"mode": "diloco"}, "islands": {"count": 4}})
    spec = resolve(diloco, Basis(257, stages=2))
    assert place_of(LoadStage(JOB, 3, 1, (1, 1), 0, spec.model_dump_json())).islands == 4
