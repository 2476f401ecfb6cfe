"""Model families: which Hugging Face classes a stage is made of.

A stage uses the library's own layer classes, cut by hand: no tracing, no code from a hub. A family whose model is
"embedding, layers, norm, head" under Llama's parameter names is one more row of FAMILIES (and of the fields in
swarm.partition).

Legend: B sequences, T tokens, D width, V vocabulary, h width of a head.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from swarm.config import JobSpec
from swarm.errors import InvalidConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """The classes of one family."""

    config: type[Any]
    layer: type[Any]
    norm: type[Any]
    rotary: type[Any]


FAMILIES = {"llama": Family(LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding)}


class _Trunk(nn.Module):
    """Holds what the library keeps under "model."; which members are set depends on the stage."""

    embed_tokens: nn.Embedding
    layers: nn.ModuleDict
    norm: nn.Module


class StageModule(nn.Module):
    """One stage's part of the model, under the parameter names of the whole model.

    The first stage has the embedding, the last one norm and head; a single stage has all. Positions are computed here
    and the attention is causal by flag, so nothing but the hidden state crosses a stage boundary.
    """

    def __init__(self, spec: JobSpec, first_layer: int, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        family = FAMILIES[spec.model.family]
        config = _config(family, spec)
        # No memory and no random numbers are spent here: `initialise` fills every parameter.
        with torch.device("meta"):
            self.model = _Trunk()
            if first:
                self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
            self.model.layers = nn.ModuleDict(
                {str(index): family.layer(config, index) for index in range(first_layer, first_layer + layers)}
            )
            if last:
                self.model.norm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to_empty(device="cpu")
        self.rotary = family.rotary(config)  # has no parameters
        self._first, self._last = first, last

    def forward(self, tokens_or_hidden: Tensor) -> Tensor:
        """Tokens [B, T] (first stage) or hidden state [B, T, D] in; hidden state or logits [B, T, V] (last) out."""
        hidden_BTD: Tensor = self.model.embed_tokens(tokens_or_hidden) if self._first else tokens_or_hidden
        position_ids = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device).unsqueeze(0)
        position_embeddings = self.rotary(hidden_BTD, position_ids=position_ids)
        for layer in self.model.layers.values():
            hidden_BTD = layer(
                hidden_BTD,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                use_cache=False,
            )
        if not self._last:
            return hidden_BTD
        logits: Tensor = self.lm_head(self.model.norm(hidden_BTD))
        return logits


def build(spec: JobSpec, stage: int, device: torch.device) -> StageModule:
    """Stage number `stage` of a resolved spec, with its initial weights, on `device`."""
    split = spec.pipeline.split
    assert split != "auto", "resolve the spec first"
    module = StageModule(spec, sum(split[:stage]), split[stage], first=stage == 0, last=stage == len(split) - 1)
    initialise(module, spec)
    return module.to(device)


@torch.no_grad()
def initialise(module: nn.Module, spec: JobSpec) -> None:
    """Fill the parameters: matrices normal with initializer_range, norms one, biases zero.

    Each parameter has its own generator, seeded by (training.seed, its name): the weights are the same whatever the
    cut. A tied head is a parameter of its own that starts as the embedding.
    """
    std = float(spec.model.config["initializer_range"])
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() < 2:
            parameter.fill_(1.0)
        else:
            source = EMBEDDING if spec.tied and name == HEAD else name
            parameter.normal_(0.0, std, generator=_generator(spec.training.seed, source))
            padding = spec.model.config.get("pad_token_id")
            if source == EMBEDDING and padding is not None:
                parameter[padding] = 0.0


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _config(family: Family, spec: JobSpec) -> Any:
    try:
        config = family.config(**spec.model.config)
    except (StrictDataclassError, TypeError, ValueError) as error:
        cause = str(error).strip().splitlines()[-1].strip()
        raise InvalidConfig(f"model.config does not describe a {spec.model.family} model: {cause}") from error
    config._attn_implementation = "sdpa"
    return config
