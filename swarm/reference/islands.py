"""The outer steps of a job whose islands all live in this process: their proposals, and the merges.

    inner step at every island ──▶ captured? proposals, held ──▶ due? one outer version, merged at every island

`OuterPlan` says when, `Stage` does it. An outer step is a step without microbatches: it makes a version of an island's
weights like any other, so graphs and older buffers are treated as behind an inner step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from swarm.errors import InvalidConfig
from swarm.job.islands import courses, outer_courses, outer_plan
from swarm.job.outer import REPLACE, fragment_of
from swarm.job.outer_log import OuterRecord, TookPart
from swarm.job.shares import Shares, next_shares
from swarm.job.spec import JobSpec
from swarm.model.families import stored_name
from swarm.model.islands.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.model.state import place_of


def took_part(spec: JobSpec, log: Iterable[OuterRecord], first_step: int) -> TookPart:
    """Which islands take part in which inner steps from `first_step` on, as the log of a swarm says; InvalidConfig.

    Steps that an island of the swarm made, and that did not count, are not made here.
    """
    if not spec.has_outer_steps:
        if tuple(log):
            raise InvalidConfig("an outer log is of a job with islands", hint="leave it out")
        return TookPart((), 1, [(spec.training.steps, 0)])
    exchanges = [
        (exchange.behind, exchange.fragment)
        for exchange in outer_courses(spec)[0].outer
        if exchange.behind > first_step
    ]
    microbatches = 0 if spec.islands.shares == "equal" else spec.training.microbatches
    return TookPart(
        [record for record in log if record.after_step > first_step], spec.island_count, exchanges, microbatches
    )


def divide(shares: Shares, exchanges: TookPart, speeds: Sequence[float]) -> None:
    """Enter the shares of a whole job: the log's, or shares that fit the speeds."""
    for (step, logged), (following, _) in pairwise(exchanges.shares()):
        if speeds:
            now, every = shares.of_cycle(step), range(shares.islands)
            seconds = {island: now[island] / speeds[island] for island in every}
            logged = next_shares(every, now, seconds, shares.microbatches, max(1, following - step))
        shares.begin(step, logged or shares.equal)


def tokens_before(spec: JobSpec, tokens_of: Callable[[int], int], first_step: int) -> list[tuple[int, dict[int, int]]]:
    """The inner steps of a resolved spec before `first_step`, as far as a proposal may hold them, with each island's
    tokens; `tokens_of` gives a portion's."""
    (first, *_), paths = outer_courses(spec), courses(spec)
    start = max(0, first_step - first.inner.lease)
    return [(at, {n: tokens_of(one.at(at).portion) for n, one in enumerate(paths)}) for at in range(start, first_step)]


def begin_anew(island: Sequence[Stage], origin: Sequence[Stage]) -> None:
    """Let an island go on with the outer weights, and all else that another one holds."""
    for stage, other in zip(island, origin, strict=True):
        names = [name for name, _ in other.parameter_sizes()]
        stage.absorb(names, other.version, memoryview(other.snapshot(names)))
        stage.settle(other.version)
        stage.begin_anew()


class ReferenceOuterSteps:
    """The proposals under way of a resolved job; each stage keeps the outer state of its parameters.

    `islands` has the stages of each island, which begin with the same weights; they are changed in place.
    """

    def __init__(
        self, spec: JobSpec, islands: Sequence[Sequence[Stage]], trained: Iterable[tuple[int, Mapping[int, int]]] = ()
    ) -> None:
        """`trained`: inner steps that were made before, at least one period, with each island's tokens."""
        self._spec = spec
        self._islands = islands
        self._plan, self._course = outer_plan(spec), outer_courses(spec)[0]
        # By fragment, until merged: of each island that has captured it, what it proposes, and its tokens.
        self._proposed: dict[int, dict[int, tuple[dict[str, Tensor], int]]] = {}
        # By fragment and island, since the last capture.
        self._tokens = [[0] * len(islands) for _ in range(self._plan.rhythm.fragments)]
        self.is_level = True  # the job can be saved
        self.streams = self._course.streams  # and weights are never the outer weights
        for step, tokens in trained:
            self._count(tokens)
            for fragment in self._plan.rhythm.captures(step):
                self._tokens[fragment] = [0] * len(islands)

    def after(self, step: int, tokens: Mapping[int, int], exchanges: TookPart | None = None) -> list[int]:
        """These islands have made inner step `step`, with these tokens: capture and merge the fragments that are due.

        Gives the fragments whose mean proposal was not finite. Their outer weights stay, and the weights of all islands
        become the outer weights, so training of these fragments since the last merge is dropped.
        """
        self._count(tokens)
        for fragment in self._plan.rhythm.captures(step):
            self._capture(fragment, sorted(tokens))
        due = self._plan.rhythm.merges(step)
        all_ = sorted(tokens)
        dropped = [p for p in due if not self._merge(p, step, exchanges.proposers(step, p) if exchanges else all_)]
        version = self._course.version_after(step + 1)
        self.is_level = version == self._course.level_from(version)
        return dropped

    def begin(self, island: int) -> None:
        """An island begins anew: it has trained nothing yet."""
        for counted in self._tokens:
            counted[island] = 0

    def _count(self, tokens: Mapping[int, int]) -> None:
        for counted in self._tokens:
            for island, more in tokens.items():
                counted[island] += more

    def _capture(self, fragment: int, islands: Sequence[int]) -> None:
        proposed = {}
        for island in islands:
            made: dict[str, Tensor] = {}  # a tied weight once: both of its stages propose the same
            for stage, names in self._held(self._islands[island], fragment):
                values = stage.propose(names)
                made |= {kept: values[name] for name, kept in names.items()}
            proposed[island] = made, self._tokens[fragment][island]
        self._proposed[fragment] = proposed
        self._tokens[fragment] = [0] * len(self._islands)

    def _merge(self, fragment: int, step: int, islands: Sequence[int]) -> bool:
        """Make the fragment's next outer version and give it to these islands; False if it is not finite."""
        captured = self._proposed.pop(fragment)
        proposals = {island: captured[island][0] for island in islands}
        counted = [captured[island][1] for island in islands]
        shares = [tokens / sum(counted) for tokens in counted]
        names = next(iter(proposals.values()))
        deltas = {name: compose([proposal[name] for proposal in proposals.values()], shares) for name in names}
        finite = all(bool(delta.isfinite().all()) for delta in deltas.values())
        update = self._plan.update if finite else None
        rule = self._plan.rule(step) if finite else REPLACE
        for island in proposals:
            for stage, held in self._held(self._islands[island], fragment):
                there = {name: deltas[kept] for name, kept in held.items()}
                stage.merge(stage.version, Merge(there, update, rule))
        return finite

    def _held(self, island: Sequence[Stage], fragment: int) -> Iterator[tuple[Stage, dict[str, str]]]:
        """Each stage with its parameters of a fragment: their names there, and in a model folder."""
        fragments = self._plan.rhythm.fragments
        for stage in island:
            held = {name: stored_name(self._spec, name) for name, _ in stage.parameter_sizes()}
            places = {name: place_of(self._spec, kept) for name, kept in held.items()}
            yield stage, {name: held[name] for name, at in places.items() if fragment_of(at, fragments) == fragment}
