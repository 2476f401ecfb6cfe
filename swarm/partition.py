"""Where the model is cut: every "auto" of a job becomes a number, once, at submit.

    stage:      0            1                   S-1
            embedding
            layers       layers     ...      layers
                                             norm, head, loss

A stage's cost is counted in multiply-adds per token. The embedding costs nothing (it is a look-up), the head costs
vocabulary x width, so the last stage gets fewer layers when the vocabulary is large. No torch here: the client and the
scheduler resolve specs too.
"""

from __future__ import annotations

import difflib
from typing import Any

from swarm.config import JobSpec, parse_job
from swarm.errors import InvalidConfig
from swarm.types import UnitName

TIED_UNIT = UnitName("tied")
END_OF_TEXT = 256  # token id of the byte tokenizer's end of text

# "auto" microbatches: at least this many per step, so that a pipeline has work for its stages whatever their number
# (the size must not depend on the number of stages: another shape gives other bits), of at most so many tokens.
AUTO_MICROBATCHES = 16
AUTO_MICROBATCH_TOKENS = 8192
# What a Route may carry as token ids and targets of 4 bytes each (swarm.rpc refuses longer messages).
MICROBATCH_BYTES_MAX = 4 << 20

# Fields of Hugging Face's LlamaConfig that shape the model, with its defaults. None: derived, or absent.
_LLAMA: dict[str, tuple[type, Any]] = {
    "vocab_size": (int, None),
    "hidden_size": (int, 4096),
    "intermediate_size": (int, 11008),
    "num_hidden_layers": (int, None),
    "num_attention_heads": (int, 32),
    "num_key_value_heads": (int, None),
    "head_dim": (int, None),
    "hidden_act": (str, "silu"),
    "max_position_embeddings": (int, None),
    "initializer_range": (float, 0.02),
    "rms_norm_eps": (float, 1e-6),
    "tie_word_embeddings": (bool, False),
    "rope_theta": (float, 10000.0),
    "attention_bias": (bool, False),
    "attention_dropout": (float, 0.0),
    "mlp_bias": (bool, False),
    "bos_token_id": (int, END_OF_TEXT),
    "eos_token_id": (int, END_OF_TEXT),
    "pad_token_id": (int, None),
}
_FIELDS = {"llama": _LLAMA}
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_SEE = "see: swarm submit --example"


def resolve(spec: JobSpec, *, vocabulary_size: int, stages_if_auto: int) -> JobSpec:
    """The spec with every "auto" but pipeline.max_in_flight replaced and the model's config filled and checked.

    `vocabulary_size` is the tokenizer's. Resolving a resolved spec changes nothing. Raises InvalidConfig if the config
    has an unknown field, or one that contradicts another, the data or the tokenizer.
    """
    values = spec.model_dump()
    values["model"]["config"] = _model_config(spec, vocabulary_size)
    if spec.training.microbatch_sequences == "auto":
        values["training"]["microbatch_sequences"] = auto_microbatch(
            spec.training.global_batch_sequences, spec.data.sequence_length
        )
    filled = parse_job(values)
    if spec.pipeline.split != "auto":
        split = spec.pipeline.split
    else:
        stages = spec.pipeline.stages
        split = balanced_split(filled, min(stages_if_auto, spec.layers) if stages == "auto" else stages)
    values["pipeline"] |= {"split": split, "stages": len(split)}
    resolved = parse_job(values)
    _check_microbatch(resolved, len(split))
    return resolved


def _check_microbatch(spec: JobSpec, stages: int) -> None:
    """Token ids travel in one message to the first stage, targets to the last; both to one peer if it is the same."""
    size = spec.training.microbatch_sequences
    assert size != "auto", "resolved by now"
    most = MICROBATCH_BYTES_MAX // (4 if stages > 1 else 8)
    if size * spec.data.sequence_length > most:
        raise InvalidConfig(
            f"a microbatch of {size} sequences of {spec.data.sequence_length} tokens is more than {most} tokens",
            hint="lower training.microbatch_sequences or data.sequence_length",
        )


def balanced_split(spec: JobSpec, stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, so that the costliest stage costs as little as possible.

    Layers are equal, so handing them out one by one to the stage that would stay cheapest is optimal. `spec` needs a
    filled model.config. Ties go to the earlier stage.
    """
    layer, head = flops_per_token(spec)
    split = [1] * stages
    for _ in range(spec.layers - stages):
        cost = [(layers + 1) * layer + (head if stage == stages - 1 else 0) for stage, layers in enumerate(split)]
        split[cost.index(min(cost))] += 1
    return tuple(split)


def flops_per_token(spec: JobSpec) -> tuple[int, int]:
    """Multiply-adds per token of one decoder layer and of the head, forward; `spec` needs a filled model.config."""
    config = spec.model.config
    width, heads, head_width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    projections = 2 * width * head_width * (heads + config["num_key_value_heads"])
    scores = heads * head_width * spec.data.sequence_length  # twice, over half of the positions (causal)
    mlp = 3 * width * config["intermediate_size"]
    return projections + scores + mlp, width * config["vocab_size"]


def auto_microbatch(global_batch_sequences: int, sequence_length: int) -> int:
    """The largest divisor of the global batch that keeps microbatches many and small enough; at least 1."""
    largest = min(global_batch_sequences // AUTO_MICROBATCHES, AUTO_MICROBATCH_TOKENS // sequence_length, 4096)
    return max((size for size in range(1, largest + 1) if global_batch_sequences % size == 0), default=1)


def unit_names(stages: int, tied: bool) -> dict[UnitName, tuple[int, ...]]:
    """The units that are averaged and the stages whose replicas are members of each.

    Embedding and head of a model that ties them are a unit of their own: first and last stage, which may be one.
    """
    units: dict[UnitName, tuple[int, ...]] = {UnitName(f"stage-{stage}"): (stage,) for stage in range(stages)}
    if tied:
        units[TIED_UNIT] = (0,) if stages == 1 else (0, stages - 1)
    return units


def _model_config(spec: JobSpec, vocabulary_size: int) -> dict[str, Any]:
    """The family's config, complete; InvalidConfig names the field."""
    fields = _FIELDS[spec.model.family]
    given = spec.model.config
    for key, value in given.items():
        _check_field(fields, key, value)
    config = {key: default for key, (_, default) in fields.items() if default is not None} | given

    config.setdefault("vocab_size", vocabulary_size)
    if config["vocab_size"] < vocabulary_size:
        raise InvalidConfig(
            f"model.config.vocab_size = {config['vocab_size']} is less than the {vocabulary_size} tokens "
            f"of the tokenizer ({spec.model.tokenizer})",
            hint=f"use at least {vocabulary_size}, or leave vocab_size out",
        )
    length = spec.data.sequence_length
    config.setdefault("max_position_embeddings", max(2048, length))
    if config["max_position_embeddings"] < length:
        raise InvalidConfig(
            f"model.config.max_position_embeddings = {config['max_position_embeddings']} is less than "
            f"data.sequence_length = {length}",
            hint=f"use at least {length}, or leave max_position_embeddings out",
        )
    heads, width = config["num_attention_heads"], config["hidden_size"]
    config.setdefault("num_key_value_heads", heads)
    if heads % config["num_key_value_heads"]:
        raise InvalidConfig(
            f"model.config.num_key_value_heads = {config['num_key_value_heads']} does not divide "
            f"num_attention_heads = {heads}",
            hint="choose a divisor, or leave it out",
        )
    if width % heads:
        raise InvalidConfig(
            f"model.config.hidden_size = {width} is not a multiple of num_attention_heads = {heads}",
            hint="give both, for example hidden_size = 128 and num_attention_heads = 4",
        )
    config.setdefault("head_dim", width // heads)
    if config["head_dim"] % 2:
        raise InvalidConfig(
            f"model.config.head_dim = {config['head_dim']} is odd; rotary positions need pairs",
            hint="change hidden_size or num_attention_heads",
        )
    if config["hidden_act"] not in _ACTIVATIONS:
        raise InvalidConfig(
            f"model.config.hidden_act = {config['hidden_act']!r} is unknown", hint=f"choose {', '.join(_ACTIVATIONS)}"
        )
    if config["attention_dropout"] != 0:
        raise InvalidConfig("model.config.attention_dropout must be 0: dropout is not supported", hint="leave it out")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key, 0) >= config["vocab_size"]:
            raise InvalidConfig(
                f"model.config.{key} = {config[key]} is no token of vocab_size = {config['vocab_size']}",
                hint="leave it out",
            )
    return config


def _check_field(fields: dict[str, tuple[type, Any]], key: str, value: object) -> None:
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
        raise InvalidConfig(f"unknown key model.config.{key}", hint=hint)
    kind = fields[key][0]
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise InvalidConfig(f"model.config.{key} = {value!r} should be of type {kind.__name__}", hint=_SEE)
    smallest = 0 if key.endswith("_token_id") or kind is float else 1
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < smallest:
        raise InvalidConfig(f"model.config.{key} = {value} should be at least {smallest}", hint=_SEE)
