"""Whether islands hold the same outer weights, at their beginning and after each outer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.brain.commit.digests import outvoted
from scheduler.brain.job import JobBrain
from scheduler.brain.state.mode import Mode
from swarm.job.course import OuterCourse


class OuterWeights:
    """The digests of outer weights that replicas report."""

    def __init__(self, courses: Sequence[OuterCourse]) -> None:
        self._courses = courses
        self._held: dict[tuple[int, int], dict[int, str]] = {}  # by version and stage: of each island

    def compare(self, islands: Mapping[int, JobBrain], *, forget: bool) -> dict[int, str]:
        """The islands whose outer weights differ from the majority's, with the fault; all islands without a majority.

        `forget`: drop versions that all `islands` have passed.
        """
        for number, one in islands.items():
            version = one.agreed
            if version != one.settings.first_step and not self._courses[number].is_outer(version - 1):
                continue
            for stage in range(len(one.settings.split)):
                if digest := one.agreed_digest(stage):  # not known of what was agreed before a restart
                    self._held.setdefault((version, stage), {})[number] = digest.rpartition("-")[2]
        oldest = min(one.agreed for one in islands.values())
        for (version, stage), said in list(self._held.items()):
            held = {number: said[number] for number in sorted(said.keys() & islands.keys())}
            self._held[version, stage] = held  # without that of an earlier life
            yet = {number for number, one in islands.items() if one.agreed < version or one.mode is Mode.LOADING}
            odd = outvoted(held)
            if odd and yet <= held.keys():
                told = ", ".join(f"island {number} holds {digest}" for number, digest in held.items())
                where = f"after step {self._courses[0].inner_steps(version)}"
                fault = f"islands differ in the outer weights of stage {stage} {where}: {told}"
                return dict.fromkeys(odd if len(odd) < len(held) else islands, fault)
            if forget and version < oldest:
                del self._held[version, stage]
        return {}
