"""What exact products of Muon cost: processor time of a step beside that of fast ones, and loss.

    python -m benchmarks.learning.muon_products [--seeds 2] [--steps 120] [--rate 4e-3] [--table docs/convergence.md]

Steps of both kinds take turns, and the shortest of each counts. Losses are those of the small Llama of
`benchmarks.learning.convergence`, synchronous: the mean over the last tenth of the steps, in nats per byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import mean

import torch

from benchmarks.learning.convergence import STAGES, Run, resolved, small_llama, trained
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish
from swarm.job.spec import TrainingSection
from swarm.model.optimizers import Optimizer
from swarm.model.runtime import is_slow_at_bfloat16
from swarm.text import counted

SHAPES = ((256, 256), (384, 1024), (1024, 4096))
TURNS = 2
PRODUCTS = ("fast", "exact")
MARKS = ("<!-- muon -->", "<!-- muon end -->")


def step_s(shape: tuple[int, int]) -> dict[str, float]:
    """Processor seconds of a step of one matrix, by products."""
    name, took = "layers.0.weight", {products: list[float]() for products in PRODUCTS}
    parameters = {name: torch.randn(shape)}
    gradients = {name: torch.randn(shape)}
    made = {
        products: Optimizer(
            TrainingSection.model_validate({"optimizer": "muon", "muon_products": products}), parameters.items()
        )
        for products in PRODUCTS
    }
    for _ in range(1 + TURNS):
        for products, optimizer in made.items():
            started_s = time.process_time()
            optimizer.step(parameters.items(), gradients, 1e-3)
            took[products].append(time.process_time() - started_s)
    return {products: min(found[1:]) for products, found in took.items()}


def loss(products: str, seed: int, rate: float, steps: int) -> float:
    """What a run ends with."""
    values = small_llama(seed, rate, steps, SOURCE)
    values["training"] |= {"optimizer": "muon", "muon_products": products}
    spec = resolved(values | {"pipeline": {"stages": STAGES, "compression": "none", "overlap": 0}})
    return Run(trained(spec).losses, spec.sync_steps, spec.overlap).at(1.0)


def time_rows() -> Iterator[list[str]]:
    for shape in SHAPES:
        took = step_s(shape)
        ratio = took["exact"] / took["fast"]
        yield [f"{shape[0]} x {shape[1]}", *(f"{1e3 * took[one]:.0f} ms" for one in PRODUCTS), f"{ratio:.2g}"]


def main() -> None:
    parser = parser_of(__doc__, seeds=2, steps=120)
    parser.add_argument("--rate", type=float, default=4e-3)
    arguments = parsed(parser)
    times = markdown(["matrix", *PRODUCTS, "exact / fast"], time_rows())
    losses = {
        one: [loss(one, seed, arguments.rate, arguments.steps) for seed in range(arguments.seeds)] for one in PRODUCTS
    }
    rows = ([str(seed), *(f"{losses[one][seed]:.4f}" for one in PRODUCTS)] for seed in range(arguments.seeds))
    apart = 100 * (mean(losses["exact"]) / mean(losses["fast"]) - 1)
    with_bfloat16 = "without" if is_slow_at_bfloat16(torch.device("cpu")) else "with"
    text = (
        f"Processor time of a step, {counted(torch.get_num_threads(), 'thread')}, on a CPU {with_bfloat16} "
        f"instructions for bfloat16:\n\n{times}\n\n"
        f"Loss after {arguments.steps} steps at learning rate {arguments.rate:g} "
        f"(exact against fast {apart:+.2f} %):\n\n"
        f"{markdown(['seed', *PRODUCTS], rows)}"
    )
    publish(text, arguments.table, MARKS)


if __name__ == "__main__":
    main()
