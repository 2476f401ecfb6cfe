"""How fast each replica computes, measured from its events.

The pace of a replica is an exponential mean (weight 0.3 for the newest sample) of the device seconds that a microbatch
took, forward and backward together. A replica that was never measured is assumed to be as fast as the fastest of its
stage: it is tried soon, and its outstanding work keeps it from being flooded.

Source: shared least expected completion, algorithms in SWARM (arXiv 2301.11913) appendix C. There each trainer measures
seconds; that the stage server reports them is ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.types import PeerId

NEWEST = 0.3
UNKNOWN_S = 0.1
RELAXED = 1.1  # of the best pace of the stage: as good as equal


class Pace:
    """Seconds per microbatch of each replica."""

    def __init__(self) -> None:
        self._mean_s: dict[PeerId, float] = {}

    def observe(self, peer: PeerId, seconds: float) -> None:
        """Take in a sample; anything but a positive, finite number of seconds is ignored."""
        if not 0.0 < seconds < float("inf"):
            return
        mean_s = self._mean_s.get(peer)
        self._mean_s[peer] = seconds if mean_s is None else NEWEST * seconds + (1.0 - NEWEST) * mean_s

    def relax(self, idle: Iterable[PeerId], stage: Iterable[PeerId]) -> list[PeerId]:
        """Assume that replicas without work became faster: halve their distance to the best of their stage.

        Otherwise a replica that was slow for a while would never be tried again. Gives those whose pace changed.
        """
        best_s = min((self._mean_s[peer] for peer in stage if peer in self._mean_s), default=0.0)
        changed = [peer for peer in idle if self._mean_s.get(peer, 0.0) > RELAXED * best_s]
        for peer in changed:
            self._mean_s[peer] = (self._mean_s[peer] + best_s) / 2.0
        return changed

    def of(self, peer: PeerId, stage: Iterable[PeerId] = ()) -> float:
        """Seconds per microbatch of the peer; if unknown, the best of `stage`; if that is unknown too, 0.1."""
        known = self._mean_s.get(peer)
        if known is not None:
            return known
        return min((self._mean_s[other] for other in stage if other in self._mean_s), default=UNKNOWN_S)

    def is_known(self, peer: PeerId) -> bool:
        return peer in self._mean_s

    def forget(self, peer: PeerId) -> None:
        """The peer left; a later incarnation is measured anew."""
        self._mean_s.pop(peer, None)
