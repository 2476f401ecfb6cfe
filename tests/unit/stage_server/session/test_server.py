"""Whom a stage server obeys, and when it gives a job up: a scheduler that says what the test wants, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch

from stage_server.device import Device, T, Timed
from stage_server.metrics import StageServerMetrics
from stage_server.ports import BuildStage
from stage_server.session import calibration
from stage_server.session.gate import HeldPasses
from stage_server.session.server import REFUSAL, EventQueue, ServerPorts, ServerSettings, StageServer, urgent_first
from swarm.errors import OutOfMemory, Refused, SchedulerUnreachable, SwarmError
from swarm.job.partition import stage_flops
from swarm.model.stage import Stage
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, Direction, Hop, JobId, Memory, Microbatch, PeerId, Round, UnitName, set_digest
from swarm.wire.messages import (
    Average,
    Averaged,
    Boundary,
    Calibrate,
    Calibrated,
    Command,
    Commit,
    Committed,
    CutOff,
    Event,
    Failed,
    FetchRequest,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    LoadStage,
    Logged,
    Member,
    Release,
    Route,
    Slice,
    StateRequest,
    StoreHeader,
    TakePass,
    UnitRound,
    Welcome,
)
from tests.support.devices import InlineDevice
from tests.support.sim import loop as sim
from tests.support.sim.network import SimNetwork
from tests.support.specs import tiny_spec

JOB = JobId("job")
ADDRESS = "scheduler"


def load(job: JobId = JOB, spec_json: str = "", stages: int = 2) -> LoadStage:
    spec = tiny_spec(stages)
    return LoadStage(job, 0, stages - 1, spec.split, 0, spec_json or spec.model_dump_json())


Script = Callable[["Session"], Awaitable[None]]


@dataclass
class Session:
    """One session as the scheduler sees it; it ends when its script does."""

    hello: Hello
    events: list[Event] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)  # when each of them came
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    _commands: asyncio.Queue[tuple[int, Command] | None] = field(default_factory=asyncio.Queue)

    def send(self, epoch: int, command: Command) -> None:
        self._commands.put_nowait((epoch, command))

    async def heard(self, kind: type[Event]) -> list[Event]:
        """The events of a kind, once there is one."""
        while not any(isinstance(event, kind) for event in self.events):
            await asyncio.sleep(0.01)
        return [event for event in self.events if isinstance(event, kind)]


class Scheduler:
    """Plays its scripts, one for each session."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.hellos: list[Hello] = []
        self.over = asyncio.Event()
        self.failures: list[Exception] = []  # of scripts

    async def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        hello = await anext(events)
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        if not self._scripts:
            self.over.set()
            await asyncio.Event().wait()
        session = Session(hello)
        reading = asyncio.ensure_future(self._read(session, events))
        playing = asyncio.ensure_future(self._play(session))
        try:
            while (command := await session._commands.get()) is not None:
                yield command
            await playing
        finally:
            reading.cancel()
            playing.cancel()

    async def _play(self, session: Session) -> None:
        try:
            await self._scripts.pop(0)(session)
        except Exception as error:
            self.failures.append(error)
        finally:
            session._commands.put_nowait(None)

    async def _read(self, session: Session, events: AsyncIterator[Event]) -> None:
        async for event in events:
            session.events.append(event)
            session.heard_s.append(asyncio.get_running_loop().time())
        session.hung_up.set()

    async def held(self, header: StoreHeader) -> int:
        return 0

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        raise Refused("nothing is stored here")

    def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        raise AssertionError("nothing is fetched here")


def play(
    *scripts: Script,
    orphan_timeout_s: float = 600.0,
    build: BuildStage = Stage,
    beside: Callable[[StageServer], Awaitable[None]] | None = None,
    passes: HeldPasses | None = None,
    told: list[PeerId] | None = None,
    device: Device | None = None,
) -> list[Hello]:
    """What one stage server says of itself at the beginning of each session, and of the one after the last script."""

    async def main() -> list[Hello]:
        network = SimNetwork(Random(0))
        scheduler = Scheduler(*scripts)
        network.add_handler(ADDRESS, scheduler)

        async def find() -> str:
            return ADDRESS

        links = network.peer_links("at p")
        links.revoked = [] if told is None else told
        async with asyncio.TaskGroup() as tasks:
            ports = ServerPorts(
                device or InlineDevice(lambda: 0.01),
                links,
                find,
                lambda address: network.scheduler_link("at p", address),
                tasks,
                StageServerMetrics("0", PROTOCOL_VERSION),
                get_logger("test"),
                passes=passes,
            )
            identity = Hello(PeerId("p"), 1, PROTOCOL_VERSION, "0", "at p", "", "cpu", 1, 1 << 30, -1)
            server = StageServer(identity, ports, ServerSettings(0.5, orphan_timeout_s, build=build))
            serving = tasks.create_task(server.serve())
            if beside is not None:
                await beside(server)
            await scheduler.over.wait()
            serving.cancel()
            await asyncio.wait({serving})
            await network.close()
        for failure in scheduler.failures:
            raise failure
        return scheduler.hellos

    return sim.run(main(), seed=1, limit_s=3600.0)


async def loads(session: Session) -> None:
    session.send(5, Welcome(PeerId("p"), 1.0))
    session.send(5, load())
    assert await session.heard(Loaded)


def test_a_job_outlives_its_session() -> None:
    assert [hello.job for hello in play(loads)] == ["", JOB]


def test_a_replica_of_a_late_island_dials_anew_for_what_it_cannot_fetch() -> None:
    """Its island may still be cut off from the others, so nothing is wrong with it; commands behind are not held up."""
    failed: list[Event] = []

    async def cut_off(session: Session) -> None:
        await loads(session)
        (loaded,) = await session.heard(Loaded)
        rounds = (UnitRound(loaded.units[0].unit, Round(5, 1)),)  # type: ignore[union-attr]
        session.send(5, Commit(0, 0, 1, rounds, 0.0, 1.0, False, (Hop(PeerId("q"), 1, 0, "at q"),), rebases=True))
        await asyncio.sleep(60.0)
        raise AssertionError("it goes on with this session")

    async def reachable(session: Session) -> None:
        assert (session.hello.job, session.hello.version) == (JOB, 0)
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(5, Commit(0, 0, 1, (), 0.0, 0.0, True))
        assert await session.heard(Committed)
        failed.extend(event for event in session.events if isinstance(event, Failed))

    assert [hello.version for hello in play(cut_off, reachable)] == [0, 0, 1]
    assert failed == []


def test_the_gate_hears_of_each_welcome_of_passes_and_of_those_who_are_revoked() -> None:
    heard: list[object] = []
    told: list[PeerId] = []

    class Gate:
        def welcomed(self, welcome: Welcome) -> None:
            heard.append(welcome)

        def take(self, token: bytes) -> None:
            heard.append(token)

        def cut_off(self, order: CutOff) -> None:
            heard.append(order)

    before = (CutOff(PeerId("old"), 5.0), CutOff(PeerId("new"), 95.0))
    welcome, order = Welcome(PeerId("p"), 1.0, bytes(32), 100.0, before), CutOff(PeerId("q"), 101.0)

    async def revokes(session: Session) -> None:
        for command in (welcome, TakePass(b"stage 1"), order):
            session.send(5, command)
        await asyncio.sleep(1.0)

    play(revokes, revokes, passes=Gate(), told=told)
    assert heard == 2 * [welcome, b"stage 1", order]
    assert told == [PeerId("new"), PeerId("q")] * 2, "who was revoked while we were away, but for long ago"
    play(revokes)  # with --insecure


def test_a_stage_server_has_a_place_from_the_order_to_load_until_it_is_released() -> None:
    seen: list[int | None] = []

    async def releases(session: Session) -> None:
        await loads(session)
        await asyncio.sleep(1.0)
        session.send(5, Release(JOB, "it is over"))
        await asyncio.sleep(1.0)

    async def watch(server: StageServer) -> None:
        while len(seen) < 3:
            stage = None if server.place is None else server.place.stage
            seen.extend([stage] if not seen or seen[-1] != stage else [])
            await asyncio.sleep(0.01)

    play(releases, beside=watch)
    assert seen == [None, 1, None]


def out_of_memory(*_: Any, **__: Any) -> Stage:
    raise OutOfMemory("no memory is left")


def broken(*_: Any, **__: Any) -> Stage:
    raise RuntimeError("CUDA error: device-side assert triggered\nsome advice")


class CountingDevice(InlineDevice):
    """Counts how often memory was given back."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.01)
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_the_memory_of_a_job_that_ended_is_given_back() -> None:
    device = CountingDevice()

    async def releases(session: Session) -> None:
        await loads(session)
        assert device.released == 0
        session.send(5, Release(JOB, "it is over"))
        await asyncio.sleep(1.0)
        assert device.released == 1

    play(releases, device=device)


def test_the_memory_of_a_stage_that_could_not_be_loaded_is_given_back() -> None:
    """The scheduler's Release for such a job finds none, so it gives nothing back."""
    held: list[weakref.ref[Stage]] = []

    def too_large(*args: Any, **named: Any) -> Stage:
        stage = Stage(*args, **named)
        held.append(weakref.ref(stage))
        raise OutOfMemory("the device has no memory left")

    class Looks(CountingDevice):
        def release(self) -> None:
            super().release()
            gc.collect()
            assert held[0]() is None, "the stage was still held when memory was given back"

    device = Looks()

    async def fails(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(5, load())
        assert await session.heard(Failed)
        await asyncio.sleep(1.0)
        assert device.released == 1

    play(fails, build=too_large, device=device)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard model that computes in no time."""
    monkeypatch.setattr(calibration, "WIDTH", 32)


async def calibrates(session: Session) -> None:
    session.send(5, Welcome(PeerId("p"), 1.0))
    session.send(5, Calibrate(5.0))


@pytest.mark.usefixtures("narrow")
def test_an_idle_stage_server_says_how_fast_it_is_and_what_it_could_not_measure() -> None:
    async def answers(session: Session) -> None:
        await calibrates(session)
        (found,) = await session.heard(Calibrated)
        assert isinstance(found, Calibrated)
        passed = 16 * 128 * sum(stage_flops(spec, spec.split)) / 0.01  # of the largest microbatch
        assert found.multiply_adds_per_s == pytest.approx(passed)
        assert (found.receipt_s, found.fault) == (0.0, "nothing is stored here")

    spec = calibration.standard(torch.device("cpu"))
    play(answers)


@pytest.mark.usefixtures("narrow")
def test_a_job_takes_a_stage_server_from_its_calibration_at_once() -> None:
    device = CountingDevice()

    async def is_wanted(session: Session) -> None:
        await calibrates(session)
        await asyncio.sleep(0.015)  # the second pass is under way
        began_s = asyncio.get_running_loop().time()
        session.send(5, load())
        assert await session.heard(Loaded)
        assert asyncio.get_running_loop().time() - began_s < 0.2, "it waits for one pass at most"
        session.send(5, Calibrate(5.0))
        await asyncio.sleep(10.0)
        assert not any(isinstance(event, Calibrated) for event in session.events)
        assert device.released == 1

    play(is_wanted, device=device)


@pytest.mark.parametrize(
    ("seconds", "build", "fault"),
    [
        (4.0, Stage, "not done within 2.5 s"),
        (0.01, out_of_memory, "no memory is left"),
        (0.01, broken, "CUDA error: device-side assert triggered"),
    ],
    ids=["slow", "out of memory", "broken"],
)
@pytest.mark.usefixtures("narrow")
def test_a_calibration_that_fails_says_why_and_the_stage_server_goes_on(
    seconds: float, build: BuildStage, fault: str
) -> None:
    async def fails(session: Session) -> None:
        await calibrates(session)
        (found,) = await session.heard(Calibrated)
        assert isinstance(found, Calibrated)
        assert (found.multiply_adds_per_s > 0.0, found.fault.partition("; ")[0]) == (build is Stage, fault)

    async def goes_on(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))

    play(fails, goes_on, build=build, device=InlineDevice(lambda: seconds))


@pytest.mark.usefixtures("narrow")
def test_a_line_is_measured_once_a_pass_that_was_broken_off_has_ended() -> None:
    class Thread(InlineDevice):
        def timed(self, work: Callable[[], T]) -> Awaitable[Timed[T]]:
            return asyncio.shield(super().timed(work))

    sent_s: list[float] = []

    async def store(*_: object) -> str:
        sent_s.append(asyncio.get_running_loop().time())
        raise Refused("nothing is stored here")

    async def main() -> None:
        nothing: Any = None
        device, began_s = Thread(lambda: 4.0), asyncio.get_running_loop().time()
        await calibration.calibrate(Calibrate(5.0), device, Memory(), Stage, nothing, store, (PeerId("p"), 1))
        assert [at_s - began_s for at_s in sent_s] == [8.0], "the second pass was broken off at 6.5 s"

    sim.run(main(), seed=1, limit_s=60.0)


class BusyDevice(InlineDevice):
    """At work for some seconds with what it was given before, once `begin` was called."""

    def begin(self, seconds: float) -> None:
        self._under_way = asyncio.ensure_future(self._after(None, seconds))


def test_a_stage_server_whose_device_goes_on_with_a_released_job_leaves_until_it_is_free() -> None:
    """A cancelled job whose one microbatch took four minutes held the next ones in loading for as long."""
    device = BusyDevice(lambda: 0.01)
    times_s: dict[str, float] = {}

    def clock(what: str) -> None:
        times_s[what] = asyncio.get_running_loop().time()

    async def cancels(session: Session) -> None:
        await loads(session)
        device.begin(240.0)
        clock("cancelled")
        session.send(5, Release(JOB, "cancelled"))
        await asyncio.sleep(1.0)
        session.send(5, load(JobId("next")))
        (leaving,) = await session.heard(Leaving)
        assert "still at work" in leaving.reason  # type: ignore[union-attr]
        clock("left")
        await session.hung_up.wait()

    async def idle(session: Session) -> None:
        clock("back")
        session.send(5, Welcome(PeerId("p"), 1.0))
        await asyncio.sleep(30.0)
        assert not any(isinstance(event, Leaving | Loaded) for event in session.events)

    assert [hello.job for hello in play(cancels, idle, device=device)] == ["", "", ""]
    assert 10.0 <= times_s["left"] - times_s["cancelled"] <= 11.5
    assert 240.0 <= times_s["back"] - times_s["cancelled"] <= 241.0


def test_a_stage_server_whose_device_is_free_before_it_has_left_comes_back_to_stay() -> None:
    """It told of itself that it leaves once more, and no job got it any more."""
    device = BusyDevice(lambda: 0.01)

    async def cancels(session: Session) -> None:
        await loads(session)
        device.begin(12.0)
        session.send(5, Release(JOB, "cancelled"))
        assert await session.heard(Leaving)
        await asyncio.sleep(5.0)  # it takes a while until the session ends

    async def idle(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        await asyncio.sleep(30.0)
        assert not any(isinstance(event, Leaving) for event in session.events)

    assert [hello.job for hello in play(cancels, idle, device=device)] == ["", "", ""]


def test_a_stage_server_whose_device_is_free_soon_serves_the_next_job_in_the_same_session() -> None:
    device = BusyDevice(lambda: 0.01)

    async def cancels(session: Session) -> None:
        await loads(session)
        device.begin(9.0)
        session.send(5, Release(JOB, "cancelled"))
        session.send(5, load(JobId("next")))
        while len(await session.heard(Loaded)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(30.0)
        assert not any(isinstance(event, Leaving) for event in session.events)

    assert [hello.job for hello in play(cancels, device=device)] == ["", "next"]


def test_an_idle_stage_server_that_ends_says_that_it_leaves() -> None:
    """Its session just broke, so the scheduler called it suspect for the whole grace period."""

    async def hears(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        assert await session.heard(Leaving) == [Leaving("SIGTERM")]
        await session.hung_up.wait()

    async def leave(server: StageServer) -> None:
        while not server.is_attached:
            await asyncio.sleep(0.01)
        await server.hang_up("SIGTERM")
        assert not server.is_attached

    play(hears, beside=leave)


def test_commands_of_an_older_scheduler_are_refused() -> None:
    async def older(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(4, load(JobId("old"), spec_json="no spec"))
        session.send(4, Release(JOB, "says the older"))
        session.send(5, load(JobId("new"), spec_json="no spec"))
        assert [event.job for event in await session.heard(Failed)] == ["new"]  # type: ignore[union-attr]

    async def asleep(session: Session) -> None:
        assert session.hello.job == JOB
        session.send(4, Welcome(PeerId("p"), 1.0))
        session.send(4, Release(JOB, "says the older"))
        await asyncio.sleep(5.0)

    assert [hello.job for hello in play(older)] == ["", ""]
    assert [hello.job for hello in play(loads, asleep)] == ["", JOB, JOB]


def test_a_scheduler_with_an_absurd_epoch_does_not_shut_out_the_true_one() -> None:
    """Whoever answered once with the epoch 2^62 was the last scheduler that this process ever obeyed."""

    obeyed: list[JobId] = []

    async def absurd(session: Session) -> None:
        session.send(1 << 62, Welcome(PeerId("p"), 1.0))
        await asyncio.sleep(5.0)

    async def true(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(5, load(JobId("new"), spec_json="no spec"))
        obeyed.extend(event.job for event in await session.heard(Failed))  # type: ignore[union-attr]

    async def far_ahead(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(1 << 30, load(JobId("false"), spec_json="no spec"))
        await asyncio.sleep(5.0)

    play(absurd, true, far_ahead, true)
    assert obeyed == ["new", "new"]


def test_only_the_job_that_is_meant_is_released() -> None:
    async def other(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(5, Release(JobId("other"), "it is over"))
        await asyncio.sleep(1.0)

    async def ours(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(5, Release(JOB, "it is over"))
        await asyncio.sleep(1.0)

    assert [hello.job for hello in play(loads, other, ours)] == ["", JOB, JOB, ""]


def test_a_job_is_given_up_when_no_scheduler_welcomes_its_holder_for_long() -> None:
    async def silent(session: Session) -> None:
        await asyncio.sleep(3.0)

    async def late(session: Session) -> None:
        """The job was given up after the Hello that told of it."""
        assert session.hello.job == JOB
        await asyncio.sleep(3.0)
        session.send(5, Welcome(PeerId("p"), 1.0))
        await asyncio.sleep(10.0)
        assert not session.events, "a session that rests on a job which is gone has begun"

    assert [hello.job for hello in play(loads, silent, orphan_timeout_s=10.0)] == ["", JOB, JOB]
    assert [hello.job for hello in play(loads, silent, orphan_timeout_s=2.0)] == ["", JOB, ""]
    assert [hello.job for hello in play(loads, late, orphan_timeout_s=2.0)] == ["", JOB, ""]


class SlowDevice(InlineDevice):
    """Every piece of work that gives something takes STEP_S, and cannot be interrupted."""

    def run(self, work: Callable[[], Any]) -> Awaitable[Any]:
        result = work()
        return asyncio.shield(asyncio.ensure_future(self._after(result, 0.0 if result is None else STEP_S)))


STEP_S = 4.0  # of a build


def told(*commands: tuple[float, Command]) -> tuple[dict[JobId, float], list[bool]]:
    """When a slow stage server had loaded each job that it was sent, and which of the stages that it built it holds."""
    loaded_s: dict[JobId, float] = {}
    held: list[bool] = []
    built: list[weakref.ref[Stage]] = []

    def build(*arguments: Any, **options: Any) -> Stage:
        made = Stage(*arguments, **options)
        built.append(weakref.ref(made))
        return made

    async def tells(session: Session) -> None:
        began_s = asyncio.get_running_loop().time()
        session.send(5, Welcome(PeerId("p"), 1.0))
        for at_s, command in commands:
            await asyncio.sleep(began_s + at_s - asyncio.get_running_loop().time())
            session.send(5, command)
        await asyncio.sleep(100.0)
        assert not any(isinstance(event, Failed) for event in session.events)
        for heard_s, event in zip(session.heard_s, session.events, strict=True):
            if isinstance(event, Loaded):
                loaded_s[event.job] = heard_s - began_s
        held.extend(stage() is not None for stage in built)

    play(tells, build=build, device=SlowDevice(lambda: STEP_S))
    return loaded_s, held


def test_a_job_that_is_released_while_it_loads_is_let_go_at_once() -> None:
    """A cancelled job kept its memory until its load ended, and the next one waited behind it."""
    load_a, load_b = load(JobId("a"), stages=1), load(JobId("b"), stages=1)
    alone_s = told((1.0, load_b))[0][JobId("b")]
    released_s = 1.5 * STEP_S  # while the stage is being built, one step after the first
    loaded_s, held = told((1.0, load_a), (released_s, Release(JobId("a"), "cancelled")), (released_s, load_b))
    assert list(loaded_s) == ["b"]
    assert loaded_s[JobId("b")] <= 1.0 + 2 * STEP_S + alone_s, "only the step that was under way is waited for"
    assert held == [False, True]


def test_a_release_of_another_job_does_not_disturb_a_load() -> None:
    loaded_s, _ = told((1.0, load(JobId("a"), stages=1)), (2.0, Release(JobId("old"), "over")))
    assert list(loaded_s) == ["a"]


def test_an_ended_job_is_freed_at_once_without_the_garbage_collector() -> None:
    """The records of past commits and the weights were cyclic garbage: 3.4 GB after four jobs at 2 GiB."""
    stages: list[weakref.ref[Stage]] = []

    def build(*arguments: Any, **options: Any) -> Stage:
        made = Stage(*arguments, **options)
        stages.append(weakref.ref(made))
        return made

    async def trains(session: Session) -> None:
        session.send(5, Welcome(PeerId("p"), 1.0))
        session.send(5, load(stages=1))
        (loaded,) = await session.heard(Loaded)
        (unit,) = loaded.units  # type: ignore[union-attr]
        ids = bytes(4 * 32)
        for index in (0, 1):
            route = Route(Microbatch(0, 0, index), 0, (Hop(PeerId("p"), 1, 1, "at p"),), ids, ids)
            session.send(5, route)
        await asyncio.sleep(5.0)
        member = Member(PeerId("p"), 1, "at p", 0, unit.elements, set_digest((0, 1)))
        session.send(5, Average(0, 0, unit.unit, Round(1, 1), (member,), 64, 3.0))
        assert await session.heard(Averaged)
        session.send(5, Commit(0, 0, 1, (UnitRound(unit.unit, Round(1, 1)),), 1e-3, 1.0, False))
        assert await session.heard(Committed)

    async def released(session: Session) -> None:
        """A session that began while the job was at work may not keep it either."""
        session.send(5, Welcome(PeerId("p"), 1.0))
        await asyncio.sleep(5.0)
        assert stages[0]() is not None
        session.send(5, Release(JOB, "it is over"))
        await asyncio.sleep(1.0)
        assert stages[0]() is None

    gc.collect()
    gc.disable()
    try:
        assert [hello.job for hello in play(trains, released, build=build)] == ["", JOB, ""]
    finally:
        gc.enable()


def test_strangers_learn_neither_the_job_nor_its_timeline_and_shape_from_refusals() -> None:
    """A refusal told the job, the timeline and the shape of a boundary tensor: all that a false one has to know."""
    told: list[SwarmError] = []
    at = Microbatch(0, 0, 0)
    right = Boundary(JOB, at, Direction.FORWARD, 1, 1, PeerId("x"), 1, "bfloat16", (2, 16, 24), "int8", 780)
    wrong = [
        replace(right, job=JobId("other")),
        replace(right, microbatch=replace(at, timeline=1)),
        replace(right, stage=0),
        replace(right, shape=(1,)),
        replace(right, codec="none"),
        replace(right, total_bytes=1),
        Slice(JOB, 0, 0, UnitName("x"), Round(1, 1), False, 0, PeerId("x"), 1, "float32", 1, 4),
    ]

    async def script(session: Session) -> None:
        await loads(session)
        for header in wrong:
            with pytest.raises(SwarmError) as refused:
                servers[0].admit(header)
            told.append(refused.value)
        with pytest.raises(SwarmError) as refused:
            await servers[0].give(StateRequest(JOB, 5, 0, "state", 0, 0, 0, PeerId("x"), 1))
        told.append(refused.value)

    servers: list[StageServer] = []

    async def beside(server: StageServer) -> None:
        servers.append(server)

    play(script, beside=beside)
    assert len(told) == len(wrong) + 1
    assert {(error.message, error.hint) for error in told} == {(REFUSAL, "")}
    assert not any(character.isdigit() for character in REFUSAL)


def _line(number: int) -> Logged:
    return Logged(JobId("demo-1"), float(number), "info", f"line {number}")


async def _all(queue: EventQueue) -> list[Event]:
    return [await queue.get() for _ in range(len(queue))]


async def test_log_lines_give_way_and_events_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage server that logs on while its link stands still grew without end."""
    monkeypatch.setattr("stage_server.session.server.LINES_WAITING_MAX", 3)
    queue = EventQueue()
    for number in range(10):
        queue.put(Heartbeat(number))
        queue.put(_line(number))
    seen = await _all(queue)
    assert [event for event in seen if isinstance(event, Heartbeat)] == [Heartbeat(number) for number in range(10)]
    assert [event for event in seen if isinstance(event, Logged)] == [_line(0), _line(1), _line(2)]
    queue.put(_line(10))
    told, last = await _all(queue)
    assert isinstance(told, Logged)
    assert (told.level, told.message) == ("warning", "7 log lines were left out: the link to the scheduler is slow")
    assert last == _line(10)
    queue.put(_line(11))
    assert await _all(queue) == [_line(11)]


async def test_a_reader_waits_for_the_next_event() -> None:
    queue = EventQueue()
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not reader.done()
    queue.put(Heartbeat(1))
    assert await reader == Heartbeat(1)


FIRST, SECOND = Release(JobId("a"), ""), Release(JobId("b"), "")
URGENT = CutOff(PeerId("p"), 1.0)


class ShortSession:
    """Gives commands with a second between, then ends in its way."""

    def __init__(self, *commands: Command, end: Exception | None = None) -> None:
        self._commands, self._end = commands, end
        self.closed = False

    async def attach(self) -> AsyncGenerator[tuple[int, Command], None]:
        try:
            for command in self._commands:
                yield 5, command
                await asyncio.sleep(1.0)
            if self._end is not None:
                raise self._end
        finally:
            self.closed = True


def carried_out(
    session: ShortSession, work_s: float, *, only: int = 99
) -> tuple[list[tuple[float, Command]], list[float]]:
    """(when, which) of the commands in order when each takes so long, and when the urgent ones were carried out."""
    inside: list[tuple[float, Command]] = []
    urgent_s: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def at_once(epoch: int, command: Command) -> bool:
            if command is URGENT:
                urgent_s.append(loop.time())
            return command is URGENT

        commands = urgent_first(session.attach(), at_once)
        try:
            async for epoch, command in commands:
                assert epoch == 5
                inside.append((loop.time(), command))
                await asyncio.sleep(work_s)
                if len(inside) == only:
                    break
        finally:
            await commands.aclose()

    sim.run(main(), seed=1, limit_s=1000.0)
    assert session.closed
    return inside, urgent_s


def test_a_command_that_must_not_wait_overtakes_those_that_wait() -> None:
    inside, urgent_s = carried_out(ShortSession(FIRST, SECOND, URGENT), 60.0)
    assert [command for _, command in inside] == [FIRST, SECOND]
    assert urgent_s == [2.0]
    assert inside[1][0] == 60.0


def test_how_a_session_ends_is_told_behind_its_commands() -> None:
    inside, _ = carried_out(ShortSession(FIRST, SECOND), 0.0)
    assert len(inside) == 2
    for end in (SchedulerUnreachable("broken"), ValueError("a fault of ours")):
        with pytest.raises(type(end)):
            carried_out(ShortSession(FIRST, end=end), 5.0)


def test_a_session_that_is_left_early_is_closed() -> None:
    assert len(carried_out(ShortSession(FIRST, SECOND, SECOND), 0.0, only=1)[0]) == 1


def test_a_session_is_read_no_further_than_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_server.session.server.WAITING_MAX", 1)
    inside, urgent_s = carried_out(ShortSession(FIRST, SECOND, FIRST, SECOND, URGENT), 60.0)
    assert [command for _, command in inside] == [FIRST, SECOND, FIRST, SECOND]
    assert urgent_s[0] > 60.0
