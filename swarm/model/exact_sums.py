"""Exact sums of gradients: addition that gives the same bits in every order.

In reproducible mode a gradient is rounded once, to a whole multiple of 2^-bits, and the multiples are added. They are
kept as float64, which holds every whole number up to 2^53: as long as no sum can pass that, float64 addition is integer
addition, associative and exact, at the price of plain float adds. So each contribution is checked once, before any of
it is added: with M x uses contributions to a sum, each may be at most floor(2^53 / (M x uses)) in magnitude.

Without reproducible mode the same functions add float32 as it comes.

Everything here is a chain of single IEEE operations on elements (scale by a power of two, round, add, divide): the
result of an element does not depend on where a slice begins, on vector width, on the number of threads or on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import islice
from operator import add
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.model.runtime import read

Wide = TypeVar("Wide", Tensor, NDArray[np.float64])

EXACT_LIMIT = 2**53
EXACT_IN_FLOAT32 = 2**24
TILE_ELEMENTS = 1 << 16  # 512 KiB of float64: a tile stays in cache between its passes (measured: 2x over 1 MiB)
# Elsewhere a tile only bounds the memory: a GPU takes longer to begin an operation than to do a small one.
TILE_ELEMENTS_ELSEWHERE = 1 << 26
NORM_BLOCK_ELEMENTS = 1 << 17
BLOCKS_ELSEWHERE = 1 << 9  # that are folded together: 512 MiB of float64


def contribution_limit(contributions: int) -> int:
    """The largest grid integer that each contribution may hold so that the sum of all stays in the exact range."""
    return EXACT_LIMIT // contributions


def in_range(gradients: Sequence[Tensor], bits: int | None, limit: int) -> Tensor:
    """Whether every element of all is finite and, on a grid, at most `limit` multiples of 2^-bits in magnitude.

    A 0-dim bool tensor on the gradients' device; the host does not wait for it here.
    """
    if _is_below_for_sure(gradients, math.inf if bits is None else math.ldexp(float(limit), -bits)):
        return torch.tensor(True)
    # A NaN anywhere makes both ends NaN. Rounding is monotone, so the largest element decides for all.
    ends = [end for gradient in gradients if gradient.numel() for end in torch.aminmax(gradient)]
    if not ends:
        return torch.tensor(True)
    largest = torch.stack(ends).abs().amax()
    if bits is None:
        return largest.isfinite()
    return (largest.to(torch.float64) * math.ldexp(1.0, bits)).round() <= limit


def _is_below_for_sure(gradients: Sequence[Tensor], limit: float) -> bool:
    """Whether sums of squares prove on a CPU that all is finite and below `limit`: faster than a look at each number.

    A sum of squares is at least as large as each of them, in whatever order it was rounded. Many numbers may be too
    large together, so False proves nothing.
    """
    if not all(
        gradient.device.type == "cpu" and gradient.dtype is torch.float32 and gradient.is_contiguous()
        for gradient in gradients
    ):
        return False
    flat = (gradient.detach().view(-1) for gradient in gradients)
    return all(float(torch.dot(gradient, gradient)) < limit * limit / 2 for gradient in flat)


def accumulate(total: Tensor, gradient: Tensor, bits: int | None) -> None:
    """Add a gradient that passed `in_range` to the flat `total`: float64 grid integers; float32 if `bits` is None."""
    flat = gradient.detach().reshape(-1)
    if bits is None:
        total.add_(flat)
        return
    scale = math.ldexp(1.0, bits)
    if total.device.type == flat.device.type == "cpu" and flat.dtype is torch.float32:
        _add_multiples(total.numpy(), flat.numpy(), scale)
        return
    tile_elements = TILE_ELEMENTS if total.device.type == "cpu" else TILE_ELEMENTS_ELSEWHERE
    for start in range(0, flat.numel(), tile_elements):
        tile = flat[start : start + tile_elements].to(torch.float64)
        total[start : start + tile_elements].add_(tile.mul_(scale).round_())


def _add_multiples(total: NDArray[np.float64], flat: NDArray[np.float32], scale: float) -> None:
    """The same on a CPU in 0.6 of the time: what passed `in_range` is scaled and rounded in float32 without loss."""
    tile = np.empty(min(TILE_ELEMENTS, flat.size), np.float32)
    for start in range(0, flat.size, TILE_ELEMENTS):
        part, sums = flat[start : start + TILE_ELEMENTS], total[start : start + TILE_ELEMENTS]
        multiples = np.rint(np.multiply(part, np.float32(scale), out=tile[: part.size]), out=tile[: part.size])
        np.add(sums, multiples, out=sums)


def sum_dtype(bits: int | None) -> torch.dtype:
    return torch.float32 if bits is None else torch.float64


def mean_of_parts(parts: Sequence[Tensor], tokens: int, bits: int | None) -> Tensor:
    """The averaged gradient as float32: the members' parts added in the given order, divided by `tokens`.

    Parts are 1-D sums of equal length, in order of peer id. Applied to slices it gives the slices of the result. With
    `bits` the order does not matter; without, all members agree because they share one order.
    """
    divisor = math.ldexp(float(tokens), bits or 0)
    if len(parts) == 1 and bits is None and tokens <= EXACT_IN_FLOAT32 and parts[0].device.type == "cpu":
        # The bits of a division in float64 that is rounded to float32. On CUDA torch multiplies by 1 / divisor instead.
        return parts[0] / divisor
    return _added(parts, torch.float32, divisor)


def sum_of_parts(parts: Sequence[Tensor]) -> Tensor:
    """The parts added in the given order, in their own dtype: grid integers exactly, float32 rounded once."""
    return _added(parts, parts[0].dtype, 1.0)


def _added(parts: Sequence[Tensor], dtype: torch.dtype, divisor: float) -> Tensor:
    found = torch.empty_like(parts[0], dtype=dtype)
    for start in range(0, found.numel(), TILE_ELEMENTS):
        first, *others = [part[start : start + TILE_ELEMENTS] for part in parts]
        total = first.to(torch.float64, copy=True)
        for part in others:
            total.add_(part)
        found[start : start + TILE_ELEMENTS] = total.div_(divisor)
    return found


def squared_norms(tensors: Iterable[Tensor]) -> list[float]:
    """Sums of squares in float64, added in fixed blocks along a fixed tree; the host waits once for all of them.

    A library's reduction depends on the number of threads; halving a block and adding its halves element by element
    does not. The tensors are taken one at a time.
    """
    sums: list[Tensor] = []  # of each tensor's blocks, 1-D
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.device.type == "mps":  # has no float64
            flat = flat.cpu()
        sums.append(_block_sums(flat))
    totals = iter(read(sums))
    # Not with sum(), which rounds otherwise from Python 3.12 on.
    return [reduce(add, islice(totals, len(blocks)), 0.0) for blocks in sums]


def _block_sums(flat: Tensor) -> Tensor:
    """The sum of squares of each block, 1-D; away from a CPU many blocks take the operations of a single block."""
    size = NORM_BLOCK_ELEMENTS
    if flat.device.type == "cpu":
        # One buffer for all: malloc kept those of single blocks apart, 8 bytes for each element in the end.
        wide = torch.empty(min(size, flat.numel()), dtype=torch.float64)
        sums = [_sum_here(flat[start : start + size], wide) for start in range(0, len(flat), size)]
        return torch.tensor(sums, dtype=torch.float64)
    whole = flat.numel() // size * size
    rows = flat[:whole].view(-1, size)
    groups = [rows[start : start + BLOCKS_ELSEWHERE] for start in range(0, len(rows), BLOCKS_ELSEWHERE)]
    if whole < flat.numel():
        groups.append(flat[whole:].view(1, -1))
    folded = [_folded_squares(group) for group in groups]
    return torch.cat(folded) if folded else flat.new_zeros(0, dtype=torch.float64)


def _folded_squares(rows: Tensor) -> Tensor:
    """The sum of squares of each row, along the tree of `_fold`: 1-D, float64."""
    wide = rows.to(torch.float64, copy=True)
    wide.mul_(wide)
    return _fold(wide.T).view(-1).clone()


def _sum_here(flat: Tensor, wide: Tensor) -> float:
    """The sum of squares on the CPU, in the memory of `wide`: numpy begins sooner, which counts in short folds."""
    held = wide[: len(flat)].copy_(flat)
    return float(_fold(held.mul_(held).numpy())[0])


def _fold(wide: Wide) -> Wide:
    """The sum along the first dimension, alone there; `wide` is used up."""
    length = len(wide)
    while length > 1:
        half = length // 2
        head = wide[:half]
        head += wide[half : 2 * half]
        if length % 2:
            first = wide[:1]
            first += wide[length - 1 : length]
        length = half
    return wide[:1]
