"""How much a job file may say, counted before anything is made of it.

pydantic looks at each element of a list, and describes each fault in it, while no other thread of Python runs: 130,000
texts in the place of a number held up a whole process for 80 ms. So what somebody writes or sends is counted first.
What is stored is not counted again: it was when it came, or came when nothing was.

Not chosen: bounds in the models themselves (`max_length`), because pydantic looks at the elements first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swarm.errors import InvalidConfig

VALUES_MAX = 1024  # of a job file; a cut into 512 stages is its longest list
CONFIG_VALUES_MAX = 16_384  # of model.config, whose longest lists name layers; as values they take 2.5 MiB
TEXT_CHARACTERS_MAX = 4096  # of a value, or of the name of one
_CONFIG = "model.config"


def check_lengths(values: Mapping[str, Any], where: str, stored: Mapping[str, Any] | None = None) -> None:
    """InvalidConfig names the first key with a text that is too long, or with which there are too many values.

    `stored`: the values that a job has already, whose long texts it may keep.
    """
    kept = {text for _, text in _walk(stored or {}) if _is_long(text)}
    counts = {VALUES_MAX: 0, CONFIG_VALUES_MAX: 0}
    for key, value in _walk(values):
        if isinstance(value, Mapping | list | tuple):
            most = CONFIG_VALUES_MAX if key.startswith(_CONFIG) else VALUES_MAX
            counts[most] += len(value)
            if counts[most] > most:
                of = _CONFIG if key.startswith(_CONFIG) else "a job file"
                raise InvalidConfig(
                    f"{where}: {key or 'it'} has {len(value)} entries, {of} at most {most} values together"
                )
        elif _is_long(value) and value not in kept:
            raise InvalidConfig(
                f"{where}: a text of {key or 'it'} has {len(value)} characters, at most {TEXT_CHARACTERS_MAX}",
                hint="name many files by a pattern: DIR/**/*.txt" if key == "data.source" else "shorten it",
            )


def _walk(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each value with its key: a table or a list, then the names in it, and what it holds."""
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, Mapping):
            for name, one in value.items():
                yield key, name
                waiting.append((f"{key}.{name}" if key else name, one))
        elif isinstance(value, list | tuple):
            waiting += ((key, one) for one in value)


def _is_long(value: object) -> bool:
    return isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX
