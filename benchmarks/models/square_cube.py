"""The square-cube law of SWARM: the larger the model, the less a pipeline waits for its links.

    python -m benchmarks.models.square_cube [--output json]

A stage computes for as long as c, then its output takes x through the link and L more to arrive. With one request in
flight it computes the share c / (c + x + L) of the time. The pairs (c, x) fit the column of the paper without latency;
the other columns follow.

What a stage of a transformer computes grows faster than what it sends: L (24 b q h^2 + 4 b q^2 h) operations in a
forward, b q h numbers of e bytes, so L (24 h + 4 q) / e operations per byte.

Source: SWARM Parallelism, arXiv 2301.11913, section 3.1 and table 1 (V100, 500 Mbit/s).
"""

from __future__ import annotations

import sys

from benchmarks.models.published import Figure, exactly, main_of

LATENCIES_MS = (0, 10, 50, 100, 200)
# Milliseconds of computing and of sending, and the percentages of table 1.
STAGES = {
    "base": (3.34, 15.2, (18.0, 11.8, 4.88, 2.78, 1.53)),
    "xxlarge": (29.5, 62.3, (32.1, 28.9, 20.1, 14.9, 10.1)),
    "GPT-3": (237.0, 51.6, (82.1, 79.3, 70.3, 60.2, 48.5)),
    "xxlarge, 3 shared layers": (350.0, 41.0, (89.5, 87.2, 79.5, 71.5, 59.2)),
}
POINTS = 1.0
SEQUENCE, NUMBER_BYTES = 512, 2
OPERATIONS = {(768, 1): 10_240, (4096, 1): 50_176, (12_288, 1): 148_480, (4096, 3): 150_528}  # by width and layers


def utilisation(computes_ms: float, sends_ms: float, latency_ms: float, in_flight: int = 1) -> float:
    """The share of the time in which a stage computes."""
    return min(1.0, in_flight * computes_ms / (computes_ms + sends_ms + latency_ms))


def operations_per_byte(width: int, layers: int, sequence: int, number_bytes: int) -> float:
    """What a stage computes in a forward for each byte that it sends."""
    return layers * (24 * width + 4 * sequence) / number_bytes


def figures() -> list[Figure]:
    cells = [
        Figure(f"{name}, {latency_ms} ms, %", f"{said:.3g}", found, said - POINTS, said + POINTS, 2)
        for name, (computes_ms, sends_ms, published) in STAGES.items()
        for latency_ms, said in zip(LATENCIES_MS, published, strict=True)
        for found in (100.0 * utilisation(computes_ms, sends_ms, latency_ms),)
    ]
    law = [
        exactly(f"operations per byte, width {width}, layers {layers}", said, found, digits=0)
        for (width, layers), said in OPERATIONS.items()
        for found in (operations_per_byte(width, layers, SEQUENCE, NUMBER_BYTES),)
    ]
    return cells + law


if __name__ == "__main__":
    sys.exit(main_of(__doc__, figures))
