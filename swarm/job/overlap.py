"""How many microbatches of a step should use weights one step old: as many as a pipeline would idle for.

Between two steps a pipeline of S stages idles, in times that a stage computes a microbatch:

    while it fills and drains                            S - 1
    while gradients are averaged and committed           about 1
    while boundary tensors travel, there and back        2 (S - 1) x travel / computing
    while a report travels, and the commit back          the time until a receipt / computing

The last two lines count where links were measured. Where these are short, they are next to nothing. The scheduler is
taken to be as far as a neighbour, because the way to it is not measured. Chosen once, at submit.

`hidden_steps` does the same for an exchange between islands: so many inner steps go on while it is under way.

Decision: docs/decisions/140.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.text import counted


@dataclass(frozen=True, slots=True)
class FleetSpeed:
    """How fast stage servers were in the jobs before: medians, or zeros where nothing was measured."""

    multiply_adds_per_s: float = 0.0  # of a forward, over the time of forward and backward
    link_bytes_per_s: float = 0.0
    receipt_s: float = 0.0  # the shortest time until a tensor's receipt
    between_bytes_per_s: float = 0.0  # of links between sites; of all links where no site is named

    def travel_s(self, size_bytes: float) -> float:
        """Seconds that a boundary tensor of this size is under way; 0 if that is not known.

        It takes half of the time until a receipt at least. The measured rate is low where few tensors travel at once,
        so what it makes of the size is not added to that.
        """
        return max(self.receipt_s / 2, size_bytes / self.link_bytes_per_s) if self.link_bytes_per_s else 0.0

    def compute_s(self, multiply_adds: float) -> float:
        """Seconds that a stage of this size computes a microbatch; 0 if that is not known."""
        return multiply_adds / self.multiply_adds_per_s if self.multiply_adds_per_s else 0.0


UNMEASURED = FleetSpeed()


@dataclass(frozen=True, slots=True)
class Overlap:
    """The late microbatches of a step, how many of them are due to links, and how long a tensor travels on these."""

    microbatches: int
    for_links: int = 0
    travel_s: float = 0.0

    def links_text(self) -> str:
        """What links have to do with it, for people; empty if nothing."""
        if not self.for_links:
            return ""
        return (
            f"{counted(self.for_links, 'microbatch')} more overlap because of the links, "
            f"on which a tensor travels {self.travel_s:.3g} s"
        )


HIDDEN_PART = 10  # of a period at most its tenth: more of it costs much more loss than 1 %


def hidden_steps(exchange_s: float, step_s: float, every_steps: int) -> int:
    """How many inner steps an exchange takes; it begins every `every_steps`."""
    most = every_steps // HIDDEN_PART
    return math.ceil(exchange_s / step_s) if exchange_s < most * step_s else most


def late_microbatches(
    stages: int,
    replicas: int,
    microbatches: int,
    travel_s: float = 0.0,
    compute_s: float = 0.0,
    receipt_s: float = 0.0,
) -> Overlap:
    """The choice for a step of this many microbatches and one pipeline for each replica: never more than half of it.

    `travel_s`: a boundary tensor's; `compute_s`: a microbatch's at the busiest stage; `receipt_s`: the way to a
    neighbour and back; 0 = not measured. More than half costs more loss than it gains time (docs/convergence.md).
    """
    most = microbatches // 2
    near = min(most, stages * replicas)
    travelling = replicas * (2 * (stages - 1) * travel_s + receipt_s) / compute_s if compute_s else 0.0
    if math.isnan(travelling):  # both are infinite: no device and no link is that slow
        travelling = 0.0
    late = min(most, stages * replicas + math.floor(min(travelling, most) + 0.5))
    return Overlap(late, late - near, travel_s if stages > 1 else receipt_s / 2.0)
