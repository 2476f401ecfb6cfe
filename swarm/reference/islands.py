"""The outer steps of a job whose islands all live in this process: their proposals, and the merges.

    inner step at every island ──▶ captured? proposals, held ──▶ due? one outer version, merged at every island

`OuterPlan` says when, `Stage` does it. An outer step is a step without microbatches: it makes a version of an island's
weights like any other, so graphs and older buffers are treated as behind an inner step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from swarm.job.fragments import fragment_of
from swarm.job.islands import outer_plan
from swarm.job.outer import REPLACE
from swarm.job.spec import JobSpec
from swarm.model.families import stored_name
from swarm.model.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.model.state import place_of


class OuterSteps:
    """The proposals under way of a resolved job; each stage keeps the outer state of its parameters.

    `islands` has the stages of each island, which begin with the same weights; they are changed in place.
    """

    def __init__(self, spec: JobSpec, islands: Sequence[Sequence[Stage]]) -> None:
        self._spec = spec
        self._islands = islands
        self._plan = outer_plan(spec)
        self._proposed: dict[int, tuple[list[dict[str, Tensor]], list[float]]] = {}  # by fragment, until merged
        # By fragment and island, since the last capture.
        self._tokens = [[0] * len(islands) for _ in range(self._plan.fragments)]
        self.is_level = True  # all islands hold the outer weights

    def after(self, step: int, tokens: Sequence[int]) -> list[int]:
        """Every island has made inner step `step`, with these tokens: capture and merge the fragments that are due.

        Gives the fragments whose mean proposal was not finite. Their outer weights stay, and the weights of all islands
        become the outer weights, so training of these fragments since the last merge is dropped.
        """
        self.is_level = False
        for counted in self._tokens:
            for island, more in enumerate(tokens):
                counted[island] += more
        for fragment in self._plan.captures(step):
            self._capture(fragment)
        due = self._plan.merges(step)
        dropped = [fragment for fragment in due if not self._merge(fragment, step)]
        self.is_level = len(due) == self._plan.fragments and self._plan.rule(step).k == 0.0
        return dropped

    def _capture(self, fragment: int) -> None:
        proposals = []
        for island in self._islands:
            made: dict[str, Tensor] = {}  # a tied weight once: both of its stages propose the same
            for stage, names in self._held(island, fragment):
                proposed = stage.propose(names)
                made |= {kept: proposed[name] for name, kept in names.items()}
            proposals.append(made)
        total = sum(self._tokens[fragment])
        self._proposed[fragment] = proposals, [tokens / total for tokens in self._tokens[fragment]]
        self._tokens[fragment] = [0] * len(self._islands)

    def _merge(self, fragment: int, step: int) -> bool:
        """Make the fragment's next outer version and give it to all islands; False if it is not finite."""
        proposals, shares = self._proposed.pop(fragment)
        deltas = {name: compose([one[name] for one in proposals], shares) for name in proposals[0]}
        finite = all(bool(delta.isfinite().all()) for delta in deltas.values())
        update = self._plan.update if finite else None
        rule = self._plan.rule(step) if finite else REPLACE
        for island, own in zip(self._islands, proposals, strict=True):
            for stage, names in self._held(island, fragment):
                there, mine = ({name: one[kept] for name, kept in names.items()} for one in (deltas, own))
                stage.merge(stage.version, Merge(there, update, rule, mine))
        return finite

    def _held(self, island: Sequence[Stage], fragment: int) -> Iterator[tuple[Stage, dict[str, str]]]:
        """Each stage with its parameters of a fragment: their names there, and in a model folder."""
        fragments = self._plan.fragments
        for stage in island:
            held = {name: stored_name(self._spec, name) for name, _ in stage.parameter_sizes()}
            places = {name: place_of(self._spec, kept) for name, kept in held.items()}
            yield stage, {name: held[name] for name, at in places.items() if fragment_of(at, fragments) == fragment}
