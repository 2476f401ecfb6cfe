"""Narrow places between decoder layers: the model itself carries less from one layer to the next there.

    layer p - 1 ── narrow_out ──▶ z, a factor narrower ── narrow_in ──▶ layer p

    maxout        z = LN(the greatest of each group of neighbouring channels of LN(x))       x' = W z
    bottleneck    z = LN(V LN(x))                                                            x' = W z
    anchor        z = V x                     x' = W z + B A[token], or with rank 0 W z + A[token]

Anchor's W starts as the transpose of V, so the hidden state goes on, projected, and the table A says what the token
alone tells of the rest. Without one of the two it learns far worse. Its ends are two parameters: tied, they would be
one unit of two neighbouring stages at every place.

A place is computed in every cut, also where no cut lies there. A stage builds its layers with `NarrowOut` and
`NarrowIn`. An exported folder holds this file as modeling_swarm_narrow.py, with the names of the model's family in the
place of Llama's, so it needs nothing but torch and Transformers.

Legend: B sequences, T tokens, D width, N narrow width.

Source: SWARM (arXiv 2301.11913), compression-aware architectures; anchor after MAPL (arXiv 2606.05484). Not chosen: the
norms of the family, because places of all families start and learn alike so; `max` with its index, because backward
would keep 8 bytes for each number; orthonormal ends, because LAPACK's bits differ between machines.
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
        self.wide_norm = None if kind == "anchor" else nn.LayerNorm(width)
        self.down = None if kind == "maxout" else nn.Linear(width, narrow_width, bias=False)
        self.norm = None if kind == "anchor" else nn.LayerNorm(narrow_width)
        self._narrow_width = narrow_width

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        wide_BTD = hidden_BTD if self.wide_norm is None else self.wide_norm(hidden_BTD)
        groups = wide_BTD.unflatten(-1, (self._narrow_width, -1))
        z_BTN: Tensor = groups.amax(-1) if self.down is None else self.down(wide_BTD)
        return z_BTN if self.norm is None else self.norm(z_BTN)


class NarrowIn(nn.Module):
    """The end of a place that belongs to the layer behind it: z [B, T, N] in, hidden state [B, T, D] out.

    Anchor adds what its table has for each of the tokens [B, T]; `vocabulary` 0: no table.
    """

    def __init__(self, width: int, narrow_width: int, vocabulary: int = 0, rank: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(narrow_width, width, bias=False)
        self.table = nn.Embedding(vocabulary, rank or width) if vocabulary else None
        self.spread = nn.Linear(rank, width, bias=False) if vocabulary and rank else None

    def forward(self, z_BTN: Tensor, tokens_BT: Tensor | None = None) -> Tensor:
        hidden_BTD: Tensor = self.up(z_BTN)
        if self.table is None:
            return hidden_BTD
        assert tokens_BT is not None, "anchor needs the tokens"
        known: Tensor = self.table(tokens_BT)
        if self.spread is not None:
            known = self.spread(known)
        return hidden_BTD + known


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
        vocabulary = config.vocab_size if narrow["kind"] == "anchor" else 0
        embedding = self.get_input_embeddings()
        embedding.register_forward_pre_hook(_remember)
        layers = next(part for part in self.base_model.children() if isinstance(part, nn.ModuleList))
        for place in range(narrow["every"], len(layers), narrow["every"]):
            layers[place - 1].narrow_out = NarrowOut(narrow["kind"], width, width // narrow["factor"])
            layers[place].narrow_in = NarrowIn(width, width // narrow["factor"], vocabulary, narrow["rank"])
            layers[place].register_forward_pre_hook(partial(_pass, layers[place - 1], embedding))


def _remember(embedding: Any, inputs: tuple[Any, ...]) -> None:
    embedding.tokens = inputs[0]


def _pass(before: Any, embedding: Any, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a layer, its hidden state led through the place before it."""
    return layer.narrow_in(before.narrow_out(inputs[0]), embedding.tokens), *inputs[1:]
