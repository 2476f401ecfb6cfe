"""Digests of tensors, made where they lie: whole numbers modulo 2^64, so every device and every order gives the same.

    row r of 16384 elements    h_r = sum of (bits of element k) * c_k        c_k odd, 2k + 1 in its low bits
    tensor                     sum of mix(h_r) * C_r                         C_r odd; mix: one to one
    tensors                    xxh3-128 over name, dtype, shape and digest of each, in order

An element that changes in any bit changes h_r, because c_k is odd; two that are swapped within a row do too, because
their bits differ by less than 2^32 and c_k - c_l is not divisible by 2^32. All other differences are missed with a
chance of about 2^-64. This finds faults, not forgeries.

On a CPU numpy adds up the products, row by row: torch would write each of them down first, which takes twice as long,
and of several rows at once less stays in cache.

Not chosen: xxh3 on a CPU and an emulation of it on GPUs, because that passes over memory more often there; two elements
as one number of 64 bits, because it misses two flipped signs; products of float64 matrices, because they take 2.5 times
as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from swarm.model.runtime import beside, read, to_device

Integers: TypeAlias = NDArray[np.int64]
Numbers = TypeVar("Numbers", Tensor, Integers)

ROW = 1 << 14
ROWS_ELSEWHERE = 1 << 10  # that are worked on at once, enough to fill a GPU
_FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd: 2^64 over the golden ratio, and SplitMix64's first
_LOW = 0xFFFFFFFF


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of named tensors of 4-byte elements, as 32 hexadecimal digits; the host waits once for each device.

    A GPU makes it beside what is queued later. What it reads must stay as it is until then.
    """
    named = list(tensors)
    numbers = dict[int, int]()
    for device in dict.fromkeys(tensor.device for _, tensor in named):
        places = [place for place, (_, tensor) in enumerate(named) if tensor.device == device]
        held = [named[place][1] for place in places]
        made = _digests_here(held) if device.type == "cpu" else _digests_there(held, device)
        numbers.update(zip(places, made, strict=True))
    state = xxhash.xxh3_128()
    for place, (name, tensor) in enumerate(named):
        state.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)} {numbers[place]}\n".encode())
    return state.hexdigest()


def _digests_there(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    """The digests of tensors on another device: of all small ones together, of each larger one by itself."""
    small = [place for place, tensor in enumerate(tensors) if tensor.numel() < ROW]
    large = [place for place, tensor in enumerate(tensors) if tensor.numel() >= ROW]
    groups = [small[start : start + ROWS_ELSEWHERE] for start in range(0, len(small), ROWS_ELSEWHERE)]
    with beside(device):
        made = [_digests_of_small([tensors[place] for place in group]) for group in groups]
        made += [_digest_of_large(tensors[place]) for place in large]
        numbers = dict(zip(small + large, map(int, read(made)), strict=True))
    return [numbers[place] for place in range(len(tensors))]


def _digests_of_small(tensors: Sequence[Tensor]) -> Tensor:
    """The digests of tensors of one row, 1-D int64: the rows are filled up with zeros, which add nothing."""
    device, sizes = tensors[0].device, [tensor.numel() for tensor in tensors]
    flat = torch.cat([*map(_bits, tensors), torch.zeros(1, dtype=torch.int32, device=device)])
    begins = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    bounds = to_device(torch.tensor([begins, sizes]), device).unsqueeze(2)
    places = torch.arange(max(sizes), device=device)
    rows = flat.take(torch.where(places < bounds[1], places + bounds[0], sum(sizes)))
    return _mix((rows.to(torch.int64) * _factors(device)[: len(places)]).sum(dim=1))


def _digest_of_large(tensor: Tensor) -> Tensor:
    """The digest of a tensor of a row or more, a 0-dim int64 on its device."""
    elements = _bits(tensor)
    factors, whole = _factors(elements.device), elements.numel() // ROW
    rows = elements[: whole * ROW].view(-1, ROW)
    # Products need 64 bits, so the elements are widened first.
    groups = [rows[start : start + ROWS_ELSEWHERE] for start in range(0, whole, ROWS_ELSEWHERE)]
    hashes = [(group.to(torch.int64) * factors).sum(dim=1) for group in groups]
    rest = elements[whole * ROW :].to(torch.int64)
    hashes.append((rest * factors[: rest.numel()]).sum().view(1))
    return _terms(torch.cat(hashes), torch.arange(whole + 1, device=elements.device)).sum()


def _digests_here(tensors: Sequence[Tensor]) -> list[int]:
    """The same of tensors on the CPU: a hash for each row, then all of them at once."""
    begins, places, hashes = list[int](), list[int](), list[np.int64]()
    for tensor in tensors:
        elements, factors = _bits(tensor).numpy(), _factors(tensor.device).numpy()
        begins.append(len(hashes))
        for place, start in enumerate(range(0, elements.size or 1, ROW)):
            row = elements[start : start + ROW]
            places.append(place)
            hashes.append(np.einsum("k,k->", row, factors[: row.size]))
    terms = _terms(np.array(hashes, np.int64), np.array(places))
    return [int(term) for term in np.add.reduceat(terms, begins)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.int32)


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """c_k for every k of a row."""
    places = torch.arange(ROW, device=device)
    return (_mix(places * _FIRST) << 15) + 2 * places + 1


def _terms(hashes: Numbers, rows: Numbers) -> Numbers:
    """What is added up to the digest of a tensor: mix(h_r) * C_r of each row r."""
    return _mix(hashes) * ((rows * _SECOND << 1) + 1)


def _mix(numbers: Numbers) -> Numbers:
    """A number for each number, one to one; neighbours end far apart."""
    return (numbers ^ ((numbers >> 32) & _LOW)) * _SECOND
