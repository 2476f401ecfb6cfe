"""One job's decisions: an event in, outputs out; the driver carries them out in the given order.

      start ──▶ LOADING ──all loaded, digests equal──▶ RUNNING ──last step agreed──▶ SAVING ──all saved──▶ ENDED
      resume ─▶ GATHERING ──all known are back────────────┘  feed microbatches, average full steps,              ▲
                           (or grace is over)                write rows, commit, compare digests, save now and then
                                                                  ├── to be paused or cancelled: committed, saved ┤
                                           anywhere: the last replica of a stage is lost, nothing moves (stalling.py) ─┘

The brain is the top: it takes events in, asks the parts below in turn, and alone changes the mode. It never waits and
never looks at a clock. Its rules of order are two: a row is written before any replica hears of the commit, and
whatever abolishes work (AbortRound, Void) is sent to a replica before the work that replaces it.

    pool        who serves which stage, and is trusted        progress   which steps are at work, what is agreed
    ledger      what is accumulated where                     loads      what each replica has to do
    loading     what fits together                            dispatch   who computes which microbatch
    rounds      averaging of full steps                       commits    rows, who is told of them, who made them
    admission   who joins                                     moves      who changes stages
    departures  who goes                                      returning  who comes back
    collecting  who hands over a checkpoint                   telling    what all that comes to, for people
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import assert_never

from scheduler.brain.checkpoint.collection import CheckpointCollector
from scheduler.brain.checkpoint.schedule import CheckpointSchedule
from scheduler.brain.commit.commits import Commits
from scheduler.brain.commit.rounds import Expel, Rounds
from scheduler.brain.explain.facts import Situation
from scheduler.brain.explain.situation import SituationView
from scheduler.brain.outputs import (
    Admitted,
    BeginCheckpoint,
    CommitRow,
    Fail,
    Finish,
    Independent,
    Left,
    Note,
    Output,
    PublishCheckpoint,
    Send,
    Stopped,
    WriteCommit,
    WriteEvaluation,
)
from scheduler.brain.replicas.admission import Admission
from scheduler.brain.replicas.departures import Departures
from scheduler.brain.replicas.loading import Loading
from scheduler.brain.replicas.moves import Moves
from scheduler.brain.replicas.reattach import Reattach
from scheduler.brain.routing.dispatch import Dispatch
from scheduler.brain.routing.evaluation import Evaluations
from scheduler.brain.routing.loads import Loads
from scheduler.brain.settings import BrainSettings
from scheduler.brain.stall import FAILED_HINT, nobody_back, stopped_by_loss, stuck
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.joiners import Joiner
from scheduler.brain.state.leaves import Leave
from scheduler.brain.state.pool import ReplicaRecord, Trust
from scheduler.brain.state.restart import RestartCensus, Resumed
from scheduler.brain.state.step import Phase, StepEvent, StepRun
from swarm.errors import OutOfMemory, PeerUnavailable, StaleMessage
from swarm.messages import (
    Accumulated,
    Admit,
    Averaged,
    ChaosBegun,
    Committed,
    Evaluated,
    EvaluationUndelivered,
    Event,
    Failed,
    Forwarded,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    Logged,
    Release,
    RoundFailed,
    Saved,
    Undelivered,
)
from swarm.text import counted, listed
from swarm.types import Decision, JobState, PeerId

__all__ = [
    "Admitted",
    "BrainSettings",
    "CommitRow",
    "Fail",
    "Finish",
    "Independent",
    "JobBrain",
    "Left",
    "Mode",
    "Note",
    "Output",
    "ReplicaRecord",
    "Send",
    "WriteCommit",
    "WriteEvaluation",
]


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
        self._census: RestartCensus | None = None  # while gathering
        self._known: Mapping[PeerId, int] = {}  # who served which stage before a restart

        self._state = state = BrainState.of(settings)
        self._saving = saving = CheckpointSchedule(settings.saving, self.stages, settings.first_step, settings.steps)
        self._evaluations = evaluations = Evaluations(
            settings.timeline,
            every_steps=settings.eval_every_steps,
            steps=settings.steps,
            staleness=settings.staleness,
            microbatches=settings.evaluation_microbatches,
            tokens=settings.evaluation_tokens,
        )
        self._loads = loads = Loads(state)
        self._loading = loading = Loading(state)
        self._dispatch = dispatch = Dispatch(state, loads, evaluations, rng)
        self._rounds = rounds = Rounds(state, loading.elements)
        self._commits = commits = Commits(state, evaluations, rng)
        self._admission = Admission(state, loading, rng)
        self._moves = moves = Moves(state, loads)
        self._collecting = CheckpointCollector(state, saving)
        self._departures = Departures(state, saving, dispatch, rounds, commits)
        self._returning = Reattach(state, evaluations, dispatch, rounds, commits)
        self._telling = SituationView(state, loads, saving, moves)

    # What happens ------------------------------------------------------------------------------------------------

    def start(self, replicas: Sequence[ReplicaRecord], now_s: float) -> list[Output]:
        """Load every replica's stage; each stage has at least one."""
        assert self.mode is Mode.WAITING
        self.mode = Mode.LOADING
        # In order of peer id, once and for all: ties between replicas must not depend on the order of a set.
        for replica in sorted(replicas, key=lambda one: one.peer):
            self._enlist(replica)
        assert not self._state.pool.empty_stages(), "each stage needs a replica"
        self._loading.begin()
        self._dispatch.open_window()
        return self._go_on(now_s)

    def resume(self, resumed: Resumed, now_s: float) -> list[Output]:
        """Go on where an earlier scheduler start stopped, once the peers that it knew have come back with Hello."""
        assert self.mode is Mode.WAITING
        self.mode = Mode.GATHERING
        self._census = RestartCensus(resumed.known, now_s + resumed.grace_s)
        self._known = resumed.known
        self._returning.resume(resumed)
        return self._go_on(now_s)

    def admits(self, hello: Hello) -> bool:
        """Whether a peer that is not (or no longer) known here may go on with the stage that it holds.

        After the job went on without it, it must have taken part in all that was committed since, and come before the
        next commit is decided; a peer that was gone never may: others did its work.
        """
        settings = self.settings
        fits = (hello.job, hello.timeline) == (settings.job, settings.timeline) and 0 <= hello.stage < self.stages
        if hello.peer in self._state.joiners:
            return True
        was_lost = self._state.pool.was_lost(hello.peer)
        if not fits or hello.join or was_lost or self.mode in (Mode.LOADING, Mode.ENDED):
            return False
        if self.mode is Mode.WAITING:
            return True  # about to resume; asked again then
        if not self._returning.holds_version(hello.version):
            return False
        return self.mode is Mode.GATHERING or self._returning.lacks_nothing(hello.version)

    def handle(self, peer: PeerId, event: Event, now_s: float) -> list[Output]:
        """An event of a peer's present incarnation; events of peers outside the job change nothing."""
        if self.mode is Mode.ENDED:
            return []
        self._state.ledger.now_s = now_s
        if peer in self._state.joiners:
            self._admission.hear(peer, event, now_s)
            return self._go_on(now_s)
        if isinstance(event, Hello):
            self._on_hello(event)
            return self._go_on(now_s)
        if peer not in self._state.pool:
            return []
        match event:
            case Accumulated() if self._census is not None:
                self._census.accumulated(peer, event)
            case Accumulated():
                self._dispatch.accumulated(peer, event, now_s)
            case Forwarded():
                self._dispatch.forwarded(peer, event, now_s)
                return []
            case Averaged():
                self._conclude(self._rounds.averaged(peer, event))
            case RoundFailed():
                self._on_round_failed(peer, event)
            case Committed():
                self._on_committed(peer, event)
            case Loaded():
                self._on_loaded(peer, event)
            case Saved():
                self._conclude(self._collecting.saved(peer, event))
            case Undelivered():
                self._on_undelivered(peer, event)
            case EvaluationUndelivered():
                self._dispatch.evaluation_undelivered(peer, event, self._state.ledger.now_s)
            case Failed():
                self._on_failed(peer, event)
            case Leaving():
                self._state.outbox.note("warning", f"{self._state.pool.name(peer)} wants to leave: {event.reason}")
            case Evaluated():
                row = self._evaluations.evaluated(peer, event)
                if row is not None:
                    self._state.outbox.put(WriteEvaluation(row))
            case Heartbeat() | Logged() | ChaosBegun():
                return []
            case _:
                assert_never(event)
        return self._go_on(now_s)

    def row_written(self, step: int, now_s: float) -> list[Output]:
        """The commit row is durable: every replica applies the step."""
        run = self._state.progress.runs.get(step)
        if self.mode is Mode.ENDED or run is None or run.row is None or run.phase is not Phase.WRITING:
            return []
        run.turn(StepEvent.DURABLE)
        for peer in self._state.pool.members(step):
            self._commits.send(peer, run.row)
        self._dispatch.close(step)
        self._state.progress.committed = step + 1
        self._admission.committed()
        self._evaluations.made(step + 1)
        self._collecting.committed(step + 1, skipped=run.row.skip, now_s=now_s)
        return self._go_on(now_s)

    def peer_suspect(self, peer: PeerId, reason: str, now_s: float, *, session_lost: bool = False) -> list[Output]:
        """Route the peer's unfinished hops around it (only with `recover`); it may still finish them.

        Without `recover` a peer that lost its session is lost: it gives up its stage with the session.
        """
        joiner = self._state.joiners.get(peer)
        if joiner is not None and session_lost:
            joiner.report = None  # it would not hear that it is admitted; it says the same again with its next session
        if self.mode is Mode.ENDED or peer not in self._state.pool or self._state.pool.is_suspect(peer):
            return []
        if session_lost and not self.settings.recover:
            return self.peer_gone(peer, reason, now_s)
        self._state.ledger.now_s = now_s
        self._state.outbox.note("warning", f"{self._state.pool.name(peer)} is suspect: {reason}")
        if self.settings.recover:
            self._state.pool[peer].trust = Trust.DETACHED if session_lost else Trust.SUSPECT
            self._dispatch.suspect(peer, reason)
        return self._go_on(now_s)

    def peer_back(self, peer: PeerId, now_s: float) -> list[Output]:
        """A suspect was heard again: it may be given work, unless its session broke; then `Hello` says so."""
        if peer in self._state.pool and self._state.pool[peer].trust is not Trust.DETACHED:
            self._trust(peer)
        return self._go_on(now_s)

    def peer_gone(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """The peer is lost: the job fails, or (with `recover`) its uncommitted work is done again elsewhere."""
        if self.mode is Mode.ENDED:
            return []
        self._state.ledger.now_s = now_s
        if (joiner := self._state.joiners.forget(peer)) is not None:
            told = f"stage server {peer} is gone while it joined stage {joiner.replica.stage}: {reason}"
            self._state.outbox.note("warning", told)
        elif peer in self._state.pool:
            self._lose(peer, reason, "gone")
        return self._go_on(now_s)

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
        if barred := self._state.joiners.barred(peer, now_s):
            return Decision(None, barred)
        return self._moves.where_to_join(peer, pinned_stage, fitting, self._state.ledger.now_s, coming)

    def join(self, replica: ReplicaRecord, now_s: float) -> list[Output]:
        """Let an idle peer fetch the stage's state, to become a replica when it has it."""
        if self.mode is Mode.ENDED:
            return []
        self._state.ledger.now_s = now_s
        if self.mode is not Mode.RUNNING or replica.peer in self._state.pool:
            self._state.outbox.put(Send(replica.peer, Release(self.settings.job, "the job takes nobody in now")))
            return self._go_on(now_s)
        self._state.pool.leaves.forget(replica.peer)
        self._admission.begin(replica, now_s)
        return self._go_on(now_s)

    def leave(self, peer: PeerId, reason: str, now_s: float, target: int | None = None) -> list[Output]:
        """Let a replica finish what it has begun, then release it: out of the job, or for stage `target`."""
        if self.mode is Mode.ENDED:
            return []
        self._state.ledger.now_s = now_s
        joiner = self._state.joiners.get(peer)
        if joiner is not None:
            self._admission.refuse(joiner, reason, now_s)
        elif peer in self._state.pool:
            self._ask_to_leave(peer, Leave(reason, target))
        return self._go_on(now_s)

    def checkpoint_kept(self, version: int, now_s: float) -> list[Output]:
        """The checkpoint of `version` is complete and was read back."""
        if self.mode is Mode.ENDED or not self._saving.kept(version):
            return []
        if version == self.settings.steps:
            self._end("finished")
            self._state.outbox.put(Finish())
        return self._go_on(now_s)

    def checkpoint_failed(self, version: int, reason: str, fault: str, now_s: float) -> list[Output]:
        """The checkpoint of `version` could not be written: `fault` for a person, `reason` as in DropCheckpoint."""
        if self.mode is not Mode.ENDED:
            self._state.ledger.now_s = now_s
            self._conclude(self._collecting.failed(version, reason, fault))
        return self._go_on(now_s)

    def stop(self, state: JobState, reason: str, now_s: float) -> list[Output]:
        """Pause or cancel: feed no new step, commit what runs, save, then stop; at once if nothing was trained."""
        if self.mode is Mode.ENDED:
            return []
        untrained = self._state.progress.committed == self.settings.first_step
        if self.mode in (Mode.WAITING, Mode.LOADING) or (untrained and state is JobState.CANCELLED):
            self._conclude(Stopped(state, reason))
        else:
            self._saving.stop = Stopped(state, reason)
        return self._go_on(now_s)

    @property
    def saves_again_s(self) -> float:
        """When the final state is saved once more, after a failure; -infinity if it never failed."""
        return self._saving.again_s

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to pause or to cancel."""
        return self._saving.stop is not None

    def tick(self, now_s: float) -> list[Output]:
        """Time passed; to be called at `due_s`."""
        return self._go_on(now_s) if self.mode is not Mode.ENDED else []

    @property
    def due_s(self) -> float:
        """When something is to be done although nothing happens; infinity if never."""
        times_s = self._rounds.retries_s()
        if self._census is not None and self.mode is Mode.GATHERING:
            times_s.append(self._census.deadline_s)
        if self.mode is Mode.RUNNING:
            times_s += [self._moves.look_s, *self._dispatch.times_s(), *self._admission.times_s()]
        if self.mode is Mode.SAVING:
            times_s.append(self._saving.again_s)
        return min((time_s for time_s in times_s if time_s > self._state.ledger.now_s), default=math.inf)

    def stuck(self, for_s: float, now_s: float) -> list[Output]:
        """Nothing moved for so long: the job cannot go on, unless it waits for nothing but a checkpoint."""
        if self.mode is Mode.ENDED:
            return []
        self._state.ledger.now_s = now_s
        at_work = self.mode in (Mode.RUNNING, Mode.SAVING)
        if at_work and self._is_idle and self._saving.open is not None:
            self._conclude(self._collecting.stuck(for_s))
        else:
            settings = self.settings
            on_stall = settings.on_stall if settings.recover else "fail"
            self._conclude(stuck(settings.job, for_s, self.waiting_for(), on_stall, self._saving.stop))
        return self._go_on(now_s)

    def cancel(self, now_s: float) -> list[Output]:
        """Release all peers; the job is over."""
        if self.mode is not Mode.ENDED:
            self._end("cancelled")
        return self._go_on(now_s)

    # What is known -----------------------------------------------------------------------------------------------

    @property
    def committed_steps(self) -> int:
        """Steps whose commit row is durable."""
        return self._state.progress.committed

    @property
    def is_over(self) -> bool:
        """Nothing will be decided any more."""
        return self.mode is Mode.ENDED

    def why_not_rebalanced(self) -> str:
        """The newest decision about moving replicas between stages, for a person."""
        return self._moves.decision.reason

    def situation(self, now_s: float) -> Situation:
        """What the job stands on, to be explained."""
        return self._telling.situation(self.waiting_for(), now_s, is_running=self.mode is Mode.RUNNING)

    def is_joining(self, peer: PeerId) -> bool:
        """Whether the peer fetches a stage's state, or still needs something that only the others of its stage have."""
        return peer in self._state.joiners or (peer in self._state.pool and self._state.pool[peer].needs_donors)

    @property
    def in_flight(self) -> int:
        """Microbatches fed and not yet accumulated at every stage."""
        return self._state.ledger.in_flight()

    @property
    def fed(self) -> int:
        """Microbatches that were ever given out, each once."""
        return self._state.progress.committed * self.settings.microbatches + self._state.ledger.fed()

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Contributions in the steps committed since this brain began, per stage, as the ledger counted them."""
        return self._state.ledger.committed()

    @property
    def replayed(self) -> int:
        """Accumulations that were void and had to be done again."""
        return sum(self._state.ledger.replayed)

    @property
    def replayed_by_stage(self) -> tuple[int, ...]:
        """`replayed` per stage."""
        return tuple(self._state.ledger.replayed)

    @property
    def reroutes(self) -> Mapping[tuple[int, str], int]:
        """Hops that were taken from one replica, by (stage, reason)."""
        return self._state.ledger.moved

    @property
    def duplicates(self) -> int:
        """Late repeats that were ignored."""
        return self._state.ledger.duplicates

    @property
    def violations(self) -> int:
        """Events that no healthy replica sends: sets, routes or digests other than expected."""
        return self._state.ledger.violations

    @property
    def stage_microbatches(self) -> tuple[int, ...]:
        """Microbatches in committed steps, per stage: once each, so equal."""
        return (self._state.progress.committed * self.settings.microbatches,) * self.stages

    def outstanding(self, peer: PeerId) -> int:
        """Hops that the peer was given and has not finished."""
        return self._state.ledger.outstanding(peer)

    def pace_s(self, peer: PeerId) -> float:
        """Device seconds that the peer needs per microbatch; 0 if never measured."""
        return self._loads.measured_s(peer)

    def story(self, step: int, index: int) -> list[str]:
        """Every transition of a microbatch and of its step, with causes; for open and the newest closed steps."""
        run = self._state.progress.runs.get(step)
        return self._state.ledger.story(step, index) + [f"step {step} {line}" for line in (run.history if run else [])]

    def waiting_for(self) -> str:
        """What the job waits for, for a person."""
        runs = self._state.progress.runs
        match self.mode:
            case Mode.GATHERING if self._census is not None:
                empty = ", ".join(map(str, self._state.pool.empty_stages()))
                missing = listed(self._census.missing())
                return f"waits after a restart for {missing}" + (f"; nobody of stage {empty}" if empty else "")
            case Mode.LOADING:
                return f"waits for {listed(self._loading.missing())} to load"
            case Mode.RUNNING if runs:
                step = min(runs)
                return f"step {step}: {self._step_waits_for(runs[step])}"
            case Mode.RUNNING if not self._evaluations.is_idle:
                return f"waits for the {self._evaluations.waiting_for()}"
            case Mode.RUNNING | Mode.SAVING:
                return self._collecting.waiting_for()
        return f"is {self.mode}"

    def _step_waits_for(self, run: StepRun) -> str:
        match run.phase:
            case Phase.FEEDING:
                return self._dispatch.waiting_for()
            case Phase.AVERAGING:
                return self._rounds.waiting_for(run)
            case Phase.COMMITTING:
                return f"waits for {listed(self._commits.owing(run))} to commit"
            case Phase.DECIDED if not self._evaluations.permits(run.step):
                return f"waits for the {self._evaluations.waiting_for()}"
        return run.phase

    def validate(self) -> None:
        """Assert what must hold between any two events."""
        self._state.ledger.validate()
        self._state.pool.validate()
        self._loads.validate()
        progress = self._state.progress
        assert progress.agreed <= progress.committed <= progress.next <= self.settings.steps
        assert sorted(progress.runs) == list(range(progress.agreed, progress.next)) or self.mode is Mode.ENDED
        assert self._state.ledger.open_steps() == [
            step for step, run in sorted(progress.runs.items()) if run.phase not in (Phase.COMMITTING, Phase.DONE)
        ]
        for run in progress.runs.values():
            if run.phase is Phase.AVERAGING:
                assert set(run.rounds) | set(self._rounds.paused(run)) == set(self.settings.units)
                assert self._state.ledger.is_full(run.step) or self.mode is Mode.ENDED
            for unit, averaging in run.rounds.items():
                assert averaging.reports.keys() <= {member.peer for member in averaging.members}
                assert averaging.members[-1].stop == self._loading.elements[unit]

    # What replicas say -------------------------------------------------------------------------------------------

    def _on_loaded(self, peer: PeerId, event: Loaded) -> None:
        current = (event.job, event.timeline) == (self.settings.job, self.settings.timeline)
        if current and self.mode in (Mode.LOADING, Mode.GATHERING):
            self._conclude(self._loading.loaded(peer, event))

    def _on_round_failed(self, peer: PeerId, event: RoundFailed) -> None:
        match self._rounds.failed(peer, event, self._state.ledger.now_s):
            case Expel(peer=leaver, cause=cause):
                self._expel(leaver, cause, "timeout")
            case Fail() as fault:
                self._conclude(fault)

    def _on_committed(self, peer: PeerId, event: Committed) -> None:
        if not self._commits.is_awaited(event):
            self._state.ledger.duplicates += 1
            return
        first = self._commits.is_first(event)
        fault = self._commits.enter(peer, event)
        if fault is None and first and event.version == self._state.progress.committed:
            self._admission.digest_known(event.stage)
        self._conclude(fault or self._commits.compare(event))

    def _on_undelivered(self, peer: PeerId, event: Undelivered) -> None:
        cause = self._dispatch.undelivered(peer, event, self._state.ledger.now_s)
        if cause:
            self._rounds.void(self._state.progress.runs[event.microbatch.step], peer, cause, "timeout")

    def _on_failed(self, peer: PeerId, event: Failed) -> None:
        """A replica gives up: the others of its stage go on, if there are any and the job was at work."""
        if event.job != self.settings.job:
            return
        recovers, name = self.settings.recover and self.mode is not Mode.LOADING, self._state.pool.name(peer)
        if recovers and len(self._state.pool.by_stage[self._state.pool.stage_of(peer)]) > 1:
            self._expel(peer, event.message, "oom" if event.code == OutOfMemory.code else "refused")
        elif recovers and event.code == StaleMessage.code:
            # Those that had what it lacks are gone, such as the averaged gradient of a round before it joined.
            self._stage_lost(f"{name} cannot go on: {event.message}; the stage has no other replica")
        else:
            self._conclude(Fail(event.code, f"{name} cannot go on: {event.message}", event.hint))

    def _on_hello(self, hello: Hello) -> None:
        """A peer of the job dialled: after its session broke, or after the scheduler was restarted."""
        peer = hello.peer
        if peer not in self._state.pool:
            if not self.admits(hello):
                self._state.outbox.put(Send(peer, Release(self.settings.job, "the job went on without it")))
                return
            pinned = hello.pinned_stage >= 0
            self._enlist(ReplicaRecord(peer, hello.incarnation, hello.address, hello.stage, hello.device, pinned))
        self._returning.heard(hello)
        if self._census is not None:
            self._census.report(hello)
        elif self.mode is Mode.LOADING:
            if not self._returning.holds_stage(hello):
                self._loading.send(self._state.pool.replica(peer))
        elif self._returning.reattach(hello):
            # Whether it was asked for its state, or has answered, is not known.
            self._conclude(self._collecting.saver_gone(peer, self._state.pool.stage_of(peer)))
        else:
            self._expel(peer, f"it holds version {hello.version}", "refused")
            return
        self._trust(peer)

    # Who is there ------------------------------------------------------------------------------------------------

    def _enlist(self, replica: ReplicaRecord) -> None:
        self._state.pool.add(replica)
        self._dispatch.add(replica.peer)

    def _trust(self, peer: PeerId) -> None:
        if self._state.pool.is_suspect(peer):
            self._state.pool[peer].trust = Trust.TRUSTED
            self._dispatch.go_on(peer)

    def _admit(self, joiner: Joiner, report: Loaded) -> None:
        """A joiner is a replica from now on."""
        replica, version, now_s = joiner.replica, report.version, self._state.ledger.now_s
        peer, took_s = replica.peer, now_s - joiner.since_s
        self._state.pool.joined(replica, report, now_s)
        self._dispatch.add(peer)
        self._dispatch.open_window()
        self._moves.fetched(replica.stage, took_s)
        self._state.outbox.put(Admitted(peer, replica.stage))
        self._state.outbox.note(
            "info", f"{self._state.pool.name(peer)} joined with version {version} after {took_s:.1f} s"
        )
        self._state.outbox.send(peer, Admit(self.settings.job, self.settings.timeline, joiner.number, version))
        self._loading.begins_with(peer, report)
        self._commits.send_since(peer, version)

    def _expel(self, peer: PeerId, cause: str, reason: str) -> None:
        """The peer is alive but cannot go on: the job goes on without it."""
        self._state.outbox.send(peer, Release(self.settings.job, cause))
        self._lose(peer, cause, reason)

    def _lose(self, peer: PeerId, cause: str, reason: str) -> None:
        """The peer is out of the job."""
        name, stage, leaves = self._state.pool.name(peer), self._state.pool.stage_of(peer), self._state.pool.leaves
        self._departures.remove(peer)
        leaves.forget(peer)
        others = self._state.pool.by_stage[stage]
        if self._census is not None:
            self._census.forget(peer)
            self._state.outbox.note("warning", f"{name} is gone: {cause}")
            return
        if not others:
            self._stage_lost(f"{name} is gone: {cause}; the stage has no other replica")
            return
        if not self.settings.recover:
            self._conclude(Fail(PeerUnavailable.code, f"{name} is gone: {cause}", FAILED_HINT))
            return
        staying = leaves.stay(others, self._state.progress.agreed)
        if all(other in leaves for other in others):
            self._stage_lost(f"{name} is gone: {cause}; who still leaves the stage has older weights")
            return
        self._state.outbox.note("warning", f"{name} is gone: {cause}; its uncommitted work is done again")
        for run in self._state.progress.redoable():
            self._rounds.reopen(run, f"{peer} is gone")
        steps = [run.step for run in self._state.progress.redoable()]
        self._state.ledger.peer_gone(peer, steps, f"gone, {cause}", reason)
        self._rounds.undecide_unheld()
        for other, until in staying.items():
            self._departures.stay(other, until)
        self._conclude(self._collecting.saver_gone(peer, stage))

    def _stage_lost(self, lost: str) -> None:
        """No replica of a stage is left, so nothing that the others hold and no checkpoint has can be used."""
        stopped = stopped_by_loss(lost, self.settings.on_stall, self._saving.stop)
        if stopped is None or not self.settings.recover:
            self._conclude(Fail(PeerUnavailable.code, lost, FAILED_HINT))
        else:
            self._conclude(stopped)

    def _ask_to_leave(self, peer: PeerId, leave: Leave) -> None:
        self._departures.ask(peer, leave, self._state.ledger.now_s, at_work=self.mode in (Mode.RUNNING, Mode.SAVING))

    # What follows ------------------------------------------------------------------------------------------------

    def _go_on(self, now_s: float) -> list[Output]:
        """Do all that has become possible, and hand out what was decided."""
        self._state.ledger.now_s = now_s
        if self.mode is Mode.LOADING and not self._loading.missing():
            self._begin()
        if self._census is not None and self.mode is Mode.GATHERING:
            self._gather(self._census)
        if self.mode is Mode.RUNNING:
            self._advance()
        elif self.mode is Mode.SAVING:  # which may take long: who is to go and can be spared goes
            self._departures.begin()
            self._departures.release(now_s)
        if self.mode in (Mode.RUNNING, Mode.SAVING):
            self._report_independent()
            self._save()
        return self._state.outbox.take()

    def _begin(self) -> None:
        """All have loaded what fits together."""
        self.mode = Mode.RUNNING
        self._state.progress.loaded(self._loading.digests())
        replicas, stages = counted(len(self._state.pool), "replica"), counted(self.stages, "stage")
        self._state.outbox.note("info", f"{replicas} of {stages} loaded: training starts")

    def _gather(self, census: RestartCensus) -> None:
        """Go on after a restart as soon as all that can be expected are back."""
        empty, missing = self._state.pool.empty_stages(), census.missing()
        is_over = self._state.ledger.now_s >= census.deadline_s
        if not empty and not self._loading.missing() and (not missing or is_over):
            self._begin_again(census)
        elif empty and is_over:
            self._stage_lost(nobody_back(empty, self._known))

    def _begin_again(self, census: RestartCensus) -> None:
        self._census = None
        self.mode = Mode.RUNNING
        self._state.pool.sort()
        self._loading.find_places()
        self._returning.begin_again(census, self._state.ledger.now_s)

    def _advance(self) -> None:
        """Everything that replicas do for the job, in this order: who joins, who leaves, what is given to whom, what
        becomes of each step, who goes, and what is evaluated."""
        progress, now_s = self._state.progress, self._state.ledger.now_s
        for joiner, report in self._admission.judge(now_s):
            self._admit(joiner, report)
        self._departures.begin()
        self._dispatch.hurry(now_s)
        for run in progress.redoable():
            self._settle_pairs(run)
            self._dispatch.refill(run, now_s)
        self._dispatch.feed(now_s, new_steps=self._saving.stop is None)
        for step in sorted(progress.runs):
            self._advance_step(progress.runs[step])
            if self.mode is not Mode.RUNNING:
                return
        self._departures.release(now_s)
        self._rebalance()
        self._dispatch.evaluate(now_s)
        if progress.agreed == self.settings.steps and self._evaluations.is_idle:
            self.mode = Mode.SAVING

    def _advance_step(self, run: StepRun) -> None:
        if run.phase is Phase.FEEDING and self._state.ledger.is_full(run.step):
            run.turn(StepEvent.FULL if self._state.ledger.is_finite(run.step) else StepEvent.NOT_FINITE)
            if not run.skip:
                self._rounds.start(run)
        self._rounds.repeat(run, self._state.ledger.now_s)
        self._rounds.complete(run)
        self._conclude(self._commits.decide(run))
        is_oldest = run.step == self._state.progress.agreed
        if run.phase is Phase.COMMITTING and is_oldest and not self._commits.owing(run):
            run.turn(StepEvent.AGREED)
            self._state.progress.agree(run)

    def _settle_pairs(self, run: StepRun) -> None:
        """Where two replicas hold one microbatch, the smaller contribution is void."""
        while (peer := self._state.ledger.superfluous(run.step)) is not None:
            self._rounds.void(run, peer, "another replica holds a microbatch of its set")

    def _report_independent(self) -> None:
        """Say which of those who joined have all that their stage has."""
        for standing in self._state.pool.standings():
            replica = standing.replica
            if standing.needs_donors and not self._commits.needs_donors(replica.peer):
                standing.needs_donors = False
                self._state.outbox.put(Independent(replica.peer, replica.incarnation))

    def _rebalance(self) -> None:
        """Move a replica where that is worth it."""
        if self._saving.stop is not None:
            return
        decision = self._moves.consider(self._state.ledger.now_s)
        if decision is not None and decision.plan is not None:
            self._ask_to_leave(decision.plan.peer, Leave(decision.reason, decision.plan.target))

    @property
    def _is_idle(self) -> bool:
        """Nothing is to be computed."""
        return not self._state.progress.runs and self._evaluations.is_idle

    def _save(self) -> None:
        """Begin or complete a checkpoint, or stop, if it is time."""
        match self._saving.next(self._state.progress.agreed, self._state.ledger.now_s, idle=self._is_idle):
            case BeginCheckpoint(version=version):
                self._collecting.begin(version, self._state.ledger.now_s)
            case PublishCheckpoint() as publish:
                self._state.outbox.put(publish)
            case Stopped() as stopped:
                self._conclude(stopped)

    def _conclude(self, end: Fail | Stopped | None) -> None:
        """The job is over, if some part of the brain says so; what was concluded first stands."""
        match end:
            case Fail() if self.mode is not Mode.ENDED:
                self._end(end.message)
                self._state.outbox.put(end)
            case Stopped():
                self._end(end.reason)
                self._state.outbox.put(end)

    def _end(self, reason: str) -> None:
        self.mode = Mode.ENDED
        for peer in [*self._state.pool, *(joiner.replica.peer for joiner in self._state.joiners)]:
            self._state.outbox.put(Send(peer, Release(self.settings.job, reason)))
