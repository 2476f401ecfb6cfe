"""Rotary positions: what a config says of them, and how far they reach.

max_position_embeddings limits learned positions, which are parameters. Rotary ones go on beyond it, and a table
(rope_scaling, in newer files rope_parameters) may stretch them by a factor. So longer sequences are no error; a job
says it in a line where nothing stretches the positions that far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swarm.errors import InvalidConfig
from swarm.job.families import FAMILIES
from swarm.job.spec import JobSpec

KINDS_OF_LAYER = ("full_attention", "sliding_attention")
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
_NUMBERS = ("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_FROM_ORIGINAL = ("yarn", "llama3", "longrope")  # stretched from original_max_position_embeddings on


def check_rope(where: str, given: Mapping[str, Any]) -> None:
    """InvalidConfig if the tables in a config describe no rotary positions; `where` is what the config is called."""
    for key in ("rope_scaling", "rope_parameters"):
        table = given.get(key)
        if table is None or (key == "rope_scaling" and not table):
            continue
        if not isinstance(table, dict):
            raise InvalidConfig(f"{where} has {key} = {table!r}, which should be a table", hint="write null there")
        kinds = [kind for kind in table if kind in KINDS_OF_LAYER]
        for one in [table[kind] for kind in kinds] or [table]:
            if one is not None:
                _check_table(where, key, one)


def _check_table(where: str, key: str, table: Any) -> None:
    kind = _kind(table) if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise InvalidConfig(
            f"{where} has {key} of the type {kind!r}, which Transformers does not know",
            hint=f"it knows {', '.join(_NEEDED)}",
        )
    for needed in _NEEDED[kind]:
        if table.get(needed) is None:
            raise InvalidConfig(f"{where} has {key} of the type {kind} without {needed}", hint=f"add {needed}")
    for name in _NUMBERS:
        value = table.get(name)
        if value is not None and not (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
            raise InvalidConfig(
                f"{where} has {key}.{name} = {value!r}, which should be a number above 0", hint="correct it"
            )


def _kind(table: Mapping[str, Any]) -> Any:
    return table.get("rope_type", table.get("type", "default"))


def keep_positions(config: dict[str, Any], wanted: Mapping[str, Any], published: Mapping[str, Any]) -> None:
    """Put a job's own keys (`wanted`) into `config`, a config.json (`published`) with them, as one table of positions.

    The table keeps what the weights were made with: the base of the positions, and how far they reached before.
    """
    before = published.get("rope_scaling") or published.get("rope_parameters") or {}
    given = wanted.keys() & {"rope_scaling", "rope_parameters"}
    now = dict((wanted.get("rope_scaling") or wanted.get("rope_parameters") or {}) if given else before)
    if before.get("rope_theta") is not None:
        now.setdefault("rope_theta", before["rope_theta"])
    if _kind(now) in _FROM_ORIGINAL and published.get("max_position_embeddings"):
        original = before.get("original_max_position_embeddings") or published["max_position_embeddings"]
        now.setdefault("original_max_position_embeddings", original)
    for key in ("rope_parameters", "rope_scaling"):
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
