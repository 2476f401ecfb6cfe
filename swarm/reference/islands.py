"""The outer steps of a job whose islands all live in this process: their proposals, and the merges.

    inner step at every island ──▶ captured? proposals, held ──▶ due? one outer version, merged at every island

An island that was late merges behind the same inner step, since one process makes all steps at the same time: what it
had captured is in no version, and it keeps its weights, with the tokens behind them, for the fragment's next capture.

`OuterPlan` says when, `Stage` does it. An outer step is a step without microbatches: it makes a version of an island's
weights like any other, so graphs and older buffers are treated as behind an inner step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from swarm.errors import InvalidConfig
from swarm.job.islands import courses, outer_courses, outer_plan
from swarm.job.leases import Cut, Leases, fill
from swarm.job.outer import REBASE, REPLACE, fragment_of
from swarm.job.outer_log import Entry, TookPart, unfit
from swarm.job.spec import JobSpec
from swarm.model.families import stored_name
from swarm.model.islands.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.model.state import place_of


def took_part(spec: JobSpec, log: Sequence[Entry], first_step: int, leases: Leases | None) -> TookPart:
    """Which islands take part in which inner steps from `first_step` on, as the log of a swarm says; InvalidConfig.

    `leases`, where they follow speed, are cut as it says. Steps that an island of the swarm made, and that did not
    count, are not made here.
    """
    if not spec.has_outer_steps:
        if tuple(log):
            raise InvalidConfig("an outer log is of a job with islands", hint="leave it out")
        return TookPart((), 1, [(spec.training.steps, 0)])
    exchanges = [(outer.behind, outer.fragment) for outer in outer_courses(spec)[0].outer if outer.behind > first_step]
    newer = [entry for entry in log if isinstance(entry, Cut) or entry.after_step > first_step]
    found = TookPart(newer, spec.island_count, exchanges, leases)
    if leases is not None and newer:
        for step in range(first_step, spec.training.steps):
            for island in found.islands(step):
                if not leases.count(island, step):
                    raise unfit(f"island {island} has no microbatch to train in step {step}")
    return found


def lease_by(speeds: Sequence[float], leases: Leases, steps: int) -> None:
    """Cut the leases of a job of so many steps as these speeds of its islands ask for, behind its first period."""
    first = leases.period(0).stop
    for start in range(first, steps, first):
        few = len(leases.period(start))
        parts = fill(
            few * leases.microbatches, {n: (0.0, speed, few, 1) for n, speed in enumerate(speeds)}, leases.microbatches
        )
        leases.cut(leases.anew(dict.fromkeys(parts, start), parts))


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
        self.is_level = True  # the job can be saved, if no island owes anything
        self._late: dict[int, set[int]] = {}  # by fragment: the islands that were late in its newest merge
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
        self._late = {fragment: late & tokens.keys() for fragment, late in self._late.items()}
        for fragment in self._plan.rhythm.captures(step):
            self._capture(fragment, sorted(tokens))
        dropped = []
        for fragment in self._plan.rhythm.merges(step):
            late = self._late[fragment] = set(exchanges.late(step, fragment) if exchanges else ())
            islands = exchanges.proposers(step, fragment) if exchanges else sorted(tokens)
            if not self._merge(fragment, step, islands, late):
                dropped.append(fragment)
        version = self._course.version_after(step + 1)
        self.is_level = version == self._course.level_from(version)
        return dropped

    def begin(self, island: int) -> None:
        """An island begins anew: it has trained nothing yet."""
        for counted in self._tokens:
            counted[island] = 0
        for late in self._late.values():
            late.discard(island)

    @property
    def owing(self) -> set[int]:
        """The islands with steps that were captured and are in no version yet, since they were late."""
        return {island for late in self._late.values() for island in late}

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

    def _merge(self, fragment: int, step: int, islands: Sequence[int], late: Iterable[int]) -> bool:
        """Make the fragment's next outer version of what these islands propose, and give it to them and to the late
        ones; False if it is not finite."""
        captured = self._proposed.pop(fragment)
        proposals = {island: captured[island][0] for island in islands}
        counted = [captured[island][1] for island in islands]
        shares = [tokens / sum(counted) for tokens in counted]
        names = next(iter(proposals.values()))
        deltas = {name: compose([proposal[name] for proposal in proposals.values()], shares) for name in names}
        finite = all(bool(delta.isfinite().all()) for delta in deltas.values())
        update = self._plan.update if finite else None
        rule = self._plan.rule(step) if finite else REPLACE
        for island in late:
            self._tokens[fragment][island] += captured[island][1]
        for island, by in [(island, rule) for island in islands] + [(island, REBASE) for island in late]:
            for stage, held in self._held(self._islands[island], fragment):
                there = {name: deltas[kept] for name, kept in held.items()}
                stage.merge(stage.version, Merge(there, update, by))
        return finite

    def _held(self, island: Sequence[Stage], fragment: int) -> Iterator[tuple[Stage, dict[str, str]]]:
        """Each stage with its parameters of a fragment: their names there, and in a model folder."""
        fragments = self._plan.rhythm.fragments
        for stage in island:
            held = {name: stored_name(self._spec, name) for name, _ in stage.parameter_sizes()}
            places = {name: place_of(self._spec, kept) for name, kept in held.items()}
            yield stage, {name: held[name] for name, at in places.items() if fragment_of(at, fragments) == fragment}
