"""The commit of a step: its content, the replicas that get it, and whether all of them have made it.

averaged, in order ──▶ row ──durable──▶ Commit to every member ──all Committed, digests alike──▶ agreed
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from random import Random

from scheduler.brain.commit.digests import SAME_HINT, Expel, Remedy, vote
from scheduler.brain.commit.slices import EMPTY_SET, squared_norms
from scheduler.brain.outputs import CommitRow, Exchanged, Fail, WriteCommit
from scheduler.brain.routing.evaluation import Evaluations
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.pool import DONORS_MAX, choose_donors
from scheduler.brain.state.step import Phase, StepEvent, StepRun, UnitAveraging, may_write
from swarm.errors import GradientRange, ReplicaDiverged
from swarm.job.schedule import NOT_FINITE_HINT, clip, not_finite_fault, overflow_fault
from swarm.types import Direction, Hop, PeerId, UnitName
from swarm.wire.messages import Commit, Committed, Member, UnitRound


class Commits:
    """The commits of one job."""

    def __init__(self, state: BrainState, evaluations: Evaluations, rng: Random) -> None:
        self._state = state
        self._evaluations = evaluations
        self._rng = rng
        self._skipped_in_a_row = state.settings.skipped_in_a_row
        units = state.settings.units
        self._units = [[unit for unit in units if stage in units[unit]] for stage in range(len(state.settings.split))]

    def decide(self, run: StepRun) -> Fail | None:
        """Decide the step's commit and hand its row to the database, once the order of commits allows it."""
        in_order = may_write(run.step, commits_sent=self._state.progress.committed, agreed=self._state.progress.agreed)
        if run.phase is not Phase.DECIDED or not in_order or not self._evaluations.permits(run.step):
            return None
        settings, inner = self._state.settings, self._state.course.at(run.step)
        tokens = settings.tokens_of(inner.portion)
        reports = {unit: averaging.reports[min(averaging.reports)] for unit, averaging in run.rounds.items()}
        squared = squared_norms(norm for report in reports.values() for norm in report.norms)
        norm, scale = clip(squared, settings.grad_clip_norm)
        if not math.isfinite(norm):
            run.skip = True
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if run.skip else 0
        if run.skip:
            cause = _cause(run)
            if settings.fail_on_nonfinite:
                hint = cause or 'lower training.learning_rate, or set limits.on_nonfinite = "skip"'
                return Fail(GradientRange.code, f"the gradient of step {inner.rate_step} is not finite", hint)
            steps = self._state.course.inner_steps(settings.steps)
            limits = {"steps": steps, "most": settings.nonfinite_steps_max}
            if fault := not_finite_fault(inner.rate_step, self._skipped_in_a_row, **limits):
                return Fail(GradientRange.code, fault, cause or NOT_FINITE_HINT)
            told = f"the gradient of step {inner.rate_step} is not finite: the step changes no weight"
            told += f"; {cause}" if cause else ""
            self._state.outbox.note("warning", told)
        total = 0.0
        for loss in self._state.ledger.losses(run.step):  # left to right, as the one-process reference adds
            total += loss
        run.row = CommitRow(
            timeline=settings.timeline,
            step=run.step,
            rounds={} if run.skip else {unit: averaging.round for unit, averaging in run.rounds.items()},
            loss=total / tokens,
            norm=0.0 if run.skip else norm,
            scale=0.0 if run.skip else scale,
            learning_rate=settings.learning_rate(inner.rate_step),
            skip=run.skip,
            tokens=tokens,
        )
        run.turn(StepEvent.WRITTEN)
        self._state.outbox.put(WriteCommit(run.row))
        return None

    def merge(self, run: StepRun, exchanged: Exchanged, elements: Mapping[UnitName, int]) -> None:
        """Hand the row of an outer step to the database; `elements` is the size of each unit.

        Only the envoys hold the mean proposal. They are the donors of the other replicas.
        """
        pool, timeline = self._state.pool, self._state.settings.timeline
        for outer in exchanged.rounds:
            whole = [(pool[peer].replica, elements[outer.unit]) for peer in outer.envoys if peer in pool]
            members = [Member(of.peer, of.incarnation, of.address, 0, stop, EMPTY_SET) for of, stop in whole]
            run.rounds[outer.unit] = UnitAveraging(outer.round, tuple(members))
        run.skip = exchanged.skip
        for event in (StepEvent.FULL, StepEvent.AVERAGED, StepEvent.WRITTEN):
            run.turn(event)
        rounds = {} if run.skip else {outer.unit: outer.round for outer in exchanged.rounds}
        norm, scale = (0.0, 0.0) if run.skip else (exchanged.norm, 1.0)
        run.row = CommitRow(timeline, run.step, rounds, 0.0, norm, scale, 0.0, run.skip, 0)
        self._state.outbox.put(WriteCommit(run.row))

    def send(self, peer: PeerId, row: CommitRow) -> None:
        """Tell a replica to make a commit. If it took no part in the rounds, name donors of the averaged gradients."""
        stage = self._state.pool.stage_of(peer)
        rounds = tuple(UnitRound(unit, row.rounds[unit]) for unit in self._units[stage] if unit in row.rounds)
        holds = self._holds(peer, self._state.progress.runs[row.step])
        donors = () if holds else self._donors(peer, stage, row.step)
        rate, version = row.learning_rate, row.step + 1
        self._state.outbox.send(
            peer, Commit(row.timeline, row.step, version, rounds, rate, row.scale, row.skip, donors)
        )

    def _donors(self, peer: PeerId, stage: int, step: int) -> tuple[Hop, ...]:
        """Replicas that hold, or will fetch, the averages of a step; of an outer step the envoys come first."""
        found = self._state.pool.donors(stage, step, peer)
        if self._state.course.is_outer(step):
            run = self._state.progress.runs[step]
            return tuple(sorted(found, key=lambda hop: not self._holds(hop.peer, run))[:DONORS_MAX])
        return choose_donors(found, self._rng)

    def send_since(self, peer: PeerId, version: int) -> None:
        """Send the commits that the peer missed. It still holds the averaged gradients, or never needed them."""
        for step in range(version, self._state.progress.committed):
            row = self._state.progress.runs[step].row
            assert row is not None
            if self._state.pool.leaves.takes_part(peer, step):
                self.send(peer, row)

    def needs_donors(self, peer: PeerId) -> bool:
        """Whether the replica must still fetch an averaged gradient: it joined after a round that it has to commit."""
        since, takes_part = self._state.pool[peer].since, self._state.pool.leaves.takes_part
        return any(
            run.step >= since and takes_part(peer, run.step) and peer not in run.commits and not self._holds(peer, run)
            for run in self._state.progress.runs.values()
        )

    def _holds(self, peer: PeerId, run: StepRun) -> bool:
        """Whether the replica is known to have the averaged gradients that the step's commit applies.

        The members of rounds of an earlier scheduler start are unknown.
        """
        stage, rounds = self._state.pool.stage_of(peer), run.rounds if run.row is None else run.row.rounds
        units = [unit for unit in self._units[stage] if unit in rounds]
        return all(unit in run.rounds and run.rounds[unit].is_held_by(peer) for unit in units)

    def is_awaited(self, event: Committed) -> bool:
        """Whether the commit is one that replicas are making now."""
        run = self._state.progress.runs.get(event.step)
        return run is not None and run.phase is Phase.COMMITTING and event.timeline == self._state.settings.timeline

    def enter(self, peer: PeerId, event: Committed) -> list[Remedy]:
        """A replica made an awaited commit; gives remedies for replicas whose commit differs."""
        pool, stage = self._state.pool, self._state.pool.stage_of(peer)
        if (event.version, event.stage) != (event.step + 1, stage):
            self._state.ledger.violations += 1
            did = f"committed step {event.step} as version {event.version} of {event.stage}"
            if self._state.settings.recover and len(pool.by_stage[stage]) > 1:
                return [Expel(peer, f"it {did}")]
            hint = "run the same release on every stage server"
            return [Fail(ReplicaDiverged.code, f"{pool.name(peer)} {did}", hint)]
        run = self._state.progress.runs[event.step]
        run.commits[peer] = event
        return [] if self._state.census is not None else self.compare(run, [stage])  # others may still come back

    def compare(self, run: StepRun, stages: Iterable[int] = ()) -> list[Remedy]:
        """Remedies for replicas whose commit differs from their stage's; all `stages` by default."""
        pool, settings = self._state.pool, self._state.settings
        for stage in stages or range(len(pool.by_stage)):
            if any(self._owes(peer, run) for peer in reversed(pool.by_stage[stage])):
                continue  # one of them may decide between the others
            said = {peer: run.commits[peer].digest for peer in pool.by_stage[stage] if peer in run.commits}
            what = f"the bytes of stage {stage} after step {run.step}"
            hint = f"{SAME_HINT}, stop the one that is broken, and go on with: swarm resume {settings.job}"
            found = vote(said, what, pool.by_stage, recover=settings.recover, hint=hint)
            if not found:
                continue
            self._state.ledger.violations += 1
            decided = [later for later in self._state.progress.runs.values() if later.row is not None]
            used = [later for later in decided if self._used(run, later)]
            if used and isinstance(found[0], Expel):
                text = f"{found[0].cause}, and step {used[0].step}, which is committed, was computed with them"
                return [Fail(ReplicaDiverged.code, text, hint)]
            return found
        return []

    def _used(self, run: StepRun, later: StepRun) -> bool:
        """Whether a later step was computed with the weights that the commit made."""
        count = self._state.course.microbatches(later.step, self._state.settings.microbatches)
        return self._state.version_of(later.step, count - 1) > run.step

    def owing(self, run: StepRun) -> list[PeerId]:
        """Replicas that have yet to report the step's commit; replicas that joined with a later version never will."""
        return [peer for peer in self._state.pool if self._owes(peer, run)]

    def is_owed(self, run: StepRun) -> bool:
        """Whether any replica has yet to report the step's commit.

        It is asked with every event, so the answer begins with the replica that was found the last time. The search for
        another begins with the replicas that got the commit last.
        """
        if run.owes is None or not self._owes(run.owes, run):
            run.owes = next((peer for peer in reversed(self._state.pool) if self._owes(peer, run)), None)
        return run.owes is not None

    def _owes(self, peer: PeerId, run: StepRun) -> bool:
        pool = self._state.pool
        return peer not in run.commits and pool.takes_part(peer, run.step) and pool[peer].since <= run.step


def _cause(run: StepRun) -> str:
    """Why the gradient is not finite, if a replica says so: outputs go up the stages, and gradients back."""
    outputs = [stage for stage, direction in run.overflows.items() if direction == Direction.FORWARD]
    if not run.overflows:
        return ""
    stage = min(outputs) if outputs else max(run.overflows)
    return overflow_fault(stage, run.overflows[stage])
