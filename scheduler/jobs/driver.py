"""One job at work: tells the brain what happened and carries out what it decides.

Everything goes through one inbox, so the brain sees one thing at a time and a commit's row is on disk before any other
decision is taken.

    inbox ──▶ brain.step ──▶ outputs, in order ──▶ effects
                  ▲               │
                  └──RowDurable───┘   what it decides comes before the outputs that are left
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import assert_never

from scheduler.brain import JobBrain
from scheduler.brain.fleet.membership import Transition
from scheduler.brain.inputs import (
    AskToLeave,
    Cancel,
    CheckpointKept,
    CheckpointNotKept,
    Happened,
    Input,
    Join,
    PeerBack,
    PeerGone,
    PeerSuspect,
    ReplicaRecord,
    Resumed,
    RowDurable,
    Start,
    Stop,
    Stuck,
    Tick,
)
from scheduler.brain.outputs import (
    Admitted,
    BeginCheckpoint,
    DropCheckpoint,
    EnterState,
    Fail,
    Finish,
    Independent,
    Left,
    Note,
    PublishCheckpoint,
    Released,
    Send,
    Stopped,
    Unfit,
    WriteCommit,
    WriteEvaluation,
)
from scheduler.brain.transcript import Recorder
from scheduler.brain.watchdog import Over, Watchdog
from scheduler.jobs.effects import JobEffects
from swarm.data.batches import Batches
from swarm.messages import ChaosBegun, Command, Evaluate, Evaluated, Event, Heartbeat, Loaded, Logged, Route, Saved
from swarm.types import JobState, PeerId, PeerState

SAVED = "all steps committed, weights saved"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    state: JobState
    reason: str
    error_code: str = ""
    hint: str = ""


class JobDriver:
    """Runs one placed job to its end. Others may ask `brain` questions; they tell it things through the inbox only."""

    def __init__(
        self,
        brain: JobBrain,
        batches: Batches,
        effects: JobEffects,
        watchdog: Watchdog,
        recorder: Recorder | None = None,
    ) -> None:
        self.brain = brain
        self._decide = recorder.step if recorder is not None else brain.step
        self._batches = _Recent(batches)
        self._effects = effects
        self._watchdog = watchdog
        self._inbox: asyncio.Queue[Input] = asyncio.Queue()
        self._cancelled = asyncio.Event()

    def made_progress(self) -> None:
        """Something moved: a step was committed, a stage was loaded, or a part of its weights arrived."""
        self._watchdog.moved(asyncio.get_running_loop().time())

    def on_event(self, peer: PeerId, event: Event) -> None:
        """An event of one of the job's peers."""
        if isinstance(event, Loaded | Saved | Evaluated):
            self.made_progress()
        if isinstance(event, Heartbeat | Logged | ChaosBegun):
            return  # the brain has no use for them, and the inbox may wait for a database for hours
        self._inbox.put_nowait(Happened(peer, event))

    def on_transition(self, transition: Transition) -> None:
        """One of the job's peers changed state."""
        peer, reason = transition.peer, transition.reason
        was_suspect = transition.before is PeerState.SUSPECT
        if transition.after is PeerState.GONE:
            self._inbox.put_nowait(PeerGone(peer, reason))
        elif transition.after is PeerState.SUSPECT:
            self._inbox.put_nowait(PeerSuspect(peer, reason, transition.session_lost))
        elif was_suspect:
            self._inbox.put_nowait(PeerBack(peer))
        if transition.after is PeerState.DRAINING:
            self._inbox.put_nowait(AskToLeave(peer, reason))

    def join(self, replica: ReplicaRecord) -> None:
        """An idle peer was given to the job: it fetches its stage's state."""
        self._inbox.put_nowait(Join(replica))

    def cancel(self, reason: str) -> None:
        """End the job soon, whatever it waits for; asking twice is the same as once."""
        self._cancelled.set()
        self._inbox.put_nowait(Cancel(reason))

    def stop(self, state: JobState, reason: str) -> None:
        """Pause or cancel the job once what runs is committed and saved."""
        self._inbox.put_nowait(Stop(state, reason))

    def checkpoint_written(self, version: int, reason: str = "", fault: str = "") -> None:
        """A checkpoint is kept, or was not because of `fault`."""
        self.made_progress()
        self._inbox.put_nowait(CheckpointNotKept(version, reason, fault) if fault else CheckpointKept(version))

    async def run(self, begin: Start | Resumed) -> Outcome:
        """Train until the job succeeds, fails, stops or is cancelled. DatabaseUnavailable and Fenced pass through."""
        self._watchdog.begin(asyncio.get_running_loop().time())
        outcome = await self._step(begin)
        while outcome is None:
            try:
                async with asyncio.timeout_at(min(self.brain.due_s, self._watchdog.due_s(self.brain.saves_again_s))):
                    happened = await self._inbox.get()
            except TimeoutError:
                happened = self._time_passed(asyncio.get_running_loop().time())
            outcome = await self._step(happened)
        return outcome

    def _time_passed(self, now_s: float) -> Input:
        match self._watchdog.over(now_s, self.brain.saves_again_s):
            case Over.RAN_OUT if not self.brain.is_stopping:
                # The job is paused as if a person had asked for that, with all saved.
                again = f"swarm resume {self.brain.settings.job} gives it as long again"
                reason = f"limits.max_runtime_s = {self._watchdog.runtime_s_max:g} has passed; {again}"
                self._effects.entered(JobState.PAUSING, reason)
                return Stop(JobState.PAUSED, reason)
            case Over.STILL:
                return Stuck(self._watchdog.still_s_max)
        return Tick()

    async def _step(self, happened: Input) -> Outcome | None:
        """Tell the brain what happened and carry out what it decides; how the job ended, if it did."""
        outputs = deque(self._decide(happened, asyncio.get_running_loop().time()))
        while outputs:
            match output := outputs.popleft():
                case Send(peer=peer, command=command):
                    self._send(peer, command)
                case Released(peer=peer, reason=reason):
                    self._effects.released(peer, reason)
                case WriteCommit(row=row):
                    if await self._written(self._effects.write_row(row)):
                        self.made_progress()
                        durable = self._decide(RowDurable(row.step), asyncio.get_running_loop().time())
                        outputs.extendleft(reversed(durable))
                case WriteEvaluation(row=evaluation):
                    await self._written(self._effects.write_evaluation(evaluation))
                    self.made_progress()
                case Note(level=level, message=message):
                    self._effects.say(level, message)
                case BeginCheckpoint(version=version):
                    self._effects.begin_checkpoint(version)
                case PublishCheckpoint():
                    self._effects.publish_checkpoint(output)
                case DropCheckpoint():
                    self._effects.drop_checkpoint(output)
                case EnterState(state=state, reason=reason):
                    if state is JobState.RUNNING:
                        self._watchdog.goes_on(asyncio.get_running_loop().time())
                    self._effects.entered(state, reason)
                case Admitted(peer=peer, stage=stage):
                    self._effects.admitted(peer, stage)
                case Independent(peer=peer, incarnation=incarnation):
                    self._effects.independent(peer, incarnation)
                case Left():
                    self._effects.left(output)
                case Unfit():
                    self._effects.unfit(output)
                case Finish():
                    return Outcome(JobState.SUCCEEDED, SAVED)
                case Fail(code=code, message=message, hint=hint):
                    return Outcome(JobState.FAILED, message, code, hint)
                case Stopped(state=state, reason=reason, hint=hint, error_code=error_code):
                    return Outcome(state, reason, error_code, hint)
                case _:
                    assert_never(output)
        return None

    def _send(self, peer: PeerId, command: Command) -> None:
        """Send a command; a route goes with token ids to its first hop and with targets to its last."""
        if isinstance(command, Route | Evaluate):
            first, last = command.hops[0].peer == peer, command.hops[-1].peer == peer
            if first or last:
                tokens, targets = self._batches.of(command)
                command = replace(command, tokens=tokens if first else b"", targets=targets if last else b"")
        self._effects.send(peer, command)
        if isinstance(command, Route):
            for stage, hop in enumerate(command.hops):
                if hop.peer == peer:
                    self._effects.routed(peer, stage)

    async def _written(self, write: Coroutine[object, object, None]) -> bool:
        """Whether it was written; False if the job was cancelled meanwhile, which the inbox says next.

        What becomes of the write then does not matter: resuming the job begins a new timeline.
        """
        writing, cancelled = asyncio.ensure_future(write), asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait((writing, cancelled), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
            return writing.done()
        finally:
            writing.cancel()
            cancelled.cancel()


class _Recent:
    """Token and target bytes of the microbatches routed last: first and last hop ask one after the other."""

    def __init__(self, batches: Batches, size: int = 64) -> None:
        self._batches = batches
        self._size = size
        self._recent: OrderedDict[tuple[int | None, int], tuple[bytes, bytes]] = OrderedDict()

    def of(self, command: Route | Evaluate) -> tuple[bytes, bytes]:
        if isinstance(command, Evaluate):
            step, index = None, command.batch.index
        else:
            step, index = command.microbatch.step, command.microbatch.index
        key = (step, index)
        if key not in self._recent:
            if step is None:
                tokens, targets = self._batches.evaluation(index)
            else:
                tokens, targets = self._batches.microbatch(step, index)
            self._recent[key] = (tokens.astype("<i4").tobytes(), targets.astype("<i4").tobytes())
            if len(self._recent) > self._size:
                self._recent.popitem(last=False)
        return self._recent[key]
