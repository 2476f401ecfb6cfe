"""Peers that a job has expelled for what they said or could not do: they are not given to it again.

A peer that is started anew (another incarnation) gets another chance, and other jobs may use it meanwhile.
"""

from __future__ import annotations

from swarm.types import PeerId

PEERS_MAX = 256  # of one job; of more, the oldest are forgotten


class UnfitPeers:
    """Those of one job."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[PeerId, int], str] = {}  # by peer and incarnation, oldest first

    def add(self, peer: PeerId, incarnation: int, reason: str) -> None:
        """The job has expelled this incarnation of the peer."""
        self._reasons[peer, incarnation] = reason
        while len(self._reasons) > PEERS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def why(self, peer: PeerId, incarnation: int) -> str:
        """Why the peer is not given to the job; empty if it may be."""
        reason = self._reasons.get((peer, incarnation))
        return f"the job expelled it ({reason}); start it anew" if reason is not None else ""
