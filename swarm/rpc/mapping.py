"""Values of `swarm.wire.messages` to protobuf and back, by field name.

A dataclass and the protobuf message of the same name have the same fields: a plan per class is made once from its type
hints. Incoming and outgoing messages are checked by the same rules; `Refused` names the class and the field. The rules
are about single values (sizes, signs, finite numbers, known words). Whether a value makes sense in the present state is
for the brains to decide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from typing import Any, NewType, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from swarm.errors import CorruptFrame, Refused
from swarm.limits import COUNTS_MAX
from swarm.rpc.fields import STREAMED_FIELDS_MAX, check_fields
from swarm.wire import frame_pb2, messages, session_pb2
from swarm.wire.messages import Command, Event, TensorHeader

T = TypeVar("T")

TEXT_BYTES_MAX = 64 << 10
SPEC_BYTES_MAX = 1 << 20
TOKENS_BYTES_MAX = 4 << 20
WORDS_CUT_BYTES = 4 << 10  # of each text for people
WORDS_BYTES_MAX = 1 << 10  # what lists of stage servers show of each
ID_LENGTH_MAX = 128
INTEGER_MAX = (1 << 63) - 1  # the largest integer of databases and numpy
NUMBER_MAX = 1e12  # seconds, ratios and rates of lines; larger values would overflow elsewhere
NUMBERS_MAX = {"Calibrated.multiply_adds_per_s": 1e18}  # of a GPU some 1e14


def to_event(event: Event) -> session_pb2.Event:
    return session_pb2.Event(**{_EVENT_NAMES[type(event)]: to_message(event)})


def from_event(pb: session_pb2.Event) -> Event:
    return cast(Event, _open(pb, _EVENTS))


def to_command(epoch: int, command: Command) -> session_pb2.Command:
    _check_epoch(epoch)
    return session_pb2.Command(epoch=epoch, **{_COMMAND_NAMES[type(command)]: to_message(command)})


def from_command(pb: session_pb2.Command) -> tuple[int, Command]:
    """(epoch, command) of an envelope; Refused if there is no command or a value breaks the rules."""
    _check_epoch(pb.epoch)
    return pb.epoch, cast(Command, _open(pb, _COMMANDS))


def to_header(header: TensorHeader) -> frame_pb2.TensorHeader:
    return frame_pb2.TensorHeader(**{_HEADER_NAMES[type(header)]: to_message(header)})


def from_header(pb: frame_pb2.TensorHeader) -> TensorHeader:
    return cast(TensorHeader, _open(pb, _HEADERS))


def parse(kind: type[Message], data: bytes, fields_max: int = STREAMED_FIELDS_MAX) -> Any:
    """A protobuf message from bytes; CorruptFrame if they are not one, or a string in it is not UTF-8.

    Also for a long one of more fields than `fields_max`.
    """
    check_fields(data, cast(Descriptor, kind.DESCRIPTOR), fields_max)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise CorruptFrame(f"{len(data)} bytes are no {kind.DESCRIPTOR.name}: {error}") from None


def to_message(value: Any) -> Any:
    """The protobuf message of the same name as the dataclass of `value`."""
    kind = type(value)
    plan = _plan(kind)
    plan.check_together(value)
    parts = {name: convert(getattr(value, name)) for name, convert in plan.outgoing}
    try:
        return plan.protobuf(**parts)
    except (TypeError, ValueError) as error:  # wrong type, or text that is not UTF-8
        raise Refused(f"{kind.__name__}: {error}") from None


def from_message(kind: type[T], pb: Any) -> T:
    """The dataclass of the same name as the protobuf message `pb`; Refused if a submessage is missing."""
    plan = _plan(kind)
    values: dict[str, Any] = {}
    for name, convert, may_be_missing in plan.incoming:
        if may_be_missing and not pb.HasField(name):
            raise Refused(f"{kind.__name__}.{name} is missing")
        values[name] = convert(getattr(pb, name))
    value = kind(**values)
    plan.check_together(value)
    return value


# The plan of a class --------------------------------------------------------------------------------------------------

Convert: TypeAlias = Callable[[Any], Any]
"""What a field's content becomes on the other side; Refused if it breaks a rule."""


@dataclass(frozen=True, slots=True)
class _Translation:
    """How the values of a class are converted and checked, field by field.

    `incoming` also says whether the field is a submessage, which may be missing.
    """

    protobuf: type[Message]
    outgoing: tuple[tuple[str, Convert], ...]
    incoming: tuple[tuple[str, Convert, bool], ...]
    check_together: Callable[[Any], None]


_PLANS: dict[type[Any], _Translation] = {}


def _plan(kind: type[Any]) -> _Translation:
    plan = _PLANS.get(kind)
    if plan is None:
        plan = _PLANS[kind] = _make_plan(kind)
    return plan


def _make_plan(kind: type[Any]) -> _Translation:
    hints = get_type_hints(kind)
    outgoing, incoming = [], []
    for field in fields(kind):
        name, hint = field.name, hints[field.name]
        repeated = get_origin(hint) is tuple
        inner = get_args(hint)[0] if repeated else hint
        is_message = hasattr(inner, "__dataclass_fields__")
        to, back = (to_message, partial(from_message, inner)) if is_message else _scalar(kind, name, inner)
        if repeated:
            where = f"{kind.__name__}.{name}"
            to, back = _repeated(where, COUNTS_MAX[where], to), _repeated(where, COUNTS_MAX[where], back)
        outgoing.append((name, to))
        incoming.append((name, back, is_message and not repeated))
    return _Translation(_protobuf(kind), tuple(outgoing), tuple(incoming), _TOGETHER.get(kind, _nothing))


def _scalar(kind: type[Any], name: str, inner: type[Any]) -> tuple[Convert, Convert]:
    where = f"{kind.__name__}.{name}"
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        check = _word(where, frozenset(inner))
        return check, lambda content: inner(check(content))
    return (_checker(where, name, inner),) * 2


def _repeated(where: str, count_max: int, convert: Convert) -> Convert:
    def convert_all(content: Collection[Any]) -> tuple[Any, ...]:
        if len(content) > count_max:  # before anything is made of the elements
            raise Refused(f"{where} has {len(content)} elements, the limit is {count_max}")
        return tuple([convert(item) for item in content])

    return convert_all


def _protobuf(kind: type[Any]) -> type[Message]:
    module = frame_pb2 if hasattr(frame_pb2, kind.__name__) else session_pb2
    return cast(type[Message], getattr(module, kind.__name__))


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _named(union: Any) -> Mapping[type[Any], str]:
    return {kind: _snake(kind.__name__) for kind in get_args(union)}


_EVENT_NAMES, _COMMAND_NAMES, _HEADER_NAMES = map(_named, (messages.Event, messages.Command, TensorHeader))
_EVENTS = {name: kind for kind, name in _EVENT_NAMES.items()}
_COMMANDS = {name: kind for kind, name in _COMMAND_NAMES.items()}
_HEADERS = {name: kind for kind, name in _HEADER_NAMES.items()}


def _open(pb: Any, kinds: Mapping[str, type[Any]]) -> Any:
    body = pb.WhichOneof("body")
    if body is None:
        raise Refused(f"{pb.DESCRIPTOR.name}.body is missing or of an unknown kind")
    return from_message(kinds[body], getattr(pb, body))


# The rules ------------------------------------------------------------------------------------------------------------

_ID = re.compile(r"[A-Za-z0-9_.:@-]*")
_IDS = frozenset({"accused", "site"})  # beside those with a type of their own
_ONE_OF: Mapping[str, frozenset[str]] = {
    "step_on": frozenset({"", "device", "cpu"}),
    "part": frozenset({"state", "records"}),
    "level": frozenset({"debug", "info", "warning", "error", "critical"}),
}
_WORDS = frozenset({"reason", "message", "hint", "fault", "refusal"})  # for people: what is too long is cut
_SIZES: Mapping[str, int] = {
    "spec_json": SPEC_BYTES_MAX,
    "tokens": TOKENS_BYTES_MAX,
    "targets": TOKENS_BYTES_MAX,
    "device": WORDS_BYTES_MAX,
    "product": WORDS_BYTES_MAX,
    "address": WORDS_BYTES_MAX,
    "http_address": WORDS_BYTES_MAX,
    "code": WORDS_BYTES_MAX,
    "stamp": 64,
}


def _checker(where: str, name: str, kind: type[Any]) -> Convert:
    """The check for one scalar field, chosen by its type and name; it returns its argument, or a beginning of that."""
    if kind is int:
        return _integer(where, -1 if name == "pinned_stage" else 0)
    if kind is float:
        # A loss or a norm may be infinite after an overflow: the rules over several fields and the ledger look at them.
        return _as_it_is if name in ("loss", "squared_norm") else _number(where)
    if isinstance(kind, NewType) or name in _IDS:
        return _id(where)
    if name in _WORDS:
        return _cut
    if name in _ONE_OF:
        return _word(where, _ONE_OF[name])
    if kind in (str, bytes):
        return _sized(where, _SIZES.get(name, TEXT_BYTES_MAX))
    return _as_it_is


def _cut(text: str) -> str:
    """As much of a text for people as a message carries of one."""
    if 4 * len(text) <= WORDS_CUT_BYTES:
        return text
    return text.encode()[:WORDS_CUT_BYTES].decode(errors="ignore")


def _as_it_is(value: Any) -> Any:
    return value


def _integer(where: str, least: int = 0) -> Callable[[int], int]:
    def check(value: int) -> int:
        if not least <= value <= INTEGER_MAX:
            raise Refused(f"{where} = {value} is not within {least} .. 2^63-1")
        return value

    return check


def _number(where: str) -> Callable[[float], float]:
    most = NUMBERS_MAX.get(where, NUMBER_MAX)

    def check(value: float) -> float:
        if not 0 <= value <= most:  # also false for NaN
            raise Refused(f"{where} = {value} is not a number within 0 .. {most:g}")
        return value

    return check


def _id(where: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if len(value) > ID_LENGTH_MAX or ".." in value or not _ID.fullmatch(value):
            shown = f"{where} = {value[:40]!r}"
            raise Refused(f"{shown} is no name: up to {ID_LENGTH_MAX} of A-Z a-z 0-9 _ . : @ -, no '..'")
        return value

    return check


def _word(where: str, known: frozenset[str]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in known:
            raise Refused(f"{where} = {value[:40]!r} is none of {', '.join(sorted(known))}")
        return value

    return check


def _sized(where: str, limit: int) -> Callable[[str | bytes], str | bytes]:
    def check(value: str | bytes) -> str | bytes:
        if len(value) * 4 <= limit:  # no character has more bytes in UTF-8
            return value
        size_bytes = len(value) if isinstance(value, bytes) else len(value.encode(errors="replace"))
        if size_bytes > limit:
            raise Refused(f"{where} has {size_bytes} bytes, the limit is {limit}")
        return value

    return check


# Rules over more than one field of a value.


def _nothing(value: Any) -> None:
    pass


def _loss_is_finite(value: messages.Accumulated | messages.ReportedCell) -> None:
    if value.finite and not math.isfinite(value.loss):
        raise Refused(f"{type(value).__name__}.loss = {value.loss} although finite")


def _norm_is_positive(value: messages.ParameterNorm) -> None:
    if value.squared_norm < 0:
        raise Refused(f"ParameterNorm.squared_norm = {value.squared_norm} is negative")


_TOGETHER: Mapping[type[Any], Callable[[Any], None]] = {
    messages.Accumulated: _loss_is_finite,
    messages.ReportedCell: _loss_is_finite,
    messages.ParameterNorm: _norm_is_positive,
}
_check_epoch = _integer("Command.epoch")
