"""What is known after something broke: which links fail, and after a restart of the scheduler who is left.

    link fails ──▶ Links: avoided for a while
    scheduler restarts ──▶ Census: peers come back with Hello, each says what it holds; then the brain goes on

Failed delivery accuses a link, never a peer: two that cannot hear each other may both be well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scheduler.brain.commit.slices import pair_of
from scheduler.brain.state.step import CommitRow
from swarm.messages import Accumulated, Hello, ReportedCell
from swarm.types import Microbatch, PeerId

LINK_AVOIDED_S = 10.0  # then it is tried again
LINK_COST_S = 1e6  # more than any route takes: a link that fails is used only where there is no other way


class Links:
    """Pairs of peers between which a delivery failed lately."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[PeerId, PeerId], float] = {}

    def accuse(self, one: PeerId, other: PeerId, now_s: float) -> None:
        """A delivery between the two failed, in whichever direction."""
        self._until_s[pair_of(one, other)] = now_s + LINK_AVOIDED_S

    def fails(self, one: PeerId, other: PeerId) -> bool:
        """Whether the link is to be avoided, as of the last `any`."""
        return pair_of(one, other) in self._until_s

    def any(self, now_s: float) -> bool:
        """Whether some link is to be avoided now; what was accused long ago is forgotten."""
        for pair in [pair for pair, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[pair]
        return bool(self._until_s)

    def failing(self, now_s: float) -> dict[tuple[PeerId, PeerId], float]:
        """The links that are to be avoided now, and until when each."""
        return {pair: until_s for pair, until_s in self._until_s.items() if until_s > now_s}

    def touches(self, peer: PeerId) -> bool:
        """Whether some link of the peer is to be avoided, as of the last `any`."""
        return any(peer in pair for pair in self._until_s)

    def cost_s(self, one: PeerId, other: PeerId) -> float:
        """What the link adds to a route."""
        return LINK_COST_S if self.fails(one, other) else 0.0

    def forget(self, peer: PeerId) -> None:
        """The peer is gone, and its links with it."""
        for pair in [pair for pair in self._until_s if peer in pair]:
            del self._until_s[pair]


@dataclass(frozen=True, slots=True)
class Resumed:
    """A job that an earlier scheduler start left at work: `rows` are its newest commits, two at most."""

    known: Mapping[PeerId, int]  # peers at the last start, and their stages
    committed: int
    rows: tuple[CommitRow, ...]
    evaluated: Collection[int]  # versions whose evaluation is stored
    grace_s: float


class RestartCensus:
    """Who has come back after a restart of the scheduler, and what each says that it holds."""

    def __init__(self, known: Iterable[PeerId], deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.hellos: dict[PeerId, Hello] = {}
        self._known = set(known)
        self._cells: dict[PeerId, dict[Microbatch, ReportedCell]] = {}

    def report(self, hello: Hello) -> None:
        """A peer attached; what it said before is void."""
        self.hellos[hello.peer] = hello
        self._cells[hello.peer] = {cell.microbatch: cell for cell in hello.cells}

    def accumulated(self, peer: PeerId, event: Accumulated) -> None:
        """A peer that has reported went on meanwhile."""
        cell = ReportedCell(event.microbatch, event.attempt, True, event.finite, event.loss)
        self._cells[peer][event.microbatch] = cell

    def forget(self, peer: PeerId) -> None:
        """The peer is gone again."""
        self._known.discard(peer)
        self.hellos.pop(peer, None)
        self._cells.pop(peer, None)

    def missing(self) -> list[PeerId]:
        """Peers that were there before and have not come back."""
        return sorted(self._known - self.hellos.keys())

    def last_step(self) -> int:
        """The newest step of which anybody holds a cell; -1 if none."""
        return max((cell.step for cells in self._cells.values() for cell in cells), default=-1)

    def cells(self, step: int) -> list[tuple[PeerId, int, ReportedCell]]:
        """What is reported of a step: (peer, stage, cell), in an order that does not depend on who came first."""
        return [
            (peer, self.hellos[peer].stage, cell)
            for peer in sorted(self._cells)
            for microbatch, cell in sorted(self._cells[peer].items())
            if microbatch.step == step
        ]
