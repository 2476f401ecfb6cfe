"""Who a stage server is to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class Identity:
    """What this stage server tells the scheduler of itself."""

    peer: PeerId
    incarnation: int
    product: str
    address: str
    http_address: str
    device: str
    threads: int
    memory_bytes: int
    pinned_stage: int
