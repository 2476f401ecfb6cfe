"""How fast each replica computes, measured from its events.

The pace of a replica is an exponential mean (weight 0.3 for the newest sample) of the device seconds that a microbatch
took, forward and backward together. A replica that was never measured is assumed to be as fast as the fastest of its
stage: it is tried soon, and its outstanding work keeps it from being flooded. One that was slow and has no work is
tried again at times, and its answer counts more than what was known.

Source: shared least expected completion, algorithms in SWARM (arXiv 2301.11913) appendix C. There each trainer measures
seconds; that the stage server reports them is ours. Decision: docs/decisions/120.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.types import PeerId

NEWEST = 0.3
UNKNOWN_S = 0.1
RELAXED = 1.1  # of the best pace of the stage: as good as equal
TRIED_AFTER = 30.0  # times what a replica took: all others may wait that long for a trial


class Pace:
    """Seconds per microbatch of each replica."""

    def __init__(self) -> None:
        self._mean_s: dict[PeerId, float] = {}
        self._took_s: dict[PeerId, float] = {}  # the newest sample
        self._relaxed: set[PeerId] = set()  # since their newest sample
        self._idle_since_s: dict[PeerId, float] = {}  # of slow replicas

    def observe(self, peer: PeerId, seconds: float) -> None:
        """Take in a sample; anything but a positive, finite number of seconds is ignored."""
        if not 0.0 < seconds < float("inf"):
            return
        if peer in self._relaxed:
            self._relaxed.discard(peer)
            del self._mean_s[peer]
        self._took_s[peer] = seconds
        self.waited(peer, seconds)

    def waited(self, peer: PeerId, seconds: float) -> None:
        """The replica has had a computation for so long and is not done, whatever keeps it."""
        if not 0.0 < seconds < float("inf"):
            return
        mean_s = self._mean_s.get(peer)
        self._mean_s[peer] = seconds if mean_s is None else NEWEST * seconds + (1.0 - NEWEST) * mean_s

    def relax(self, idle: Iterable[PeerId], stage: Sequence[PeerId], now_s: float) -> list[PeerId]:
        """Assume that slow replicas without work became faster: halve their distance to the best of their stage.

        Otherwise a replica that was slow for a while would never be tried again. One that did compute slowly, and not
        only kept others waiting, must have been idle for long, because a trial makes others wait. It is then believed
        to be as good as the best, so that it is tried. Gives those whose pace changed.
        """
        best_s = min((self._mean_s[peer] for peer in stage if peer in self._mean_s), default=0.0)
        best_took_s = min((self._took_s[peer] for peer in stage if peer in self._took_s), default=0.0)
        slow = {peer for peer in idle if self._mean_s.get(peer, 0.0) > RELAXED * best_s}
        for peer in self._idle_since_s.keys() & set(stage) - slow:
            del self._idle_since_s[peer]
        changed = []
        for peer in sorted(slow):
            took_s = self._took_s.get(peer, 0.0)
            if took_s > RELAXED * best_took_s:
                if now_s - self._idle_since_s.setdefault(peer, now_s) < TRIED_AFTER * took_s:
                    continue
                del self._idle_since_s[peer]
                self._relaxed.add(peer)
                self._mean_s[peer] = best_s
            else:
                self._mean_s[peer] = (self._mean_s[peer] + best_s) / 2.0
            changed.append(peer)
        return changed

    @property
    def is_relaxing(self) -> bool:
        """Whether a slow replica is idle and will be believed to be faster in time."""
        return bool(self._idle_since_s)

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
        for kept in (self._mean_s, self._took_s, self._idle_since_s):
            kept.pop(peer, None)
        self._relaxed.discard(peer)
