"""What a round of averaging takes in a play."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from scheduler.brain.commit.slices import seconds_of
from scheduler.planning.pool import PeerPool, PoolPeer


def round_s(pool: PeerPool, peers: Sequence[PoolPeer], shares: Sequence[float], size_bits: float) -> float:
    """The slowest line of a member, or the slowest way between two, and three of the ways.

    Parts go one way, means back, and a member is done when it has the receipts of its means.
    """
    if len(peers) == 1:
        return 0.0
    seconds = seconds_of(shares, [min(peer.up_bits_per_s, peer.down_bits_per_s) for peer in peers]) * size_bits
    delay_s, ways = 0.0, defaultdict[tuple[str, str], float](float)
    for peer, share in zip(peers, shares, strict=True):
        for other, others in zip(peers, shares, strict=True):
            if peer is other:
                continue
            link, ends = pool.link(peer, other), (pool.end_of(peer), pool.end_of(other))
            ways[ends if ends[0] != ends[1] else (peer.name, other.name)] += (share + others) / link.bits_per_s
            delay_s = max(delay_s, link.delay_s)
    return max(seconds, max(ways.values()) * size_bits) + 3.0 * delay_s
