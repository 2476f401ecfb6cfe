"""What published step times of a pipeline over slow links say of fewer bytes, by arithmetic.

    python -m benchmarks.models.published_links

The records are those of ProtocolNanoGPT (github.com/PluralisResearch/ProtocolNanoGPT, records of September 2026): 8
stages of a layer, width 1024, 512 sequences of 1024 tokens a step, links of 200 Mbit/s and 50 ms, FineWeb to a loss of
3.276. With 1F1B a step takes 2 (M + S - 1) times what a tensor takes on its way, if computing is short beside that.
The other rows are that formula with other bytes, and the steps of the dense record: what they would have to keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.tables import show

STAGES, WIDTH, RATE_BYTES, LATENCY_S = 8, 1024, 200e6 / 8, 0.05
SEQUENCES, LENGTH = 512, 1024
DENSE_STEPS = 2925


@dataclass(frozen=True, slots=True)
class Way:
    """What crosses a cut for each token, and what was published of it; 0: nothing."""

    name: str
    bytes_per_token: float
    microbatch_sequences: int = 8
    step_s: float = 0.0
    steps: int = 0

    @property
    def formula_s(self) -> float:
        """The time of a step by the formula."""
        microbatches = SEQUENCES // self.microbatch_sequences
        travel_s = self.bytes_per_token * self.microbatch_sequences * LENGTH / RATE_BYTES + LATENCY_S
        return 2 * (microbatches + STAGES - 1) * travel_s


INT8 = 1.02 * WIDTH
WAYS = (
    Way("dense bfloat16 (record)", 2048, step_s=100.475, steps=2925),
    Way("subspace of 160 (record)", 322, 16, 19.889, 9125),
    Way("int8", INT8),
    Way("int8, factor 4", INT8 / 4),
    Way("int8, factor 8", INT8 / 8),
)


def rows() -> list[list[str]]:
    """Each way: published and computed seconds of a step, and how many times the steps it may take to win."""
    dense_s = WAYS[0].step_s * DENSE_STEPS
    return [
        [
            way.name,
            f"{way.bytes_per_token:.0f}",
            f"{way.step_s:g}" if way.step_s else "",
            f"{way.formula_s:.1f}",
            f"{way.steps / DENSE_STEPS:.2f}" if way.steps else "",
            f"{dense_s / DENSE_STEPS / (way.step_s or way.formula_s):.2f}",
        ]
        for way in WAYS
    ]


if __name__ == "__main__":
    header = ("way", "bytes per token", "published s", "formula s", "times the steps", "as many as it may take")
    show(header, rows())
