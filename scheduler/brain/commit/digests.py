"""Replicas that must hold the same bytes: whether their digests say so, and who is the odd one out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from scheduler.brain.outputs import Fail
from swarm.errors import ReplicaDiverged
from swarm.text import listed
from swarm.types import PeerId


def difference(digests: Mapping[PeerId, str], what: str) -> Fail | None:
    """How the job ends if the digests `of what` differ: it names those that are not like the most."""
    counts = Counter(digests.values())
    if len(counts) == 1:
        return None
    (common, most), (_, next_most), *_ = counts.most_common()
    odd = sorted(peer for peer, digest in digests.items() if digest != common or most == next_most)
    held = ", ".join(f"{peer} holds {digests[peer]}" for peer in sorted(digests))
    message = f"replicas differ in the bytes {what}: {listed(odd)} ({held})"
    return Fail(ReplicaDiverged.code, message, "run the same release, device class and thread count on all of them")
