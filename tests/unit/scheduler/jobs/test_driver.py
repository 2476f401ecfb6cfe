"""scheduler.jobs.driver: what a job's step trains is what the course of its brain says, from the data to the row."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from scheduler.brain.inputs import Join, PeerBack, PeerGone, PeerSuspect, ReplicaRecord, RowDurable, Start, Stuck, Tick
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import CommitRow, Effect, EvaluationRow, Finish, IslandLost, Output, WriteCommit
from scheduler.brain.stall import Watchdog
from scheduler.jobs.driver import JobDriver
from swarm.data.batches import Batches, TokenData
from swarm.errors import NoProgress
from swarm.job.spec import TrainingSection
from swarm.types import EvaluationBatch, Microbatch, PeerId
from swarm.wire.messages import Average, Command, Evaluated, Event, Loaded, ParameterHash, Route, Saved
from tests.support.brain import JOB, A, C, Swarm
from tests.support.shifted_course import PORTIONS_AHEAD, RATE_STEPS_AHEAD, ShiftedCourse
from tests.support.sim import loop as sim

LENGTH, MICROBATCHES = 8, 4
END = 300  # closes a text, so portions differ in how many of their targets count


class Told:
    """Replicas that obey at once, and what they and the database were told; the job ends with its first row."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.driver: JobDriver
        self.commands: list[tuple[PeerId, Command]] = []
        self.rows: list[CommitRow] = []

    def send(self, peer: PeerId, command: Command) -> None:
        self.commands.append((peer, command))
        if (event := self.swarm.reply(peer, command)) is not None:
            self.driver.on_event(peer, event)

    async def write_row(self, row: CommitRow) -> None:
        self.rows.append(row)
        self.driver.cancel("enough")

    async def write_evaluation(self, row: EvaluationRow) -> None:
        raise AssertionError("nothing is evaluated")

    def carry_out(self, output: Effect) -> None:
        pass


@pytest.mark.parametrize("all_read", [False, True])
def test_token_ids_divisor_and_learning_rate_are_those_that_the_course_names(all_read: bool) -> None:
    row = np.arange(40 * LENGTH + 1, dtype=np.uint16) % 257
    row[PORTIONS_AHEAD * MICROBATCHES * LENGTH + 2] = END  # in the portion of step 0, not in portion 0
    training = TrainingSection(steps=2, warmup_steps=0, global_batch_sequences=MICROBATCHES, microbatch_sequences=1)
    batches = Batches(TokenData([row]), training, LENGTH, False, 0, end_of_text=END)
    swarm = Swarm({A: 0, C: 1}, tokens_of=batches.tokens_of, learning_rate=lambda rate_step: rate_step / 100)
    brain = JobBrain(swarm.brain.settings, Random(0), ShiftedCourse())
    told = Told(swarm)
    told.driver = JobDriver(brain, batches, told, Watchdog(60.0, 0.0), all_read=all_read)
    replicas = tuple(ReplicaRecord(peer, 1, "", stage) for peer, stage in swarm.stage_of.items())
    asyncio.run(told.driver.run(Start(replicas)))

    routes = {(peer, one.microbatch): one for peer, one in told.commands if isinstance(one, Route)}
    for index in range(MICROBATCHES):
        tokens, targets = (array.astype("<i4").tobytes() for array in batches.microbatch(PORTIONS_AHEAD, index))
        assert routes[A, Microbatch(0, 0, index)].tokens == tokens != batches.microbatch(0, index)[0].tobytes()
        assert routes[C, Microbatch(0, 0, index)].targets == targets
        assert routes[C, Microbatch(0, 0, index)].tokens == (tokens if all_read else b"")
    divisor = MICROBATCHES * LENGTH - 1
    averages = [command for _, command in told.commands if isinstance(command, Average) and command.step == 0]
    assert {command.tokens for command in averages} == {divisor}
    assert [(row.tokens, row.learning_rate) for row in told.rows] == [(divisor, RATE_STEPS_AHEAD / 100)]


class Patient:
    """A brain that has a step to commit and then something to do 5 s later; it notes the time of all that it hears."""

    due_s = math.inf
    saves_again_s = -math.inf
    is_stopping = False

    def __init__(self) -> None:
        self.heard: list[tuple[type[object], float]] = []

    def step(self, happened: object, now_s: float) -> list[Output]:
        self.heard.append((type(happened), now_s))
        match happened:
            case Start():
                return [WriteCommit(CommitRow(0, 0, {}, 1.0, 1.0, 1.0, 1e-3, False, 10))]
            case RowDurable():
                self.due_s = now_s + 5.0
            case Tick():
                assert now_s >= self.due_s
                return [Finish()]
        return []


@pytest.mark.parametrize("waits_s", [0.0, 0.5, 16.1, 1e5 / 3])
def test_nobody_is_late_for_a_database_that_was_waited_for(waits_s: float) -> None:
    """After an outage of 16 s the scheduler took work from stage servers that had done theirs, and blamed them."""
    brain: Any = Patient()

    class Away:
        async def write_row(self, row: CommitRow) -> None:
            await asyncio.sleep(waits_s)
            driver.tell(PeerBack(A))  # meanwhile

    effects: Any = Away()
    driver = JobDriver(brain, None, effects, Watchdog(60.0, 0.0))  # type: ignore[arg-type]

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await driver.run(Start(()))
        return began_s, loop.time()

    began_s, ended_s = sim.run(main(), seed=1, limit_s=1e6)
    counted_s = waits_s if waits_s <= 1.0 else 0.0
    times = [at_s - began_s for _, at_s in brain.heard]
    assert times == pytest.approx([0.0, counted_s, counted_s, counted_s + 5.0])
    assert times == sorted(times)
    assert ended_s - began_s == pytest.approx(waits_s + 5.0)


class Punctual:
    """A brain whose next look is put off, or brought forward, by what it hears; it notes when it looks."""

    saves_again_s = -math.inf
    is_stopping = False

    def __init__(self) -> None:
        self.due_s = math.inf
        self.looked_s: list[float] = []

    def step(self, happened: object, now_s: float) -> list[Output]:
        match happened:
            case PeerSuspect(reason=seconds):
                self.due_s = now_s + float(seconds)
            case Tick():
                assert now_s >= self.due_s
                self.looked_s.append(now_s)
                self.due_s = math.inf
            case PeerBack():
                return [Finish()]
        return []


def test_an_alarm_that_was_put_off_rings_when_it_is_due_and_one_that_was_brought_forward_does_too() -> None:
    """The driver keeps an alarm that is early enough, and looks again when it rings."""
    brain: Any = Punctual()

    async def main() -> tuple[list[float], int]:
        loop = asyncio.get_running_loop()
        made, call_at = 0, loop.call_at

        def counted(when: float, callback: Any, *args: Any, **named: Any) -> asyncio.TimerHandle:
            nonlocal made
            made += callback == driver._ring
            return call_at(when, callback, *args, **named)

        loop.call_at = counted  # type: ignore[method-assign]
        batches: Any = None
        effects: Any = None
        driver = JobDriver(brain, batches, effects, Watchdog(1e6, 0.0))
        running = asyncio.ensure_future(driver.run(Start(())))
        began_s = loop.time()
        for _ in range(50):  # each puts the look off: 10 s from then
            await asyncio.sleep(0.1)
            driver.tell(PeerSuspect(A, "10", True))
        await asyncio.sleep(20.0)
        driver.tell(PeerSuspect(A, "100", True))
        await asyncio.sleep(1.0)
        driver.tell(PeerSuspect(A, "2", True))  # sooner than what was due
        await asyncio.sleep(5.0)
        driver.tell(PeerBack(A))
        await running
        return [looked_s - began_s for looked_s in brain.looked_s], made

    looked_s, alarms = sim.run(main(), seed=0)
    assert looked_s == pytest.approx([15.0, 28.0])
    assert alarms < 10, "50 inputs need no alarm each"


def given_up_after_s(act: Callable[[JobDriver, int], None]) -> float:
    """When a job ends that gets no further and may stand still for 60 s, if something happens every 20 s."""
    driver = JobDriver(Swarm.loaded({A: 0, C: 1}).brain, None, Hanging(), Watchdog(60.0, 0.0))  # type: ignore[arg-type]

    async def main() -> float:
        loop = asyncio.get_running_loop()
        began_s, ends = loop.time(), asyncio.ensure_future(driver.run(Tick()))  # type: ignore[arg-type]
        for turn in range(1, 10):
            await asyncio.wait({ends}, timeout=20.0)
            if not ends.done():
                act(driver, turn)
        assert (await ends).error_code == NoProgress.code
        return loop.time() - began_s

    return sim.run(main(), seed=1, limit_s=1e6)


def test_stage_servers_that_join_again_and_again_do_not_hide_that_the_job_hangs() -> None:
    """Whatever any stage server loaded put off the limit, so a job, or an island, that hung was never given up."""

    def join(driver: JobDriver, number: int) -> None:
        newcomer = PeerId(f"new-{number}")
        driver.tell(Join(ReplicaRecord(newcomer, 1, "", 0)))
        driver.on_event(newcomer, Loaded(JOB, 0, 0, 0, "start", (), join=number))
        driver.on_event(A, Loaded(JOB, 0, 0, 0, "start", ()))  # told again, in a new session

    assert given_up_after_s(join) < 200.0


@pytest.mark.parametrize(
    "event",
    [
        Saved(JOB, 0, 1, 0, (ParameterHash("w0", "float32", (1,), "00"),)),
        Saved(JOB, 0, 1, 0, (), "it holds another version"),
        Evaluated(EvaluationBatch(0, 0, 0), 1, 2.0),
    ],
)
def test_a_stage_server_that_says_what_nobody_asked_for_does_not_hide_that_the_job_hangs(event: Event) -> None:
    """A part of a checkpoint, or a loss, put off the limit, whoever sent it."""
    assert given_up_after_s(lambda driver, turn: driver.on_event(A, event)) < 100.0


def test_a_job_that_has_lost_an_island_has_as_long_again() -> None:
    """The limit passed just after the loss, before the others could do anything without it, and the job stalled."""

    class Losing:
        due_s, saves_again_s, is_stopping = math.inf, -math.inf, False

        def step(self, happened: object, now_s: float) -> list[Output]:
            match happened:
                case PeerGone():
                    return [IslandLost(1)]
                case Stuck():
                    return [Finish()]
            return []

    brain: Any = Losing()
    driver = JobDriver(brain, None, Hanging(), Watchdog(60.0, 0.0))  # type: ignore[arg-type]

    async def main() -> float:
        loop = asyncio.get_running_loop()
        began_s, ends = loop.time(), asyncio.ensure_future(driver.run(Start(())))
        await asyncio.sleep(59.0)
        driver.tell(PeerGone(A, "killed"))
        await ends
        return loop.time() - began_s

    assert sim.run(main(), seed=1, limit_s=1e6) == pytest.approx(59.0 + 60.0)


class Hanging:
    """Effects of which nothing comes."""

    def send(self, peer: PeerId, command: Command) -> None:
        pass

    def carry_out(self, output: Effect) -> None:
        pass
