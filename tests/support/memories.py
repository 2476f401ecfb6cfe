"""Memories of machines without a device beside their host."""

from __future__ import annotations

from swarm.types import Memory


def memories(*sizes_bytes: int) -> tuple[Memory, ...]:
    return tuple(map(Memory, sizes_bytes))
