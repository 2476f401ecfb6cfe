"""Do two devices step alike? A digest of the job's optimizer's result for a fixed input, to the bit.

Replicas of a stage get the same averaged gradient, byte for byte, and each runs the optimizer on it. If one device
rounds a square root otherwise, or flushes small numbers to zero, the replicas drift apart without any error. So each
runs this probe when it loads, where it will run the optimizer, and the scheduler compares the digests (design: as the
weights after every commit, but before any of it is lost). Decision: docs/decisions/200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from swarm.job.spec import TrainingSection
from swarm.model.digests import digest_of
from swarm.model.optimizers import Optimizer

ELEMENTS = 4099  # odd: the last elements are not a whole vector
SIDE = 64  # of the matrix with EDGES; the one without is three times as wide
STEPS = 4
SEED = 20_240_229
# What everyday numbers do not show: zeros, denormals, the smallest normal numbers, large ones.
EDGES = (0.0, -0.0, 1e-45, -3e-42, 1.1e-38, 1.18e-38, -1e-30, 1e-8, 0.1, 1.0, -65504.0, 1e12, -1e18)


def probe_digest(training: TrainingSection, device: torch.device) -> str:
    """The digest of parameters and state after each of a few steps of the job's optimizer on `device`."""
    start, gradients_of = _inputs()
    parameters = {name: tensor.to(device, copy=True) for name, tensor in start.items()}
    optimizer = Optimizer(training, parameters.items())
    seen: list[tuple[str, Tensor]] = []
    for step in range(STEPS):
        # Clipped, as gradients are.
        gradients = {name: one.to(device) * 0.7316227766016838 for name, one in gradients_of[step].items()}
        optimizer.step(parameters.items(), gradients, training.learning_rate * (1.0 + 0.1 * step))
        for name, parameter in parameters.items():
            for key, tensor in (("", parameter), *optimizer.state_of(name).items()):
                seen.append((f"{step} {name}@{key}", tensor.clone()))
    return digest_of(seen)


@cache
def _inputs() -> tuple[Mapping[str, Tensor], Sequence[Mapping[str, Tensor]]]:
    """Parameters, and their gradients in each step; on the CPU, not to be changed."""
    generator = torch.Generator().manual_seed(SEED)
    matrix = _values(generator, 0.02)[: SIDE * SIDE].view(SIDE, SIDE)
    start = {"layers.0.weight": matrix, "vector": _values(generator, 1.0)}
    gradients = [
        {name: _values(generator, 10.0 ** (-2 * step))[: one.numel()].view(one.shape) for name, one in start.items()}
        for step in range(STEPS)
    ]
    # Muon divides a matrix by its norm, and beside EDGES that leaves nothing of everyday numbers.
    wide = "layers.1.weight"
    start[wide] = torch.randn(SIDE, 3 * SIDE, generator=generator) * 0.02
    for of_step in gradients:
        of_step[wide] = torch.randn(start[wide].shape, generator=generator)
    return start, gradients


def _values(generator: torch.Generator, scale: float) -> Tensor:
    values = torch.randn(ELEMENTS, generator=generator) * scale
    edges = torch.tensor(EDGES)
    for start in range(0, 8 * len(edges), len(edges)):  # at the places of different elements of a vector
        values[start : start + len(edges)] = edges
    return values
