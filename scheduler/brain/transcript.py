"""Transcripts: the inputs of a job's brain, recorded as JSON lines so that they can be replayed.

    {"transcript": 1, "seed": ..., "settings": {...}}      what the brain was made of
    [at_s, input, answers, digest]                         one line for each input, as soon as it was decided
    {"ended": "..."}                                       where recording stopped although the job went on

`answers` has the brain's questions about the data and the schedule, each answer in the first line that needs it:
[name, step, number]. `digest` covers everything that the brain decided, words included; null means that it raised an
error. A value is an object with the compared fields of its class, and the name of the class under "is". Floats that
JSON lacks are strings: "nan", "inf", "-inf".
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from random import Random
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from scheduler.brain.inputs import Input
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import Output
from scheduler.brain.settings import BrainSettings
from swarm.errors import BadTranscript
from swarm.wire.messages import Member

VERSION = 1
ASKED = ("learning_rate", "tokens_of")  # what the settings hold as functions: of a rate step, of a portion
_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


# Writing -------------------------------------------------------------------------------------------------------------


class Recorder:
    """Makes a brain and writes a line for each input that it takes in; `write` gets each line without its newline."""

    def __init__(self, settings: BrainSettings, seed: int, write: Callable[[str], None]) -> None:
        self._write = write
        self._asked: dict[tuple[str, int], float] = {}
        self._answers: list[tuple[str, int, float]] = []
        asked: dict[str, Any] = {name: self._asking(name, getattr(settings, name)) for name in ASKED}
        self.brain = JobBrain(replace(settings, **asked), Random(seed))
        names = [field.name for field in fields(settings) if field.name not in ASKED]
        plain = {name: encoded(getattr(settings, name)) for name in names}
        write(_line({"transcript": VERSION, "seed": str(seed), "settings": plain}))

    def step(self, happened: Input, now_s: float) -> list[Output]:
        decided = None
        try:
            outputs = self.brain.step(happened, now_s)
            decided = digest(outputs)
        finally:
            self._write(_line([encoded(now_s), encoded(happened), self._answers, decided]))
            self._answers = []
        return outputs

    def _asking(self, name: str, of: Callable[[int], float]) -> Callable[[int], float]:
        def ask(place: int) -> float:
            if (name, place) not in self._asked:
                self._asked[name, place] = of(place)
                self._answers.append((name, place, self._asked[name, place]))
            return self._asked[name, place]

        return ask


def ended(reason: str) -> str:
    """The line that says why recording stops before the job does."""
    return _line({"ended": reason})


def digest(outputs: Iterable[Output]) -> str:
    """A digest of the brain's decisions."""
    return hashlib.blake2b(_line([encoded(output) for output in outputs]).encode(), digest_size=8).hexdigest()


def encoded(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case Enum():
            return value.value
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return value.hex()
        case Mapping():
            return {str(key): encoded(one) for key, one in value.items()}
        case set() | frozenset():
            return sorted(map(encoded, value))
        case Collection():
            return [encoded(item) for item in value]
        case _:
            assert is_dataclass(value), f"a transcript has no place for {value!r}"
            told = {field.name: encoded(getattr(value, field.name)) for field in fields(value) if field.compare}
            if isinstance(value, Member) and not value.group:
                del told["group"]  # as in transcripts from before there were groups
            return {"is": type(value).__name__} | told


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# Reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """One input, its time, and the digest of the decisions; None: the brain raised an error."""

    at_s: float
    happened: Input
    digest: str | None


class Transcript:
    """A transcript that is read from its lines; BadTranscript, also while it is iterated, if they make no sense."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.ended = ""  # why recording stopped, once the last line was read
        self._answers: dict[tuple[str, int], float] = {}
        self._lines = enumerate(lines, start=1)
        head = self._parsed(*next(self._lines, (1, "")))
        if not isinstance(head, dict) or head.get("transcript") != VERSION or "settings" not in head:
            raise BadTranscript(f"line 1: it does not begin as a transcript of version {VERSION} does")
        asked = {name: self._answering(name) for name in ASKED}
        self.settings: BrainSettings = _decoded_fields(BrainSettings, head["settings"], "line 1", asked)
        self._seed = _decoded(str, head.get("seed"), "line 1: seed")

    def brain(self) -> JobBrain:
        """The brain as it was at the beginning; it knows those answers only that were read so far."""
        try:
            return JobBrain(self.settings, Random(int(self._seed)))
        except ValueError:
            raise BadTranscript("line 1: the seed is no number") from None

    def __iter__(self) -> Iterator[Recorded]:
        for number, text in self._lines:
            line, where = self._parsed(number, text), f"line {number}"
            if isinstance(line, dict) and "ended" in line:
                self.ended = _decoded(str, line["ended"], where)
                return
            if not isinstance(line, list) or len(line) != 4:
                raise BadTranscript(f"{where}: it is not [at_s, input, answers, digest]")
            at_s, happened, answers, decided = line
            for name, place, answer in _decoded(tuple[tuple[str, int, float], ...], answers, f"{where}: answers"):
                self._answers[name, place] = int(answer) if name == "tokens_of" else answer
            yield Recorded(
                _decoded(float, at_s, f"{where}: at_s"),
                _decoded(Input, happened, where),
                _decoded(str | None, decided, f"{where}: digest"),
            )

    def _parsed(self, number: int, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise BadTranscript(
                f"line {number}: it is no JSON", hint="the last line of a scheduler that was killed may be cut: drop it"
            ) from None

    def _answering(self, name: str) -> Callable[[int], Any]:
        def answer(place: int) -> float:
            if (name, place) not in self._answers:
                raise BadTranscript(f"the brain asks for {name}({place}), which the recorded one did not")
            return self._answers[name, place]

        return answer


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """The value of that type; BadTranscript if the JSON does not fit it."""
    origin, args = get_origin(kind), get_args(kind)
    if hasattr(kind, "__supertype__"):
        return _decoded(kind.__supertype__, value, where)
    if origin in (Union, types.UnionType):
        return _one_of(args, value, where)
    if origin is Literal:
        if value not in args:
            raise BadTranscript(f"{where}: {value!r} is none of {args}")
        return value
    if origin is tuple and args[1:] != (...,):
        if not isinstance(value, list) or len(value) != len(args):
            raise BadTranscript(f"{where}: not {len(args)} values")
        return tuple(_decoded(one, item, where) for one, item in zip(args, value, strict=True))
    if origin in (tuple, Collection):
        if not isinstance(value, list):
            raise BadTranscript(f"{where}: {value!r} is no list")
        return tuple(_decoded(args[0], item, where) for item in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise BadTranscript(f"{where}: {value!r} is no object")
        return {key: _decoded(args[1], one, f"{where}: {key}") for key, one in value.items()}
    if is_dataclass(kind):
        return _decoded_fields(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise BadTranscript(f"{where}: {value!r} is no {kind.__name__}") from None
    if kind is float:
        value = _ODD.get(value, value) if isinstance(value, str) else value
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadTranscript(f"{where}: {value!r} is no {getattr(kind, '__name__', kind)}")
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    tag = value.get("is") if isinstance(value, dict) else None
    for kind in kinds:
        fits = getattr(kind, "__name__", "") == tag if is_dataclass(kind) else tag is None
        if fits and kind is not types.NoneType:
            return _decoded(kind, value, where)
    raise BadTranscript(f"{where}: {tag or value!r} is not known here")


def _decoded_fields(kind: Any, value: Any, where: str, given: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """A dataclass out of an object; `given` are fields that the object lacks."""
    if not isinstance(value, dict):
        raise BadTranscript(f"{where}: {value!r} is no {kind.__name__}")
    hints, found = _hints(kind), dict(given)
    for field in fields(kind):
        if field.name in value:
            found[field.name] = _decoded(hints[field.name], value[field.name], f"{where}: {kind.__name__}.{field.name}")
        elif field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise BadTranscript(f"{where}: {kind.__name__} lacks {field.name}")
    if unknown := value.keys() - found.keys() - {"is"}:
        raise BadTranscript(f"{where}: {kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**found)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
