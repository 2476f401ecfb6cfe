"""Digests of tensors, made where they lie: whole numbers modulo 2^64, so every device and every order gives the same.

    row r of 16384 elements    h_r = sum of (bits of element k) * c_k        c_k odd, 2k + 1 in its low bits
    tensor                     sum of mix(h_r) * C_r                         C_r odd; mix: one to one
    tensors                    xxh3-128 over name, dtype, shape and digest of each, in order

An element that changes in any bit changes h_r, because c_k is odd; two that are swapped within a row do too, because
their bits differ by less than 2^32 and c_k - c_l is not divisible by 2^32. All other differences are missed with a
chance of about 2^-64. This finds faults, not forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

from swarm.model.runtime import read

ROW = 1 << 14
# Rows that are worked on at once: on a CPU few enough to stay in cache, on a GPU enough to fill it.
ROWS_ON_CPU, ROWS_ELSEWHERE = 1 << 2, 1 << 10
_FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd: 2^64 over the golden ratio, and SplitMix64's first
_LOW = 0xFFFFFFFF


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of named tensors of 4-byte elements, as 32 hexadecimal digits; the host waits once for each device."""
    named = list(tensors)
    state = xxhash.xxh3_128()
    for (name, tensor), number in zip(named, read([_digest(tensor) for _, tensor in named]), strict=True):
        state.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)} {int(number)}\n".encode())
    return state.hexdigest()


def _digest(tensor: Tensor) -> Tensor:
    """The digest of one tensor, a 0-dim int64 on its device."""
    elements = tensor.detach().contiguous().view(-1).view(torch.int32)
    device = elements.device
    if elements.numel() < ROW:
        return _mix((elements.to(torch.int64) * _factors(device)[: elements.numel()]).sum())
    whole = elements.numel() // ROW
    rows, at_once = elements[: whole * ROW].view(-1, ROW), ROWS_ON_CPU if device.type == "cpu" else ROWS_ELSEWHERE
    factors = _factors(device)
    # Products need 64 bits, so the elements are widened first.
    groups = [rows[start : start + at_once] for start in range(0, whole, at_once)]
    hashes = [(group.to(torch.int64) * factors).sum(dim=1) for group in groups]
    rest = elements[whole * ROW :].to(torch.int64)
    hashes.append((rest * factors[: rest.numel()]).sum().view(1))
    mixed = _mix(torch.cat(hashes))
    return (mixed * ((torch.arange(mixed.numel(), device=device) * _SECOND << 1) + 1)).sum()


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """c_k for every k of a row."""
    places = torch.arange(ROW, device=device)
    return (_mix(places * _FIRST) << 15) + 2 * places + 1


def _mix(numbers: Tensor) -> Tensor:
    """A number for each number, one to one; neighbours end far apart."""
    return (numbers ^ ((numbers >> 32) & _LOW)) * _SECOND
