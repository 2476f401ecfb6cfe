"""Pools of machines that are planned for, and a job to plan; nothing here loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from scheduler.planning.pool import PeerPool, PoolLink, PoolPeer
from swarm.job.spec import JobSpec, parse_job

GIB = 1 << 30
CITIES = ("ashburn", "dublin", "frankfurt", "london", "oregon", "paris", "seoul", "tokyo")


def planned_job(layers: int = 12, **sections: dict[str, Any]) -> JobSpec:
    """A model of width 768 and 259 tokens; what the job file leaves open is open."""
    config = {"hidden_size": 768, "num_hidden_layers": layers, "num_attention_heads": 12, "vocab_size": 8192}
    values: dict[str, dict[str, Any]] = {
        "model": {"config": config},
        "data": {"source": "x", "sequence_length": 512},
        "training": {"global_batch_sequences": 128},
    }
    more = {name: values.get(name, {}) | section for name, section in sections.items()}
    return parse_job({"name": "t"} | values | more)


def machine(name: str, site: str = "", *, speed: float = 2e12, line: float = 1e9, memory: int = 24 * GIB) -> PoolPeer:
    return PoolPeer(name, "cuda", memory, site, speed, line, line, 0.35)


def equals(count: int = 8) -> PeerPool:
    """Machines that are alike, at one site."""
    return PeerPool(tuple(machine(f"p{number}") for number in range(count)))


def cities(each: int = 8) -> PeerPool:
    """Eight sites with machines of three speeds, and links that differ."""
    rng = Random(7)
    peers = tuple(
        machine(f"{city}-{number}", city, speed=1e12 * rng.choice((1, 2, 4))) for city in CITIES
        for number in range(each)
    )  # fmt: skip
    links = {
        (a, b): PoolLink(0.001, 1e10) if a == b else PoolLink(0.01 * rng.randint(1, 15), 1e8 * rng.randint(2, 10))
        for a in CITIES
        for b in CITIES
    }
    return PeerPool(peers, links)


def two_sites() -> PeerPool:
    """Four fast machines with good lines, and four with uplinks of 20 Mbit/s."""
    good = [machine(f"oregon-{number}", "oregon") for number in range(4)]
    slow = [machine(f"paris-{number}", "paris", line=2e7) for number in range(4)]
    return PeerPool(
        (*good, *slow), {("oregon", "paris"): PoolLink(0.07, 2e8), ("paris", "oregon"): PoolLink(0.07, 2e7)}
    )


def drawn(rng: Random, count: int) -> PeerPool:
    """Machines at two sites, with any speeds, lines, memories and links."""
    peers = tuple(
        machine(
            f"p{number}", rng.choice(("a", "b")), speed=rng.uniform(0.5, 4.0) * 1e12,
            line=10 ** rng.uniform(7, 10), memory=rng.choice((8, 16, 48)) * GIB,
        ) for number in range(count)
    )  # fmt: skip
    ways: Sequence[tuple[str, str]] = (("a", "a"), ("a", "b"), ("b", "a"), ("b", "b"))
    return PeerPool(peers, {way: PoolLink(rng.uniform(0.001, 0.2), 10 ** rng.uniform(7, 10)) for way in ways})
