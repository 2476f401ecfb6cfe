"""DeDLOC's roles: who adds up how much of the gradients, beside the published figures.

    python -m benchmarks.models.dedloc [--progress] [--output json]

Peers upload and download at given rates. Those that compute have gradients of P bits and want the sums; the others, the
auxiliaries, only add up. A peer that adds up a share f gets f P from each that computes, and sends the sum of it to
each that computes.

    paper   a linear program over pairs: how fast each sends gradients and sums to each other, so that the peer that
            gets sums slowest gets them as fast as can be (solved by HiGHS)
    shares  one number for each peer: one that computes moves (1 + (c - 2) f) P each way, where c compute, an auxiliary
            c f P. The least T in which all shares can be given is found by halving.

Both are compared with equal shares, 2 P (n - 1) / n / the slowest rate. The row that skips peers leaves out the four
slowest, whose samples come with the next round.

--progress: 100 random fleets gather a batch of B as DeDLOC does. Each peer reports its samples and its rate after each
microbatch, and the batch is there when the reports, drawn on by their rates, reach B. Then each peer ends its own
microbatch. What was gathered is 1.0 to 1.1 of B.

Source: Distributed Deep Learning in Open Collaborations, arXiv 2106.10207, section 3; hivemind's load balancing and
progress tracker (github.com/learning-at-home/hivemind).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from benchmarks.models.published import Figure, exactly, parser, tell
from scheduler.brain.commit.slices import apportion, shares_of

HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Link:
    """A peer's line in Gbit/s; an auxiliary does not compute."""

    up: float
    down: float
    computes: bool = True


def links(*groups: tuple[int, float, float, bool]) -> list[Link]:
    return [Link(up, down, computes) for many, up, down, computes in groups for _ in range(many)]


SLOWEST = 4
LAST = links((4, 0.2, 0.2, True), (8, 0.1, 0.1, True), (4, 0.05, 0.05, True), (4, 0.5, 0.5, False))
# Peers, P in Gbit, and the ratio of equal shares to the best ones.
ROWS: dict[str, tuple[list[Link], float, float]] = {
    "8 at 1 Gbit/s": (links((8, 1.0, 1.0, True)), 0.576, 1.00),
    "7 at 1, 1 at 10": (links((7, 1.0, 1.0, True), (1, 10.0, 10.0, True)), 0.576, 1.75),
    "6 at 0.2, 2 auxiliaries at 2.5": (links((6, 0.2, 0.2, True), (2, 2.5, 2.5, False)), 0.576, 1.75),
    "8 at 0.1 up and 0.5 down, 1 auxiliary": (links((8, 0.1, 0.5, True), (1, 2.5, 2.5, False)), 0.576, 1.78),
    "4 at 0.2, 8 at 0.1, 4 at 0.05, 4 auxiliaries": (LAST, 0.288, 1.90),
}
SKIPPED = "the same, the four slowest skipped", 3.80
# hivemind: rates and shares; numbers, fractions and parts.
SHARES = {(1, 1, 2, 4): (0, 0, 1 / 2, 1 / 2), (1, 2, 3, 4): (0, 1 / 3, 1 / 3, 1 / 3)}
PARTS = {(100, (0.5, 0.333, 0.167)): (50, 33, 17), (7, (0.4, 0.35, 0.25)): (3, 2, 2)}


def equal_s(peers: Sequence[Link], gbit: float) -> float:
    """Seconds of a round with equal shares."""
    return 2.0 * gbit * (len(peers) - 1) / len(peers) / min(min(peer.up, peer.down) for peer in peers)


def paper_s(peers: Sequence[Link], gbit: float) -> float:
    """Seconds of a round by the linear program over pairs."""
    count = len(peers)
    computing = [number for number, peer in enumerate(peers) if peer.computes]
    gradient, total = np.arange(count * count).reshape(count, count), count * count
    sums, pace = gradient + total, 2 * total  # variables: gradients and sums from i to j, and what all get
    rows: list[dict[int, float]] = []
    bounds: list[float] = []

    def at_most(limit: float, terms: dict[int, float]) -> None:
        rows.append(terms)
        bounds.append(limit)

    for one, peer in enumerate(peers):
        others = [other for other in range(count) if other != one]
        at_most(peer.up, {int(place[one, other]): 1.0 for place in (gradient, sums) for other in others})
        at_most(peer.down, {int(place[other, one]): 1.0 for place in (gradient, sums) for other in others})
    for giver in range(count):
        for to in computing:
            for source in computing:
                if source != giver:  # a sum is of the gradients of all
                    at_most(0.0, {int(sums[giver, to]): 1.0, int(gradient[source, giver]): -1.0})
    for each in computing:
        at_most(0.0, {pace: 1.0} | {int(sums[other, each]): -1.0 for other in range(count)})
    matrix = lil_matrix((len(rows), pace + 1))
    for row, terms in enumerate(rows):
        for variable, factor in terms.items():
            matrix[row, variable] = factor
    free = [(0.0, None)] * (pace + 1)
    for one, other in permutations(range(count), 2):
        if not peers[one].computes:
            free[gradient[one, other]] = (0.0, 0.0)
    solved = linprog(-np.eye(pace + 1)[pace], A_ub=matrix.tocsr(), b_ub=bounds, bounds=free, method="highs")
    return gbit / float(solved.x[pace])


def shares_s(peers: Sequence[Link], gbit: float) -> float:
    """Seconds of a round by one share for each peer."""
    computing = sum(peer.computes for peer in peers)

    def room(seconds: float) -> float:
        """The sum of the shares that can be given in this time."""
        rates = [(min(peer.up, peer.down) * seconds / gbit, peer.computes) for peer in peers]
        if any(rate < 1.0 for rate, computes in rates if computes):
            return 0.0
        return sum(
            min(1.0, (rate - 1.0) / (computing - 2) if computes else rate / computing) for rate, computes in rates
        )

    low, high = 0.0, equal_s(peers, gbit) * 2.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if room(middle) >= 1.0 else (middle, high)
    return high


def gathered(peers: int, target: int, seed: int) -> float:
    """The samples of a step as a share of the target, in a random fleet: unequal, with noise, and unequal reports."""
    rng = Random(seed)
    sizes = [rng.choice((1, 2, 4, 8)) for _ in range(peers)]
    seconds = [size * 4.0 ** rng.random() for size in sizes]  # of a microbatch
    samples, reported = [0] * peers, [(0.0, 0.0)] * peers  # when, and the mean rate
    ends = sorted((seconds[peer] * rng.random(), peer) for peer in range(peers))
    while True:
        now_s, peer = ends.pop(0)
        took_s = seconds[peer] * rng.lognormvariate(0.0, 0.1)
        samples[peer] += sizes[peer]
        rate = sizes[peer] / took_s
        reported[peer] = now_s, rate if not reported[peer][1] else 0.1 * rate + 0.9 * reported[peer][1]
        estimate = sum(samples) + sum((now_s - at_s) * rate for at_s, rate in reported)
        if estimate >= target:  # the others end what they are computing
            return (sum(samples) + sum(sizes[other] for _, other in ends)) / target
        ends.append((now_s + took_s, peer))
        ends.sort()


def figures(*, progress: bool) -> list[Figure]:
    found = []
    for about, (peers, gbit, ratio) in ROWS.items():
        for form, seconds in (("paper", paper_s), ("shares", shares_s)):
            found.append(exactly(f"{about}: {form}", ratio, equal_s(peers, gbit) / seconds(peers, gbit), 2))
    fast = sorted(LAST, key=lambda peer: peer.up)[SLOWEST:]
    gbit = ROWS["4 at 0.2, 8 at 0.1, 4 at 0.05, 4 auxiliaries"][1]
    for form, seconds in (("paper", paper_s), ("shares", shares_s)):
        found.append(exactly(f"{SKIPPED[0]}: {form}", SKIPPED[1], equal_s(LAST, gbit) / seconds(fast, gbit), 2))
    for rates, published in SHARES.items():
        off = max(abs(one - said) for one, said in zip(shares_of(rates), published, strict=True))
        found.append(exactly(f"hivemind's shares of {rates}, how far off", 0.0, off))
    for (numbers, fractions), parts in PARTS.items():
        off = max(abs(one - said) for one, said in zip(apportion(numbers, fractions), parts, strict=True))
        found.append(exactly(f"hivemind's parts of {numbers}, how far off", 0, off, 0))
    if progress:
        shares = [gathered(4 + seed % 37, 4096, seed) for seed in range(100)]
        found.append(Figure("samples / target, least of 100 fleets", "1.0", min(shares), 1.0, 1.1))
        found.append(Figure("samples / target, most of 100 fleets", "1.1", max(shares), 1.0, 1.1))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--progress", action="store_true", help="gather batches too")
    given = options.parse_args()
    return tell(given, figures(progress=given.progress))


if __name__ == "__main__":
    sys.exit(main())
