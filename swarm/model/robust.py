"""A mean that a minority of false parts cannot spoil: centred clipping. It compares sizes, so only for ordinary mode.

    part of r, a sum over n_r microbatches ──/ n_r──▶ v_r         m = the median of all v_r, element by element
    radius of r = RADIUS x the median of sqrt(n_i) |v_i - m| / sqrt(n_r)
    c = m;  some times: c += the mean over r of (v_r - c), each cut to its radius
    result: c + the sum over r of n_r / n x (v_r - c), each cut to its radius

A mean of few microbatches strays further from the others than one of many, so it has a larger radius. The centre c
counts heads, because a liar that seems fast gets many microbatches. The last line counts microbatches: if nothing is
cut there, it is the plain mean, and then the result is the plain mean, to the bit. One false part moves the result by
no more than a few radii, however large it is.

All v_r - c lie in the span of the v_r - m, so the lengths follow from the inner products of those: the parts are read
once, and once more if something is cut. Inner products are added in fixed blocks along a fixed tree, as norms are, so
another member gets the same bits from the same parts.

Source: Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust Optimization" (arXiv 2012.10333),
section 4. The median to start from, radii from what is there, and the last line are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from swarm.model.exact_sums import mean_of_parts

RADIUS = 3.0
ITERATIONS = 20
BLOCK_ELEMENTS = 1 << 15


@dataclass(frozen=True, slots=True)
class Share:
    """The content of a part: the sum of `microbatches` of a stage. A tied weight has parts of two stages."""

    stage: int
    microbatches: int


def clipped_mean(parts: Sequence[Tensor], shares: Sequence[Share], tokens: int) -> Tensor:
    """The averaged gradient as float32; parts of different stages are sums of different things, and clipped apart.

    A part without microbatches counts for nothing, one that is not finite for as much as the centre.
    """
    groups = []
    for stage in sorted({share.stage for share in shares}):
        held = [(part, share.microbatches) for part, share in zip(parts, shares, strict=True) if share.stage == stage]
        groups.append(_Group.of([part for part, count in held if count], [count for _, count in held if count]))
    if not any(group.is_clipped for group in groups):
        told = [part for part, share in zip(parts, shares, strict=True) if share.microbatches]
        return mean_of_parts(told or parts, tokens, None)
    mean = torch.empty(parts[0].numel())
    for at in _blocks(parts[0].numel()):
        mean[at] = sum(group.total(at) for group in groups if group.parts) / float(tokens)
    return mean


@dataclass(frozen=True, slots=True)
class _Group:
    """The parts of one stage's replicas, and how much of each is in the result."""

    parts: list[Tensor]
    counts: list[int]
    microbatches: int  # also those of parts that are left out
    shares: list[float]  # of each v_r; what is missing to 1 is the median's
    is_clipped: bool

    @classmethod
    def of(cls, parts: Sequence[Tensor], counts: Sequence[int]) -> _Group:
        total = sum(counts)
        finite = [bool(part.isfinite().all()) for part in parts]
        if 2 * sum(finite) <= len(parts):  # no majority: the mean is not finite, and the step is skipped
            return cls(list(parts), list(counts), total, [count / total for count in counts], is_clipped=False)
        kept = [part for part, is_finite in zip(parts, finite, strict=True) if is_finite]
        of = [count for count, is_finite in zip(counts, finite, strict=True) if is_finite]
        shares, is_clipped = [count / total for count in of], False
        if len(kept) > 2:  # of two, nobody can say which one strays
            shares, is_clipped = _shares(_products(kept, of), of, shares)
        return cls(kept, of, total, shares, is_clipped or len(kept) < len(parts))

    def total(self, at: slice) -> Tensor:
        """The sum of the microbatches' gradients as it should be, float64."""
        means = _means(self.parts, self.counts, at)
        middle = _middle(means) * (1.0 - math.fsum(self.shares))
        for share, mean in zip(self.shares, means, strict=True):
            middle += mean * share
        return middle * self.microbatches


def _shares(products: list[list[float]], counts: list[int], weights: list[float]) -> tuple[list[float], bool]:
    """How much of each v_r - m is in the result, and whether anything was cut in the last line."""
    lengths = [math.sqrt(products[r][r] * count) for r, count in enumerate(counts)]
    radii = [RADIUS * median(lengths) / math.sqrt(count) for count in counts]
    centre = [0.0] * len(counts)
    for _ in range(ITERATIONS):
        centre = _moved(centre, _cuts(products, centre, radii), [1.0 / len(counts)] * len(counts))
    cuts = _cuts(products, centre, radii)
    return _moved(centre, cuts, weights), min(cuts) < 1.0


def _cuts(products: list[list[float]], centre: list[float], radii: list[float]) -> list[float]:
    """By what each v_r - c is multiplied, so that it is no longer than its radius."""
    with_centre = [math.fsum(one * share for one, share in zip(row, centre, strict=True)) for row in products]
    own = math.fsum(one * share for one, share in zip(with_centre, centre, strict=True))
    squares = [products[r][r] - 2.0 * with_centre[r] + own for r in range(len(radii))]
    return [
        1.0 if square <= radius * radius else radius / math.sqrt(square)
        for square, radius in zip(squares, radii, strict=True)
    ]


def _moved(centre: list[float], cuts: list[float], weights: list[float]) -> list[float]:
    """The centre plus the weighted sum of the cut v_r - c."""
    pulls = [cut * weight for cut, weight in zip(cuts, weights, strict=True)]
    rest = 1.0 - math.fsum(pulls)
    return [share * rest + pull for share, pull in zip(centre, pulls, strict=True)]


def _products(parts: Sequence[Tensor], counts: Sequence[int]) -> list[list[float]]:
    """The inner products of all v_r - m."""
    count = len(parts)
    total = torch.zeros(count, count, dtype=torch.float64)
    for at in _blocks(parts[0].numel()):
        away = _means(parts, counts, at)
        away -= _middle(away)
        for r in range(count):
            total[r, r:] += _folded(away[r:] * away[r])
    upper = total.tolist()
    return [[upper[min(r, s)][max(r, s)] for s in range(count)] for r in range(count)]


def _means(parts: Sequence[Tensor], counts: Sequence[int], at: slice) -> Tensor:
    """A block of all v_r, one per row."""
    return torch.stack([part[at].to(torch.float64) / float(count) for part, count in zip(parts, counts, strict=True)])


def _middle(rows: Tensor) -> Tensor:
    """The median of each column; of an even number the mean of the two in the middle.

    Sorted by comparing neighbours, whole rows at a time: for few rows many times as fast as torch's sort.
    """
    ordered: list[Tensor] = list(rows.unbind())
    for turn in range(len(ordered)):
        for at in range(turn % 2, len(ordered) - 1, 2):
            low, high = ordered[at : at + 2]
            ordered[at : at + 2] = torch.minimum(low, high), torch.maximum(low, high)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low is high else (low + high) / 2.0


def _folded(rows: Tensor) -> Tensor:
    """The sum of each row, halves upon halves."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        folded = rows[:, :half] + rows[:, half : 2 * half]
        if rows.shape[1] % 2:
            folded[:, 0] += rows[:, -1]
        rows = folded
    return rows[:, 0]


def _blocks(elements: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_ELEMENTS) for start in range(0, elements, BLOCK_ELEMENTS))
