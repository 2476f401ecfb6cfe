"""The numbers of a job at work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.brain.state.brain_state import BrainState


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted since this brain began; tuples have one number per stage."""

    committed_steps: int  # of the job: steps whose commit row is durable
    microbatches: int  # in those steps; every stage computed each once
    fed: int  # microbatches that were ever given out, each once
    in_flight: int  # fed, and not yet accumulated at every stage
    accumulated: tuple[int, ...]  # contributions in the steps committed since this brain began
    replayed_by_stage: tuple[int, ...]  # contributions that were void and had to be computed again
    reroutes: Mapping[tuple[int, str], int]  # hops that were taken from one replica, by (stage, reason)
    duplicates: int  # late repeats that were ignored
    violations: int  # events that no healthy replica sends: sets, routes or digests other than expected

    @property
    def replayed(self) -> int:
        """At all stages together."""
        return sum(self.replayed_by_stage)

    @property
    def rerouted(self) -> int:
        """For whatever reason."""
        return sum(self.reroutes.values())


def counts(state: BrainState) -> Counts:
    """Take the numbers as they are now."""
    ledger, committed = state.ledger, state.progress.committed
    microbatches = committed * state.settings.microbatches
    return Counts(
        committed,
        microbatches,
        microbatches + ledger.fed(),
        ledger.in_flight(),
        ledger.committed(),
        tuple(ledger.replayed),
        dict(ledger.moved),
        ledger.duplicates,
        ledger.violations,
    )
