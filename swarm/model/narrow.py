"""Narrow places between decoder layers: the model itself carries less from one layer to the next there.

    layer p - 1 ── narrow_out ──▶ z, a factor narrower ── narrow_in ──▶ layer p

    maxout        z = LN(the greatest of each group of neighbouring channels of LN(x))       x' = W z
    bottleneck    z = LN(V LN(x))                                                            x' = W z

A place is computed in every cut, also where no cut lies there. A stage builds its layers with `NarrowOut` and
`NarrowIn`. An exported folder holds this file as modeling_swarm_narrow.py, with the names of the model's family in the
place of Llama's, so it needs nothing but torch and Transformers.

Legend: B sequences, T tokens, D width, N narrow width.

Source: SWARM (arXiv 2301.11913), compression-aware architectures. Not chosen: the norms of the family, because places
of all families start and learn alike so; `max` with its index, because backward would keep 8 bytes for each number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM


class NarrowOut(nn.Module):
    """The end of a place that belongs to the layer before it: hidden state [B, T, D] in, z [B, T, N] out."""

    def __init__(self, kind: str, width: int, narrow_width: int) -> None:
        super().__init__()
        self.wide_norm = nn.LayerNorm(width)
        if kind == "bottleneck":
            self.down = nn.Linear(width, narrow_width, bias=False)
        self.norm = nn.LayerNorm(narrow_width)
        self._kind, self._narrow_width = kind, narrow_width

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        wide_BTD = self.wide_norm(hidden_BTD)
        if self._kind == "maxout":
            narrow_BTN = wide_BTD.unflatten(-1, (self._narrow_width, -1)).amax(-1)
        else:
            narrow_BTN = self.down(wide_BTD)
        z_BTN: Tensor = self.norm(narrow_BTN)
        return z_BTN


class NarrowIn(nn.Module):
    """The end of a place that belongs to the layer behind it: z [B, T, N] in, hidden state [B, T, D] out."""

    def __init__(self, width: int, narrow_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(narrow_width, width, bias=False)

    def forward(self, z_BTN: Tensor) -> Tensor:
        hidden_BTD: Tensor = self.up(z_BTN)
        return hidden_BTD


class _HandedOver(torch.autograd.Function):
    """A tensor and its gradient, contiguous, as they arrive where a cut is."""

    @staticmethod
    def forward(ctx: Any, z_BTN: Tensor) -> Tensor:
        return z_BTN.contiguous().view_as(z_BTN)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def handed_over(z_BTN: Tensor) -> Tensor:
    """z in float32, with the bits that it and its gradient have where a cut lies at the place."""
    over: Tensor = _HandedOver.apply(z_BTN.float())  # type: ignore[no-untyped-call]
    return over


class SwarmNarrowConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """The family's config, with `narrow`: what places there are."""

    model_type = "swarm_narrow_llama"


class SwarmNarrowForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """The family's model, with the places that its config names."""

    config_class = SwarmNarrowConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        narrow, width = config.narrow, config.hidden_size
        layers = next(part for part in self.base_model.children() if isinstance(part, nn.ModuleList))
        for place in range(narrow["every"], len(layers), narrow["every"]):
            narrow_out = NarrowOut(narrow["kind"], width, width // narrow["factor"])
            layers[place - 1].narrow_out = narrow_out
            layers[place].narrow_in = NarrowIn(width, width // narrow["factor"])
            layers[place].register_forward_pre_hook(partial(_pass, layers[place - 1]))


def _pass(before: Any, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a layer, its hidden state led through the place before it."""
    return layer.narrow_in(before.narrow_out(inputs[0])), *inputs[1:]
