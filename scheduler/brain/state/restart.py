"""The census after a restart of the scheduler: peers come back, report their cells, and the job goes on.

Decision: docs/decisions/021.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Accumulated, Hello, ReportedCell


class RestartCensus:
    """The peers that have come back after a restart of the scheduler, and the cells that each reports.

    A reported cell was given to its peer: its Hello came here with those alone that bear the scheduler's stamp.
    """

    def __init__(self, known: Mapping[PeerId, int], now_s: float, grace_s: float) -> None:
        self.known = known  # the stage that each peer served before
        self.deadline_s, self._grace_s = now_s + grace_s, grace_s
        self.is_heard = not known  # no peer is awaited then
        self.hellos: dict[PeerId, Hello] = {}
        self.doubted: set[PeerId] = set()  # reported cells without a stamp as well
        self._awaited = set(known)
        self._cells: dict[PeerId, dict[Microbatch, ReportedCell]] = {}

    def report(self, hello: Hello, now_s: float, *, doubted: bool = False) -> None:
        """A peer attached; its earlier reports are void."""
        self.heard(now_s)
        self.hellos[hello.peer] = hello
        self._cells[hello.peer] = {cell.microbatch: cell for cell in hello.cells}
        if doubted:
            self.doubted.add(hello.peer)

    def heard(self, now_s: float) -> None:
        """A peer is here, with its stage or without. If the first comes late, others may come late, too."""
        if not self.is_heard and now_s > self.deadline_s:
            self.deadline_s = now_s + self._grace_s
        self.is_heard = True

    def accumulated(self, peer: PeerId, event: Accumulated) -> bool:
        """A replica has accumulated a microbatch of which it reported the cell; False, and nothing counts, if not."""
        reported = self._cells[peer].get(event.microbatch)
        if reported is None or event.attempt > reported.attempt:
            return False
        self._cells[peer][event.microbatch] = ReportedCell(
            event.microbatch, event.attempt, True, event.finite, event.loss
        )
        return True

    def forget(self, peer: PeerId) -> None:
        self._awaited.discard(peer)
        self.hellos.pop(peer, None)
        self._cells.pop(peer, None)
        self.doubted.discard(peer)

    def missing(self) -> list[PeerId]:
        """Peers that were there before and have not come back."""
        return sorted(self._awaited - self.hellos.keys())

    def last_step(self) -> int:
        """The newest step of which a peer holds a cell; -1 if none."""
        return max((cell.step for cells in self._cells.values() for cell in cells), default=-1)

    def cells(self, step: int) -> list[tuple[PeerId, int, ReportedCell]]:
        """The reports about a step: (peer, stage, cell), in an order that does not depend on their arrival."""
        return [
            (peer, self.hellos[peer].stage, cell)
            for peer in sorted(self._cells)
            for microbatch, cell in sorted(self._cells[peer].items())
            if microbatch.step == step
        ]
