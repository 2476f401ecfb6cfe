"""One job's decisions: an event in, outputs out; the driver carries them out in the given order.

      start ──▶ LOADING ──all loaded, digests equal──▶ RUNNING ──last step agreed──▶ SAVING ──all saved──▶ ENDED
      resume ─▶ GATHERING ──all known are back────────────┘  feed microbatches, average full steps,              ▲
                           (or grace is over)                write rows, commit, compare digests, save now and then
                                                                  ├── to be paused or cancelled: committed, saved ┤
                                           anywhere: the last replica of a stage is lost (stalling.py) ───────────┘

The brain composes ledger (what counts), step (what may overlap), wiring and pace (who computes) and averaging (who sums
what). It never waits and never looks at a clock. Its rules of order are two: a row is written before any replica hears
of the commit, and whatever abolishes work (AbortRound, Void) is sent to a replica before the work that replaces it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import TypeAlias, assert_never

from scheduler.averaging import ROUNDS_MAX, Participant, Troubles, plan_round, squared_norms
from scheduler.deadlines import DeadlineSettings
from scheduler.devices import explain_probes, step_places, step_together
from scheduler.evaluation import EvaluationRow, Evaluations
from scheduler.explaining import JoinerStanding, MoveMade, ReplicaStanding, Situation
from scheduler.joining import Joiner, Joining, choose_donors
from scheduler.lateness import Lateness
from scheduler.leaving import Leave, Leaves
from scheduler.ledger import Ledger, Verdict
from scheduler.pace import Pace
from scheduler.rebalancing import Move, Rebalancer, RebalanceSettings, StagePool, StageReplica, where_to_join
from scheduler.recovery import Census, Links, Resumed
from scheduler.saving import (
    NEVER,
    SAVING_S_MAX,
    BeginCheckpoint,
    DropCheckpoint,
    PublishCheckpoint,
    Saving,
    SavingRules,
    Stopped,
    Turned,
)
from scheduler.stalling import FAILED_HINT, nobody_back, stopped_by_loss
from scheduler.step import (
    CommitRow,
    Phase,
    StepRun,
    Turn,
    UnitAveraging,
    may_open,
    may_write,
    version_needed,
)
from scheduler.wiring import WIRINGS, ReplicaLoad, StageLoad, choose_route
from swarm.errors import (
    GradientRange,
    JobFailed,
    OutOfMemory,
    PeerUnavailable,
    ReplicaDiverged,
    SetMismatch,
    StaleMessage,
)
from swarm.messages import (
    AbortRound,
    Accumulated,
    Admit,
    Average,
    Averaged,
    ChaosBegun,
    Command,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    Follow,
    Forwarded,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    LoadStage,
    Logged,
    Release,
    RoundFailed,
    Route,
    Saved,
    SaveStage,
    StateFile,
    Undelivered,
    UnitRound,
    Void,
)
from swarm.schedule import clip
from swarm.types import (
    Decision,
    Hop,
    JobId,
    JobState,
    Microbatch,
    OnStall,
    PeerId,
    Round,
    Routing,
    UnitName,
    set_digest,
)

__all__ = [
    "Admitted",
    "BrainSettings",
    "CommitRow",
    "Fail",
    "Finish",
    "JobBrain",
    "Left",
    "Mode",
    "Note",
    "Output",
    "Replica",
    "Send",
    "WriteCommit",
    "WriteEvaluation",
]


DEADLINES = DeadlineSettings()
NO_REBALANCING = RebalanceSettings(rebalance=False)
QUEUE_SLACK = 3.0  # a hop is late if it took so many times as long as all that its replica has to do takes others
FIRST_SLACK = 10.0  # for a replica that was never measured: its first computations prepare the device
RELAX_S = 5.0  # a replica that got no work for being slow is believed to be faster by and by


@dataclass(frozen=True, slots=True)
class BrainSettings:
    """What a job's decisions depend on; `split` is decoder layers per stage, `units` the stages that share a unit."""

    job: JobId
    epoch: int
    timeline: int
    steps: int
    microbatches: int
    split: tuple[int, ...]
    spec_json: str
    staleness: int
    max_in_flight: int | None  # None = auto
    units: Mapping[UnitName, tuple[int, ...]]
    grad_clip_norm: float  # 0 = off
    averaging_timeout_s: float
    fail_on_nonfinite: bool
    learning_rate: Callable[[int], float] = field(repr=False)
    tokens_of: Callable[[int], int] = field(repr=False)
    routing: Routing = "least_completion"
    eval_every_steps: int = 0  # 0 = never
    evaluation_microbatches: int = 0
    evaluation_tokens: int = 0
    pause_on_nonfinite: bool = False  # commit the step as skip, then pause
    first_step: int = 0  # the version that is loaded, from `files`
    files: tuple[StateFile, ...] = field(default=(), repr=False)
    saving: SavingRules = NEVER
    recover: bool = False  # route around lost replicas; else the job fails when one is gone
    work: tuple[float, ...] = ()  # of a microbatch at each stage, in any unit; all alike if not known
    state_bytes: tuple[int, ...] = ()  # that a peer fetches when it joins a stage
    on_stall: OnStall = "wait"  # with `recover`, when a stage has no replica left
    rebalance: RebalanceSettings = NO_REBALANCING
    deadlines: DeadlineSettings = DEADLINES


@dataclass(frozen=True, slots=True)
class Replica:
    """A peer that serves a stage of this job."""

    peer: PeerId
    incarnation: int
    address: str
    stage: int
    device: str = ""  # as the peer names it
    pinned: bool = False  # to its stage


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to a peer. A Route comes without tokens and targets: the driver fills them in."""

    peer: PeerId
    command: Command


@dataclass(frozen=True, slots=True)
class WriteCommit:
    """Make the row durable, then call `row_written(row.step, now_s)`."""

    row: CommitRow


@dataclass(frozen=True, slots=True)
class WriteEvaluation:
    """Make the result of an evaluation durable; nothing waits for it."""

    row: EvaluationRow


@dataclass(frozen=True, slots=True)
class Admitted:
    """A peer that joined is a replica from now on."""

    peer: PeerId
    stage: int


@dataclass(frozen=True, slots=True)
class Left:
    """A replica was released, and nothing depends on it any more; `target` is the stage to which it moves."""

    peer: PeerId
    stage: int
    target: int | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the job's log."""

    level: str
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job succeeded: the checkpoint after its last step is kept."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The job failed; peers that are still there were sent `Release` before."""

    code: str
    message: str
    hint: str


Output: TypeAlias = (
    Send
    | WriteCommit
    | WriteEvaluation
    | Admitted
    | Left
    | Note
    | Finish
    | Fail
    | BeginCheckpoint
    | PublishCheckpoint
    | DropCheckpoint
    | Stopped
    | Turned
)


JOINER_BYTES_PER_S_MIN = 1e6
JOIN_S_MIN = 600.0
JOINER_BYTES_PER_S = 25e6  # a home link of 200 Mb/s, until transfers are measured
EMPTY_SET = set_digest(())
CHECKPOINT_FAILED = "E1500"  # the code of swarm.checkpoint.CheckpointFailed, whose module reads files


class Mode(StrEnum):
    """Where the job stands, as far as the brain is concerned."""

    WAITING = "waiting"
    GATHERING = "gathering"
    LOADING = "loading"
    RUNNING = "running"
    SAVING = "saving"
    ENDED = "ended"


class JobBrain:
    """All decisions of one job. After Finish, Fail or cancel every call gives nothing."""

    def __init__(self, settings: BrainSettings, rng: Random) -> None:
        self.settings = settings
        self.stages = len(settings.split)
        self.mode = Mode.WAITING
        self._rng = rng
        self._ledger = Ledger(settings.timeline, self.stages, settings.microbatches)
        self._pace = Pace()
        self._wiring = WIRINGS[settings.routing]()
        self._evaluations = Evaluations(
            settings.timeline,
            every_steps=settings.eval_every_steps,
            steps=settings.steps,
            staleness=settings.staleness,
            microbatches=settings.evaluation_microbatches,
            tokens=settings.evaluation_tokens,
        )
        self._replicas: dict[PeerId, Replica] = {}  # those that are not gone
        self._pools: list[list[PeerId]] = [[] for _ in range(self.stages)]
        self._suspects: set[PeerId] = set()
        self._detached: set[PeerId] = set()  # suspects without a session: their Hello comes before anything else
        self._lost: set[PeerId] = set()  # were gone once: what they hold is void
        self._joining = Joining()
        self._leaves = Leaves()
        self._asked_s: dict[PeerId, float] = {}  # when those who leave were asked to
        self._lateness = Lateness(settings.deadlines)
        self._relax_s = 0.0  # when to look at replicas without work
        self._relaxes = False  # some of them are believed to be slow
        self._rebalancer = Rebalancer(settings.rebalance)
        self._rebalance_s = math.inf  # when to look again
        self._rebalancing: Decision[Move] = Decision(None, "the job has not run long enough")
        self._joined_s: dict[PeerId, float] = {}
        self._bytes_per_s = JOINER_BYTES_PER_S
        self._since: dict[PeerId, int] = {}  # version with which a replica was admitted: it has no older records
        self._digests: dict[int, str] = {}  # of each stage's state at version `_agreed`, if known
        self._links = Links()
        self._census: Census | None = None  # while gathering
        self._known: Mapping[PeerId, int] = {}  # who served which stage before a restart
        self._loads: list[dict[PeerId, ReplicaLoad]] = [{} for _ in range(self.stages)]
        self._changed: set[PeerId] = set()  # whose load in `_loads` is out of date
        self._places: Sequence[str] = ()  # where the optimizer of each stage runs
        self._step_together = step_together(self.stages, settings.units)
        self._unmeasured: list[set[PeerId]] = [set() for _ in range(self.stages)]
        self._loaded: dict[PeerId, Loaded] = {}
        self._elements: dict[UnitName, int] = {}
        self._saving = Saving(settings.saving, self.stages, settings.first_step, settings.steps)
        self._runs: dict[int, StepRun] = {}
        self._next_step = settings.first_step
        self._commits_sent = settings.first_step  # steps whose row is durable
        self._agreed = settings.first_step  # steps on whose commit all replicas agree
        self._round_number = 0
        self._in_flight_max = 0
        self._violations = 0
        self._no_route = ""  # why a microbatch could not be given away
        self._outputs: list[Output] = []

    # What happens ------------------------------------------------------------------------------------------------

    def start(self, replicas: Sequence[Replica], now_s: float) -> list[Output]:
        """Load every replica's stage; each stage has at least one."""
        assert self.mode is Mode.WAITING
        self.mode = Mode.LOADING
        for replica in sorted(replicas, key=lambda one: one.peer):
            self._replicas[replica.peer] = replica
            self._pools[replica.stage].append(replica.peer)
            self._unmeasured[replica.stage].add(replica.peer)
            self._wiring.add(replica.peer, replica.stage)
        assert all(self._pools), "each stage needs a replica"
        self._load_stages()
        for peer, replica in self._replicas.items():
            # In order of peer id, once and for all: ties between replicas must not depend on the order of a set.
            self._loads[replica.stage][peer] = self._load(peer)
        self._open_window()
        return self._go_on(now_s)

    def _open_window(self) -> None:
        # One microbatch at each replica of the largest pool and one on its way, at every stage.
        settings = self.settings
        window = settings.microbatches * (1 + settings.staleness)
        self._in_flight_max = settings.max_in_flight or min(window, 2 * self.stages * max(map(len, self._pools)))

    def resume(self, resumed: Resumed, now_s: float) -> list[Output]:
        """Go on where an earlier scheduler start stopped, once the peers that it knew have come back with Hello."""
        assert self.mode is Mode.WAITING
        self.mode = Mode.GATHERING
        self._census = Census(resumed.known, now_s + resumed.grace_s)
        self._known = resumed.known
        self._commits_sent = self._next_step = resumed.committed
        self._agreed = resumed.committed - len(resumed.rows)
        for row in resumed.rows:
            self._runs[row.step] = StepRun(row.step, Phase.COMMITTING, row.skip, row=row)
        for version in range(
            max(self.settings.first_step + 1, resumed.committed - self.settings.staleness), resumed.committed + 1
        ):
            if version not in resumed.evaluated:
                self._evaluations.made(version)
        return self._go_on(now_s)

    def admits(self, hello: Hello) -> bool:
        """Whether a peer that is not (or no longer) known here may go on with the stage that it holds.

        After the job went on without it, it must have taken part in all that was committed since, and come before the
        next commit is decided; a peer that was gone never may: others did its work.
        """
        settings = self.settings
        fits = (hello.job, hello.timeline) == (settings.job, settings.timeline) and 0 <= hello.stage < self.stages
        if hello.peer in self._joining:
            return True
        if not fits or hello.join or hello.peer in self._lost or self.mode in (Mode.LOADING, Mode.ENDED):
            return False
        if self.mode is Mode.WAITING:
            return True  # about to resume; asked again then
        if not self._agreed <= hello.version <= self._commits_sent:
            return False
        if self.mode is Mode.GATHERING:
            return True
        if any(run.phase in (Phase.DECIDED, Phase.WRITING) for run in self._runs.values()):
            return False
        rows = [run.row for step, run in self._runs.items() if step >= hello.version and run.row is not None]
        return all(made.epoch < settings.epoch for row in rows for made in row.rounds.values())

    def handle(self, peer: PeerId, event: Event, now_s: float) -> list[Output]:
        """An event of a peer's present incarnation; events of peers outside the job change nothing."""
        if self.mode is Mode.ENDED:
            return []
        self._ledger.now_s = now_s
        if peer in self._joining:
            self._on_joiner(peer, event)
            return self._go_on(now_s)
        if isinstance(event, Hello):
            self._on_hello(event)
            return self._go_on(now_s)
        if peer not in self._replicas:
            return []
        match event:
            case Accumulated() if self._census is not None:
                self._census.accumulated(peer, event)
            case Accumulated():
                self._on_accumulated(peer, event)
            case Forwarded(microbatch=microbatch):
                at = (microbatch.step, event.stage, microbatch.index)
                self._lateness.forwarded(*at, peer, now_s)
                return []
            case Averaged():
                self._on_averaged(peer, event)
            case RoundFailed():
                self._on_round_failed(peer, event)
            case Committed():
                self._on_committed(peer, event)
            case Loaded():
                self._on_loaded(peer, event)
            case Saved():
                self._on_saved(peer, event, now_s)
            case Undelivered():
                self._on_undelivered(peer, event)
            case Failed():
                self._on_failed(peer, event)
            case Leaving():
                self._note("warning", f"{self._name(peer)} wants to leave: {event.reason}")
            case Evaluated():
                row = self._evaluations.evaluated(peer, event)
                if row is not None:
                    self._outputs.append(WriteEvaluation(row))
            case Heartbeat() | Logged() | ChaosBegun():
                return []
            case _:
                assert_never(event)
        return self._go_on(now_s)

    def row_written(self, step: int, now_s: float) -> list[Output]:
        """The commit row is durable: every replica applies the step."""
        run = self._runs.get(step)
        if self.mode is Mode.ENDED or run is None or run.row is None or run.phase is not Phase.WRITING:
            return []
        run.turn(Turn.DURABLE)
        row = run.row
        for peer in self._members(step):
            self._send_commit(peer, row)
        self._ledger.close(step)
        self._lateness.forget_step(step)
        self._commits_sent = step + 1
        for joiner in self._joining:
            self._tell(joiner)
        self._evaluations.made(step + 1)
        self._after_commit(step + 1, row.skip, now_s)
        return self._go_on(now_s)

    def peer_suspect(self, peer: PeerId, reason: str, now_s: float, *, session_lost: bool = False) -> list[Output]:
        """Route the peer's unfinished hops around it (only with `recover`); it may still finish them.

        Without `recover` a peer that lost its session is lost: it gives up its stage with the session.
        """
        joiner = self._joining.get(peer)
        if joiner is not None and session_lost:
            joiner.report = None  # it would not hear that it is admitted; it says the same again with its next session
        if self.mode is Mode.ENDED or peer not in self._replicas or peer in self._suspects:
            return []
        if session_lost and not self.settings.recover:
            return self.peer_gone(peer, reason, now_s)
        self._ledger.now_s = now_s
        self._note("warning", f"{self._name(peer)} is suspect: {reason}")
        if self.settings.recover:
            self._suspects.add(peer)
            self._lateness.forget_peer(peer)
            self._wiring.remove(peer)
            self._changed.add(peer)
            self._evaluations.withdraw(peer)
            for run in self._redoable():
                self._ledger.withdraw(run.step, peer, f"suspect, {reason}")
        if session_lost:
            self._detached.add(peer)
        return self._go_on(now_s)

    def peer_back(self, peer: PeerId, now_s: float) -> list[Output]:
        """A suspect was heard again: it may be given work, unless its session broke; then `Hello` says so."""
        if peer not in self._detached:
            self._trust(peer)
        return self._go_on(now_s)

    def _trust(self, peer: PeerId) -> None:
        if peer in self._suspects:
            self._suspects.discard(peer)
            self._may_work(peer)
        self._changed.add(peer)

    def _may_work(self, peer: PeerId) -> None:
        """A replica that got no new work may get some, unless there is another reason against it."""
        if peer not in self._suspects and peer not in self._leaves:
            self._wiring.add(peer, self._replicas[peer].stage)
        self._changed.add(peer)

    def peer_gone(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """The peer is lost: the job fails, or (with `recover`) its uncommitted work is done again elsewhere."""
        if self.mode is Mode.ENDED:
            return []
        self._ledger.now_s = now_s
        if (joiner := self._joining.forget(peer)) is not None:
            self._note("warning", f"stage server {peer} is gone while it joined stage {joiner.replica.stage}: {reason}")
        elif peer in self._replicas:
            self._lose(peer, reason, "gone")
        return self._go_on(now_s)

    def _lose(self, peer: PeerId, cause: str, reason: str) -> None:
        """The peer is out of the job."""
        name, replica = self._name(peer), self._remove(peer)
        self._leaves.forget(peer)
        if self._census is not None:
            self._census.forget(peer)
            self._note("warning", f"{name} is gone: {cause}")
            return
        if not self._pools[replica.stage]:
            self._stage_lost(f"{name} is gone: {cause}; the stage has no other replica")
            return
        if not self.settings.recover:
            self._fail(PeerUnavailable.code, f"{name} is gone: {cause}", FAILED_HINT)
            return
        staying = self._leaves.stay(self._pools[replica.stage], self._agreed)
        if all(other in self._leaves for other in self._pools[replica.stage]):
            self._stage_lost(f"{name} is gone: {cause}; who still leaves the stage has older weights")
            return
        self._note("warning", f"{name} is gone: {cause}; its uncommitted work is done again")
        for run in self._redoable():
            self._reopen(run, f"{peer} is gone")
        self._ledger.peer_gone(peer, [run.step for run in self._redoable()], f"gone, {cause}", reason)
        for run in list(self._runs.values()):
            if run.phase is Phase.DECIDED and not run.skip and not self._is_held(run):
                self._undecide(run)
        for other, until in staying.items():
            self._note("warning", f"{self._name(other)} stays: it is the last of its stage")
            self._may_work(other)
            for run in self._runs.values():
                if run.phase is Phase.COMMITTING and run.step >= until and run.row is not None:
                    self._send_commit(other, run.row)  # it was no member, and is waited for from now on
        self._saver_gone(peer, replica.stage)

    def _is_held(self, run: StepRun) -> bool:
        """Whether each stage has a replica that holds the averages of the step."""
        return all(
            any(averaging.is_held_by(peer) for peer in self._pools[stage])
            for unit, averaging in run.rounds.items()
            for stage in self.settings.units[unit]
        )

    def _undecide(self, run: StepRun) -> None:
        """All of a stage that held a step's averages are lost before its row was written: accumulate it again."""
        lost = sorted({peer for averaging in run.rounds.values() for peer in averaging.lost})
        for unit in list(run.rounds):
            self._abort(run, unit)
        run.turn(Turn.REOPENED, "nobody of a stage holds the average any more")
        self._note("warning", f"step {run.step} was averaged, and all who hold that of a stage are lost: done again")
        for peer in lost:
            self._ledger.peer_gone(peer, [run.step], "gone with the average", "gone")

    def _remove(self, peer: PeerId) -> Replica:
        for run in self._runs.values():
            for averaging in run.rounds.values():
                averaging.lost.add(peer)
        replica = self._replicas.pop(peer)
        self._pools[replica.stage].remove(peer)
        self._loads[replica.stage].pop(peer, None)
        self._suspects.discard(peer)
        self._detached.discard(peer)
        self._lost.add(peer)
        self._loaded.pop(peer, None)
        self._since.pop(peer, None)
        self._joined_s.pop(peer, None)
        self._links.forget(peer)
        self._lateness.forget_peer(peer)
        self._pace.forget(peer)
        self._evaluations.withdraw(peer)
        self._wiring.remove(peer)
        self._pace_changed(*self._pools[replica.stage])
        return replica

    def _members(self, step: int) -> list[PeerId]:
        """Replicas that average and commit the step."""
        return [peer for peer in self._replicas if self._leaves.takes_part(peer, step)]

    def _stage_lost(self, lost: str) -> None:
        """No replica of a stage is left, so nothing that the others hold and no checkpoint has can be used."""
        stopped = stopped_by_loss(lost, self.settings.on_stall, self._saving.stop)
        if stopped is None or not self.settings.recover:
            self._fail(PeerUnavailable.code, lost, FAILED_HINT)
            return
        self._end(stopped.reason)
        self._outputs.append(stopped)

    def checkpoint_kept(self, version: int, now_s: float) -> list[Output]:
        """The checkpoint of `version` is complete and was read back."""
        if self.mode is Mode.ENDED or not self._saving.kept(version):
            return []
        if version == self.settings.steps:
            self._end("finished")
            self._outputs.append(Finish())
        return self._go_on(now_s)

    def checkpoint_failed(self, version: int, reason: str, fault: str, now_s: float) -> list[Output]:
        """The checkpoint of `version` could not be written: `fault` for a person, `reason` as in DropCheckpoint."""
        if self.mode is not Mode.ENDED and self._saving.open is not None and self._saving.open.version == version:
            self._give_up_saving(reason, fault)
        return self._go_on(now_s)

    def stop(self, state: JobState, reason: str, now_s: float) -> list[Output]:
        """Pause or cancel: feed no new step, commit what runs, save, then stop; at once if nothing was trained."""
        if self.mode is Mode.ENDED:
            return []
        untrained = self._commits_sent == self.settings.first_step
        if self.mode in (Mode.WAITING, Mode.LOADING) or (untrained and state is JobState.CANCELLED):
            self._end(reason)
            self._outputs.append(Stopped(state, reason))
        else:
            self._saving.stop = Stopped(state, reason)
        return self._go_on(now_s)

    def tick(self, now_s: float) -> list[Output]:
        """Time passed; to be called at `due_s`."""
        return self._go_on(now_s) if self.mode is not Mode.ENDED else []

    @property
    def due_s(self) -> float:
        """When something is to be done although nothing happens; infinity if never."""
        times_s = [trouble.retry_s for run in self._runs.values() for trouble in self._paused(run).values()]
        if self._census is not None:
            times_s.append(self._census.deadline_s)
        if self.mode is Mode.RUNNING:
            times_s += [self._rebalance_s, self._lateness.due_s() or math.inf]
            times_s += [self._relax_s] * self._relaxes
            times_s += [one.since_s + self._join_s_max(one) for one in self._joining if one.report is None]
        return min((time_s for time_s in times_s if time_s > self._ledger.now_s), default=math.inf)

    def cancel(self, now_s: float) -> list[Output]:
        """Release all peers; the job is over."""
        if self.mode is not Mode.ENDED:
            self._end("cancelled")
        return self._go_on(now_s)

    # What is known -----------------------------------------------------------------------------------------------

    @property
    def committed_steps(self) -> int:
        """Steps whose commit row is durable."""
        return self._commits_sent

    @property
    def is_over(self) -> bool:
        """Nothing will be decided any more."""
        return self.mode is Mode.ENDED

    def why_not_rebalanced(self) -> str:
        """The newest decision about moving replicas between stages, for a person."""
        return self._rebalancing.reason

    def situation(self, now_s: float) -> Situation:
        """What the job stands on, to be explained."""
        done, newest = self._ledger.contributions(), self._leaves.newest_move
        return Situation(
            self.mode is Mode.RUNNING,
            self.stages,
            self._agreed,
            self.waiting_for(),
            self.why_not_rebalanced(),
            tuple(
                ReplicaStanding(
                    peer,
                    replica.stage,
                    self.pace_s(peer),
                    self.outstanding(peer),
                    done[peer],
                    peer in self._suspects,
                    self._leaves.wants(peer),
                    self._asked_s.get(peer, math.nan),
                )
                for peer, replica in self._replicas.items()
            ),
            tuple(
                JoinerStanding(one.replica.peer, one.replica.stage, one.since_s, one.report is not None)
                for one in self._joining
            ),
            self._leaves.moves,
            newest and MoveMade(newest[0], newest[1].target or 0, newest[1].reason, newest[2]),
            self._links.failing(now_s),
            self._saving.open,
        )

    def is_joining(self, peer: PeerId) -> bool:
        """Whether the peer fetches a stage's state, and is no replica yet."""
        return peer in self._joining

    @property
    def in_flight(self) -> int:
        """Microbatches fed and not yet accumulated at every stage."""
        return self._ledger.in_flight()

    @property
    def fed(self) -> int:
        """Microbatches that were ever given out, each once."""
        return self._commits_sent * self.settings.microbatches + self._ledger.fed()

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Contributions in the steps committed since this brain began, per stage, as the ledger counted them."""
        return self._ledger.committed()

    @property
    def replayed(self) -> int:
        """Accumulations that were void and had to be done again."""
        return sum(self._ledger.replayed)

    @property
    def replayed_by_stage(self) -> tuple[int, ...]:
        """`replayed` per stage."""
        return tuple(self._ledger.replayed)

    @property
    def reroutes(self) -> Mapping[tuple[int, str], int]:
        """Hops that were taken from one replica, by (stage, reason)."""
        return self._ledger.moved

    @property
    def duplicates(self) -> int:
        """Late repeats that were ignored."""
        return self._ledger.duplicates

    @property
    def violations(self) -> int:
        """Events that no healthy replica sends: sets, routes or digests other than expected."""
        return self._violations + self._ledger.violations

    @property
    def stage_microbatches(self) -> tuple[int, ...]:
        """Microbatches in committed steps, per stage: once each, so equal."""
        return (self._commits_sent * self.settings.microbatches,) * self.stages

    def outstanding(self, peer: PeerId) -> int:
        """Hops that the peer was given and has not finished."""
        return self._ledger.outstanding(peer)

    def pace_s(self, peer: PeerId) -> float:
        """Device seconds that the peer needs per microbatch; 0 if never measured."""
        return self._pace.of(peer) if self._pace.is_known(peer) else 0.0

    def story(self, step: int, index: int) -> list[str]:
        """Every transition of a microbatch and of its step, with causes; for open and the newest closed steps."""
        run = self._runs.get(step)
        return self._ledger.story(step, index) + [f"step {step} {line}" for line in (run.history if run else [])]

    def waiting_for(self) -> str:
        """What the job waits for, for a person."""
        match self.mode:
            case Mode.GATHERING:
                empty = [str(stage) for stage, pool in enumerate(self._pools) if not pool]
                missing = _listed(self._census.missing() if self._census else [])
                return f"waits after a restart for {missing}" + (f"; nobody of stage {', '.join(empty)}" * bool(empty))
            case Mode.LOADING:
                return f"waits for {_listed(self._replicas.keys() - self._loaded)} to load"
            case Mode.SAVING:
                return self._waiting_for_checkpoint()
            case Mode.RUNNING if self._runs:
                return self._waiting_for_step(self._runs[min(self._runs)])
            case Mode.RUNNING if not self._evaluations.is_idle:
                return f"waits for the {self._evaluations.waiting_for()}"
            case Mode.RUNNING:
                return self._waiting_for_checkpoint()
        return f"is {self.mode}"

    def validate(self) -> None:
        """Assert what must hold between any two events."""
        self._ledger.validate()
        assert self._agreed <= self._commits_sent <= self._next_step <= self.settings.steps
        assert sorted(self._runs) == list(range(self._agreed, self._next_step)) or self.mode is Mode.ENDED
        assert self._ledger.open_steps() == [
            step for step, run in sorted(self._runs.items()) if run.phase not in (Phase.COMMITTING, Phase.DONE)
        ]
        for run in self._runs.values():
            if run.phase is Phase.AVERAGING:
                assert set(run.rounds) | set(self._paused(run)) == set(self.settings.units)
                assert self._ledger.is_full(run.step) or self.mode is Mode.ENDED
            for unit, averaging in run.rounds.items():
                assert averaging.reports.keys() <= {member.peer for member in averaging.members}
                assert averaging.members[-1].stop == self._elements[unit]
        for peer, replica in self._replicas.items():
            assert peer in self._pools[replica.stage]
            assert (
                peer in self._changed
                or self._ledger.has_changed(peer)
                or self._loads[replica.stage][peer] == self._load(peer)
            )
        assert sum(map(len, self._pools)) == len(self._replicas)

    # Loading and saving ------------------------------------------------------------------------------------------

    def _find_places(self) -> None:
        devices = [[self._replicas[peer].device for peer in pool] for pool in self._pools]
        self._places = step_places(devices, self._step_together)

    def _load_stages(self) -> None:
        self._find_places()
        for replica in self._replicas.values():
            self._send_load(replica)
        mixed = [str(stage) for stage, place in enumerate(self._places) if place == "cpu"]
        if mixed:
            self._note("info", f"unequal devices: the optimizer of stage {', '.join(mixed)} runs on the CPU")

    def _compare_probes(self, stage: int) -> None:
        """Replicas whose optimizer gives other bits must not train together."""
        stages = self._step_together[stage]
        probes = {peer: one.probe for peer, one in self._loaded.items() if one.stage in stages}
        fault = explain_probes(probes, {peer: self._replicas[peer].device for peer in probes}, stages)
        if fault:
            hint = "give each kind of device stages of its own: start its stage servers with --stage N"
            self._fail(ReplicaDiverged.code, fault, hint)

    def _send_load(self, replica: Replica) -> None:
        self._send(replica.peer, self._load_command(replica))

    def _load_command(self, replica: Replica) -> LoadStage:
        settings = self.settings
        return LoadStage(
            settings.job,
            settings.timeline,
            replica.stage,
            settings.split,
            settings.first_step,
            settings.spec_json,
            settings.files,
            step_on=self._places[replica.stage],
        )

    def _on_loaded(self, peer: PeerId, event: Loaded) -> None:
        replica, settings = self._replicas[peer], self.settings
        if self.mode not in (Mode.LOADING, Mode.GATHERING) or (event.job, event.timeline) != (
            settings.job,
            settings.timeline,
        ):
            return
        expected = {unit for unit, stages in settings.units.items() if replica.stage in stages}
        sizes = {size.unit: size.elements for size in event.units}
        # One that joined later, and tells of it again after a restart of the scheduler, began with a later version.
        version = max(event.version, settings.first_step) if event.join else settings.first_step
        if (event.stage, event.version, set(sizes)) != (replica.stage, version, expected):
            held = f"stage {event.stage}, version {event.version}, units {_listed(sizes)}"
            wanted = f"stage {replica.stage}, version {version}, units {_listed(expected)}"
            self._fail(JobFailed.code, f"{self._name(peer)} loaded {held} instead of {wanted}", "")
            return
        for unit, elements in sizes.items():
            if self._elements.setdefault(unit, elements) != elements:
                message = f"{self._name(peer)} has {elements} elements in unit {unit}, others {self._elements[unit]}"
                self._fail(ReplicaDiverged.code, message, "run the same release on every stage server")
                return
        self._loaded[peer] = event
        if event.join:
            self._begins_with(replica, event)
        self._compare_probes(event.stage)
        alike = (event.stage, event.version)
        digests = {other: one.digest for other, one in self._loaded.items() if (one.stage, one.version) == alike}
        self._compare(digests, f"of stage {event.stage} after loading")

    def _after_commit(self, version: int, skipped: bool, now_s: float) -> None:
        """The replicas were just told to make `version`: who shall save it must be told next."""
        if skipped and self.settings.pause_on_nonfinite and self._saving.stop is None:
            reason = f'the gradient of step {version - 1} was not finite (limits.on_nonfinite = "pause")'
            self._saving.stop = Stopped(JobState.PAUSED, reason)
            self._outputs.append(Turned(JobState.PAUSING, reason))
        decision = self._saving.due(version, now_s)
        if decision.plan is not None:
            if self._saving.open is not None:
                self._give_up_saving("timeout", f"it took more than {SAVING_S_MAX:g} s")
            self._collect(version, now_s)
        elif decision.reason:
            self._note("warning", decision.reason)

    def _collect(self, version: int, now_s: float) -> None:
        """Ask one replica of each stage, the one with the least to do, for its state."""
        self._outputs.append(BeginCheckpoint(version))
        savers = [
            min(pool, key=lambda peer: (peer in self._leaves, self._ledger.outstanding(peer), peer))
            for pool in self._pools
        ]
        self._saving.begin(version, savers, now_s)
        for saver in savers:
            self._ask_to_save(saver, version)

    def _ask_to_save(self, saver: PeerId, version: int) -> None:
        settings = self.settings
        self._send(saver, SaveStage(settings.job, settings.timeline, version, settings.saving.optimizer))

    def _on_saved(self, peer: PeerId, event: Saved, now_s: float) -> None:
        current = (event.job, event.timeline) == (self.settings.job, self.settings.timeline)
        if not current or not self._saving.saved(peer, event):
            self._ledger.duplicates += 1
        elif event.fault:
            self._give_up_saving("peer", f"{self._name(peer)} could not hand over its state: {event.fault}")

    def _saver_gone(self, peer: PeerId, stage: int) -> None:
        held = self._saving.open
        if held is None or self._saving.stage_of(peer) is None:
            return
        if held.version == self._commits_sent:  # others hold that version still
            saver = min(self._pools[stage], key=lambda one: (one in self._leaves, one in self._suspects, one))
            self._saving.replace(stage, peer, saver)
            self._ask_to_save(saver, held.version)
        else:
            self._give_up_saving("peer", f"stage server {peer} was lost before it had handed over stage {stage}")

    def _give_up_saving(self, reason: str, fault: str) -> None:
        """The job goes on without this checkpoint, unless it was the last word: weights are never lost silently."""
        version, kept = self._saving.give_up(), self._saving.newest
        self._outputs.append(DropCheckpoint(version, reason, fault))
        newest = f"the newest checkpoint is that of step {kept}" if kept else "there is no earlier checkpoint"
        stop = self._saving.stop
        if version < self._commits_sent or any(step >= version for step in self._runs):
            stop = None  # it was one on the way: what the job shall stop with is newer, and not saved yet
        if version == self.settings.steps:
            again = f"swarm resume {self.settings.job}" if kept else "submit the job again"
            message = f"the final weights (step {version}) could not be saved: {fault}; {newest}"
            self._fail(CHECKPOINT_FAILED, message, f"see to it that checkpoints can be written, then: {again}")
        elif stop is not None and stop.state is JobState.CANCELLED:
            text = f"{stop.reason}; the checkpoint at step {version} could not be written: {fault}; {newest}"
            self._end(text)
            self._outputs.append(Stopped(stop.state, text))
        elif stop is not None:
            self._saving.stop = None
            text = f"cannot pause, goes on: the checkpoint at step {version} could not be written: {fault}"
            self._note("error", text)
            self._outputs.append(Turned(JobState.RUNNING, text))
        else:
            self._note("error", f"the checkpoint at step {version} could not be written: {fault}; {newest}")

    # Accumulating ------------------------------------------------------------------------------------------------

    def _on_accumulated(self, peer: PeerId, event: Accumulated) -> None:
        run = self._runs.get(event.microbatch.step)
        if run is not None and not run.can_be_redone:
            # All members proved their sets when they sealed; nothing can have been added to them since.
            self._ledger.duplicates += 1
            return
        verdict = self._ledger.accumulated(peer, event)
        if verdict in (Verdict.COUNTED, Verdict.SECOND):
            self._pace.observe(peer, event.forward_s + event.backward_s)
            self._wiring.done(peer, event.forward_s + event.backward_s + event.wait_s)
            self._pace_changed(peer)
            step, index = event.microbatch.step, event.microbatch.index
            self._lateness.accumulated(step, event.stage, index, peer, self._ledger.now_s)
        if verdict is Verdict.UNASKED:
            self._note("error", f"{self._name(peer)} accumulated {event.microbatch} without being asked")

    def _hurry(self) -> None:
        """Give what takes too long to another replica; try those again that were slow."""
        now_s = self._ledger.now_s
        for late in self._lateness.expired(now_s) if self.settings.recover else ():
            step, stage, index, peer = late.hop.step, late.hop.stage, late.hop.index, late.hop.peer
            run = self._runs.get(step)
            if run is None or run.phase is not Phase.FEEDING or peer not in self._replicas:
                continue
            hops = self._ledger.hops(step, index)
            named = hops[stage]
            if named is None or named.peer != peer or self._ledger.holder(step, stage, index) == peer:
                continue
            slack = QUEUE_SLACK if self._pace.is_known(peer) else QUEUE_SLACK * FIRST_SLACK
            if late.waited_s < slack * (self._ledger.outstanding(peer) + 1) * self._best_s(stage):
                self._lateness.look_again(late, now_s)
                continue  # its queue explains that, or that it is new
            self._pace.observe(peer, late.waited_s)
            self._pace_changed(peer)
            if self._has_other(stage, hops):
                self._note("warning", f"{late.reason}: given to another replica")
                self._ledger.take(step, stage, index, late.reason, "timeout")
        if now_s >= self._relax_s:
            self._relax_s, self._relaxes = now_s + RELAX_S, False
            for pool in self._pools:
                idle = [peer for peer in pool if not self._ledger.outstanding(peer)]
                faster = self._pace.relax(idle, pool)
                self._changed.update(faster)
                self._relaxes |= bool(faster)

    def _best_s(self, stage: int) -> float:
        """Seconds per microbatch of the stage's fastest replica."""
        return min((self._pace.of(peer, self._pools[stage]) for peer in self._pools[stage]), default=0.0)

    def _settle_pairs(self, run: StepRun) -> None:
        """Where two replicas hold one microbatch, the smaller contribution is void."""
        while (peer := self._ledger.superfluous(run.step)) is not None:
            self._void(run, peer, "another replica holds a microbatch of its set")

    def _void(self, run: StepRun, peer: PeerId, cause: str, reason: str = "refused") -> None:
        self._reopen(run, f"{peer} is void")
        struck = self._ledger.void(run.step, peer, cause, reason)
        self._send(peer, Void(self.settings.timeline, run.step, struck))

    def _refill(self, run: StepRun, *, keep: bool = False) -> None:
        """Give every orphan a new hop, those that some replica holds already to that replica.

        `keep`: what nobody holds goes to whoever was at work on it before.
        """
        raised = False
        for index, stages in self._ledger.orphans(run.step):
            kept = self._ledger.hops(run.step, index)
            fixed = [hop.peer if hop else self._ledger.holder(run.step, s, index) for s, hop in enumerate(kept)]
            if keep:
                before = [self._ledger.at_work(run.step, stage, index) for stage in range(self.stages)]
                usable = self._replicas.keys() - self._suspects
                fixed = [one or (asked if asked in usable else None) for one, asked in zip(fixed, before, strict=True)]
            peers = self._choose(fixed)
            if peers is None:
                return  # tried again with the next event
            if not raised:
                self._ledger.next_attempt(run.step)
                raised = True
            for stage in stages:
                self._ledger.reroute(run.step, stage, index, self._hop(peers[stage], run.step), "refill")
                if fixed[stage] is None:
                    self._wiring.given(peers[stage])
            self._send_route(run.step, index)

    def _feed(self) -> None:
        """Feed microbatches in order, older steps first, while there is room in flight."""
        while self._ledger.in_flight() < self._in_flight_max:
            step = next((s for s in self._ledger.open_steps() if self._ledger.unfed(s) is not None), None)
            if step is None and self._saving.stop is not None:
                return
            if step is None:
                step = self._next_step
                limits = {"steps": self.settings.steps, "staleness": self.settings.staleness}
                if not may_open(step, commits_sent=self._commits_sent, **limits):
                    return
                self._next_step += 1
                self._runs[step] = StepRun(step)
                self._ledger.open(step)
            peers = self._choose([None] * self.stages)
            if peers is None:
                return
            for peer in peers:
                self._wiring.given(peer)
            self._send_route(step, self._ledger.feed(step, [self._hop(peer, step) for peer in peers]))

    def _choose(self, fixed: Sequence[PeerId | None]) -> tuple[PeerId, ...] | None:
        """One replica per stage, the fixed ones kept."""
        self._refresh_loads()
        loads = [
            StageLoad(stage, (self._load(keep, keep=True),) if keep else tuple(self._loads[stage].values()))
            for stage, keep in enumerate(fixed)
        ]
        now_s = self._ledger.now_s
        if self._links.any(now_s):
            decision = choose_route(loads, now_s, self._rng, self._links.cost_s)
        else:
            decision = self._wiring.choose(loads, now_s, self._rng)
        self._no_route = "" if decision.plan else decision.reason
        return decision.plan

    def _refresh_loads(self) -> None:
        self._changed |= self._ledger.take_changed()
        for peer in self._changed & self._replicas.keys():
            self._loads[self._replicas[peer].stage][peer] = self._load(peer)
        self._changed.clear()

    def _evaluate(self) -> None:
        """Feed evaluation microbatches; those who lost their place on a route are told too."""
        if self._evaluations.is_idle:
            return
        self._refresh_loads()
        pools = [tuple(loads.values()) for loads in self._loads]
        if self._links.any(self._ledger.now_s):
            reached = [tuple(one for one in pool if not self._links.touches(one.peer)) for pool in pools]
            usable = [any(one.has_credit for one in pool) for pool in reached]
            pools = [reached[stage] if usable[stage] else pool for stage, pool in enumerate(pools)]
        for turn in self._evaluations.feed(pools, self._in_flight_max):
            replicas = [self._replicas[peer] for peer in turn.peers]
            hops = tuple(Hop(one.peer, one.incarnation, turn.attempt, one.address) for one in replicas)
            microbatch = Microbatch(self.settings.timeline, turn.version, turn.index)
            for peer in (*turn.peers, *turn.displaced):
                self._send(peer, Evaluate(microbatch, turn.version, hops))

    def _pace_changed(self, *peers: PeerId) -> None:
        """Of those that were never measured we believe what the measured ones of their stage show."""
        self._changed.update(peers)
        for stage in {self._replicas[peer].stage for peer in peers}:
            self._unmeasured[stage] = {peer for peer in self._unmeasured[stage] if not self._pace.is_known(peer)}
            self._changed |= self._unmeasured[stage]

    def _load(self, peer: PeerId, *, keep: bool = False) -> ReplicaLoad:
        """`keep`: the replica has what the others of a route need, so that it leaves is no reason against it."""
        pace_s = self._pace.of(peer, self._pools[self._replicas[peer].stage])
        may_work = peer not in self._suspects and (keep or peer not in self._leaves)
        return ReplicaLoad(peer, self._ledger.outstanding(peer), pace_s, may_work)

    def _hop(self, peer: PeerId, step: int) -> Hop:
        replica = self._replicas[peer]
        return Hop(peer, replica.incarnation, self._ledger.attempt(step), replica.address)

    def _send_route(self, step: int, index: int) -> None:
        """Tell all on the route, and those that it displaced."""
        hops = tuple(hop for hop in self._ledger.hops(step, index) if hop is not None)
        assert len(hops) == self.stages
        held = [self._ledger.holder(step, stage, index) == hop.peer for stage, hop in enumerate(hops)]
        self._lateness.routed(step, index, [hop.peer for hop in hops], held, self._ledger.now_s)
        version = version_needed(step, self.settings.staleness)
        route = Route(Microbatch(self.settings.timeline, step, index), version, hops)
        for peer in dict.fromkeys([hop.peer for hop in hops] + self._ledger.displaced(step, index)):
            self._send(peer, route)

    # Averaging ---------------------------------------------------------------------------------------------------

    def _start_rounds(self, run: StepRun) -> None:
        sets = self._ledger.sets(run.step)
        run.digests = {peer: set_digest(indexes) for peer, indexes in sets.items()}
        for unit in self.settings.units:
            self._start_round(run, unit)

    def _start_round(self, run: StepRun, unit: UnitName) -> None:
        stages = set(self.settings.units[unit])
        members = [one for peer in self._members(run.step) if (one := self._replicas[peer]).stage in stages]
        trouble = run.troubles.get(unit)
        planned = plan_round(
            [
                Participant(one.peer, one.incarnation, one.address, run.digests.get(one.peer, EMPTY_SET))
                for one in members
            ],
            self._elements[unit],
            trouble.owners([one.peer for one in members]) if trouble else None,
        )
        self._round_number += 1
        number = Round(self.settings.epoch, self._round_number)
        run.rounds[unit] = UnitAveraging(number, planned)
        timeline, timeout_s = self.settings.timeline, self.settings.averaging_timeout_s
        command = Average(timeline, run.step, unit, number, planned, self.settings.tokens_of(run.step), timeout_s)
        for member in planned:
            self._send(member.peer, command)

    def _abort(self, run: StepRun, unit: UnitName) -> None:
        averaging = run.rounds.pop(unit)
        for member in averaging.members:
            self._send(member.peer, AbortRound(self.settings.timeline, run.step, unit, averaging.round))

    def _reopen(self, run: StepRun, cause: str) -> None:
        """Contributions of a step that is being averaged change: give its rounds up and accumulate again."""
        if run.phase is Phase.AVERAGING:
            for unit in list(run.rounds):
                self._abort(run, unit)
            run.turn(Turn.REOPENED, cause)

    def _present_round(self, peer: PeerId, event: Averaged | RoundFailed) -> UnitAveraging | None:
        """The round that the event is about, if it is still the unit's present one."""
        run = self._runs.get(event.step)
        averaging = run.rounds.get(event.unit) if run and run.phase is Phase.AVERAGING else None
        current = averaging is not None and event.timeline == self.settings.timeline
        if averaging is None or not current or averaging.round != event.round or not averaging.is_member(peer):
            return None
        return averaging

    def _on_averaged(self, peer: PeerId, event: Averaged) -> None:
        averaging = self._present_round(peer, event)
        if averaging is None or peer in averaging.reports:
            self._ledger.duplicates += 1
            return
        averaging.reports[peer] = event
        digests = {other: report.digest for other, report in averaging.reports.items()}
        self._compare(digests, f"of the averaged gradient of unit {event.unit}, step {event.step}")

    def _on_round_failed(self, peer: PeerId, event: RoundFailed) -> None:
        averaging, run = self._present_round(peer, event), self._runs.get(event.step)
        if averaging is None or run is None:
            return
        if SetMismatch.code in event.reason:
            self._violations += 1
            self._note("error", f"{self._name(peer)} holds another set than the ledger: {event.reason}; done again")
            self._void(run, peer, "its set is not the ledger's")
            return
        trouble = run.troubles.setdefault(event.unit, Troubles())
        accused = PeerId(event.accused) if event.accused in self._replicas else None
        self._abort(run, event.unit)
        count = trouble.failed(peer, accused, self._ledger.now_s)
        says = f"{self._name(peer)} says {event.reason}" + (f" (accuses {accused})" if accused else "")
        told = f"round {averaging.round.number} of unit {event.unit}, step {event.step}, failed: {says}"
        self._note("warning", told)
        if accused is not None:
            self._links.accuse(peer, accused, self._ledger.now_s)
        if count < ROUNDS_MAX or {peer, accused} & self._suspects:
            return  # membership will say whether a suspect is gone
        share = {member.peer: self._ledger.share(run.step, member.peer) for member in averaging.members}
        leaver = trouble.leaver([one for one in (peer, accused) if one is not None], self._spare(), share)
        if leaver is not None:
            self._expel(leaver, f"it cannot average with the others; {says}", "timeout")
        elif accused is None:
            hint = "check the network between stage servers, or raise averaging.timeout_s"
            self._fail(JobFailed.code, f"{told}, {count} times", hint)

    def _paused(self, run: StepRun) -> dict[UnitName, Troubles]:
        """Units of a step that is being averaged whose round failed, and that have no other yet."""
        if run.phase is not Phase.AVERAGING:
            return {}
        return {unit: trouble for unit, trouble in run.troubles.items() if unit not in run.rounds}

    def _repeat_rounds(self, run: StepRun) -> None:
        for unit, trouble in self._paused(run).items():
            stages = self.settings.units[unit]
            waits = any(
                self._replicas[peer].stage in stages and self._leaves.takes_part(peer, run.step)
                for peer in self._suspects
            )
            if trouble.retry_s <= self._ledger.now_s and not waits:
                self._start_round(run, unit)

    # Recovery ----------------------------------------------------------------------------------------------------

    def _on_hello(self, hello: Hello) -> None:
        """A peer of the job dialled: after its session broke, or after the scheduler was restarted."""
        peer = hello.peer
        if peer not in self._replicas:
            if not self.admits(hello):
                self._outputs.append(Send(peer, Release(self.settings.job, "the job went on without it")))
                return
            pinned = hello.pinned_stage >= 0
            self._enlist(Replica(peer, hello.incarnation, hello.address, hello.stage, hello.device, pinned))
        self._detached.discard(peer)
        self._evaluations.withdraw(peer)
        self._evaluations.raise_attempt(hello.attempt)
        self._ledger.raise_attempts(hello.attempt)
        settings, replica = self.settings, self._replicas[peer]
        holds = (hello.job, hello.timeline, hello.stage) == (settings.job, settings.timeline, replica.stage)
        if self._census is not None:
            self._census.report(hello)
        elif self.mode is Mode.LOADING:
            if not holds:
                self._send_load(replica)
        else:
            version = hello.version
            report = self._loaded.get(peer)
            if hello.join and report is not None and report.join == hello.join:
                # It never heard that it was admitted, and keeps what it had reported.
                version = report.version
                self._send(peer, Admit(settings.job, settings.timeline, hello.join, version))
            elif hello.join:
                version = -1
            if not holds or not self._agreed <= version <= self._commits_sent:
                self._expel(peer, f"it holds version {hello.version}", "refused")
                return
            self._send_commits(peer, version)
            for run in self._redoable():
                # What became of each of its cells is not asked: all that is not committed is done again.
                self._void(run, peer, "its session broke", "timeout")
            self._saver_gone(peer, replica.stage)  # whether it was asked, or has answered, is not known
        self._trust(peer)

    def _enlist(self, replica: Replica) -> None:
        self._replicas[replica.peer] = replica
        self._pools[replica.stage].append(replica.peer)
        self._unmeasured[replica.stage].add(replica.peer)
        self._wiring.add(replica.peer, replica.stage)
        self._loads[replica.stage][replica.peer] = self._load(replica.peer)

    def _send_commits(self, peer: PeerId, version: int) -> None:
        """The commits that the peer missed; it still holds the means of their rounds, or never needed them."""
        for step in range(version, self._commits_sent):
            row = self._runs[step].row
            assert row is not None
            if self._leaves.takes_part(peer, step):
                self._send_commit(peer, row)

    def _begin_again(self, census: Census) -> None:
        """All that can be expected are back: the ledger is what they report."""
        self._census = None
        self.mode = Mode.RUNNING
        self._pools = [sorted(pool) for pool in self._pools]
        self._find_places()
        self._loads = [dict(sorted(loads.items())) for loads in self._loads]
        self._open_window()
        for peer, hello in sorted(census.hellos.items()):
            self._send_commits(peer, hello.version)
        for step in range(self._commits_sent, min(self.settings.steps, census.last_step() + 1)):
            self._runs[step] = StepRun(step)
            self._next_step = step + 1
            self._ledger.adopt(step, census.cells(step))
            self._refill(self._runs[step], keep=True)
        missing = f"; without {_listed(census.missing())}" if census.missing() else ""
        self._note("info", f"{len(self._replicas)} replicas are back: goes on at step {self._commits_sent}{missing}")

    def _on_undelivered(self, peer: PeerId, event: Undelivered) -> None:
        """A link fails: give the hop at one of its ends to another replica."""
        step, index = event.microbatch.step, event.microbatch.index
        run, stage = self._runs.get(step), self._replicas[peer].stage
        if event.evaluation and event.to in self._replicas:
            self._links.accuse(peer, event.to, self._ledger.now_s)
            self._evaluations.withdraw(event.to)
            return
        if run is None or run.phase is not Phase.FEEDING or event.to not in self._replicas:
            return
        self._links.accuse(peer, event.to, self._ledger.now_s)
        hops = self._ledger.hops(step, index)
        if not 0 <= event.stage < self.stages or abs(event.stage - stage) != 1:
            self._violations += 1
            return
        hop = hops[event.stage]
        if hop is None or (hop.peer, hop.attempt) != (event.to, event.attempt):
            return  # moved since
        cause = f"{peer} cannot reach {event.to}: {event.reason}"
        for end, at in ((event.to, event.stage), (peer, stage)):
            named = hops[at]
            if named is None or named.peer != end or not self._has_other(at, hops):
                continue
            if end != self._ledger.holder(step, at, index):
                self._ledger.take(step, at, index, cause, "timeout")
                return
            if end == peer:
                self._void(run, peer, cause, "timeout")  # the other end lacks what only this one has
                return

    def _has_other(self, stage: int, hops: Sequence[Hop | None]) -> bool:
        """Whether another replica of the stage can be reached from the neighbours on the route."""
        named = hops[stage]
        near = [hops[at] for at in (stage - 1, stage + 1) if 0 <= at < self.stages]
        return any(
            (named is None or other != named.peer)
            and other not in self._suspects
            and other not in self._leaves
            and not any(hop is not None and self._links.fails(other, hop.peer) for hop in near)
            for other in self._pools[stage]
        )

    def _on_failed(self, peer: PeerId, event: Failed) -> None:
        """A replica gives up: the others of its stage go on, if there are any and the job was at work."""
        if event.job != self.settings.job:
            return
        recovers = self.settings.recover and self.mode is not Mode.LOADING
        if recovers and len(self._pools[self._replicas[peer].stage]) > 1:
            self._expel(peer, event.message, "oom" if event.code == OutOfMemory.code else "refused")
        elif recovers and event.code == StaleMessage.code:
            # Those that had what it lacks are gone, such as the averaged gradient of a round before it joined.
            self._stage_lost(f"{self._name(peer)} cannot go on: {event.message}; the stage has no other replica")
        else:
            self._fail(event.code, f"{self._name(peer)} cannot go on: {event.message}", event.hint)

    def _spare(self) -> set[PeerId]:
        """Replicas whose stage has another one that is not suspect."""
        return {
            peer
            for pool in self._pools
            for peer in pool
            if any(other != peer and other not in self._suspects and other not in self._leaves for other in pool)
        }

    def _expel(self, peer: PeerId, cause: str, reason: str) -> None:
        """The peer is alive but cannot go on: the job goes on without it."""
        self._send(peer, Release(self.settings.job, cause))
        self._lose(peer, cause, reason)

    # Joining -----------------------------------------------------------------------------------------------------

    def where_to_join(
        self,
        peer: PeerId,
        pinned_stage: int,
        fitting: Iterable[int],
        now_s: float,
        coming: Mapping[PeerId, int] | None = None,
    ) -> Decision[int]:
        """The stage that an idle peer is to join, of those whose state fits into its memory; or why it is not to.

        `coming`: peers that were sent to a stage just now, of which this brain has not heard.
        """
        if self.mode is not Mode.RUNNING or not self.settings.recover or self._saving.stop is not None:
            return Decision(None, "the job takes nobody in now")
        if barred := self._joining.barred(peer, now_s):
            return Decision(None, barred)
        fits = set(fitting)
        if pinned_stage >= 0:
            fits &= {pinned_stage}
        destination = self._leaves.destination(peer)
        if destination is not None and destination.target in fits:
            return Decision(destination.target, destination.reason)
        pools = [pool for pool in self._stage_pools(peer, coming or {}) if pool.stage in fits]
        if not pools:
            return Decision(None, "no stage fits its memory" if pinned_stage < 0 else f"stage {pinned_stage} does not")
        return where_to_join(pools, min_replicas=self.settings.rebalance.min_replicas)

    def _stage_pools(
        self, without: PeerId | None = None, coming: Mapping[PeerId, int] = MappingProxyType({})
    ) -> list[StagePool]:
        """The stages as the planners see them; who joins or moves counts as arriving, who leaves not at all."""
        settings = self.settings
        arriving = {peer: stage for peer, stage in coming.items() if peer not in self._replicas}
        arriving |= {joiner.replica.peer: joiner.replica.stage for joiner in self._joining}
        arriving |= self._leaves.moving(self._ledger.now_s)
        if without is not None:
            arriving.pop(without, None)
        paces_s = [[self._pace.of(peer, pool) for peer in pool] for pool in self._pools]
        return [
            StagePool(
                stage,
                (
                    *(
                        StageReplica(
                            peer, pace_s, self._joined_s.get(peer, -math.inf), pinned=self._replicas[peer].pinned
                        )
                        for peer, pace_s in zip(pool, paces_s[stage], strict=True)
                        if peer not in self._leaves
                    ),
                    *(
                        StageReplica(peer, self._pace.of(peer, pool), arriving=True)
                        for peer, at in arriving.items()
                        if at == stage
                    ),
                ),
                settings.state_bytes[stage] if settings.state_bytes else 0,
                self._bytes_per_s,
                settings.work[stage] if settings.work else 1.0,
            )
            for stage, pool in enumerate(self._pools)
        ]

    def join(self, replica: Replica, now_s: float) -> list[Output]:
        """Let an idle peer fetch the stage's state, to become a replica when it has it."""
        if self.mode is Mode.ENDED:
            return []
        self._ledger.now_s = now_s
        if self.mode is not Mode.RUNNING or replica.peer in self._replicas:
            self._outputs.append(Send(replica.peer, Release(self.settings.job, "the job takes nobody in now")))
            return self._go_on(now_s)
        self._leaves.forget(replica.peer)
        joiner = self._joining.begin(replica, now_s)
        self._note("info", f"stage server {replica.peer} joins stage {replica.stage}")
        self._outputs.append(Send(replica.peer, replace(self._load_command(replica), join=joiner.number)))
        self._tell(joiner)
        return self._go_on(now_s)

    def _tell(self, joiner: Joiner) -> None:
        """What is new for a joiner: versions, digest, donors, and that its report was seen."""
        settings, stage = self.settings, joiner.replica.stage
        version = self._commits_sent
        known = self._digest_at(stage, version)
        agreed = (version, known) if known else (self._agreed, self._digests.get(stage, ""))
        donors = self._donors(stage, joiner.replica.peer, self._commits_sent)
        self._outputs.append(
            Send(
                joiner.replica.peer,
                Follow(settings.job, settings.timeline, joiner.number, version, *agreed, donors, joiner.answered),
            )
        )

    def _digest_at(self, stage: int, version: int) -> str:
        """The digest of the stage's state at a version, as the first replica said; empty if none has."""
        if version == self._agreed and self._digests:
            return self._digests.get(stage, "")
        run = self._runs.get(version - 1)
        return next((one.digest for one in run.commits.values() if one.stage == stage), "") if run is not None else ""

    def _donors(self, stage: int, joiner: PeerId, step: int) -> tuple[Hop, ...]:
        """Replicas that have the state and, from `step` on, the records of the stage."""
        pool = [self._replicas[peer] for peer in self._pools[stage] if peer != joiner and peer not in self._suspects]
        able = [one for one in pool if self._since.get(one.peer, 0) <= step and self._leaves.takes_part(one.peer, step)]
        return choose_donors([Hop(one.peer, one.incarnation, 0, one.address) for one in able], self._rng)

    def _on_joiner(self, peer: PeerId, event: Event) -> None:
        """An event of a peer that is no replica yet: what it says of an earlier life counts for nothing."""
        joiner = self._joining.get(peer)
        assert joiner is not None
        match event:
            case Loaded() if self._joining.reported(peer, event):
                fault = self._unfit(joiner, event)
                if fault:
                    self._refuse(joiner, fault)
            case Hello() if event.join == joiner.number and event.job == self.settings.job:
                self._tell(joiner)
            case Hello():
                self._refuse(joiner, "its session broke before it knew what to fetch")
            case Failed() if event.job == self.settings.job:
                self._refuse(joiner, event.message)
            case Leaving():
                self._refuse(joiner, f"it wants to leave: {event.reason}")

    def _refuse(self, joiner: Joiner, reason: str) -> None:
        peer = joiner.replica.peer
        self._joining.failed(peer, reason, self._ledger.now_s)
        self._note("warning", f"stage server {peer} could not join stage {joiner.replica.stage}: {reason}")
        self._outputs.append(Send(peer, Release(self.settings.job, reason)))

    def _unfit(self, joiner: Joiner, event: Loaded) -> str:
        """Why a joiner can never serve beside the replicas; empty if it can."""
        stage = joiner.replica.stage
        sizes = {size.unit: size.elements for size in event.units}
        expected = {unit: self._elements.get(unit) for unit, stages in self.settings.units.items() if stage in stages}
        if (event.job, event.timeline, event.stage) != (self.settings.job, self.settings.timeline, stage):
            return f"it loaded stage {event.stage} of job {event.job}"
        if sizes != {unit: elements for unit, elements in expected.items() if elements is not None}:
            return f"it has {sizes} parameters, the stage {expected}"
        if event.version > self._commits_sent:
            self._violations += 1
            return f"it says version {event.version}, the newest is {self._commits_sent}"
        stages = self._step_together[stage]
        probes = {other: one.probe for other, one in self._loaded.items() if one.stage in stages}
        devices = {other: self._replicas[other].device for other in probes}
        return explain_probes(
            probes | {joiner.replica.peer: event.probe}, devices | {joiner.replica.peer: joiner.replica.device}, stages
        )

    def _judge_joiners(self) -> None:
        """Admit whoever reported a state that is right and new enough; answer those who are too late."""
        for joiner in self._joining:
            report = joiner.report
            if report is None and self._ledger.now_s >= joiner.since_s + self._join_s_max(joiner):
                self._refuse(joiner, "it takes too long to fetch the state")
            if report is None:
                continue
            if report.version < self._agreed:
                self._joining.answer(joiner)
                self._tell(joiner)
                continue
            digest = self._digest_at(joiner.replica.stage, report.version)
            if digest and digest != report.digest:
                self._refuse(joiner, f"its state of version {report.version} is not that of the replicas")
            elif digest:
                self._admit(joiner, report)

    def _join_s_max(self, joiner: Joiner) -> float:
        """How long a joiner may take: moves wait for it, and it counts as a replica to come."""
        sizes = self.settings.state_bytes
        return JOIN_S_MIN + (sizes[joiner.replica.stage] / JOINER_BYTES_PER_S_MIN if sizes else 0.0)

    def _admit(self, joiner: Joiner, report: Loaded) -> None:
        replica, version = joiner.replica, report.version
        self._joining.admitted(replica.peer)
        self._lost.discard(replica.peer)
        self._loaded[replica.peer] = report
        self._enlist(replica)
        self._open_window()
        settings, took_s = self.settings, self._ledger.now_s - joiner.since_s
        self._joined_s[replica.peer] = self._ledger.now_s
        if settings.state_bytes and took_s > 0.0:
            self._bytes_per_s += 0.3 * (settings.state_bytes[replica.stage] / took_s - self._bytes_per_s)
        self._outputs.append(Admitted(replica.peer, replica.stage))
        self._note("info", f"{self._name(replica.peer)} joined with version {version} after {took_s:.1f} s")
        self._send(replica.peer, Admit(settings.job, settings.timeline, joiner.number, version))
        self._begins_with(replica, report)
        self._send_commits(replica.peer, version)

    def _begins_with(self, replica: Replica, report: Loaded) -> None:
        """The replica joined with a version: it made no commit before that, and has that one's outcome."""
        peer, version = replica.peer, report.version
        self._since[peer] = version
        before = self._runs.get(version - 1)
        if before is not None:
            before.commits[peer] = Committed(report.timeline, version - 1, version, replica.stage, report.digest)

    # Leaving and moving ------------------------------------------------------------------------------------------

    def leave(self, peer: PeerId, reason: str, now_s: float, target: int | None = None) -> list[Output]:
        """Let a replica finish what it has begun, then release it: out of the job, or for stage `target`."""
        if self.mode is Mode.ENDED:
            return []
        self._ledger.now_s = now_s
        joiner = self._joining.get(peer)
        if joiner is not None:
            self._refuse(joiner, reason)
        elif peer in self._replicas:
            self._ask_to_leave(peer, reason, target)
        return self._go_on(now_s)

    def _ask_to_leave(self, peer: PeerId, reason: str, target: int | None = None) -> None:
        if not self._leaves.ask(peer, Leave(reason, target)):
            return
        self._asked_s[peer] = self._ledger.now_s
        if self.mode is Mode.RUNNING:
            self._begin_leaves(self._replicas[peer].stage)
        if peer not in self._leaves:
            self._note("warning", f"{self._name(peer)} is to leave ({reason}), and stays until another one has joined")

    def _begin_leaves(self, stage: int) -> None:
        for peer in self._leaves.begin(self._pools[stage], self._suspects, self._next_step):
            leave = self._leaves.wants(peer)
            assert leave is not None
            self._wiring.remove(peer)
            self._changed.add(peer)
            self._note("info", f"{self._name(peer)} takes no new work: {leave.reason}")

    def _release_leavers(self) -> None:
        """Let go of those on whom nothing depends any more."""
        for peer in self._leaves.due(self._agreed):
            if self._saving.stage_of(peer) is not None:
                continue  # it still hands over a checkpoint
            if peer not in self._spare():
                continue  # whether a suspect comes back, or this one has to stay, is not known yet
            leave, name = self._leaves.done(peer, self._ledger.now_s), self._name(peer)
            self._outputs.append(Send(peer, Release(self.settings.job, leave.reason)))
            stage = self._remove(peer).stage
            took_s = self._ledger.now_s - self._asked_s.pop(peer)
            where = f"moves to stage {leave.target}" if leave.target is not None else "has handed over its work"
            self._note("info", f"{name} {where}: {leave.reason}")
            self._outputs.append(Left(peer, stage, leave.target, took_s))

    def _rebalance(self) -> None:
        """Look at the stages from time to time, and move a replica where that is worth it."""
        settings, now_s = self.settings, self._ledger.now_s
        if not settings.recover or not settings.rebalance.rebalance or self.stages < 2 or self._saving.stop is not None:
            return
        if self._rebalance_s == math.inf:
            self._rebalance_s = now_s + settings.rebalance.interval_s
        if now_s < self._rebalance_s:
            return
        self._rebalance_s = now_s + settings.rebalance.interval_s
        if not all(any(self._pace.is_known(peer) for peer in pool) for pool in self._pools):
            return
        on_the_way = [*self._leaves.moving(now_s), *(joiner.replica.peer for joiner in self._joining)]
        moving = on_the_way[0] if on_the_way else None
        decision = self._rebalancer.consider(self._stage_pools(), now_s, moving)
        if decision.reason != self._rebalancing.reason:
            self._note("debug", f"rebalancing: {decision.reason}")
        self._rebalancing = decision
        if decision.plan is not None:
            self._ask_to_leave(decision.plan.peer, decision.reason, decision.plan.target)

    # Committing --------------------------------------------------------------------------------------------------

    def _decide(self, run: StepRun) -> None:
        """Fix what the step's commit will say, and hand it to the store once the order of commits allows it."""
        if run.phase is Phase.AVERAGING and run.is_averaged and not self._paused(run):
            run.turn(Turn.AVERAGED)
        in_order = may_write(run.step, commits_sent=self._commits_sent, agreed=self._agreed)
        if run.phase is not Phase.DECIDED or not in_order or not self._evaluations.permits(run.step):
            return
        settings, tokens = self.settings, self.settings.tokens_of(run.step)
        reports = {unit: averaging.reports[min(averaging.reports)] for unit, averaging in run.rounds.items()}
        squared = squared_norms(norm for report in reports.values() for norm in report.norms)
        norm, scale = clip(squared, settings.grad_clip_norm)
        if not math.isfinite(norm):
            run.skip = True
        if run.skip:
            if settings.fail_on_nonfinite:
                hint = 'lower training.learning_rate, or set limits.on_nonfinite = "skip"'
                self._fail(GradientRange.code, f"the gradient of step {run.step} is not finite", hint)
                return
            self._note("warning", f"the gradient of step {run.step} is not finite: the step changes no weight")
        total = 0.0
        for loss in self._ledger.losses(run.step):  # left to right, as the one-process reference adds
            total += loss
        run.row = CommitRow(
            timeline=settings.timeline,
            step=run.step,
            rounds={} if run.skip else {unit: averaging.round for unit, averaging in run.rounds.items()},
            loss=total / tokens,
            norm=0.0 if run.skip else norm,
            scale=0.0 if run.skip else scale,
            learning_rate=settings.learning_rate(run.step),
            skip=run.skip,
            tokens=tokens,
        )
        run.turn(Turn.WRITTEN)
        self._outputs.append(WriteCommit(run.row))

    def _send_commit(self, peer: PeerId, row: CommitRow) -> None:
        stage = self._replicas[peer].stage
        units = [unit for unit, stages in self.settings.units.items() if stage in stages]
        rounds = tuple(UnitRound(unit, row.rounds[unit]) for unit in units if unit in row.rounds)
        averaged = self._runs[row.step].rounds
        took_part = all(unit in averaged and averaged[unit].is_held_by(peer) for unit in units)
        donors = () if took_part or not rounds else self._donors(stage, peer, row.step)
        rate, version = row.learning_rate, row.step + 1
        self._send(peer, Commit(row.timeline, row.step, version, rounds, rate, row.scale, row.skip, donors))

    def _on_committed(self, peer: PeerId, event: Committed) -> None:
        run, replica = self._runs.get(event.step), self._replicas[peer]
        if run is None or run.phase is not Phase.COMMITTING or event.timeline != self.settings.timeline:
            self._ledger.duplicates += 1
            return
        if (event.version, event.stage) != (event.step + 1, replica.stage):
            self._violations += 1
            message = f"{self._name(peer)} committed step {event.step} as version {event.version} of {event.stage}"
            self._fail(ReplicaDiverged.code, message, "run the same release on every stage server")
            return
        first = all(one.stage != event.stage for one in run.commits.values())
        run.commits[peer] = event
        if first and event.version == self._commits_sent:
            for joiner in self._joining:
                if joiner.replica.stage == event.stage:
                    self._tell(joiner)
        digests = {other: one.digest for other, one in run.commits.items() if one.stage == event.stage}
        self._compare(digests, f"of stage {event.stage} after step {event.step}")

    def _owing(self, run: StepRun) -> list[PeerId]:
        """Who has not said yet that it made the step's commit; whoever joined with a later version never will."""
        able = [peer for peer in self._members(run.step) if self._since.get(peer, 0) <= run.step]
        return [peer for peer in able if peer not in run.commits]

    def _compare(self, digests: Mapping[PeerId, str], what: str) -> None:
        """Replicas that must hold the same bytes: if they do not, the job fails and names the odd ones out."""
        counts = Counter(digests.values())
        if len(counts) == 1:
            return
        self._violations += 1
        (common, most), (_, next_most), *_ = counts.most_common()
        odd = sorted(peer for peer, digest in digests.items() if digest != common or most == next_most)
        held = ", ".join(f"{peer} holds {digests[peer]}" for peer in sorted(digests))
        message = f"replicas differ in the bytes {what}: {_listed(odd)} ({held})"
        self._fail(ReplicaDiverged.code, message, "run the same release, device class and thread count on all of them")

    # What follows ------------------------------------------------------------------------------------------------

    def _go_on(self, now_s: float) -> list[Output]:
        """Do all that has become possible, and hand out what was decided."""
        self._ledger.now_s = now_s
        if self.mode is Mode.LOADING and self._replicas.keys() <= self._loaded.keys():
            self.mode = Mode.RUNNING
            self._digests = {one.stage: one.digest for one in self._loaded.values()}
            stages = f"{self.stages} stage{'' if self.stages == 1 else 's'}"
            self._note("info", f"{len(self._replicas)} replicas of {stages} loaded: training starts")
        census = self._census
        ready = all(self._pools) and self._replicas.keys() <= self._loaded.keys()
        if census is not None and ready and (not census.missing() or now_s >= census.deadline_s):
            self._begin_again(census)
        elif census is not None and not all(self._pools) and now_s >= census.deadline_s:
            self._stage_lost(nobody_back([s for s, pool in enumerate(self._pools) if not pool], self._known))
        if self.mode is Mode.RUNNING:
            self._advance()
        if self.mode in (Mode.RUNNING, Mode.SAVING):
            self._save(now_s)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _advance(self) -> None:
        self._judge_joiners()
        for stage in range(self.stages) if self._leaves else ():
            self._begin_leaves(stage)
        self._hurry()
        for run in self._redoable():
            self._settle_pairs(run)
            self._refill(run)
        self._feed()
        for step in sorted(self._runs):
            run = self._runs[step]
            if run.phase is Phase.FEEDING and self._ledger.is_full(step):
                run.turn(Turn.FULL if self._ledger.is_finite(step) else Turn.NOT_FINITE)
                if not run.skip:
                    self._start_rounds(run)
            self._repeat_rounds(run)
            self._decide(run)
            if run.phase is Phase.COMMITTING and self._agreed == step and not self._owing(run):
                run.turn(Turn.AGREED)
                self._agreed = step + 1
                self._digests = {one.stage: one.digest for one in run.commits.values()}
                del self._runs[step]
            if self.mode is not Mode.RUNNING:
                return
        self._release_leavers()
        self._rebalance()
        self._evaluate()
        if self._agreed == self.settings.steps and self._evaluations.is_idle:
            self.mode = Mode.SAVING

    def _save(self, now_s: float) -> None:
        """Begin or complete a checkpoint, or stop, if it is time."""
        move = self._saving.next(self._agreed, idle=not self._runs and self._evaluations.is_idle)
        match move:
            case BeginCheckpoint(version=version):
                self._collect(version, now_s)
            case PublishCheckpoint():
                self._outputs.append(move)
            case Stopped(reason=reason):
                self._end(reason)
                self._outputs.append(move)

    def _redoable(self) -> list[StepRun]:
        return [run for _, run in sorted(self._runs.items()) if run.can_be_redone]

    def _waiting_for_checkpoint(self) -> str:
        held = self._saving.open
        if held is None:
            return "waits for nothing"
        if held.savers:
            return f"waits for {_listed(held.savers)} to hand over the weights"
        return f"waits until the checkpoint at step {held.version} is written"

    def _waiting_for_step(self, run: StepRun) -> str:
        match run.phase:
            case Phase.FEEDING:
                stuck = f"; {self._no_route}" if self._no_route else ""
                return f"step {run.step}: {self.in_flight} microbatches in flight{stuck}"
            case Phase.AVERAGING:
                missing = [f"{_listed(one.missing())} ({unit})" for unit, one in run.rounds.items() if one.missing()]
                return f"step {run.step}: waits for averaging at {'; '.join(missing)}"
            case Phase.COMMITTING:
                return f"step {run.step}: waits for {_listed(self._owing(run))} to commit"
            case Phase.DECIDED if not self._evaluations.permits(run.step):
                return f"step {run.step}: waits for the {self._evaluations.waiting_for()}"
        return f"step {run.step}: {run.phase}"

    def _send(self, peer: PeerId, command: Command) -> None:
        if peer in self._replicas:
            self._outputs.append(Send(peer, command))

    def _note(self, level: str, message: str) -> None:
        self._outputs.append(Note(level, message))

    def _fail(self, code: str, message: str, hint: str) -> None:
        if self.mode is not Mode.ENDED:
            self._end(message)
            self._outputs.append(Fail(code, message, hint))

    def _end(self, reason: str) -> None:
        self.mode = Mode.ENDED
        for peer in [*self._replicas, *(joiner.replica.peer for joiner in self._joining)]:
            self._outputs.append(Send(peer, Release(self.settings.job, reason)))

    def _name(self, peer: PeerId) -> str:
        return f"stage server {peer} (stage {self._replicas[peer].stage})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"
