"""Drives one job at work: gives inputs to its brain, and carries out the outputs.

Everything goes through one inbox, so the brain sees one thing at a time and a commit's row is on disk before any other
decision is taken.

    inbox ──▶ brain.step ──▶ outputs, in order ──▶ effects
                  ▲               │
                  └──RowDurable───┘   its outputs come before those that are left

Decision: docs/decisions/117.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeAlias

from scheduler.brain import inputs, outputs
from scheduler.brain.fleet.membership import Transition
from scheduler.brain.inputs import Input
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.job import JobBrain
from scheduler.brain.stall import Over, Watchdog
from scheduler.brain.trace import Trace
from scheduler.brain.transcript import Recorder
from swarm.data.batches import Batches
from swarm.types import JobState, PeerId, PeerState
from swarm.wire.messages import (
    Check,
    Command,
    Evaluate,
    Evaluated,
    Event,
    Heartbeat,
    Loaded,
    Logged,
    Route,
    Saved,
)

SAVED = "all steps committed, weights saved"
STOOD_STILL_S = 1.0  # a longer wait for the database is nobody's delay: every replica may be this late anyway
Brain: TypeAlias = JobBrain | IslandsBrain
Begin: TypeAlias = inputs.Start | inputs.Resumed | inputs.EachIsland


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    state: JobState
    reason: str
    error_code: str = ""
    hint: str = ""


class JobEffects(Protocol):
    """The effects of a driver on the world. Only the two writes can wait; the driver decides nothing while they do."""

    def send(self, peer: PeerId, command: Command) -> None:
        """Send a command to a peer."""

    async def write_row(self, row: outputs.CommitRow) -> None:
        """Make a commit row durable and show it, however long that takes."""

    async def write_rows(self, write: outputs.WriteRows) -> None:
        """The same for rows of several islands, all or none."""

    async def write_evaluation(self, row: outputs.EvaluationRow) -> None:
        """Make the result of an evaluation durable and show it."""

    def carry_out(self, output: outputs.Effect) -> None:
        """Carry out a decision that nothing waits for."""


class JobDriver:
    """Runs one placed job to its end. Others tell the job's brain things through the inbox only."""

    def __init__(
        self,
        brain: Brain,
        batches: Batches,
        effects: JobEffects,
        watchdog: Watchdog,
        recorder: Recorder | None = None,
        *,
        all_read: bool = False,
    ) -> None:
        """With `all_read` every stage gets the token ids."""
        self._brain = brain
        self._all_read = all_read
        self.trace = Trace()
        self._decide = self.trace.watching(recorder.step if recorder is not None else brain.step)
        self._bytes = _remembered(batches)
        self._effects = effects
        self._watchdog = watchdog
        self._inbox: deque[Input] = deque()
        self._arrived = asyncio.Event()  # something is in the inbox, or the alarm has rung
        self._alarm: asyncio.TimerHandle | None = None
        self._waits = False
        self._rung_s = -math.inf  # the time of the alarm that rang while the driver waited
        self._cancelled = asyncio.Event()
        self._stood_still_s = 0.0  # how long the database was waited for, in all
        self._newest_s = -math.inf

    def now_s(self) -> float:
        """The clock of the brain and of the watchdog: the event loop's, without long waits for the database.

        What replicas do during such a wait is heard afterwards, all at once, and no replica counts as late for it.
        """
        self._newest_s = max(self._newest_s, asyncio.get_running_loop().time() - self._stood_still_s)
        return self._newest_s

    def made_progress(self) -> None:
        """Something moved: a step was committed, a stage or a part of its weights loaded, or an island was lost."""
        self._watchdog.moved(self.now_s())

    def on_event(self, peer: PeerId, event: Event, room: int = 0, *, doubted: bool = False) -> None:
        if isinstance(event, Loaded | Saved | Evaluated) and self._brain.awaits(peer, event):
            self.made_progress()
        if isinstance(event, Heartbeat | Logged):
            return  # the brain has no use for them, and the inbox may wait for a database for hours
        self.tell(inputs.Happened(peer, event, room, doubted))

    def on_transition(self, transition: Transition) -> None:
        peer, reason = transition.peer, transition.reason
        was_suspect = transition.before is PeerState.SUSPECT
        if transition.after is PeerState.GONE:
            self.tell(inputs.PeerGone(peer, reason))
        elif transition.after is PeerState.SUSPECT:
            self.tell(inputs.PeerSuspect(peer, reason, transition.session_lost))
        elif was_suspect:
            self.tell(inputs.PeerBack(peer))
        if transition.after is PeerState.DRAINING:
            self.tell(inputs.AskToLeave(peer, reason))

    def tell(self, happened: Input) -> None:
        """Put something into the inbox."""
        self._inbox.append(happened)
        self._arrived.set()

    def cancel(self, reason: str) -> None:
        """End the job soon, without waiting for anything; asking twice is the same as once."""
        self._cancelled.set()
        self.tell(inputs.Cancel(reason))

    def checkpoint_written(self, version: int, reason: str = "", fault: str = "") -> None:
        """A checkpoint is kept, or was not because of `fault`."""
        self.made_progress()
        self.tell(inputs.CheckpointNotKept(version, reason, fault) if fault else inputs.CheckpointKept(version))

    async def run(self, begin: Begin) -> Outcome:
        """Train until the job succeeds, fails, stops or is cancelled. DatabaseUnavailable and Fenced pass through."""
        self._watchdog.begin(self.now_s())
        try:
            outcome = await self._step(begin)
            while outcome is None:
                outcome = await self._step(await self._next())
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
        return outcome

    async def _next(self) -> Input:
        """The next input, or a Tick if none came in time."""
        while not self._inbox:
            due_s = min(self._brain.due_s, self._watchdog.due_s(self._brain.saves_again_s))
            self._set_alarm(due_s + self._stood_still_s)
            self._arrived.clear()
            self._waits = True
            try:
                await self._arrived.wait()
            finally:
                self._waits = False
            rung_s, self._rung_s = self._rung_s, -math.inf
            if due_s + self._stood_still_s <= rung_s:
                self._newest_s = max(self._newest_s, due_s)  # whatever adding and subtracting has made of the last bits
                return self._time_passed(self.now_s())
        return self._inbox.popleft()

    def _set_alarm(self, at_s: float) -> None:
        """Wake the driver at this time, or earlier: an alarm stays as long as it is early enough.

        Most inputs put off what is due next. A timer that was made anew for each took a tenth of what they cost.
        """
        if self._alarm is not None:
            if self._alarm.when() <= at_s:
                return
            self._alarm.cancel()
        self._alarm = None if at_s == math.inf else asyncio.get_running_loop().call_at(at_s, self._ring, at_s)

    def _ring(self, at_s: float) -> None:
        self._alarm = None
        if self._waits:
            self._rung_s = at_s
            self._arrived.set()

    def _time_passed(self, now_s: float) -> Input:
        match self._watchdog.over(now_s, self._brain.saves_again_s):
            case Over.RAN_OUT if not self._brain.is_stopping:
                # The job is paused as if a person had asked for that, with all saved.
                again = f"swarm resume {self._brain.settings.job} gives it as long again"
                reason = f"limits.max_runtime_s = {self._watchdog.runtime_s_max:g} has passed; {again}"
                self._effects.carry_out(outputs.EnterState(JobState.PAUSING, reason))
                return inputs.Stop(JobState.PAUSED, reason)
            case Over.STILL:
                return inputs.Stuck(self._watchdog.still_s_max)
        return inputs.Tick()

    async def _step(self, happened: Input) -> Outcome | None:
        """Tell the brain what happened and carry out what it decides; how the job ended, if it did."""
        decided = deque(self._decide(happened, self.now_s()))
        while decided:
            match decided.popleft():
                case outputs.Send(peer=peer, command=command):
                    self._send(peer, command)
                case outputs.WriteCommit(row=row):
                    if await self._written(self._effects.write_row(row)):
                        self.made_progress()
                        durable = self._decide(inputs.RowDurable(row.step), self.now_s())
                        decided.extendleft(reversed(durable))
                case outputs.WriteRows(rows=rows, shares=shares) as write:
                    if await self._written(self._effects.write_rows(write)):
                        self.made_progress()
                        durable = self._decide(inputs.RowsDurable(rows, shares), self.now_s())
                        decided.extendleft(reversed(durable))
                case outputs.WriteEvaluation(row=evaluation):
                    await self._written(self._effects.write_evaluation(evaluation))
                    self.made_progress()
                case outputs.IslandLost():
                    self.made_progress()
                case outputs.Finish():
                    return Outcome(JobState.SUCCEEDED, SAVED)
                case outputs.Fail(code=code, message=message, hint=hint):
                    return Outcome(JobState.FAILED, message, code, hint)
                case outputs.Stopped(state=state, reason=reason, hint=hint, error_code=error_code):
                    return Outcome(state, reason, error_code, hint)
                case effect:
                    if isinstance(effect, outputs.EnterState) and effect.state is JobState.RUNNING:
                        self._watchdog.goes_on(self.now_s())
                    self._effects.carry_out(effect)
        return None

    def _send(self, peer: PeerId, command: Command) -> None:
        """Send a command; a route goes with token ids to its first hop or all hops, and with targets to its last."""
        if isinstance(command, Route | Evaluate | Check):
            computes = not isinstance(command, Check) or command.hops[command.stage].peer == peer
            first, last = (computes and hop.peer == peer for hop in (command.hops[0], command.hops[-1]))
            reads = first or (computes and self._all_read)
            if reads or last:
                tokens, targets = self._bytes(*self._place(command))
                command = replace(command, tokens=tokens if reads else b"", targets=targets if last else b"")
        self._effects.send(peer, command)

    def _place(self, command: Route | Evaluate | Check) -> tuple[int | None, int]:
        """Portion and index of a microbatch; an evaluation microbatch is of no portion."""
        if isinstance(command, Evaluate):
            return None, command.batch.index
        microbatch = command.microbatch
        return self._brain.portion_of(microbatch.timeline, microbatch.step), microbatch.index

    async def _written(self, write: Coroutine[object, object, None]) -> bool:
        """Whether it was written, which does not matter once the job is cancelled: the next timeline is another."""
        writing, cancelled = asyncio.ensure_future(write), asyncio.ensure_future(self._cancelled.wait())
        began_s = asyncio.get_running_loop().time()
        try:
            await asyncio.wait((writing, cancelled), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
            return writing.done()
        finally:
            writing.cancel()
            cancelled.cancel()
            waited_s = asyncio.get_running_loop().time() - began_s
            self._stood_still_s += waited_s if waited_s > STOOD_STILL_S else 0.0


def _remembered(batches: Batches) -> Callable[[int | None, int], tuple[bytes, bytes]]:
    """Token and target bytes of a microbatch, kept for a while: its first and its last hop ask one after the other."""

    @lru_cache(maxsize=64)
    def of(portion: int | None, index: int) -> tuple[bytes, bytes]:
        tokens, targets = batches.evaluation(index) if portion is None else batches.microbatch(portion, index)
        return tokens.astype("<i4").tobytes(), targets.astype("<i4").tobytes()

    return of
