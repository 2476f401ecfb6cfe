"""How much of the pipeline's idle time overlap hides: the real system in virtual time, with modelled compute.

    python -m benchmarks.models.bubbles [--microbatches 8] [--stages 2 4 8] [--whole]

Scheduler and stage servers are the product's own; only time, network and devices are simulated. Each forward and each
backward of a microbatch takes one unit of time at every stage, an optimizer step too, and everything else next to
nothing. Backwards are split, as both parts take no longer than one call: dx half a unit, the gradients of the weights
the other half. With `--whole` none is, and a synchronous step takes 2 (M + S - 1) + 1 units with M microbatches and S
stages. No step takes less than 2 M + 1.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import structlog
import torch
from rich.console import Console
from rich.table import Table

from stage_server.brain import splitting
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from tests.support.devices import InlineDevice
from tests.support.simulated import Tokens, run_swarm, small_spec, write_text

T = TypeVar("T")

COMPUTE_S = 0.2
STAGES = (2, 4, 8)
MICROBATCHES = 8
SHORT, LONG = 4, 10  # steps; what a step takes is the difference, without start and end


class EvenDevice(InlineDevice):
    """A device on which every computation takes the same time, and each part of a split backward half of it."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__(lambda: COMPUTE_S)

    async def aside(self, work: Callable[[], T]) -> T:
        """What needs no device takes no time."""
        return work()


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline with one replica per stage."""

    stages: int
    microbatches: int = MICROBATCHES
    whole: bool = False  # no backward is split

    @property
    def bubble(self) -> float:
        """The share of a synchronous step in which a stage waits for others, but for averaging and the optimizer."""
        return (self.stages - 1) / (self.microbatches + self.stages - 1)


def step_units(shape: Shape, overlap: int) -> float:
    """How long a step takes of which the first `overlap` microbatches use weights that are one step old."""
    return (_training_s(shape, overlap, LONG) - _training_s(shape, overlap, SHORT)) / (LONG - SHORT) / COMPUTE_S


def _training_s(shape: Shape, overlap: int, steps: int) -> float:
    torch.set_num_threads(1)  # tensors are tiny: on a busy machine more threads mostly wait for each other
    with tempfile.TemporaryDirectory() as name:
        spec = resolve(
            small_spec(
                write_text(Path(name)),
                config__num_hidden_layers=shape.stages,
                pipeline__stages=shape.stages,
                pipeline__overlap=overlap,
                pipeline__sync_steps=0,
                training__steps=steps,
                training__global_batch_sequences=shape.microbatches,
                training__microbatch_sequences=1,
            ),
            Basis(ByteTokenizer.vocabulary_size),
        )
        tokens = Tokens.make(Path(name), spec)
        with patch.object(splitting, "WINDOW", 0), patch.object(splitting.Splitting, "pays", not shape.whole):
            return run_swarm(spec, tokens, shape.stages, seed=0, device_type=EvenDevice).training_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--whole", action="store_true", help="split no backward")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    table = Table("stages", "bubble", *(f"{late} late" for late in ("0", "1/8", "1/4", "1/2", "all")))
    for stages in arguments.stages:
        shape = Shape(stages, arguments.microbatches, arguments.whole)
        overlaps = [round(share * shape.microbatches) for share in (0, 1 / 8, 1 / 4, 1 / 2, 1)]
        table.add_row(
            f"{stages}", f"{shape.bubble:.0%}", *(f"{step_units(shape, overlap):.1f}" for overlap in overlaps)
        )
    Console().print(table)


if __name__ == "__main__":
    main()
