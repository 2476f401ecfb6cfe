"""The parts of one job's brain, and how they are put together. Decision: docs/decisions/193."""

from __future__ import annotations

from random import Random

from scheduler.brain.checkpoint.collection import CheckpointCollector
from scheduler.brain.checkpoint.schedule import CheckpointSchedule
from scheduler.brain.commit.commits import Commits
from scheduler.brain.commit.rounds import Rounds
from scheduler.brain.inputs import Stored
from scheduler.brain.replicas.admission import Admission, Loading
from scheduler.brain.replicas.departures import Departures
from scheduler.brain.replicas.reattach import Reattach
from scheduler.brain.replicas.rebalancing import Moves
from scheduler.brain.routing.dispatch import Dispatch
from scheduler.brain.routing.evaluation import Evaluations
from scheduler.brain.routing.loads import Loads
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.brain_state import BrainState, Mode
from scheduler.brain.state.step import Phase, StepRun
from scheduler.brain.trust.audits import audits_of
from swarm.job.course import Course
from swarm.types import PeerId
from swarm.wire.messages import Evaluated, Event, Loaded, Saved


class Parts:
    """Each part decides one thing. All share the state, and each knows only parts above it in this list."""

    def __init__(self, settings: BrainSettings, rng: Random, course: Course) -> None:
        self.state = state = BrainState(settings, course)  # mode, replicas, steps, ledger
        stages, first = len(settings.split), settings.first_step
        self.saving = CheckpointSchedule(settings.saving, stages, first, settings.steps, course)  # and when to stop
        self.evaluations = Evaluations(settings, course)  # the loss on the validation split
        self.loads = Loads(state)  # what each replica has to do
        self.loading = Loading(state)  # what fits together
        self.dispatch = Dispatch(state, self.loads, self.evaluations, rng)  # which replica computes which microbatch
        self.rounds = Rounds(state, self.loading.elements)  # averaging of full steps
        self.commits = Commits(state, self.evaluations, rng)  # rows, and whether all replicas made their commits
        self.collector = CheckpointCollector(state, self.saving)  # replicas that hand over a checkpoint
        self.audits = audits_of(state, self.saving, self.collector, rng)  # find replicas that give wrong numbers
        self.moves = Moves(state, self.loads)  # replicas that change stages
        self.admission = Admission(state, self.loading, self.dispatch, self.commits, self.moves, rng)  # peers that join
        work = (self.evaluations, self.dispatch, self.rounds, self.commits)
        self.departures = Departures(state, self.saving, *work, self.collector)  # replicas that leave or are lost
        self.reattach = Reattach(state, *work)  # replicas that come back

    @property
    def is_idle(self) -> bool:
        """No step is open, and nothing is being evaluated."""
        return not self.state.progress.runs and self.evaluations.is_idle

    @property
    def outer_step(self) -> int | None:
        """As JobBrain.outer_step."""
        state, step = self.state, self.state.progress.next
        is_due = state.mode is Mode.RUNNING and state.progress.agreed == step and step < state.settings.steps
        is_outer = is_due and state.course.is_outer(step)
        return step if is_outer and self.evaluations.permits(step) else None

    @property
    def saves_only(self) -> bool:
        """As JobBrain.saves_only. An island that has come to an outer step waits for that."""
        is_idle = self.is_idle and self.outer_step is None
        return self.state.mode.is_at_work and is_idle and self.saving.is_under_way

    def awaits(self, peer: PeerId, event: Event) -> bool:
        """Whether the job cannot go on without what the peer says here."""
        match event:
            case Loaded():
                return self.state.mode in (Mode.LOADING, Mode.GATHERING) and peer in self.loading.missing()
            case Saved():
                settings = self.state.settings
                is_of_job = (event.job, event.timeline) == (settings.job, settings.timeline)
                return is_of_job and self.saves_only and self.saving.awaits(peer, event)  # steps wait for no checkpoint
            case Evaluated():
                return self.evaluations.awaits(peer, event)
        return False

    def permit(self, run: StepRun, now_s: float) -> bool:
        """Whether nothing of the step is being checked, or has to be now."""
        if not self.state.course.is_outer(run.step):
            for audit in self.audits:
                audit.draw(run, now_s)
        return not self.audits_wait_for(run.step)

    def audited(self, peer: PeerId, event: Event | Stored, now_s: float) -> bool:
        """Show an event to the audits; False if none of them waits for it."""
        return any(audit.hear(peer, event, now_s) for audit in self.audits)

    def audits_wait_for(self, step: int) -> str:
        """What an audit of the step waits for; empty if no check of it is open."""
        return next(filter(None, (audit.waiting_for(step) for audit in self.audits)), "")

    def validate(self) -> None:
        state, progress = self.state, self.state.progress
        is_over = state.mode is Mode.ENDED
        state.ledger.validate()
        state.pool.validate()
        self.loads.validate()
        self.dispatch.validate()
        assert progress.agreed <= progress.committed <= progress.next <= state.settings.steps
        assert sorted(progress.runs) == list(range(progress.agreed, progress.next)) or is_over
        assert state.ledger.open_steps() == [
            step
            for step, run in sorted(progress.runs.items())
            if run.phase not in (Phase.COMMITTING, Phase.DONE) and not state.course.is_outer(step)
        ]
        for run in progress.runs.values():
            if run.phase is Phase.AVERAGING:
                assert set(run.rounds) | set(self.rounds.paused(run)) == set(state.settings.units)
                assert state.ledger.is_full(run.step) or is_over
            for unit, averaging in run.rounds.items():
                assert averaging.reports.keys() <= {member.peer for member in averaging.members}
                if averaging.members or not state.course.is_outer(run.step):  # the envoys may be those of other islands
                    assert averaging.members[-1].stop == self.loading.elements[unit]
