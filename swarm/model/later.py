"""Linear layers whose weights' gradients can be computed later than dx.

A backward gives dx, which the stage before waits for, and the gradients of the weights, which only the commit waits
for. Most of the second part is one product per linear layer, of its input x and the gradient g of its output:

    at once       g ──▶ dx, product                      one node of autograd's graph
    put off       g ──▶ dx       x, g kept ──▶ product   in a backward within `PutOff.during`

Both ways multiply the same matrices, so the bits are the same. Only the linear layers of decoder layers are put off:
norms, biases and embeddings cost little, and the head's g is as large as the logits.

Legend: B sequences, T tokens, N = B x T, D width of a layer's input, O width of its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Products: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""By a weight's name: matrices `left` [N, a] and `right` [N, b]; its gradient [a, b] is left.t() @ right."""


class PutOff:
    """The products that the linear layers of one module put off; outside `during` they compute them."""

    def __init__(self) -> None:
        self.products: Products | None = None

    @contextmanager
    def during(self, wanted: bool) -> Iterator[Products]:
        """Around a backward: gives the products that it puts off, none unless `wanted`."""
        products: Products = {}
        self.products = products if wanted else None
        try:
            yield products
        finally:
            self.products = None


class _Product(torch.autograd.Function):
    """x [B, T, D] times a weight, [O, D] or GPT-2's [D, O], plus a bias [O]; it casts as autocast does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
        ctx.layer = layer
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        if not layer.is_transposed:
            return nn.functional.linear(x, weight, bias)
        assert bias is not None
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BTO,) = gradients
        x_BTD, weight = ctx.saved_tensors
        layer: _Layer = ctx.layer
        needs_dx, _, needs_bias, _ = ctx.needs_input_grad
        x_ND, g_NO = x_BTD.reshape(-1, x_BTD.shape[-1]), g_BTO.reshape(-1, g_BTO.shape[-1])
        dx = g_NO.mm(weight.t() if layer.is_transposed else weight).view(x_BTD.shape) if needs_dx else None
        left, right = (x_ND, g_NO) if layer.is_transposed else (g_NO, x_ND)
        product = None
        if layer.put_off.products is None:
            product = left.t().mm(right)
        else:
            layer.put_off.products[layer.weight_name] = left, right
        return dx, product, g_NO.sum(0) if needs_bias else None, None


class _Layer(nn.Module):
    """A linear layer that `let_put_off` has changed."""

    is_transposed: bool
    put_off: PutOff
    weight_name: str

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            plain: Tensor = super().forward(x)
            return plain
        y: Tensor = _Product.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
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
