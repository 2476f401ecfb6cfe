"""Islands that exchange when each is ready, without waiting for others (`averaging.mode = "async_dn"`), in one process.

    island 0   lease ──▶| version 1, next lease ──▶| version 3, ...        an island that ends its lease proposes alone,
    island 1   lease ────────▶| version 2 ────────▶| ...                   takes over all outer versions made since, and
                                                                           trains on from the newest

Which island comes first is a matter of speed, so islands step on a virtual clock with given speeds, and the job file
with these speeds defines the bits. A fast island gets a longer lease, as fits its speed, so all come at about the same
time; islands that come at one moment go on from the same weights.

Source: Liu et al., asynchronous local SGD (arXiv 2401.09135): delayed Nesterov and dynamic local updates.

Price: no checkpoints, as islands hold the same weights at the end only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.job.course import InnerStep
from swarm.job.outer import REPLACE, OuterUpdate, delayed_nesterov
from swarm.job.spec import JobSpec
from swarm.model.families import stored_name
from swarm.model.islands.outer import Merge
from swarm.model.stage import Stage


@dataclass(frozen=True, slots=True)
class Lease:
    """The portions that an island trains next."""

    first_portion: int
    steps: int
    rate_step: int  # of its first step

    def at(self, step: int) -> InnerStep:
        return InnerStep(self.first_portion + step, self.rate_step + step)


class Leases:
    """Gives out the portions of a job, lowest first."""

    def __init__(self, portions: int, every_steps: int, speeds: Sequence[float]) -> None:
        """`every_steps` is the lease of the fastest island; `speeds` has the inner steps per second of each."""
        self._portions = portions
        self._given = 0
        self._longest = [max(1, int(every_steps * speed / max(speeds))) for speed in speeds]

    def grant(self, asking: Sequence[int]) -> dict[int, Lease]:
        """The next leases of islands that ask at one moment; none for those for which nothing is left.

        What is left in the end is divided as their leases are.
        """
        wanted = {island: self._longest[island] for island in sorted(asking)}
        left = self._portions - self._given
        if (total := sum(wanted.values())) > left:
            ends = [left * sum(list(wanted.values())[: at + 1]) // total for at in range(len(wanted))]
            starts = [0, *ends]
            wanted = {island: end - start for island, start, end in zip(wanted, starts, ends, strict=False)}
        rate_step = self._given // len(self._longest)
        granted = {}
        for island, steps in wanted.items():
            if steps:
                granted[island] = Lease(self._given, steps, rate_step)
                self._given += steps
        return granted


@dataclass(frozen=True, slots=True)
class Turn:
    """An inner step that ends at `time_s` of the virtual clock."""

    time_s: float
    island: int
    inner: InnerStep
    ends_lease: bool


class VirtualClock:
    """Whose inner step ends next, if each island makes `speeds` of them in a second, and together they train `portions`
    in the given leases."""

    def __init__(self, portions: int, every_steps: int, speeds: Sequence[float]) -> None:
        self._leases = Leases(portions, every_steps, speeds)
        self._speeds = speeds

    def moments(self) -> Iterator[list[Turn]]:
        """All inner steps of a job by island; steps that end at one moment are together."""
        waiting: list[tuple[float, int, int]] = []  # when it ends, whose, which of its lease
        held: dict[int, tuple[float, Lease]] = {}

        def begin(asking: Sequence[int], time_s: float) -> None:
            for island, lease in self._leases.grant(asking).items():
                held[island] = time_s, lease
                heapq.heappush(waiting, (time_s + 1 / self._speeds[island], island, 0))

        begin(range(len(self._speeds)), 0.0)
        while waiting:
            time_s = waiting[0][0]
            turns = []
            while waiting and waiting[0][0] == time_s:
                _, island, step = heapq.heappop(waiting)
                begun_s, lease = held[island]
                turns.append(Turn(time_s, island, lease.at(step), step + 1 == lease.steps))
                if step + 1 < lease.steps:
                    heapq.heappush(waiting, (begun_s + (step + 2) / self._speeds[island], island, step + 1))
            yield turns
            begin([turn.island for turn in turns if turn.ends_lease], time_s)


@dataclass(frozen=True, slots=True)
class _Version:
    """An outer version: the proposal that made it, by name in a model folder, and its numbers."""

    delta: Mapping[str, Tensor]
    update: OuterUpdate


class AsyncOuterSteps:
    """The outer versions of a resolved job; each stage keeps the outer state of its parameters, as old as its island's
    last exchange.

    `islands` has the stages of each island, which begin with the same weights; they are changed in place.
    """

    def __init__(self, spec: JobSpec, islands: Sequence[Sequence[Stage]]) -> None:
        self._spec = spec
        self._islands = islands
        self._versions: list[_Version] = []
        self._held = [0] * len(islands)  # the outer version that each island holds

    def exchange(self, islands: Sequence[int]) -> list[int]:
        """These islands have ended their leases: each proposes, in turn, and then takes over the newest version.

        Gives those whose proposal was not finite: it is dropped.
        """
        dropped = []
        for island in islands:
            if not self._propose(island):
                dropped.append(island)
        for island in islands:
            self._take_over(island)
        return dropped

    def close(self) -> None:
        """All islands take over the newest version, which is the model."""
        for island in range(len(self._islands)):
            self._take_over(island)

    def _propose(self, island: int) -> bool:
        outer = self._spec.outer
        assert outer.learning_rate != "auto", "resolve the spec first"
        assert outer.momentum != "auto", "resolve the spec first"
        assert outer.buffer != "auto", "resolve the spec first"
        delta: dict[str, Tensor] = {}  # a tied weight once: both of its stages propose the same
        for stage in self._islands[island]:
            names = self._names(stage)
            delta |= {names[name]: value for name, value in stage.propose(names).items()}
        if not all(bool(one.isfinite().all()) for one in delta.values()):
            return False
        update = delayed_nesterov(len(self._versions), outer.learning_rate, outer.momentum, outer.buffer)
        self._versions.append(_Version(delta, update))
        return True

    def _take_over(self, island: int) -> None:
        """Make the outer versions that the island lacks, and let its weights be the newest; pending ones are gone."""
        missed = self._versions[self._held[island] :]
        for stage in self._islands[island]:
            names = self._names(stage)
            for one in missed:
                deltas = {name: one.delta[kept] for name, kept in names.items()}
                stage.merge(stage.version, Merge(deltas, one.update, REPLACE))
            if not missed:  # its own proposal was dropped
                stage.merge(stage.version, Merge(dict.fromkeys(names, torch.zeros(0)), None, REPLACE))
        self._held[island] = len(self._versions)
        oldest = min(self._held)
        self._versions[:oldest] = [_SPENT] * oldest

    def _names(self, stage: Stage) -> dict[str, str]:
        """The parameters of a stage: their names there, and in a model folder."""
        return {name: stored_name(self._spec, name) for name, _ in stage.parameter_sizes()}


_SPENT = _Version({}, OuterUpdate(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))  # all islands have it
