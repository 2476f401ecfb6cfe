"""The outer steps of a job whose islands all live in this process: their proposals, and the merges.

    inner step at every island ──▶ captured? proposals, held ──▶ due? one outer version, merged at every island

`OuterPlan` says when, `Stage` does it. An outer step is a step without microbatches: it makes a version of an island's
weights like any other, so graphs and older buffers are treated as behind an inner step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from swarm.errors import InvalidConfig
from swarm.job.fragments import fragment_of
from swarm.job.islands import course_of, outer_plan
from swarm.job.outer import REPLACE
from swarm.job.outer_log import OuterRecord, TookPart
from swarm.job.spec import JobSpec
from swarm.model.families import stored_name
from swarm.model.islands.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.model.state import place_of


def took_part(spec: JobSpec, log: Iterable[OuterRecord], first_step: int) -> TookPart:
    """Which islands take part in which inner steps from `first_step` on, as the log of a swarm says; InvalidConfig.

    Steps that an island of the swarm made, and that did not count, are not made here.
    """
    if spec.averaging.mode != "diloco":
        if tuple(log):
            raise InvalidConfig('an outer log is of a job with averaging.mode = "diloco"', hint="leave it out")
        return TookPart((), spec.island_count, [spec.training.steps])
    course = course_of(spec, 0)
    behind = range(first_step + 1, spec.training.steps + 1)
    exchanges = [n for n in behind if course.version_after(n) == course.level_from(course.version_after(n))]
    return TookPart([one for one in log if one.after_step > first_step], spec.island_count, exchanges)


def begin_anew(island: Sequence[Stage], origin: Sequence[Stage]) -> None:
    """Let an island go on with all that another one holds."""
    for stage, other in zip(island, origin, strict=True):
        names = [name for name, _ in other.parameter_sizes()]
        stage.absorb(names, other.version, memoryview(other.snapshot(names)))
        stage.settle(other.version)


class OuterSteps:
    """The proposals under way of a resolved job; each stage keeps the outer state of its parameters.

    `islands` has the stages of each island, which begin with the same weights; they are changed in place.
    """

    def __init__(self, spec: JobSpec, islands: Sequence[Sequence[Stage]]) -> None:
        self._spec = spec
        self._islands = islands
        self._plan = outer_plan(spec)
        # By fragment, until merged: of each island that takes part.
        self._proposed: dict[int, tuple[dict[int, dict[str, Tensor]], list[float]]] = {}
        # By fragment and island, since the last capture.
        self._tokens = [[0] * len(islands) for _ in range(self._plan.fragments)]
        self.is_level = True  # all islands hold the outer weights

    def after(self, step: int, tokens: Mapping[int, int]) -> list[int]:
        """These islands have made inner step `step`, with these tokens: capture and merge the fragments that are due.

        Gives the fragments whose mean proposal was not finite. Their outer weights stay, and the weights of all islands
        become the outer weights, so training of these fragments since the last merge is dropped.
        """
        self.is_level = False
        for counted in self._tokens:
            for island, more in tokens.items():
                counted[island] += more
        for fragment in self._plan.captures(step):
            self._capture(fragment, sorted(tokens))
        due = self._plan.merges(step)
        dropped = [fragment for fragment in due if not self._merge(fragment, step)]
        self.is_level = len(due) == self._plan.fragments and self._plan.rule(step).k == 0.0
        return dropped

    def _capture(self, fragment: int, islands: Sequence[int]) -> None:
        proposals = {}
        for island in islands:
            made: dict[str, Tensor] = {}  # a tied weight once: both of its stages propose the same
            for stage, names in self._held(self._islands[island], fragment):
                proposed = stage.propose(names)
                made |= {kept: proposed[name] for name, kept in names.items()}
            proposals[island] = made
        counted = [self._tokens[fragment][island] for island in islands]
        self._proposed[fragment] = proposals, [tokens / sum(counted) for tokens in counted]
        self._tokens[fragment] = [0] * len(self._islands)

    def _merge(self, fragment: int, step: int) -> bool:
        """Make the fragment's next outer version and give it to all islands; False if it is not finite."""
        proposals, shares = self._proposed.pop(fragment)
        names = next(iter(proposals.values()))
        deltas = {name: compose([one[name] for one in proposals.values()], shares) for name in names}
        finite = all(bool(delta.isfinite().all()) for delta in deltas.values())
        update = self._plan.update if finite else None
        rule = self._plan.rule(step) if finite else REPLACE
        for island, own in proposals.items():
            for stage, held in self._held(self._islands[island], fragment):
                there, mine = ({name: one[kept] for name, kept in held.items()} for one in (deltas, own))
                stage.merge(stage.version, Merge(there, update, rule, mine))
        return finite

    def _held(self, island: Sequence[Stage], fragment: int) -> Iterator[tuple[Stage, dict[str, str]]]:
        """Each stage with its parameters of a fragment: their names there, and in a model folder."""
        fragments = self._plan.fragments
        for stage in island:
            held = {name: stored_name(self._spec, name) for name, _ in stage.parameter_sizes()}
            places = {name: place_of(self._spec, kept) for name, kept in held.items()}
            yield stage, {name: held[name] for name, at in places.items() if fragment_of(at, fragments) == fragment}
