"""Rotary positions: what a config says of them, and how far they reach.

max_position_embeddings limits learned positions, which are parameters. Rotary ones go on beyond it, and a table
(rope_scaling, in newer files rope_parameters) may stretch them by a factor. So longer sequences are no error; a job
says it in a line where nothing stretches the positions that far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from swarm.errors import InvalidConfig
from swarm.job.families import FAMILIES, Family
from swarm.job.spec import JobSpec

KINDS_OF_LAYER = ("full_attention", "sliding_attention")
TABLES = ("rope_scaling", "rope_parameters")  # the library takes the first one that is there
# By type, the keys without which the library cannot compute frequencies.
_NEEDED: dict[Any, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_NUMBERS = (
    *("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor"),
)
_NUMBERS_OR_0 = ("mscale", "mscale_all_dim")
_FROM_ORIGINAL = ("yarn", "llama3", "longrope")  # stretched from original_max_position_embeddings on


def check_rope(where: str, family: Family, given: Mapping[str, Any]) -> None:
    """InvalidConfig if the tables in a config describe no rotary positions; `where` is what the config is called.

    `given` has the common names of the fields, checked by themselves, or a table alone. Nothing is checked for a model
    without rotary positions, which does not use them.
    """
    if family.learns_positions:
        return
    for key in TABLES:
        table = given.get(key)
        if table is None or (key == "rope_scaling" and not table):
            continue
        if not isinstance(table, dict):
            raise InvalidConfig(f"{where} has {key} = {table!r}, which should be a table", hint="leave it out")
        if kinds := [kind for kind in table if kind in KINDS_OF_LAYER]:
            raise InvalidConfig(
                f"{where} has {key}.{kinds[0]}: this family has one table for all layers", hint="give its keys alone"
            )
        _check_table(where, key, table, family, given)


def _check_table(where: str, key: str, table: Mapping[str, Any], family: Family, given: Mapping[str, Any]) -> None:
    kind = _kind(table)
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise InvalidConfig(
            f"{where} has {key} of the type {kind!r}, which Transformers does not know",
            hint=f"it knows {', '.join(_NEEDED)}",
        )
    for needed in _NEEDED[kind]:
        if table.get(needed) is None:
            raise InvalidConfig(f"{where} has {key} of the type {kind} without {needed}", hint=f"add {needed}")
    for name in (*_NUMBERS, *_NUMBERS_OR_0):
        value, least = table.get(name), "of at least 0" if name in _NUMBERS_OR_0 else "above 0"
        if value is not None and not (_is_number(value) and (value > 0 or (value == 0 and name in _NUMBERS_OR_0))):
            raise InvalidConfig(
                f"{where} has {key}.{name} = {value!r}, which should be a number {least}", hint="correct it"
            )
    base = table.get("rope_theta") or given.get("rope_theta", given.get("rotary_emb_base"))
    original = table.get("original_max_position_embeddings") or given.get("max_position_embeddings")
    if (kind, 1) in (("yarn", base), ("longrope", original)):
        divisor = "rope_theta" if kind == "yarn" else "original_max_position_embeddings"
        raise InvalidConfig(f"{where} has {divisor} = 1, by whose logarithm {kind} divides", hint="use more than 1")
    if kind in ("default", "proportional"):
        return
    share = table.get("partial_rotary_factor", given.get("partial_rotary_factor", 1))
    if "rotary_pct" not in family.fields and share not in (None, 1):
        raise InvalidConfig(
            f"{where} has partial_rotary_factor = {share!r}: a model of this family turns whole heads",
            hint="leave it out",
        )
    if "hidden_size" not in given:  # a job's table alone; it is checked again beside its model
        return
    channels = _channels(family, table, given)
    if kind == "dynamic" and channels == 2:
        raise InvalidConfig(
            f"{where} has {key} of the type dynamic, and 2 rotary channels of a head", hint="it needs at least 4"
        )
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        _check_factors(f"{where} has {key}.{name}", table[name], (channels + 1) // 2)


def _check_factors(what: str, factors: Any, count: int) -> None:
    if not isinstance(factors, list) or not all(_is_number(factor) and factor > 0 for factor in factors):
        raise InvalidConfig(f"{what}, which should be a list of numbers above 0", hint="correct it")
    if len(factors) not in (1, count):  # the library takes one for all
        raise InvalidConfig(
            f"{what} with {len(factors)} numbers, and a head has {count} pairs of rotary channels",
            hint=f"give {count}",
        )


def _channels(family: Family, table: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """How many channels of a head rotary positions turn."""
    head = given.get("head_dim") if "head_dim" in family.fields else None
    head = head or family.head_dim or given["hidden_size"] // given["num_attention_heads"]
    if "rotary_pct" not in family.fields:
        return int(head)
    share = table.get("partial_rotary_factor") or given.get("rotary_pct", family.fields["rotary_pct"][1])
    return int(head * share)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(table: Mapping[str, Any]) -> Any:
    return table.get("rope_type", table.get("type", "default"))


def own_positions(where: str, family: Family, config: dict[str, Any]) -> None:
    """Turn the table of a model from scratch into the library's own; InvalidConfig if it is none.

    The base of the positions is the table's, else the field's, and both say the same afterwards.
    """
    given = [key for key in TABLES if config.get(key)]
    if len(given) > 1:
        raise InvalidConfig(f"{where} has rope_scaling and rope_parameters", hint="give one of the two")
    check_rope(where, family, config)
    table = dict(config[given[0]]) if given else {}
    for key in TABLES:
        config.pop(key, None)
    if table.get("partial_rotary_factor") not in (None, config.get("rotary_pct", 1)):
        raise InvalidConfig(f"{where} has a partial_rotary_factor in its table of positions", hint="set rotary_pct")
    if table:
        base = "rope_theta" if "rope_theta" in family.fields else "rotary_emb_base"
        config[base] = table.setdefault("rope_theta", config[base])
        config["rope_parameters"] = {"rope_type": _kind(table)} | {key: table[key] for key in table if key != "type"}


def keep_positions(config: dict[str, Any], wanted: Mapping[str, Any], published: Mapping[str, Any]) -> None:
    """Put a job's own keys (`wanted`) into `config`, a config.json (`published`) with them, as one table of positions.

    The table keeps what the weights were made with: the base of the positions, and how far they reached before.
    """
    before = published.get("rope_scaling") or published.get("rope_parameters") or {}
    given = wanted.keys() & set(TABLES)
    now = dict((wanted.get("rope_scaling") or wanted.get("rope_parameters") or {}) if given else before)
    if before.get("rope_theta") is not None:
        now.setdefault("rope_theta", before["rope_theta"])
    if _kind(now) in _FROM_ORIGINAL and published.get("max_position_embeddings"):
        original = before.get("original_max_position_embeddings") or published["max_position_embeddings"]
        now.setdefault("original_max_position_embeddings", original)
    for key in TABLES:
        config.pop(key, None)
    if now:
        config["rope_parameters"] = {"rope_type": _kind(now)} | {key: now[key] for key in now if key != "type"}


def position_remarks(spec: JobSpec) -> Iterator[str]:
    """A line if sequences are longer than the model's rotary positions are meant for; `spec` is resolved."""
    config, length = spec.model.config, spec.data.sequence_length
    most = config.get("max_position_embeddings")
    if FAMILIES[spec.model.family].learns_positions or not isinstance(most, int):
        return
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, factor = _kind(table), table.get("factor")
    if kind in ("default", "proportional"):
        if length > most:
            yield (
                f"data.sequence_length = {length} is more than max_position_embeddings = {most}: without rope_scaling "
                "the rotary positions beyond are new to the model"
            )
        return
    reach = most
    if isinstance(factor, int | float):
        scaled = int(factor * (table.get("original_max_position_embeddings") or most))
        reach = max(most, scaled) if kind == "longrope" else scaled
    if length > reach:
        yield f"data.sequence_length = {length} is more than the {reach} positions to which {kind} scaling reaches"
