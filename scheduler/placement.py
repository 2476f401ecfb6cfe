"""Peers to stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.types import Decision, PeerId


@dataclass(frozen=True, slots=True)
class Candidate:
    """An idle peer; `pinned_stage` -1 = any; `speed` relative to others."""

    peer: PeerId
    pinned_stage: int = -1
    speed: float = 1.0


def place(candidates: Sequence[Candidate], stages: int, min_replicas: int) -> Decision[dict[PeerId, int]]:
    """Spread the peers evenly over the stages; no plan if some stage would have fewer than `min_replicas`."""
    raise NotImplementedError
