"""How an owner makes one mean of all parts of its slice, as the job file says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.model.exact_sums import mean_of_parts
from swarm.model.robust import Share, clipped_mean
from swarm.wire.messages import Average


@dataclass(frozen=True, slots=True)
class Reduction:
    """`bits` is the fixed-point grid of the sums, None in ordinary mode, in which alone false parts can be clipped."""

    bits: int | None
    clips: bool = False

    def reduce(self, parts: Sequence[Tensor], average: Average) -> Tensor:
        """The mean of the parts, which are in the order of the round's members."""
        if not self.clips:
            return mean_of_parts(parts, average.tokens, self.bits)
        return clipped_mean(parts, [Share(one.stage, one.microbatches) for one in average.members], average.tokens)
