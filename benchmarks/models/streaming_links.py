"""What bandwidth between islands keeps so much of the time for computing, beside the figures of Streaming DiLoCo.

    python -m benchmarks.models.streaming_links

Two sites train a model of L layers, a step of which takes so long. A site computes one layer after the other: forward,
then, from the last layer to the first, the gradient of the weights and that of the layer before. The link carries one
layer at a time, in the order in which they become ready:

    data-parallel      the gradient of every layer in every step; the next forward of the layer waits for it
    diloco             the same behind every H-th step
    streaming          the same for the layers of one fragment, in its turn: layer l is of fragment l mod P
    with overlap       the layers wait at the end of the next step
    with overlap, FP4  4 bits per parameter in the place of 16

Utilisation is the time of the steps alone, as a share of all. A line is drawn where a bisection finds the bandwidth at
which that reaches 50, 80, 90, 95 and 99 %. "Closed form" is W = 16 N u / ((1 - u) H T): as if nothing overlapped.

Source: arXiv 2501.18512, table of required bandwidth. Its figures in 16 bits lie on a logarithmic grid, each 21 % above
the one before, so they are no more precise than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

EVERY_STEPS = 100  # H
LAYERS_OF_FRAGMENT = 3
UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
GBIT = 1e9
ROUNDS = 40  # of the bisection


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained: its size, and the time of a step."""

    name: str
    parameters: float
    layers: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Method:
    """How sites average."""

    name: str
    every_steps: int = EVERY_STEPS
    streams: bool = False
    overlap_steps: int = 0
    bits: int = 16

    def sends(self, layer: int, layers: int, step: int) -> bool:
        """Whether a layer is sent behind this step (from 0)."""
        fragments = -(-layers // LAYERS_OF_FRAGMENT) if self.streams else 1
        return (step + 1 - layer % fragments * self.every_steps // fragments) % self.every_steps == 0


SMALL, LARGE = Model("1 B", 1e9, 24, 0.1), Model("10 B", 1e10, 48, 0.8)
DATA_PARALLEL, DILOCO = Method("data-parallel", every_steps=1), Method("diloco")
STREAMING = Method("streaming", streams=True)
OVERLAP = Method("with overlap", streams=True, overlap_steps=1)
FP4 = Method("with overlap, FP4", streams=True, overlap_steps=1, bits=4)
# Gbit/s at each of UTILISATIONS.
PUBLISHED: Mapping[tuple[Model, Method], Sequence[float]] = {
    (SMALL, DATA_PARALLEL): (86.8, 152.6, 184.2, 222.3, 569.0),
    (SMALL, DILOCO): (1.4, 6.2, 13.3, 23.3, 86.8),
    (SMALL, STREAMING): (1.4, 5.2, 9.1, 16.0, 28.1),
    (SMALL, OVERLAP): (1.4, 4.3, 6.2, 9.1, 11.0),
    (SMALL, FP4): (0.4, 0.9, 1.7, 2.0, 3.0),
    (LARGE, DILOCO): (1.7, 7.5, 16.0, 33.9, 104.8),
    (LARGE, FP4): (0.4, 0.9, 1.4, 1.4, 1.7),
}


def utilisation(model: Model, method: Method, bits_per_s: float) -> float:
    """The share of the time in which a site computes: of one period, behind another that filled the link."""
    computes_s = model.step_s / (3 * model.layers - 1)  # of a layer, one of its three; layer 0 has nothing before it
    sends_s = method.bits * model.parameters / model.layers / bits_per_s
    now_s = link_s = began_s = 0.0
    ready_s = [0.0] * model.layers
    awaited: list[tuple[int, int, float]] = []  # behind which step, which layer, since when it is there
    period = max(method.every_steps, 10)
    for step in range(2 * period):
        if step == period:
            began_s = now_s
        for layer in range(model.layers):
            now_s = max(now_s, ready_s[layer]) + computes_s
        for layer in reversed(range(model.layers)):
            now_s += computes_s
            if method.sends(layer, model.layers, step):
                link_s = max(link_s, now_s) + sends_s
                awaited.append((step + method.overlap_steps, layer, link_s))
            now_s += computes_s if layer else 0.0
        for behind, layer, there_s in awaited:
            if behind == step:
                ready_s[layer] = there_s
        awaited = [exchange for exchange in awaited if exchange[0] > step]
    return period * model.step_s / (now_s - began_s)


def required_bits_per_s(model: Model, method: Method, least: float) -> float:
    """The bandwidth at which utilisation reaches `least`."""
    low, high = 1e-3 * GBIT, 1e5 * GBIT
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if utilisation(model, method, middle) >= least else (middle, high)
    return high


def closed_form(model: Model, method: Method, least: float) -> float:
    """The same if a site waited for all that it sends."""
    return method.bits * model.parameters * least / ((1.0 - least) * method.every_steps * model.step_s)


def main() -> None:
    table = Table("model", "method", *(f"{least:.0%}" for least in UTILISATIONS), title="Gbit/s: published / found")
    closed = Table("model", "method", *(f"{least:.0%}" for least in UTILISATIONS), title="Gbit/s by the closed form")
    for (model, method), published in PUBLISHED.items():
        found = [required_bits_per_s(model, method, least) / GBIT for least in UTILISATIONS]
        cells = [f"{said:g} / {one:.3g} ({one / said - 1:+.0%})" for said, one in zip(published, found, strict=True)]
        table.add_row(model.name, method.name, *cells)
        forms = (closed_form(model, method, least) / GBIT for least in UTILISATIONS)
        closed.add_row(model.name, method.name, *(f"{form:.3g}" for form in forms))
    console = Console(width=140)
    console.print(table)
    console.print(closed)


if __name__ == "__main__":
    main()
