"""The outer steps of a job whose islands all live in this process: what they propose, and what a merge makes of it.

    inner step at every island ──▶ captured? proposals, held ──▶ due? one outer version, merged at every island

`OuterPlan` says when, `swarm.model.outer` how. An outer step is a step without microbatches: it makes a version of an
island's weights like any other, so graphs and older buffers are treated as behind an inner step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from swarm.job.fragments import fragment_of
from swarm.job.islands import outer_plan
from swarm.job.outer import REPLACE
from swarm.job.spec import JobSpec
from swarm.model.families import stored_name
from swarm.model.outer import OuterState, advance, compose, merged, proposal
from swarm.model.stage import Stage
from swarm.model.state import place_of


class OuterSteps:
    """The outer weights and momentum of a resolved job, and the proposals under way.

    `islands` has the stages of each island, which begin with the same weights; they are changed in place.
    """

    def __init__(self, spec: JobSpec, islands: Sequence[Sequence[Stage]]) -> None:
        self._spec = spec
        self._islands = islands
        self._plan = outer_plan(spec)
        self._states = {name: OuterState.of(weights) for name, weights in self._weights(islands[0]).items()}
        self._names: list[list[str]] = [[] for _ in range(self._plan.fragments)]
        for name in self._states:
            self._names[fragment_of(place_of(spec, name), self._plan.fragments)].append(name)
        self._proposed: dict[int, tuple[list[dict[str, Tensor]], list[float]]] = {}  # by fragment, until merged
        self._tokens = [[0] * len(islands) for _ in self._names]  # by fragment and island, since the last capture
        self.is_level = True  # all islands hold the outer weights

    def after(self, step: int, tokens: Sequence[int]) -> list[int]:
        """Every island has made inner step `step`, with so many tokens: capture and merge what is due.

        Gives the fragments whose mean proposal was not finite: the weights of all islands become the anchor, which
        stays, so what they had learned of it since the last merge is dropped.
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
        codec = self._spec.outer.compression
        proposals = []
        for island in self._islands:
            weights = self._weights(island)
            proposals.append(
                {name: proposal(self._states[name].anchor, weights[name], codec) for name in self._names[fragment]}
            )
        total = sum(self._tokens[fragment])
        self._proposed[fragment] = proposals, [tokens / total for tokens in self._tokens[fragment]]
        self._tokens[fragment] = [0] * len(self._islands)

    def _merge(self, fragment: int, step: int) -> bool:
        """Make the fragment's next outer version and give it to all islands; False if it is not finite."""
        proposals, shares = self._proposed.pop(fragment)
        deltas = {name: compose([one[name] for one in proposals], shares) for name in self._names[fragment]}
        finite = all(bool(delta.isfinite().all()) for delta in deltas.values())
        before = {name: self._states[name].anchor for name in deltas}
        if finite:
            self._states |= {name: advance(self._states[name], deltas[name], self._plan.update) for name in deltas}
        rule = self._plan.rule(step) if finite else REPLACE
        for island, own in zip(self._islands, proposals, strict=True):
            weights = self._weights(island)
            taken = {
                name: merged(weights[name], before[name], self._states[name].anchor, rule, own[name]) for name in deltas
            }
            for stage in island:
                held = {name: stored_name(self._spec, name) for name, _ in stage.parameter_sizes()}
                stage.take_over(stage.version, {name: taken[kept] for name, kept in held.items() if kept in taken})
        return finite

    def _weights(self, island: Sequence[Stage]) -> Mapping[str, Tensor]:
        """The newest weights of an island, float32 on the CPU; a tied weight once."""
        found: dict[str, Tensor] = {}
        for stage in island:
            for name, weights in stage.weights.newest().items():
                found.setdefault(stored_name(self._spec, name), weights.detach().cpu())
        return found
