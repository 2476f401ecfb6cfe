"""A job's model.config: filled, checked, and written under the family's own names.

Job files use common names (hidden_size); the family's own (n_embd) are understood too. Keys that a job file leaves out
have the family's default, or follow from its data and tokenizer. No torch. Decision: docs/decisions/018.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

from swarm.errors import InvalidConfig
from swarm.job.families import DROPOUTS, FAMILIES, Family, Fields
from swarm.job.positions import TABLES, check_rope, keep_positions, own_positions
from swarm.job.published import check_published, is_of
from swarm.job.spec import JobSpec
from swarm.limits import LAYERS_MAX

_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_SEE = "see: swarm submit --example"


NUMBER_MAX = (1 << 31) - 1  # of a whole number in a config
ENTRIES_MAX = 10_000  # of a list or table in a config
_SIZES_MAX = {"num_labels": ENTRIES_MAX} | dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS_MAX)


def hugging_face_config(spec: JobSpec) -> dict[str, Any]:
    """The filled model.config under the names of the family's own config class, as in its config.json.

    Special tokens that a job from scratch does not name are set to none: some families would otherwise take an
    ordinary byte for padding.
    """
    names = FAMILIES[spec.model.family].own_names
    config = {names.get(key, key): value for key, value in spec.model.config.items()}
    unknown = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return config if spec.model.id else unknown | config


def check_sizes(config: dict[str, Any]) -> None:
    """InvalidConfig if a number in a model's config is none, or could make the library build something of absurd size.

    A config.json decides the whole architecture, so fields that we do not know reach the library. Its author may be
    anybody: a million labels are a million names in every stage server.
    """
    for key, value in config.items():
        most = _SIZES_MAX.get(key, NUMBER_MAX)
        if isinstance(value, int) and not -NUMBER_MAX <= value <= most:
            raise InvalidConfig(f"model.config.{key} = {value} is more than {most}", hint="is the config.json damaged?")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidConfig(f"model.config.{key} = {value} is no finite number", hint="correct it")
        if isinstance(value, dict):
            check_sizes(value)
        if isinstance(value, list | dict) and len(value) > ENTRIES_MAX:
            raise InvalidConfig(f"model.config.{key} has {len(value)} entries, more than {ENTRIES_MAX}")


def common_name(family: str, field_name: str) -> str:
    """The name that a field of model.config has in a resolved spec: hidden_size for GPT-2's n_embd."""
    own_names = FAMILIES[family].own_names
    return next((name for name, own in own_names.items() if own == field_name), field_name)


def filled_config(spec: JobSpec, vocabulary_size: int, end_of_text: int) -> dict[str, Any]:
    """The family's config, complete; InvalidConfig names the field."""
    family = FAMILIES[spec.model.family]
    check_sizes(spec.model.config)
    given = _common_names(family, spec.model.config)
    if spec.model.id:
        return _pretrained_config(spec, family, given, vocabulary_size)
    positions = () if family.learns_positions else TABLES
    for key, value in given.items():
        if key not in positions:
            _check_field(family.fields, key, value)
    config = {key: default for key, (_, default) in family.fields.items() if default is not None} | given
    if end_of_text >= 0:
        config = {"bos_token_id": end_of_text, "eos_token_id": end_of_text} | config
    _check_vocabulary(spec, config, vocabulary_size)
    length = spec.data.sequence_length
    config.setdefault("max_position_embeddings", max(family.least_positions, length))
    if family.learns_positions and config["max_position_embeddings"] < length:
        raise InvalidConfig(
            f"model.config.max_position_embeddings = {config['max_position_embeddings']} is less than "
            f"data.sequence_length = {length}",
            hint=f"use at least {length}, or leave max_position_embeddings out",
        )
    _check_heads(family, config)
    if not family.learns_positions:
        own_positions("model.config", family, config)
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


def _pretrained_config(spec: JobSpec, family: Family, given: dict[str, Any], vocabulary_size: int) -> dict[str, Any]:
    """All that a config.json says, checked in what can be known without the library."""
    where = f'the config.json of model.id = "{spec.model.id}"'
    needed = [*_SHAPE, *(key for key in ("intermediate_size", "num_key_value_heads") if key in family.fields)]
    if family.learns_positions:
        needed.append("max_position_embeddings")
    names = family.own_names
    for key in needed:
        value = given.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            if key == "num_key_value_heads" and value is None and family.may_omit_pairs:
                continue
            raise InvalidConfig(
                f"{where} has {names.get(key, key)} = {value!r}, which should be a whole number of at least 1",
                hint=f"is it a {spec.model.family} model for text?",
            )
    check_published(where, family, given)
    defaults = {
        key: family.dropout if key in DROPOUTS else default
        for key, (_, default) in family.fields.items()
        if key in (*DROPOUTS, "tie_word_embeddings", "initializer_range")
    }
    config = defaults | given
    if config["vocab_size"] < vocabulary_size:
        raise InvalidConfig(
            f"{where} has vocab_size = {config['vocab_size']}, texts can have {vocabulary_size} tokens by "
            f"{tokenizer_text(spec)}",
            hint="use the model's own tokenizer: leave model.tokenizer out"
            if spec.model.tokenizer
            else "the tokenizer and the weights are of different models: copy the whole folder again",
        )
    length, most = spec.data.sequence_length, config.get("max_position_embeddings")
    if family.learns_positions and isinstance(most, int) and most < length:
        raise InvalidConfig(
            f"{where} allows {most} positions, data.sequence_length is {length}",
            hint=f"lower data.sequence_length to at most {most}",
        )
    _check_dropout(config)
    return config


def tokenizer_text(spec: JobSpec) -> str:
    """What a person calls the job's tokenizer."""
    if spec.model.tokenizer or not spec.model.id:
        return f'the tokenizer "{spec.model.tokenizer or "byte"}"'
    return f'the tokenizer of model.id = "{spec.model.id}"'


def _check_dropout(config: dict[str, Any]) -> None:
    for key, value in config.items():
        if key in DROPOUTS and not (isinstance(value, int | float) and 0 <= value < 1):
            raise InvalidConfig(
                f"model.config.{key} = {value!r} should be a share of at least 0 and less than 1", hint="leave it out"
            )


def with_overrides(family_name: str, given: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    """The model's config.json (`published`) with a job file's model.config (`given`); InvalidConfig if they contradict.

    Only dropout may differ, and how far rotary positions reach.
    """
    family = FAMILIES[family_name]
    same, wanted = _common_names(family, published), _common_names(family, given)
    free = {key for key in family.fields if key in DROPOUTS}
    positions = set() if family.learns_positions else {*TABLES, "max_position_embeddings"}
    for key, value in wanted.items():
        if key in family.fields and key in (*DROPOUTS, *positions):
            _check_field(family.fields, key, value)
        elif key in positions:
            check_rope("model.config of the job", family, {key: value})
        elif key not in same or same[key] != value:
            raise InvalidConfig(
                f"model.config.{key} cannot be set beside model.id: the model's own config.json decides it",
                hint=f"remove it; only {', '.join(sorted(free | positions))} may differ, or remove model.id to train a "
                "model from scratch",
            )
    config = {**published, **given}
    if wanted.keys() & positions:
        keep_positions(config, wanted, published)
    return config


def _common_names(family: Family, given: dict[str, Any]) -> dict[str, Any]:
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


def _check_heads(family: Family, config: dict[str, Any]) -> None:
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


def _check_field(fields: Fields, key: str, value: object) -> None:
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
        raise InvalidConfig(f"unknown key model.config.{key}", hint=hint)
    kind = fields[key][0]
    if not is_of(kind, value):
        raise InvalidConfig(f"model.config.{key} = {value!r} should be of type {kind.__name__}", hint=_SEE)
    smallest = 0 if key.endswith(("_token_id", "_window_layers")) or kind is float else 1
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < smallest:
        raise InvalidConfig(f"model.config.{key} = {value} should be at least {smallest}", hint=_SEE)
