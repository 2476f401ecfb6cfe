"""Values of `swarm.messages` to protobuf and back, by field name.

A dataclass and the protobuf message of the same name have the same fields, so nothing is written twice: a plan per
class is made once from its type hints. Incoming and outgoing messages are checked by the same rules; `Refused` names
the class and the field. The rules are about single values (sizes, signs, finite numbers, known words). Whether a value
makes sense in the present state is for the brains to decide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sized
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from swarm import messages
from swarm.errors import CorruptFrame, Refused
from swarm.limits import COUNTS_MAX
from swarm.messages import Command, Event
from swarm.peer_messages import TensorHeader
from swarm.types import Direction
from swarm.wire import frame_pb2, session_pb2

T = TypeVar("T")

TEXT_BYTES_MAX = 64 << 10
SPEC_BYTES_MAX = 1 << 20
TOKENS_BYTES_MAX = 4 << 20
ID_LENGTH_MAX = 128
INTEGER_MAX = (1 << 63) - 1  # the largest integer of databases and numpy
NUMBER_MAX = 1e12  # seconds and ratios; larger values would overflow elsewhere


def to_event(event: Event) -> session_pb2.Event:
    return session_pb2.Event(**{_snake(type(event).__name__): to_message(event)})


def from_event(pb: session_pb2.Event) -> Event:
    return cast(Event, _open(pb, _EVENTS))


def to_command(epoch: int, command: Command) -> session_pb2.Command:
    _check_integer("Command.epoch", epoch)
    return session_pb2.Command(epoch=epoch, **{_snake(type(command).__name__): to_message(command)})


def from_command(pb: session_pb2.Command) -> tuple[int, Command]:
    """(epoch, command) of an envelope; Refused if there is no command or a value breaks the rules."""
    _check_integer("Command.epoch", pb.epoch)
    return pb.epoch, cast(Command, _open(pb, _COMMANDS))


def to_header(header: TensorHeader) -> frame_pb2.TensorHeader:
    return frame_pb2.TensorHeader(**{_NAMES[type(header)]: to_message(header)})


def from_header(pb: frame_pb2.TensorHeader) -> TensorHeader:
    return cast(TensorHeader, _open(pb, _HEADERS))


def parse(kind: type[Message], data: bytes) -> Any:
    """A protobuf message from bytes; CorruptFrame if they are not one, or a string in it is not UTF-8."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise CorruptFrame(f"{len(data)} bytes are no {kind.DESCRIPTOR.name}: {error}") from None


def to_message(value: Any) -> Any:
    """The protobuf message of the same name as the dataclass of `value`."""
    kind = type(value)
    _check_together(value)
    parts: dict[str, Any] = {}
    for part in _plan(kind):
        content = getattr(value, part.name)
        if part.repeated:
            _check_count(kind, part, content)
            for item in content:
                part.check(item)
            parts[part.name] = [to_message(item) for item in content] if part.message else content
        else:
            part.check(content)
            parts[part.name] = to_message(content) if part.message else content
    try:
        return _protobuf(kind)(**parts)
    except (TypeError, ValueError) as error:  # wrong type, or text that is not UTF-8
        raise Refused(f"{kind.__name__}: {error}") from None


def from_message(kind: type[T], pb: Any) -> T:
    """The dataclass of the same name as the protobuf message `pb`.

    A missing submessage takes the dataclass's default; Refused if there is no default.
    """
    values: dict[str, Any] = {}
    for part in _plan(kind):
        content = getattr(pb, part.name)
        if part.repeated:
            _check_count(kind, part, content)
            items = tuple(from_message(part.kind, item) for item in content) if part.message else tuple(content)
            for item in items:
                part.check(item)
            values[part.name] = items
        elif not part.message:
            part.check(content)
            values[part.name] = part.kind(content) if part.word else content
        elif pb.HasField(part.name):
            values[part.name] = from_message(part.kind, content)
        elif not part.optional:
            raise Refused(f"{kind.__name__}.{part.name} is missing")
    value = kind(**values)
    _check_together(value)
    return value


# The plan of a class --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """One field: how to convert and what to check."""

    name: str
    kind: type[Any]
    message: bool
    word: bool  # of an enumeration
    repeated: bool
    count_max: int  # of a repeated one
    optional: bool
    check: Callable[[Any], None]


_PLANS: dict[type[Any], tuple[_Part, ...]] = {}


def _plan(kind: type[Any]) -> tuple[_Part, ...]:
    if kind not in _PLANS:
        _PLANS[kind] = _make_plan(kind)
    return _PLANS[kind]


def _make_plan(kind: type[Any]) -> tuple[_Part, ...]:
    hints = get_type_hints(kind)
    parts = []
    for field in fields(kind):
        hint = hints[field.name]
        repeated = get_origin(hint) is tuple
        inner = get_args(hint)[0] if repeated else hint
        inner = getattr(inner, "__supertype__", inner)  # NewType
        message = hasattr(inner, "__dataclass_fields__")
        check = _nothing if message else _checker(f"{kind.__name__}.{field.name}", field.name, inner)
        optional, word = field.default is not MISSING, issubclass(inner, StrEnum)
        count_max = COUNTS_MAX[f"{kind.__name__}.{field.name}"] if repeated else 1
        parts.append(_Part(field.name, inner, message, word, repeated, count_max, optional, check))
    return tuple(parts)


def _protobuf(kind: type[Any]) -> type[Message]:
    module = frame_pb2 if hasattr(frame_pb2, kind.__name__) else session_pb2
    return cast(type[Message], getattr(module, kind.__name__))


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


_EVENTS: Mapping[str, type[Any]] = {_snake(kind.__name__): kind for kind in get_args(messages.Event)}
_HEADERS: Mapping[str, type[Any]] = {_snake(kind.__name__): kind for kind in get_args(TensorHeader)}
_NAMES: Mapping[type[Any], str] = {kind: name for name, kind in _HEADERS.items()}
_COMMANDS: Mapping[str, type[Any]] = {_snake(kind.__name__): kind for kind in get_args(messages.Command)}


def _open(pb: Any, kinds: Mapping[str, type[Any]]) -> Any:
    body = pb.WhichOneof("body")
    if body is None:
        raise Refused(f"{pb.DESCRIPTOR.name}.body is missing or of an unknown kind")
    return from_message(kinds[body], getattr(pb, body))


# The rules ------------------------------------------------------------------------------------------------------------

_ID = re.compile(r"[A-Za-z0-9_.:@-]*")
_IDS = frozenset({"accused", "job", "peer", "sender", "to", "unit"})
_ONE_OF: Mapping[str, frozenset[str]] = {
    "direction": frozenset(Direction),
    "harm": frozenset({"kill", "freeze", "slow", "partition", "corrupt"}),
    "step_on": frozenset({"", "device", "cpu"}),
    "part": frozenset({"state", "records"}),
    "level": frozenset({"debug", "info", "warning", "error", "critical"}),
}
_SIZES: Mapping[str, int] = {"spec_json": SPEC_BYTES_MAX, "tokens": TOKENS_BYTES_MAX, "targets": TOKENS_BYTES_MAX}


def _checker(where: str, name: str, kind: type[Any]) -> Callable[[Any], None]:
    """The check for one scalar field, chosen by its type and name."""
    if kind is int:
        least = -1 if name == "pinned_stage" else 0
        return lambda value: _check_integer(where, value, least)
    if kind is float:
        # A loss or a norm may be infinite after an overflow: `_check_together` and the ledger look at them.
        return _nothing if name in ("loss", "squared_norm") else lambda value: _check_number(where, value)
    if name in _IDS:
        return lambda value: _check_id(where, value)
    if name in _ONE_OF:
        return lambda value: _check_word(where, value, _ONE_OF[name])
    if kind in (str, bytes):
        limit = _SIZES.get(name, TEXT_BYTES_MAX)
        return lambda value: _check_size(where, value, limit)
    return _nothing


def _nothing(value: Any) -> None:
    pass


def _check_count(kind: type[Any], part: _Part, content: Sized) -> None:
    """Before anything is made of the elements."""
    if len(content) > part.count_max:
        raise Refused(f"{kind.__name__}.{part.name} has {len(content)} elements, the limit is {part.count_max}")


def _check_integer(where: str, value: int, least: int = 0) -> None:
    if not least <= value <= INTEGER_MAX:
        raise Refused(f"{where} = {value} is not within {least} .. 2^63-1")


def _check_number(where: str, value: float) -> None:
    if not 0 <= value <= NUMBER_MAX:  # also false for NaN
        raise Refused(f"{where} = {value} is not a number within 0 .. {NUMBER_MAX:g}")


def _check_id(where: str, value: str) -> None:
    if len(value) > ID_LENGTH_MAX or ".." in value or not _ID.fullmatch(value):
        raise Refused(f"{where} = {value[:40]!r} is no name: up to {ID_LENGTH_MAX} of A-Z a-z 0-9 _ . : @ -, no '..'")


def _check_word(where: str, value: str, known: frozenset[str]) -> None:
    if value not in known:
        raise Refused(f"{where} = {value[:40]!r} is none of {', '.join(sorted(known))}")


def _check_size(where: str, value: str | bytes, limit: int) -> None:
    if len(value) * 4 <= limit:  # no character has more bytes in UTF-8
        return
    size_bytes = len(value) if isinstance(value, bytes) else len(value.encode(errors="replace"))
    if size_bytes > limit:
        raise Refused(f"{where} has {size_bytes} bytes, the limit is {limit}")


def _check_together(value: Any) -> None:
    """Rules over more than one field of a value."""
    match value:
        case messages.Accumulated() | messages.ReportedCell():
            if value.finite and not math.isfinite(value.loss):
                raise Refused(f"{type(value).__name__}.loss = {value.loss} although finite")
        case messages.ParameterNorm() if value.squared_norm < 0:
            raise Refused(f"ParameterNorm.squared_norm = {value.squared_norm} is negative")
