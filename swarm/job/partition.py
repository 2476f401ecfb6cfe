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
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import InvalidConfig
from swarm.job.spec import JobSpec, parse_job
from swarm.types import UnitName

TIED_UNIT = UnitName("tied")
END_OF_TEXT = 256  # token id of the byte tokenizer's end of text

# "auto" microbatches: at least this many per step, so that a pipeline has work for its stages whatever their number
# (the size must not depend on the number of stages: another shape gives other bits), of at most so many tokens.
AUTO_MICROBATCHES = 16
AUTO_MICROBATCH_TOKENS = 8192
# What a Route may carry as token ids and targets of 4 bytes each (swarm.rpc refuses longer messages).
MICROBATCH_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model.config may say for one family, and what follows from it; swarm.model.families has the classes.

    `fields` are those of the Hugging Face config that shape the model: type and default (None: derived, or absent).
    Dropout is 0 here, whatever the library's default; a pretrained config.json that does not name its dropout has the
    library's, `dropout`.
    """

    fields: dict[str, tuple[type, Any]]
    activation: str = "hidden_act"  # the field that names it
    positions: int = 2048  # max_position_embeddings unless the sequences are longer
    mlp_matrices: int = 3  # gate, up, down; or up and down
    own_names: dict[str, str] = field(default_factory=dict)  # where the family's config.json differs from all others
    head_dim: int | None = None  # the library's default; None: width / heads
    dropout: float = 0.0


_BASE: dict[str, tuple[type, Any]] = {
    "vocab_size": (int, None),
    "hidden_size": (int, 4096),
    "num_hidden_layers": (int, None),
    "num_attention_heads": (int, 32),
    "max_position_embeddings": (int, None),
    "initializer_range": (float, 0.02),
    "tie_word_embeddings": (bool, False),
    "bos_token_id": (int, None),  # both: the tokenizer's end of text
    "eos_token_id": (int, None),
    "pad_token_id": (int, None),
}
_GATED: dict[str, tuple[type, Any]] = _BASE | {
    "intermediate_size": (int, 11008),
    "num_key_value_heads": (int, None),
    "hidden_act": (str, "silu"),
    "rms_norm_eps": (float, 1e-6),
    "rope_theta": (float, 10000.0),
    "attention_dropout": (float, 0.0),
}
_WINDOW: dict[str, tuple[type, Any]] = {"sliding_window": (int, 4096)}
_QWEN2: dict[str, tuple[type, Any]] = (
    _GATED
    | _WINDOW
    | {"intermediate_size": (int, 22016), "use_sliding_window": (bool, False), "max_window_layers": (int, 28)}
)
_GEMMA2: dict[str, tuple[type, Any]] = (
    {key: value for key, value in _GATED.items() if key != "hidden_act"}
    | _WINDOW
    | {
        "hidden_size": (int, 2304),
        "intermediate_size": (int, 9216),
        "num_attention_heads": (int, 8),
        "head_dim": (int, None),
        "hidden_activation": (str, "gelu_pytorch_tanh"),
        "attention_bias": (bool, False),
        "tie_word_embeddings": (bool, True),
        "query_pre_attn_scalar": (int, None),
        "attn_logit_softcapping": (float, 50.0),
        "final_logit_softcapping": (float, 30.0),
    }
)
_GPT2: dict[str, tuple[type, Any]] = _BASE | {
    "hidden_size": (int, 768),
    "num_attention_heads": (int, 12),
    "n_inner": (int, None),
    "activation_function": (str, "gelu_new"),
    "layer_norm_epsilon": (float, 1e-5),
    "scale_attn_weights": (bool, True),
    "scale_attn_by_inverse_layer_idx": (bool, False),
    "resid_pdrop": (float, 0.0),
    "embd_pdrop": (float, 0.0),
    "attn_pdrop": (float, 0.0),
    "tie_word_embeddings": (bool, True),
}
_GPT_NEOX: dict[str, tuple[type, Any]] = _BASE | {
    "hidden_size": (int, 6144),
    "intermediate_size": (int, 24576),
    "num_attention_heads": (int, 64),
    "hidden_act": (str, "gelu"),
    "layer_norm_eps": (float, 1e-5),
    "rotary_pct": (float, 0.25),
    "rotary_emb_base": (float, 10000.0),
    "use_parallel_residual": (bool, True),
    "attention_bias": (bool, True),
    "attention_dropout": (float, 0.0),
    "hidden_dropout": (float, 0.0),
}
_FAMILIES = {
    "llama": _Family(_GATED | {"head_dim": (int, None), "attention_bias": (bool, False), "mlp_bias": (bool, False)}),
    "mistral": _Family(_GATED | _WINDOW | {"intermediate_size": (int, 14336), "head_dim": (int, None)}),
    "qwen2": _Family(_QWEN2),
    "qwen3": _Family(_QWEN2 | {"head_dim": (int, None), "attention_bias": (bool, False)}, head_dim=128),
    "gemma2": _Family(_GEMMA2, activation="hidden_activation", head_dim=256),
    "gpt2": _Family(
        _GPT2,
        activation="activation_function",
        positions=1024,
        mlp_matrices=2,
        dropout=0.1,
        own_names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
    "gpt_neox": _Family(_GPT_NEOX, mlp_matrices=2),
}
FAMILY_NAMES = tuple(_FAMILIES)
_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
_SEE = "see: swarm submit --example"


def resolve(spec: JobSpec, *, vocabulary_size: int, stages_if_auto: int, end_of_text: int = END_OF_TEXT) -> JobSpec:
    """The spec with every "auto" but pipeline.max_in_flight replaced and the model's config filled and checked.

    `vocabulary_size` and `end_of_text` (-1: unknown) are the tokenizer's. Resolving a resolved spec changes nothing.
    Raises InvalidConfig if the config has an unknown field, or one that contradicts another, the data or the tokenizer.
    """
    spec = _with_family(spec)
    values = spec.model_dump()
    values["model"]["config"] = _model_config(spec, vocabulary_size, end_of_text)
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


def _with_family(spec: JobSpec) -> JobSpec:
    """The spec with a family, and with the start that a model without an id has."""
    model = spec.model
    if model.id:
        if model.family == "auto":
            raise InvalidConfig(f'model.id = "{model.id}" was not looked up: its config.json decides the family')
        return spec
    family = "llama" if model.family == "auto" else model.family
    return spec.model_copy(update={"model": model.model_copy(update={"family": family, "init": "random"})})


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
    """Multiply-adds per token of one decoder layer and of the head, forward; `spec` needs a filled model.config.

    Layers count as equal: a sliding window, which makes some layers of some families cheaper, is left out.
    """
    config, widths = spec.model.config, layer_widths(spec)
    scores = widths.queries * spec.data.sequence_length  # twice, over half of the positions (causal)
    return widths.matrices + scores, config["hidden_size"] * config["vocab_size"]


@dataclass(frozen=True, slots=True)
class LayerWidths:
    """Sizes of one decoder layer: elements of its matrices, and the widths of what it computes per token."""

    matrices: int
    queries: int
    attention: int  # queries, keys and values
    inner: int  # of the MLP


def layer_widths(spec: JobSpec) -> LayerWidths:
    """The sizes of the model's decoder layers; `spec` needs a filled model.config."""
    config = spec.model.config
    width, heads = config["hidden_size"], config["num_attention_heads"]
    family = _FAMILIES[spec.model.family]
    # A config.json says null where the library derives a field.
    head_width = config.get("head_dim") or family.head_dim or width // heads
    pairs = config.get("num_key_value_heads") or heads
    inner = config.get("n_inner") or config.get("intermediate_size") or 4 * width
    return LayerWidths(
        matrices=2 * width * head_width * (heads + pairs) + family.mlp_matrices * width * inner,
        queries=heads * head_width,
        attention=head_width * (heads + 2 * pairs),
        inner=inner,
    )


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


def hugging_face_config(spec: JobSpec) -> dict[str, Any]:
    """The filled model.config under the names of the family's own config class, as in its config.json.

    From scratch, what the job does not say of special tokens is none: some families would otherwise call an ordinary
    byte padding.
    """
    names = _FAMILIES[spec.model.family].own_names
    config = {names.get(key, key): value for key, value in spec.model.config.items()}
    unknown = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return config if spec.model.id else unknown | config


def common_name(family: str, field_name: str) -> str:
    """The name that a field of model.config has in a resolved spec: hidden_size for GPT-2's n_embd."""
    own_names = _FAMILIES[family].own_names
    return next((name for name, own in own_names.items() if own == field_name), field_name)


def _model_config(spec: JobSpec, vocabulary_size: int, end_of_text: int) -> dict[str, Any]:
    """The family's config, complete; InvalidConfig names the field."""
    family = _FAMILIES[spec.model.family]
    given = _common_names(family, spec.model.config)
    if spec.model.id:
        return _pretrained_config(spec, family, given, vocabulary_size)
    for key, value in given.items():
        _check_field(family.fields, key, value)
    config = {key: default for key, (_, default) in family.fields.items() if default is not None} | given
    if end_of_text >= 0:
        config = {"bos_token_id": end_of_text, "eos_token_id": end_of_text} | config
    _check_vocabulary(spec, config, vocabulary_size)
    length = spec.data.sequence_length
    config.setdefault("max_position_embeddings", max(family.positions, length))
    if config["max_position_embeddings"] < length:
        raise InvalidConfig(
            f"model.config.max_position_embeddings = {config['max_position_embeddings']} is less than "
            f"data.sequence_length = {length}",
            hint=f"use at least {length}, or leave max_position_embeddings out",
        )
    _check_heads(family, config)
    if "n_inner" in family.fields:
        config.setdefault("n_inner", 4 * config["hidden_size"])
    if config[family.activation] not in _ACTIVATIONS:
        raise InvalidConfig(
            f"model.config.{family.activation} = {config[family.activation]!r} is unknown",
            hint=f"choose {', '.join(_ACTIVATIONS)}",
        )
    _check_dropout(config)
    for key, value in config.items():
        if key.endswith("softcapping") and value == 0:
            raise InvalidConfig(f"model.config.{key} must be more than 0: logits are divided by it", hint=_SEE)
    return config


# What a stage cannot be built or cut without; a config.json that lacks one is none of a whole model.
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def _pretrained_config(spec: JobSpec, family: _Family, given: dict[str, Any], vocabulary_size: int) -> dict[str, Any]:
    """All that a config.json says, checked as far as the cut needs it; what else it means is the library's to say."""
    where = f'the config.json of model.id = "{spec.model.id}"'
    needed = [*_SHAPE, *(key for key in ("intermediate_size", "num_key_value_heads") if key in family.fields)]
    if "n_inner" in family.fields:
        needed.append("max_position_embeddings")  # learned positions have a shape
    names = family.own_names
    for key in needed:
        value = given.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            if key == "num_key_value_heads" and value is None and spec.model.family == "llama":
                continue
            raise InvalidConfig(
                f"{where} has {names.get(key, key)} = {value!r}, which should be a whole number of at least 1",
                hint=f"is it a {spec.model.family} model for text?",
            )
    defaults = {
        key: family.dropout if key in DROPOUTS else default
        for key, (_, default) in family.fields.items()
        if key in (*DROPOUTS, "tie_word_embeddings", "initializer_range")
    }
    config = defaults | given
    if config["vocab_size"] < vocabulary_size:
        raise InvalidConfig(
            f"{where} has vocab_size = {config['vocab_size']}, the tokenizer ({spec.model.tokenizer}) has "
            f"{vocabulary_size} tokens",
            hint="use the model's own tokenizer",
        )
    length, most = spec.data.sequence_length, config.get("max_position_embeddings")
    if isinstance(most, int) and most < length:
        raise InvalidConfig(
            f"{where} allows {most} positions, data.sequence_length is {length}",
            hint=f"lower data.sequence_length to at most {most}",
        )
    _check_dropout(config)
    return config


def _check_dropout(config: dict[str, Any]) -> None:
    for key, value in config.items():
        if key in DROPOUTS and not (isinstance(value, int | float) and 0 <= value < 1):
            raise InvalidConfig(
                f"model.config.{key} = {value!r} should be a share of at least 0 and less than 1", hint="leave it out"
            )


def check_overrides(family_name: str, given: dict[str, Any], published: dict[str, Any]) -> None:
    """InvalidConfig if `given` (the job file's model.config) would make another model of `published` (a config.json).

    Only dropout may differ.
    """
    family = _FAMILIES[family_name]
    same = _common_names(family, published)
    for key, value in _common_names(family, given).items():
        if key in DROPOUTS and key in family.fields:
            _check_field(family.fields, key, value)
        elif key not in same or same[key] != value:
            allowed = ", ".join(name for name in family.fields if name in DROPOUTS)
            raise InvalidConfig(
                f"model.config.{key} cannot be set beside model.id: the model's own config.json decides it",
                hint=f"remove it; only {allowed} may differ, or remove model.id to train a model from scratch",
            )


def _common_names(family: _Family, given: dict[str, Any]) -> dict[str, Any]:
    """A family's own names, such as n_embd, replaced by those of all the others, such as hidden_size."""
    common = {own: name for name, own in family.own_names.items()}
    for own, name in common.items():
        if own in given and name in given:
            raise InvalidConfig(f"model.config.{own} and model.config.{name} are the same", hint="give one of the two")
    return {common.get(key, key): value for key, value in given.items()}


def _check_vocabulary(spec: JobSpec, config: dict[str, Any], vocabulary_size: int) -> None:
    config.setdefault("vocab_size", vocabulary_size)
    if config["vocab_size"] < vocabulary_size:
        raise InvalidConfig(
            f"model.config.vocab_size = {config['vocab_size']} is less than the {vocabulary_size} tokens "
            f"of the tokenizer ({spec.model.tokenizer or 'byte'})",
            hint=f"use at least {vocabulary_size}, or leave vocab_size out",
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key, 0) >= config["vocab_size"]:
            raise InvalidConfig(
                f"model.config.{key} = {config[key]} is no token of vocab_size = {config['vocab_size']}",
                hint="leave it out",
            )


def _check_heads(family: _Family, config: dict[str, Any]) -> None:
    """Fills what follows from width and heads, and refuses what does not fit."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if "num_key_value_heads" in family.fields:
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
    head_width = config.get("head_dim", width // heads)
    if "head_dim" in family.fields:
        config["head_dim"] = head_width
    if "query_pre_attn_scalar" in family.fields:
        config.setdefault("query_pre_attn_scalar", head_width)
    if "rope_theta" in family.fields and head_width % 2:
        raise InvalidConfig(
            f"model.config.head_dim = {head_width} is odd; rotary positions need pairs",
            hint="change hidden_size or num_attention_heads",
        )
    if "rotary_pct" in family.fields:
        rotated = int(head_width * config["rotary_pct"])
        if rotated < 2 or rotated % 2 or rotated > head_width:
            raise InvalidConfig(
                f"model.config.rotary_pct = {config['rotary_pct']} of a head's {head_width} channels is {rotated}; "
                "rotary positions need pairs",
                hint="choose a share that gives an even number of channels, such as 0.5 or 1.0",
            )


def _check_field(fields: dict[str, tuple[type, Any]], key: str, value: object) -> None:
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
        raise InvalidConfig(f"unknown key model.config.{key}", hint=hint)
    kind = fields[key][0]
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise InvalidConfig(f"model.config.{key} = {value!r} should be of type {kind.__name__}", hint=_SEE)
    smallest = 0 if key.endswith(("_token_id", "_window_layers")) or kind is float else 1
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < smallest:
        raise InvalidConfig(f"model.config.{key} = {value} should be at least {smallest}", hint=_SEE)
