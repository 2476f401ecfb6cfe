"""One job at work: feeds the brain what happened and carries out what it decides.

Everything goes through one inbox, so the brain sees one thing at a time and a commit's row is on disk before any other
decision is taken.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, assert_never

from scheduler.brain.fleet.membership import Transition
from scheduler.brain.job import (
    Admitted,
    CommitRow,
    Fail,
    Finish,
    Independent,
    JobBrain,
    Left,
    Note,
    Output,
    ReplicaRecord,
    Send,
    WriteCommit,
    WriteEvaluation,
)
from scheduler.brain.outputs import (
    BeginCheckpoint,
    DropCheckpoint,
    EnterState,
    EvaluationRow,
    PublishCheckpoint,
    Stopped,
)
from scheduler.brain.state.restart import Resumed
from scheduler.brain.watchdog import Over, Watchdog
from swarm.data.batches import Batches
from swarm.messages import (
    ChaosBegun,
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
from swarm.types import JobState, PeerId, PeerState

SAVED = "all steps committed, weights saved"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    state: JobState
    reason: str
    error_code: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class _Happened:
    peer: PeerId
    event: Event


@dataclass(frozen=True, slots=True)
class _Changed:
    transition: Transition


@dataclass(frozen=True, slots=True)
class _Joins:
    replica: ReplicaRecord


@dataclass(frozen=True, slots=True)
class _Cancel:
    reason: str


@dataclass(frozen=True, slots=True)
class _Stop:
    state: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class _Written:
    """What became of a checkpoint; without a fault it is kept."""

    version: int
    reason: str = ""
    fault: str = ""


_Item: TypeAlias = _Happened | _Changed | _Joins | _Cancel | _Stop | _Written


class CommitWriter(Protocol):
    """Makes a commit row durable before it returns."""

    async def __call__(self, row: CommitRow) -> None: ...


class EvaluationWriter(Protocol):
    """Makes the result of an evaluation durable and shows it."""

    async def __call__(self, row: EvaluationRow) -> None: ...


class Sink(Protocol):
    """Takes the files of a checkpoint and completes it; what became of it comes back by `checkpoint_written`."""

    def begin(self, version: int) -> None: ...

    def publish(self, move: PublishCheckpoint) -> None: ...

    def drop(self) -> None: ...


class JobDriver:
    """Runs one placed job to its end."""

    def __init__(
        self,
        brain: JobBrain,
        batches: Batches,
        send: Callable[[PeerId, Command], None],
        write_commit: CommitWriter,
        on_commit: Callable[[CommitRow], None],
        say: Callable[[str, str], None],
        on_turn: Callable[[EnterState | DropCheckpoint | Admitted | Independent | Left], None],
        *,
        write_evaluation: EvaluationWriter,
        patience: Watchdog,
    ) -> None:
        self.brain = brain
        self._batches = _Recent(batches)
        self._send = send
        self._write_commit = write_commit
        self._on_commit = on_commit
        self._say = say
        self._write_evaluation = write_evaluation
        self._on_turn = on_turn
        self.keeper: Sink | None = None
        self._patience = patience
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue()
        self._cancelled = asyncio.Event()

    def made_progress(self) -> None:
        """Something moved that is no commit: a stage was loaded, or a part of its weights arrived."""
        self._patience.moved(asyncio.get_running_loop().time())

    def on_event(self, peer: PeerId, event: Event) -> None:
        """An event of one of the job's peers."""
        if isinstance(event, Loaded | Saved | Evaluated):
            self.made_progress()
        if isinstance(event, Heartbeat | Logged | ChaosBegun):
            return  # the brain has no use for them, and the inbox may wait for a database for hours
        self._inbox.put_nowait(_Happened(peer, event))

    def on_transition(self, transition: Transition) -> None:
        """One of the job's peers changed state."""
        self._inbox.put_nowait(_Changed(transition))

    def join(self, replica: ReplicaRecord) -> None:
        """An idle peer was given to the job: it fetches its stage's state."""
        self._inbox.put_nowait(_Joins(replica))

    def cancel(self, reason: str) -> None:
        """End the job soon, whatever it waits for; asking twice is the same as once."""
        self._cancelled.set()
        self._inbox.put_nowait(_Cancel(reason))

    def stop(self, state: JobState, reason: str) -> None:
        """Pause or cancel the job once what runs is committed and saved."""
        self._inbox.put_nowait(_Stop(state, reason))

    def checkpoint_written(self, version: int, reason: str = "", fault: str = "") -> None:
        """A checkpoint is kept, or was not because of `fault`."""
        self.made_progress()
        self._inbox.put_nowait(_Written(version, reason, fault))

    async def run(self, begin: list[ReplicaRecord] | Resumed) -> Outcome:
        """Train until the job succeeds, fails or is cancelled. StoreUnavailable and Fenced pass through.

        `begin` says with whom, or where an earlier scheduler start stopped.
        """
        loop = asyncio.get_running_loop()
        self._patience.begin(loop.time())
        committed = self.brain.committed_steps
        start = self.brain.resume if isinstance(begin, Resumed) else self.brain.start
        outcome = await self._carry_out(start(begin, loop.time()))  # type: ignore[arg-type]  # as just distinguished
        while outcome is None:
            if self.brain.committed_steps != committed:
                committed = self.brain.committed_steps
                self.made_progress()
            try:
                async with asyncio.timeout_at(min(self.brain.due_s, self._patience.due_s(self.brain.saves_again_s))):
                    item = await self._inbox.get()
            except TimeoutError:
                outcome = await self._carry_out(self._time_passed(loop.time()))
                continue
            outcome = await self._carry_out(self._decide(item, loop.time())) or (
                Outcome(JobState.CANCELLED, item.reason) if isinstance(item, _Cancel) else None
            )
        return outcome

    def _time_passed(self, now_s: float) -> list[Output]:
        match self._patience.over(now_s, self.brain.saves_again_s):
            case Over.RAN_OUT:
                return self._run_out(now_s)
            case Over.STILL:
                return self.brain.stuck(self._patience.still_s_max, now_s)
            case None:
                return self.brain.tick(now_s)

    def _decide(self, item: _Item, now_s: float) -> list[Output]:
        match item:
            case _Happened(peer=peer, event=event):
                return self.brain.handle(peer, event, now_s)
            case _Changed(transition=transition):
                return self._peer_changed(transition, now_s)
            case _Joins(replica=replica):
                return self.brain.join(replica, now_s)
            case _Cancel():
                return self.brain.cancel(now_s)
            case _Stop(state=state, reason=reason):
                return self.brain.stop(state, reason, now_s)
            case _Written(version=version, fault=""):
                return self.brain.checkpoint_kept(version, now_s)
            case _Written(version=version, reason=reason, fault=fault):
                return self.brain.checkpoint_failed(version, reason, fault, now_s)
            case _:
                assert_never(item)

    def _peer_changed(self, transition: Transition, now_s: float) -> list[Output]:
        match transition.after:
            case PeerState.GONE:
                return self.brain.peer_gone(transition.peer, transition.reason, now_s)
            case PeerState.SUSPECT:
                return self.brain.peer_suspect(
                    transition.peer, transition.reason, now_s, session_lost=transition.session_lost
                )
            case PeerState.DRAINING:
                back = transition.before is PeerState.SUSPECT
                outputs = self.brain.peer_back(transition.peer, now_s) if back else []
                return outputs + self.brain.leave(transition.peer, transition.reason, now_s)
            case _ if transition.before is PeerState.SUSPECT:
                return self.brain.peer_back(transition.peer, now_s)
            case _:
                return []

    async def _carry_out(self, outputs: list[Output]) -> Outcome | None:
        for output in outputs:
            match output:
                case Send(peer=peer, command=command):
                    self._send(peer, self._with_tokens(peer, command))
                case WriteCommit(row=row):
                    if not await self._written(self._write_commit(row)):
                        continue
                    self._on_commit(row)
                    now_s = asyncio.get_running_loop().time()
                    outcome = await self._carry_out(self.brain.row_written(row.step, now_s))
                    if outcome is not None:
                        return outcome
                case WriteEvaluation(row=evaluation):
                    await self._written(self._write_evaluation(evaluation))
                    self.made_progress()
                case Note(level=level, message=message):
                    self._say(level, message)
                case Finish():
                    return Outcome(JobState.SUCCEEDED, SAVED)
                case Fail(code=code, message=message, hint=hint):
                    return Outcome(JobState.FAILED, message, code, hint)
                case BeginCheckpoint() | PublishCheckpoint() | DropCheckpoint():
                    self._keep(output)
                case EnterState(state=JobState.RUNNING):
                    self._patience.goes_on(asyncio.get_running_loop().time())
                    self._on_turn(output)
                case EnterState() | Admitted() | Independent() | Left():
                    self._on_turn(output)
                case Stopped(state=state, reason=reason, hint=hint, error_code=error_code):
                    return Outcome(state, reason, error_code, hint)
                case _:
                    assert_never(output)
        return None

    async def _written(self, write: Coroutine[object, object, None]) -> bool:
        """Whether it was written; False if the job was cancelled meanwhile, which the inbox says next.

        What becomes of the write then does not matter: who resumes the job begins a new timeline.
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

    def _keep(self, output: BeginCheckpoint | PublishCheckpoint | DropCheckpoint) -> None:
        assert self.keeper is not None, "a job at work has a keeper"
        match output:
            case BeginCheckpoint(version=version):
                self.keeper.begin(version)
            case PublishCheckpoint():
                self.keeper.publish(output)
            case DropCheckpoint():
                self.keeper.drop()
                self._on_turn(output)

    def _with_tokens(self, peer: PeerId, command: Command) -> Command:
        """A route with token ids for the first hop and targets for the last; a stage in between needs neither."""
        if not isinstance(command, Route | Evaluate):
            return command
        first, last = command.hops[0].peer == peer, command.hops[-1].peer == peer
        if not first and not last:
            return command
        tokens, targets = self._batches.of(command)
        return replace(command, tokens=tokens if first else b"", targets=targets if last else b"")

    def _run_out(self, now_s: float) -> list[Output]:
        """The job has run as long as it may: it is paused as if a person had asked for that, with all saved."""
        if self.brain.is_stopping:
            return []
        again = f"swarm resume {self.brain.settings.job} gives it as long again"
        reason = f"limits.max_runtime_s = {self._patience.runtime_s_max:g} has passed; {again}"
        self._on_turn(EnterState(JobState.PAUSING, reason))
        return self.brain.stop(JobState.PAUSED, reason, now_s)


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
