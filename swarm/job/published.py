"""What a model's config.json says of its family's fields, checked without the library.

The library's config classes take null, a whole number for a share, or a number as text in some fields and not in
others. A stage server would hear of it when it builds the model; `swarm submit` says it before anything is sent.
tests/unit/swarm/job/test_published.py holds these rules against the library's own verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.errors import InvalidConfig
from swarm.job.families import DROPOUTS, Family
from swarm.job.positions import KINDS_OF_LAYER, check_rope

_ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh"),
    *("gelu_accurate", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6"),
    *("sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NULL = (*_TOKENS, *DROPOUTS, "num_key_value_heads", "n_inner", "sliding_window")
_WHOLE_TOO = (*DROPOUTS, "rope_theta", "rotary_emb_base", "rotary_pct")  # the other shares must have a point
_KIND_TEXTS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def check_published(where: str, family: Family, given: Mapping[str, Any]) -> None:
    """InvalidConfig if a field has a type or value with which no model of the family can be built.

    `given` is a config.json under the common names of its fields, `where` is what it is called.
    """
    for key, (kind, _) in family.fields.items():
        if key in given:
            _check_field(where, family, key, kind, given[key])
    _check_use(where, given)
    _check_kinds(where, family, given)
    _check_padding(where, family, given)
    _check_heads(where, family, given)
    check_rope(where, family, given)


def _check_field(where: str, family: Family, key: str, kind: type, value: Any) -> None:
    own, text = family.own_names.get(key, key), _KIND_TEXTS[kind]
    if value is None:
        if key not in _NULL and not key.endswith("softcapping") and not (key == "head_dim" and family.head_dim is None):
            raise InvalidConfig(f"{where} has {own} = null, which should be {text}", hint="correct it, or leave it out")
        return
    if key == "eos_token_id" and isinstance(value, list) and all(is_of(int, token) for token in value):
        return
    if not is_of(kind, value):
        number = _number(value) if kind in (int, float) else None
        hint = f"write {own} = {number!r} there, without quotation marks" if number is not None else "correct it"
        raise InvalidConfig(f"{where} has {own} = {value!r}, which should be {text}", hint=hint)
    if kind is float and isinstance(value, int) and key not in _WHOLE_TOO:
        raise InvalidConfig(
            f"{where} has {own} = {value}, which Transformers takes with a point only", hint=f"write {float(value)}"
        )
    least = 0 if key == "max_window_layers" else 1
    if kind is int and key not in _TOKENS and value < least:
        raise InvalidConfig(f"{where} has {own} = {value}, which should be at least {least}", hint="correct it")
    if key == "initializer_range" and not 0 <= value <= 1:
        raise InvalidConfig(f"{where} has {own} = {value}, which should be between 0 and 1", hint="correct it")
    if key == family.activation and value not in _ACTIVATIONS:
        raise InvalidConfig(
            f"{where} has {own} = {value!r}, which Transformers does not know",
            hint=f"it knows {', '.join(_ACTIVATIONS)}",
        )
    if key == "rotary_pct" and not 0 < value <= 1:
        raise InvalidConfig(f"{where} has {own} = {value}, which should be a share of a head", hint="correct it")


def _check_use(where: str, given: Mapping[str, Any]) -> None:
    """Fields of every model, which say nothing of its shape and can still keep it from being built."""
    if "use_cache" in given and not isinstance(given["use_cache"], bool):
        raise InvalidConfig(f"{where} has use_cache = {given['use_cache']!r}, which should be true or false")
    labels = given.get("id2label")
    if labels is not None and not (isinstance(labels, dict) and all(str(key).isdecimal() for key in labels)):
        raise InvalidConfig(f"{where} has an id2label that is no table of numbers", hint="leave it out")
    if given.get("add_cross_attention"):
        raise InvalidConfig(f"{where} has add_cross_attention = true, which a model for text has not")


def _check_kinds(where: str, family: Family, given: Mapping[str, Any]) -> None:
    layers, kinds = given.get("num_hidden_layers"), given.get("layer_types")
    if kinds is None:
        if family.alternates and given.get("sliding_window", 1) is None:
            raise InvalidConfig(f"{where} has no sliding_window, which every other layer of its family needs")
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise InvalidConfig(f"{where} has {layers} layers and layer_types of {count}", hint="give one for each layer")
    unknown = next((kind for kind in kinds if kind not in KINDS_OF_LAYER), None)
    if unknown is not None:
        raise InvalidConfig(
            f"{where} has {unknown!r} among layer_types, which this version cannot train",
            hint=f"it can train {', '.join(KINDS_OF_LAYER)}",
        )
    if "sliding_attention" not in kinds or "sliding_window" not in family.fields:
        return
    key = "use_sliding_window" if "use_sliding_window" in family.fields else "sliding_window"
    if given.get("sliding_window", 1) is None or not given.get(key, key == "sliding_window"):
        raise InvalidConfig(f"{where} has sliding_attention among layer_types, but {key} is off", hint="correct it")


def _check_padding(where: str, family: Family, given: Mapping[str, Any]) -> None:
    padding, size = given.get("pad_token_id"), given["vocab_size"]
    if padding is not None and family.padded and not -size <= padding < size:
        raise InvalidConfig(
            f"{where} has pad_token_id = {padding}, which is no row of the {size} that vocab_size says",
            hint="write null there: padding is not trained on",
        )


def _check_heads(where: str, family: Family, given: Mapping[str, Any]) -> None:
    width, heads, pairs = given["hidden_size"], given["num_attention_heads"], given.get("num_key_value_heads")
    own = given.get("head_dim", family.head_dim) if "head_dim" in family.fields else None
    # The library insists for some even where head_dim is given.
    if width % heads and (own is None or family.whole_heads):
        raise InvalidConfig(f"{where} has hidden_size = {width}, no multiple of its {heads} heads", hint="correct it")
    if pairs and "num_key_value_heads" in family.fields and heads % pairs:
        raise InvalidConfig(f"{where} has {heads} heads, no multiple of num_key_value_heads = {pairs}")


def is_of(kind: type, value: object) -> bool:
    """Whether a value is of a kind; a whole number is a number too, and true is none."""
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))


def _number(value: object) -> int | float | None:
    """The number that a text spells."""
    if not isinstance(value, str):
        return None
    try:
        return int(value) if value.strip().lstrip("-").isdecimal() else float(value)
    except ValueError:
        return None
