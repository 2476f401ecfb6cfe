"""Moshpit's averaging in groups: how far peers are from the true mean after each round, beside the published errors.

    python -m benchmarks.models.moshpit [--trials 400] [--output json]

1,024 peers stand on a grid of 32 x 32, each with a number of N(0, 1). Rows average in one round, columns in the next;
if nobody misses, all have the mean after two. A peer misses a round with probability p, and keeps its number. "Random":
groups of 32 that are drawn anew each time, where two rounds are not enough. The error is the mean square of what peers
are off; figures are means over trials.

An all-reduce of all of them needs everybody: (1 - p)^1,024.

Source: Moshpit SGD, arXiv 2103.03239, sections 3.1 and 4.1.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from benchmarks.models.published import Figure, near, parser, tell

SIDE = 32
ROUNDS = 4
# Mean errors after each round, by the share of misses on the grid; and of random groups.
GRID = {
    0.0: (3.0e-2,),
    0.001: (3.3e-2, 6e-5, 1.1e-6, 2e-9),
    0.01: (4.0e-2, 6.8e-4, 2.1e-5, 4e-7),
    0.05: (8.1e-2, 5.5e-3, 5.0e-4, 3e-5),
}
RANDOM = (3.1e-2, 9.2e-4, 2.9e-5, 9e-7)
NOTHING = 1e-30  # what rounding leaves
OFF = 0.25  # printed with one or two digits, of trials that differ by far more
ALL_REDUCE = 0.01, 3e-5


def errors(rng: np.random.Generator, misses: float, *, at_random: bool = False) -> list[float]:
    """The error after each round of one trial."""
    numbers = rng.standard_normal(SIDE * SIDE)
    mean, found = numbers.mean(), []
    for turn in range(ROUNDS):
        groups = (rng.permutation(SIDE * SIDE) if at_random else np.arange(SIDE * SIDE)).reshape(SIDE, SIDE)
        numbers = _averaged(numbers, groups.T if turn % 2 else groups, rng.random(SIDE * SIDE) >= misses)
        found.append(float(((numbers - mean) ** 2).mean()))
    return found


def _averaged(
    numbers: NDArray[np.float64], groups: NDArray[np.int64], is_here: NDArray[np.bool_]
) -> NDArray[np.float64]:
    here, inside, after = is_here[groups], numbers[groups], numbers.copy()
    means = np.where(here, inside, 0.0).sum(axis=1) / np.maximum(here.sum(axis=1), 1)
    after[groups] = np.where(here, means[:, None], inside)
    return after


def figures(trials: int) -> list[Figure]:
    found = []
    rows = [(f"misses {misses:.1%}", misses, False, said) for misses, said in GRID.items()]
    for about, misses, at_random, published in [*rows, ("random groups", 0.0, True, RANDOM)]:
        rng = np.random.default_rng(0)
        means = np.mean([errors(rng, misses, at_random=at_random) for _ in range(trials)], axis=0)
        for turn, (said, mean) in enumerate(zip(published, means, strict=False), 1):
            found.append(near(f"{about}, round {turn}", said, float(mean), OFF))
        if len(published) == 1:
            found.append(Figure(f"{about}, round 2", f"< {NOTHING:g}", float(means[1]), 0.0, NOTHING))
    misses, said = ALL_REDUCE
    return [*found, near("probability of one all-reduce, misses 1%", said, (1.0 - misses) ** (SIDE * SIDE), OFF)]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trials", type=int, default=400)
    given = options.parse_args()
    return tell(given, figures(given.trials))


if __name__ == "__main__":
    sys.exit(main())
