"""Who may speak in a session, and how much may wait in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.api import sessions as scheduler_sessions
from scheduler.api.sessions import COMMANDS_WAITING_MAX, Connections, PassDesk, Sessions
from scheduler.brain.fleet.membership import Membership, Transition
from scheduler.brain.members.enrolment import Member
from scheduler.jobs.ports import SchedulerPorts
from swarm import limits
from swarm.errors import ClocksDiffer, IncompatibleVersion, Refused, RetryElsewhere, StaleMessage
from swarm.pki.names import Principal, Role
from swarm.process.logs import get_logger
from swarm.rpc.guard import CALLER, Caller
from swarm.rpc.session import CONNECTION, Pipe
from swarm.types import NO_JOB, PROTOCOL_VERSION, JobId, PeerId, PeerState
from swarm.wire.messages import Calibrated, Event, FetchRequest, Heartbeat, Hello, Release, StoreHeader, Welcome

PEER = PeerId("p")
HELLO = Hello(PEER, 2, PROTOCOL_VERSION, "0", "at p", "", "cpu", 1, 0, -1, JobId(""), 0, 0)
STATE = StoreHeader(JobId("job"), PEER, 2, 0, 1, 0, 0, "model/model.safetensors")


@dataclass
class Heard:
    """The events that came out of the sessions."""

    events: list[Event] = field(default_factory=list)

    def on_event(self, peer: PeerId, event: Event) -> None:
        self.events.append(event)

    def on_transition(self, transition: Transition) -> None:
        pass


class Transfer:
    """Takes what is stored, and gives the same to everybody."""

    async def held(self, header: StoreHeader) -> int:
        return 0

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        return "stored"

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        yield b"fetched"


@asynccontextmanager
async def sessions(
    heard: Heard,
    connections: Connections | None = None,
    membership: Membership | None = None,
    passes: PassDesk | None = None,
) -> AsyncIterator[Sessions]:
    log = get_logger("test")
    async with asyncio.TaskGroup() as tasks:
        connections, membership = connections or Connections(log), membership or Membership()
        stores = SimpleNamespace(database=SimpleNamespace(epoch=7))
        ports = cast(SchedulerPorts, SimpleNamespace(stores=stores, log=log, wall_s=time.time))
        others: Any = (heard, Transfer())
        yield Sessions(ports, membership, connections, *others, tasks, passes)


@contextmanager
def on_connection(name: str) -> Iterator[None]:
    """What is called within is called on this connection."""
    token = CONNECTION.set(name)
    yield
    CONNECTION.reset(token)


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


class Line:
    """The events of one session, sent when the test says so."""

    def __init__(self, *first: Event) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        for event in first:
            self.send(event)

    def send(self, event: Event) -> None:
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            yield await self._queue.get()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_session_begins_with_a_hello_of_this_protocol() -> None:
    async with sessions(Heard()) as made:
        with pytest.raises(Refused, match="begins with Hello"):
            await anext(aiter(made.attach(aiter(Line(Heartbeat(0))))))
        with pytest.raises(IncompatibleVersion, match=f"speaks {PROTOCOL_VERSION + 2}"):
            await anext(aiter(made.attach(aiter(Line(replace(HELLO, protocol=PROTOCOL_VERSION + 2))))))
        with pytest.raises(StaleMessage):
            await made.store(STATE, nothing())


async def test_commands_carry_the_epoch_and_state_comes_from_those_that_are_attached() -> None:
    membership = Membership()
    async with sessions(Heard(), membership=membership) as made:
        session = aiter(made.attach(aiter(Line(HELLO))))
        assert await anext(session) == (7, Welcome(PEER, 1.0))
        with pytest.raises(Refused, match="does not serve stage 0"):
            await made.store(STATE, nothing())
        membership.assign(PEER, STATE.job, 0, 0.0)
        assert await made.store(STATE, nothing()) == "stored"
        for other in (replace(STATE, stage=1), replace(STATE, job=JobId("another"))):
            with pytest.raises(Refused, match="does not serve stage"):
                await made.store(other, nothing())
        for other in (replace(STATE, incarnation=1), replace(STATE, peer=PeerId("q"))):
            with pytest.raises(StaleMessage, match="has no session"):
                await made.store(other, nothing())
        made.close()
        with pytest.raises(StopAsyncIteration):
            await anext(session)


async def test_a_line_is_measured_by_those_alone_that_were_asked() -> None:
    membership, sent = Membership(), StoreHeader(NO_JOB, PEER, 2, 0, 0, 0, 3)
    wanted = FetchRequest(NO_JOB, 0, "", 0, 3 << 20)
    async with sessions(Heard(), membership=membership) as made:
        with on_connection("line"):
            session = aiter(made.attach(aiter(Line(HELLO))))
            await anext(session)

            async def refused() -> None:
                with pytest.raises(Refused, match="not asked to measure its line"):
                    await made.store(sent, nothing())
                with pytest.raises(Refused, match="not asked to measure its line"):
                    await anext(made.fetch(wanted))

            await refused()
            assert membership.calibrate(asyncio.get_running_loop().time() + 10.0) == PEER
            assert await made.store(sent, nothing()), "a reply without a hash is no end"
            assert [len(chunk) async for chunk in made.fetch(wanted)] == [1 << 20] * 3
            assert await made.store(sent, pieces(b"abc"))
            with pytest.raises(Refused, match="more than the 3 bytes"):
                await made.store(sent, pieces(b"ab", b"cd"))
            with pytest.raises(Refused, match="with 4194305 bytes"):
                await anext(made.fetch(replace(wanted, stop=(4 << 20) + 1)))
            membership.calibrated(PEER, Calibrated(1.0, 1.0, 1.0, 1.0))
            await refused()
            made.close()
            with pytest.raises(StopAsyncIteration):
                await anext(session)


async def test_passes_come_after_the_welcome_and_others_hear_of_who_is_revoked() -> None:
    """A peer that attaches may hold a stage, which the listener gives back to it: then it needs a pass."""
    happened: list[str] = []

    class Desk:
        def welcome(self, peer: PeerId, heartbeat_s: float) -> Welcome:
            return Welcome(peer, heartbeat_s, b"key")

        def renew(self, peer: PeerId) -> None:
            happened.append(f"{peer} has a pass, {len(heard.events)} event was heard")

        def cut_off(self, peer: PeerId) -> None:
            happened.append(f"{peer} is cut off")

    heard = Heard()
    async with sessions(heard) as made:
        guarded = replace(made, _passes=Desk())
        session = aiter(guarded.attach(aiter(Line(HELLO))))
        assert await anext(session) == (7, Welcome(PEER, 1.0, b"key"))
        guarded.revoke(PEER, "stolen")
        assert await anext(session, None) is None
        guarded.revoke(PeerId("away"), "stolen")
    assert happened == ["p has a pass, 1 event was heard", "p is cut off", "away is cut off"]


async def test_a_session_that_was_replaced_is_not_heard_any_more() -> None:
    heard = Heard()
    async with sessions(heard) as made:
        old, new = Line(HELLO), Line(HELLO)
        first, second = aiter(made.attach(aiter(old))), aiter(made.attach(aiter(new)))
        await anext(first)
        old.send(Heartbeat(1))
        await settle()
        await anext(second)
        old.send(Heartbeat(2))
        new.send(Heartbeat(3))
        await settle()
        assert [event.sequence for event in heard.events if isinstance(event, Heartbeat)] == [1, 3]
        with pytest.raises(StopAsyncIteration):
            await anext(first)
        made.close()
        with pytest.raises(StopAsyncIteration):
            await anext(second)


async def test_a_peer_that_does_not_read_its_commands_loses_its_session() -> None:
    connections = Connections(get_logger("test"))
    async with sessions(Heard(), connections) as made:
        session = aiter(made.attach(aiter(Line(HELLO))))
        await anext(session)
        for _ in range(COMMANDS_WAITING_MAX + 1):
            connections.send(PEER, Release(JobId("job"), ""))
        async with asyncio.timeout(30):
            assert len([command async for command in session]) < COMMANDS_WAITING_MAX


async def test_nothing_of_a_revoked_peer_counts_although_it_does_not_read_that_its_session_has_ended() -> None:
    """Its events counted for as long as the end of the session waited behind a command that it did not read."""
    heard, events = Heard(), Pipe[Event](8)
    await events.put(HELLO)
    async with sessions(heard) as made:
        session = aiter(made.attach(events))
        await anext(session)  # and it reads no more
        await events.put(Heartbeat(1))
        while Heartbeat(1) not in heard.events:
            await asyncio.sleep(0)
        made.revoke(PEER, "it was revoked")
        assert made._membership.find(PEER).state is PeerState.GONE
        await events.put(Heartbeat(2))
        events.end()
        with pytest.raises(StopAsyncIteration):
            await anext(session)
    assert Heartbeat(2) not in heard.events


@pytest.mark.parametrize("thief", [replace(HELLO, incarnation=3), HELLO], ids=["newer", "same"])
async def test_nobody_but_its_own_machine_takes_over_the_name_of_a_peer_that_answers(thief: Hello) -> None:
    """Hello with another peer's name ended its session, and locked its process out."""
    membership, now = Membership(), asyncio.get_running_loop().time
    async with sessions(Heard(), membership=membership) as made:
        with on_connection("ipv4:10.0.0.1:4999"):
            await anext(aiter(made.attach(aiter(Line(HELLO)))))
        with on_connection("ipv4:10.0.0.1:5000"):  # the process that dials again is welcome at once
            victim = aiter(made.attach(aiter(Line(HELLO))))
            await anext(victim)
        with on_connection("ipv4:10.6.6.6:5000"):
            with pytest.raises(StaleMessage, match="attached already, and its process answers"):
                await anext(aiter(made.attach(aiter(Line(thief)))))
            assert not (await asyncio.wait({asyncio.ensure_future(_next(victim))}, timeout=0.05))[0]
            membership.tick(now() + 3.0)  # it has been silent
            assert await anext(aiter(made.attach(aiter(Line(thief)))))
        made.close()


async def _next(session: AsyncIterator[object]) -> object:
    return await anext(session, None)


async def test_a_start_in_the_future_is_refused() -> None:
    ahead_s = time.time() + 2 * limits.INCARNATION_AHEAD_S
    async with sessions(Heard()) as made:
        for incarnation in (2**63 - 1, int(ahead_s * 1e9)):
            with pytest.raises(ClocksDiffer, match=r"started in the future.*here it is") as caught:
                await anext(aiter(made.attach(aiter(Line(replace(HELLO, incarnation=incarnation))))))
            assert "clock" in caught.value.hint
        assert await anext(aiter(made.attach(aiter(Line(replace(HELLO, incarnation=time.time_ns()))))))
        made.close()


async def test_files_go_to_and_come_from_the_connection_of_the_session_only() -> None:
    membership, request = Membership(), FetchRequest(STATE.job, 0, "model/config.json", 0, 1)

    async def fetched(made: Sessions, job: JobId = STATE.job) -> list[bytes]:
        return [chunk async for chunk in made.fetch(replace(request, job=job))]

    async with sessions(Heard(), membership=membership) as made:
        with on_connection("ipv4:10.0.0.1:5000"):
            await anext(aiter(made.attach(aiter(Line(HELLO)))))
            with pytest.raises(Refused, match="does not serve job"):
                await fetched(made)
            membership.assign(PEER, STATE.job, 0, 0.0)
            assert await made.store(STATE, nothing()) == "stored"
            assert await fetched(made) == [b"fetched"]
            with pytest.raises(Refused, match="does not serve job"):
                await fetched(made, JobId("another"))
        with on_connection("ipv4:10.6.6.6:5000"):
            with pytest.raises(StaleMessage, match="has no session"):
                await made.store(STATE, nothing())
            with pytest.raises(Refused, match="has no session"):
                await fetched(made)
        made.close()


async def _dial(made: Sessions, hello: Hello, times: int) -> None:
    for _ in range(times):
        await anext(aiter(made.attach(aiter(Line(hello)))))


async def test_peers_and_their_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.api.sessions.PEERS_MAX", 3)
    monkeypatch.setattr("scheduler.api.sessions.SESSIONS_PER_S", 8.0)  # so a slow machine does not fill it up meanwhile
    monkeypatch.setattr("scheduler.api.sessions.SESSIONS_OF_ONE_AT_ONCE", 10_000)
    async with sessions(Heard()) as made:
        for number in range(3):
            await anext(aiter(made.attach(aiter(Line(replace(HELLO, peer=PeerId(f"p-{number}")))))))
        with pytest.raises(Refused, match="3 stage servers are known"):
            await anext(aiter(made.attach(aiter(Line(HELLO)))))
        again = replace(HELLO, peer=PeerId("p-1"))
        with pytest.raises(RetryElsewhere, match="at once"):
            await _dial(made, again, limits.SESSIONS_AT_ONCE + 200)
        await asyncio.sleep(0.2)
        assert await anext(aiter(made.attach(aiter(Line(again)))))
        made.close()


async def test_one_that_dials_without_end_takes_no_sessions_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes joined the job at work and was lost again, and the log had six lines of each."""
    monkeypatch.setattr("scheduler.api.sessions.SESSIONS_OF_ONE_PER_S", 0.001)
    heard = Heard()
    async with sessions(heard) as made:
        await _dial(made, HELLO, limits.SESSIONS_OF_ONE_AT_ONCE)
        with pytest.raises(RetryElsewhere, match="too many sessions of p begin"):
            await _dial(made, HELLO, 1)
        assert len(heard.events) == limits.SESSIONS_OF_ONE_AT_ONCE
        assert await anext(aiter(made.attach(aiter(Line(replace(HELLO, peer=PeerId("another")))))))
        made.close()


# Who says who he is ---------------------------------------------------------------------------------------------------


@contextmanager
def called_by(name: str) -> Iterator[None]:
    """What is called within is called by the stage server with a certificate of this name."""
    token = CALLER.set(Caller(Principal("a" * 16, Role.STAGE_SERVER, name), "00"))
    yield
    CALLER.reset(token)


async def test_a_stage_server_goes_by_the_name_in_its_certificate() -> None:
    membership = Membership()
    async with sessions(Heard(), membership=membership) as made:
        with called_by("q"):
            with pytest.raises(Refused, match="stage-server q called itself p"):
                await anext(aiter(made.attach(aiter(Line(HELLO)))))
            with pytest.raises(Refused, match="stage-server q called itself p"):
                await made.store(STATE, nothing())
        assert membership.get(PEER) is None
        with called_by(PEER):
            session = aiter(made.attach(aiter(Line(HELLO))))
            assert await anext(session) == (7, Welcome(PEER, 1.0))
            membership.assign(PEER, STATE.job, 0, 0.0)
            assert await made.store(STATE, nothing()) == "stored"
        made.close()
        with pytest.raises(StopAsyncIteration):
            await anext(session)


async def test_a_stage_server_whose_key_is_good_no_more_dials_again_and_keeps_its_place() -> None:
    membership = Membership()
    async with sessions(Heard(), membership=membership) as made:
        session = aiter(made.attach(aiter(Line(HELLO))))
        await anext(session)
        made.replaced(Member(Role.VIEWER, PEER))
        made.replaced(Member(Role.STAGE_SERVER, "another"))
        await settle()
        made.replaced(Member(Role.STAGE_SERVER, PEER))
        with pytest.raises(StopAsyncIteration):
            await anext(session)
        known = membership.get(PEER)
        assert known is not None
        assert known.state is not PeerState.GONE


NO_DESK: Any = SimpleNamespace(
    welcome=lambda peer, heartbeat_s: Welcome(peer, heartbeat_s), renew=lambda peer: None, cut_off=lambda peer: None
)


@pytest.mark.parametrize(
    ("address", "origin", "is_taken"),
    [
        ("127.0.0.1:7951", "ipv4:127.0.0.1:4000", True),
        ("[::1]:7951", "ipv6:%5B::1%5D:4000", True),
        ("127.0.0.1:7951", "ipv4:10.0.0.4:4000", True),
        ("127.0.0.1:7951", "ipv4:10.0.0.5:4000", False),
        ("[::1]:7951", "ipv4:10.0.0.5:4000", False),
        ("localhost:7951", "ipv4:10.0.0.5:4000", False),
        ("0.0.0.0:7951", "ipv4:127.0.0.1:4000", False),
        ("127.1:7951", "ipv4:127.0.0.1:4000", False),
        ("[fe80::1]:7951", "ipv4:10.0.0.5:4000", False),
        ("10.0.0.5:7951", "ipv4:10.0.0.5:4000", True),
        ("gpu-1.example:7951", "ipv4:10.0.0.5:4000", True),
        ("", "ipv4:10.0.0.5:4000", True),
    ],
)
async def test_nobody_sends_others_to_their_own_loopback(
    monkeypatch: pytest.MonkeyPatch, address: str, origin: str, is_taken: bool
) -> None:
    """Neighbours on other machines dialled their own 127.0.0.1, and showed what listened there their passes."""
    monkeypatch.setattr(scheduler_sessions, "own_addresses", lambda: {"127.0.0.1", "10.0.0.4"})
    async with sessions(Heard(), passes=NO_DESK) as made:
        with on_connection(origin):
            session = aiter(made.attach(aiter(Line(replace(HELLO, address=address)))))
            if is_taken:
                assert await anext(session) == (7, Welcome(PEER, 1.0))
                made.close()
                assert [command async for command in session] == []
            else:
                with pytest.raises(Refused, match="another machine for each that dials") as told:
                    await anext(session)
                assert "--listen or --announce" in told.value.hint
