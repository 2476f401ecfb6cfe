"""Values that a person sets on top of a job file: `--set KEY=VALUE`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from swarm.errors import InvalidConfig, UsageError

SEE = "see: swarm submit --example"


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply each KEY=VALUE to `values`, in place. UsageError for anything that is not KEY=VALUE."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UsageError(f'--set needs KEY=VALUE, got "{override}"', hint="for example: --set training.steps=100")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text  # a bare word is a string
        put_value(values, key.strip(), value)
    return values


def put_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key, in place; InvalidConfig if a part of the key is not a table."""
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InvalidConfig(f'cannot set {key}: "{section}" is a value, not a section', hint=SEE)
    values[name] = value
