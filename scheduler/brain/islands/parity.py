"""Whether islands hold the same outer weights: where they begin, and behind each outer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.brain.job import JobBrain
from swarm.job.course import OuterCourse


class OuterWeights:
    """What replicas say of the outer weights that they hold, by hash."""

    def __init__(self, courses: Sequence[OuterCourse]) -> None:
        self._courses = courses
        self._held: dict[tuple[int, int], dict[int, str]] = {}  # by version and stage: of each island

    def compare(self, islands: Mapping[int, JobBrain], *, forget: bool) -> str:
        """What is wrong, for a person; empty if nothing. `forget` what all `islands` have behind them."""
        for number, one in islands.items():
            version = one.agreed
            if version != one.settings.first_step and not self._courses[number].is_outer(version - 1):
                continue
            for stage in range(len(one.settings.split)):
                if digest := one.agreed_digest(stage):  # not known of what was agreed before a restart
                    self._held.setdefault((version, stage), {})[number] = digest.rpartition("-")[2]
        oldest = min(one.agreed for one in islands.values())
        for (version, stage), held in list(self._held.items()):
            if len(set(held.values())) > 1:
                told = ", ".join(f"island {number} holds {digest}" for number, digest in sorted(held.items()))
                where = f"after step {self._courses[0].inner_steps(version)}"
                return f"islands differ in the outer weights of stage {stage} {where}: {told}"
            if forget and version < oldest:
                del self._held[version, stage]
        return ""
