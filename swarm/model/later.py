"""Linear layers whose weights' gradients can be computed later than dx.

A backward gives dx, which the stage before waits for, and the gradients of the weights, which only the commit waits
for. Most of the second part is one product per linear layer, of its input x and the gradient g of its output:

    at once       autograd computes it, as of any layer
    put off       autograd is asked for g in place of the weight's gradient       x, g kept ──▶ product

So the layers are the library's, and only note in a forward what a later product needs. Both ways multiply the same
matrices, so the bits are the same. Only the linear layers of decoder layers are put off: norms, biases and embeddings
cost little, and the head's g is as large as the logits.

Legend: N tokens, D width of a layer's input, O width of its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from transformers.pytorch_utils import Conv1D

Products: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""By a weight's name: matrices `left` [N, a] and `right` [N, b]; its gradient [a, b] is left.t() @ right."""


class Notes:
    """What the linear layers of a module note in one forward: x, and the node of autograd's graph that will get g.

    `cast` is the dtype of autocast: layers cast x themselves, so that it is kept once and not in two copies.
    """

    def __init__(self, cast: torch.dtype | None = None) -> None:
        self.cast = cast
        self.made: list[tuple[_Layer, Tensor, Node]] = []

    def edges(self) -> list[GradientEdge]:
        """Where autograd finds each g."""
        return [GradientEdge(node, 0) for _, _, node in self.made]

    def products(self, gradients: Sequence[Tensor]) -> Products:
        """The products that are left to compute, from each g."""
        products = {}
        for (layer, x, _), g in zip(self.made, gradients, strict=True):
            x_ND, g_NO = x.detach().reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
            products[layer.weight_name] = (x_ND, g_NO) if layer.is_transposed else (g_NO, x_ND)
        return products


class PutOff:
    """Where the linear layers of one module note what a product needs; outside `during` they note nothing."""

    def __init__(self) -> None:
        self.notes: Notes | None = None

    @contextmanager
    def during(self, cast: torch.dtype | None = None) -> Iterator[Notes]:
        """Around a forward."""
        self.notes = notes = Notes(cast)
        try:
            yield notes
        finally:
            self.notes = None


class _Layer(nn.Module):
    """A linear layer that `let_put_off` has changed."""

    is_transposed: bool
    put_off: PutOff
    weight_name: str

    def forward(self, x: Tensor) -> Tensor:
        notes = self.put_off.notes
        if notes is not None and notes.cast is not None:
            x = x.to(notes.cast)
        y: Tensor = super().forward(x)
        if notes is not None and (node := y.grad_fn) is not None:
            notes.made.append((self, x, node))
        return y


class _Linear(_Layer, nn.Linear):
    is_transposed = False


class _Conv1D(_Layer, Conv1D):
    is_transposed = True


def let_put_off(module: nn.Module, layers: nn.Module, put_off: PutOff) -> frozenset[str]:
    """Let the linear layers within `layers` put their products off; gives the names of their weights in `module`."""
    # The class is changed, not the instance's `forward`: a bound method there would be a circle of references, and the
    # memory of a job that ends would wait for the garbage collector.
    inside, changed = set(layers.modules()), {nn.Linear: _Linear, Conv1D: _Conv1D}
    names = set()
    for name, layer in module.named_modules():
        if layer in inside and type(layer) in changed:
            layer.__class__ = changed[type(layer)]
            layer.put_off, layer.weight_name = put_off, f"{name}.weight"
            names.add(f"{name}.weight")
    return frozenset(names)
