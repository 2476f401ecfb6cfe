"""Verdicts on replicas that report one hop differently, and the evidence in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.brain.commit.digests import outvoted
from swarm.text import listed
from swarm.types import PeerId
from swarm.wire.messages import Accumulated, Checked

SHOWN = 8  # characters of a hash


@dataclass(frozen=True, slots=True)
class Place:
    """A hop: microbatch `index` of a step at a stage."""

    step: int
    stage: int
    index: int

    def __str__(self) -> str:
        return f"step {self.step}, microbatch {self.index}, stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Work:
    """Hashes of a replica's inputs (x, g) and results (y, dx, the loss) at one hop; "" where there is nothing.

    From the same inputs all replicas compute the same results, bit for bit.
    """

    x: str
    y: str
    g: str
    dx: str
    finite: bool
    loss: str  # as text: NaN is like NaN

    @classmethod
    def of(cls, event: Accumulated | Checked) -> Work:
        x, y, g, dx = event.digests
        return cls(x, y, g, dx, event.finite, repr(event.loss))

    @property
    def inputs(self) -> tuple[str, str]:
        return self.x, self.g

    @property
    def results(self) -> tuple[str, str, bool, str]:
        return self.y, self.dx, self.finite, self.loss

    def result_unlike(self, other: Work) -> tuple[str, str]:
        """The first result in which they differ, and this one's value there."""
        if self.y != other.y:
            return "output y", self.y[:SHOWN]
        if self.dx != other.dx:
            return "gradient dx", self.dx[:SHOWN]
        return ("loss", self.loss) if self.loss != other.loss else ("finiteness", str(self.finite).lower())


def odd_ones(said: Mapping[PeerId, Work]) -> tuple[PeerId, ...]:
    """Those whose results are not those of a strict majority; all of them if there is no such majority."""
    return outvoted({peer: work.results for peer, work in said.items()})


def inconstant(said: Mapping[PeerId, Work], again: Mapping[PeerId, Work]) -> PeerId | None:
    """The one replica that computes different results from the same inputs; None if there is not exactly one."""
    found = [peer for peer, work in said.items() if again[peer].results != work.results]
    same_inputs = all(again[peer].inputs == work.inputs for peer, work in said.items())
    return found[0] if same_inputs and len(found) == 1 else None


def evidence(place: Place, peer: PeerId, said: Mapping[PeerId, Work], guard: str) -> str:
    """A replica's result, and that of the others."""
    others = [other for other in sorted(said) if said[other].results != said[peer].results]
    what, mine = said[peer].result_unlike(said[others[0]])
    _, theirs = said[others[0]].result_unlike(said[peer])
    alike = [other for other in others if said[other].results == said[others[0]].results]
    return f"{what} of {place} was {mine}, {_and(alike)} got {theirs} ({guard})"


def second_evidence(place: Place, peer: PeerId, said: Mapping[PeerId, Work], again: Mapping[PeerId, Work]) -> str:
    """A replica's first and second result."""
    what, first = said[peer].result_unlike(again[peer])
    _, then = again[peer].result_unlike(said[peer])
    return f"{what} of {place} was {first}, and {then} when it computed it again"


def _and(peers: Sequence[PeerId]) -> str:
    return " and ".join(peers) if len(peers) < 3 else listed(peers)
