"""Error feedback: the part of a replica's gradients that compression leaves out is added at a later step.

    part + left  ──encode──▶ what the owner gets        left for the next step = (part + left) - what the owner gets

What rounding takes away at one step is sent with the next one, so errors do not add up. A step
that is averaged again begins with the same leftovers, and only its commit uses them up. A step that is skipped, or
averaged without this replica, leaves them alone, and so does one for which it had no microbatches, if parts are
clipped: such a part counts for nothing. They are lost with the replica.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv 1901.09847), algorithm 2; there with one step size.

Decision: docs/decisions/040.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model import codec
from swarm.types import UnitName


@dataclass(frozen=True, slots=True)
class Coded:
    """A slice as it travels, and how its receivers hold it: 1-D float32, or float64 where nothing is compressed."""

    payload: memoryview
    dtype: str
    received: Tensor


def coded(values: Tensor, codec_name: str) -> Coded:
    """Encode a 1-D slice."""
    payload, dtype = codec.encode_slice(values, codec_name)
    received = values if codec_name == "none" else codec.decode_slice(payload, dtype, values.numel())
    return Coded(payload, dtype, received)


@dataclass(slots=True)
class _Residual:
    """The part of a unit that one applied step has left out."""

    tensor: Tensor  # 1-D float32
    lent_to: int | None = None  # an open step, whose commit uses it up


class ErrorFeedback:
    """The leftovers of one replica, by unit. With two open steps, the later one gets what the earlier one left."""

    def __init__(self, codec_name: str) -> None:
        self.codec_name = codec_name
        self._left: dict[UnitName, list[_Residual]] = {}

    def lend(self, unit: UnitName, step: int) -> tuple[Tensor, ...]:
        """The residual to add to this step's gradient. Repeated calls return it again, plus what was added since."""
        lent = []
        for residual in self._left.get(unit, ()):
            if residual.lent_to in (None, step):
                residual.lent_to = step
                lent.append(residual.tensor)
        return tuple(lent)

    def committed(self, step: int, left: Mapping[UnitName, Tensor]) -> None:
        """The step was committed, and its newest rounds have left this; nothing if it was skipped."""
        for unit, tensor in left.items():
            kept = [residual for residual in self._left.get(unit, ()) if residual.lent_to != step]
            self._left[unit] = [*kept, _Residual(tensor)]
        for residual in (residual for ones in self._left.values() for residual in ones):
            if residual.lent_to is not None and residual.lent_to <= step:
                residual.lent_to = None  # it was not used after all


def together(part: Tensor, left: tuple[Tensor, ...]) -> Tensor:
    """A part with the leftovers added, in memory of its own."""
    total = part.to(torch.float32, copy=True)
    for tensor in left:
        total.add_(tensor)
    return total
