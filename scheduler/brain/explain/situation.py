"""The situation of a job at work: its replicas, why it waits, its numbers. facts.py makes sentences of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.brain.explain.facts import JoinerStanding, ReplicaStanding, Situation, Team
from scheduler.brain.parts import Parts
from scheduler.brain.state.brain_state import BrainState, Mode
from scheduler.brain.state.step import Phase, StepRun
from swarm.text import listed
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters since this brain began; tuples have one number per stage."""

    committed_steps: int  # of the job: steps whose commit row is durable
    microbatches: int  # in those steps; every stage computed each once
    in_flight: int  # fed, and not yet accumulated at every stage
    accumulated: tuple[int, ...]  # contributions in the steps committed since this brain began
    replayed_by_stage: tuple[int, ...]  # contributions that were void and had to be computed again
    reroutes: Mapping[tuple[int, str], int]  # hops that were taken from one replica, by (stage, reason)
    duplicates: int  # late repeats that were ignored
    violations: int  # events that no healthy replica sends: sets, routes or digests other than expected

    @classmethod
    def of_islands(cls, of: Sequence[Counts]) -> Counts:
        """The job's counts from its islands' counts."""
        reroutes: Counter[tuple[int, str]] = Counter()
        for counts in of:
            reroutes.update(counts.reroutes)
        return cls(
            min(island.committed_steps for island in of),
            sum(island.microbatches for island in of),
            sum(island.in_flight for island in of),
            tuple(map(sum, zip(*(island.accumulated for island in of), strict=True))),
            tuple(map(sum, zip(*(island.replayed_by_stage for island in of), strict=True))),
            reroutes,
            sum(island.duplicates for island in of),
            sum(island.violations for island in of),
        )

    @property
    def replayed(self) -> int:
        return sum(self.replayed_by_stage)


def counts(state: BrainState) -> Counts:
    ledger, committed = state.ledger, state.course.inner_steps(state.progress.committed)
    microbatches = state.course.trained(state.progress.committed, state.settings.microbatches)
    return Counts(
        committed,
        microbatches,
        ledger.in_flight(),
        ledger.committed(),
        tuple(ledger.replayed),
        dict(ledger.moved),
        ledger.duplicates,
        ledger.violations,
    )


def team(state: BrainState) -> Team:
    pool = state.pool
    return Team(len(pool), len(pool.suspects()), sum(peer in pool.leaves for peer in pool), len(state.joiners))


def situation(parts: Parts, now_s: float) -> Situation:
    state, leaves = parts.state, parts.state.pool.leaves
    done = state.ledger.contributions()
    joiners = [
        JoinerStanding(
            joiner.replica.peer, joiner.replica.stage, joiner.since_s, joiner.report is not None, joiner.waits
        )
        for joiner in state.joiners
    ]
    return Situation(
        state.mode is Mode.RUNNING,
        len(state.pool.by_stage),
        state.course.inner_steps(state.progress.agreed),
        waiting_for(parts, now_s),
        parts.moves.decision.reason,
        tuple(_replica(parts, peer, done[peer]) for peer in state.pool),
        tuple(joiners),
        leaves.moves,
        leaves.newest_move,
        state.links.failing(now_s),
        parts.saving.open,
        parts.moves.decided_s,
        state_bytes=state.settings.state_bytes,
        averages=dict(parts.rounds.forms.told),
    )


def _replica(parts: Parts, peer: PeerId, contributions: int) -> ReplicaStanding:
    standing = parts.state.pool[peer]
    return ReplicaStanding(
        peer,
        standing.replica.stage,
        parts.loads.measured_s(peer),
        parts.state.ledger.outstanding(peer),
        contributions,
        standing.is_suspect,
        parts.state.pool.leaves.wants(peer),
        standing.asked_s,
        standing.needs_donors,
    )


def waiting_for(parts: Parts, now_s: float) -> str:
    """The reason why the job waits, for a person."""
    state, runs = parts.state, parts.state.progress.runs
    match state.mode:
        case Mode.GATHERING if state.census is not None:
            empty = ", ".join(map(str, state.pool.empty_stages()))
            missing = listed(state.census.missing())
            return f"waits after a restart for {missing}" + (f"; nobody of stage {empty}" if empty else "")
        case Mode.LOADING:
            return f"waits for {listed(parts.loading.missing())} to load"
        case Mode.RUNNING if runs:
            step = min(runs)
            kind = "outer step behind step" if state.course.is_outer(step) else "step"
            return f"{kind} {state.course.inner_steps(step)}: {_step_waits_for(parts, runs[step], now_s)}"
        case Mode.RUNNING if not parts.evaluations.is_idle:
            return f"waits for the {parts.evaluations.waiting_for()}"
        case Mode.RUNNING | Mode.SAVING:
            return parts.collector.waiting_for()
    return f"is {state.mode}"


def _step_waits_for(parts: Parts, run: StepRun, now_s: float) -> str:
    match run.phase:
        case Phase.FEEDING:
            return parts.dispatch.waiting_for()
        case Phase.AVERAGING:
            return parts.rounds.waiting_for(run, now_s)
        case Phase.COMMITTING:
            return f"waits for {listed(parts.commits.owing(run))} to commit"
        case Phase.DECIDED if told := parts.audits_wait_for(run.step):
            return told
        case Phase.DECIDED if not parts.evaluations.permits(run.step):
            return f"waits for the {parts.evaluations.waiting_for()}"
    return run.phase
