"""Messages survive the wire, and what breaks a rule is refused by name."""

import math
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swarm import events, messages
from swarm.errors import CorruptFrame, Refused
from swarm.events import Accumulated, Event, Heartbeat, Hello, Logged, ParameterNorm
from swarm.messages import Command, LoadStage, Route, StoreHeader, Welcome
from swarm.peer_messages import StateReply, StateRequest, TensorHeader
from swarm.rpc import mapping
from swarm.rpc.mapping import (
    from_command,
    from_event,
    from_header,
    from_message,
    parse,
    to_command,
    to_event,
    to_header,
    to_message,
)
from swarm.types import Direction, EvaluationBatch, Hop, JobId, Microbatch, PeerId, Round, RoundFault, UnitName
from swarm.wire import frame_pb2, session_pb2

EVENTS = get_args(Event)
COMMANDS = get_args(Command)
PARTS = (Microbatch, EvaluationBatch, Round, Hop, events.ReportedCell, events.UnitSize, events.ParameterNorm)
MORE_PARTS = (
    *(events.ParameterHash, messages.Member, messages.UnitRound, messages.StateFile, messages.RelayAt),
    *(messages.Envoy, events.LinkSpeed),
)
REQUESTS = (StoreHeader, messages.FetchRequest, StateRequest, StateReply)
HEADERS = get_args(TensorHeader)
ENVELOPES = ((session_pb2.Event, EVENTS), (session_pb2.Command, COMMANDS), (frame_pb2.TensorHeader, HEADERS))
EVERYTHING = (*EVENTS, *COMMANDS, *PARTS, *MORE_PARTS, *REQUESTS, *HEADERS)

names = st.from_regex(r"[A-Za-z0-9_:@-]{0,20}(\.[a-z]{1,5})?", fullmatch=True)
WORDS = {
    "direction": list(Direction),
    "cause": list(RoundFault),
    "step_on": ["", "device", "cpu"],
    "harm": ["kill", "freeze", "slow", "partition", "corrupt"],
    "part": ["state", "records"],
    "level": ["debug", "info", "warning", "error", "critical"],
}
UINT32 = {
    "timeline",
    "index",
    "attempt",
    "stage",
    "number",
    "protocol",
    "threads",
    "microbatch",
    "split",
    "join",
    "island",
    "microbatches",
    "chunk",
    "answered",
    "indexes",
}


def values(kind: type[Any], name: str) -> st.SearchStrategy[Any]:
    """Every value of a field that the rules allow."""
    kind = getattr(kind, "__supertype__", kind)
    if name in WORDS:
        return st.sampled_from(WORDS[name])
    if name in ("job", "peer", "unit", "sender", "accused", "to", "owner", "verifier", "site"):
        return names
    if name == "pinned_stage":
        return st.integers(-1, 2**31 - 1)
    if kind is int:
        return st.integers(0, 2**32 - 1 if name in UINT32 else 2**63 - 1)
    if kind is float:
        return st.floats(0, 1e12)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    if kind is bytes:
        return st.binary(max_size=100)
    return instances(kind)


def instances(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    parts = {}
    for name, hint in hints.items():
        if get_origin(hint) is tuple:
            parts[name] = st.lists(values(get_args(hint)[0], name), max_size=3).map(tuple)
        else:
            parts[name] = values(hint, name)
    return st.builds(kind, **parts)


@pytest.mark.parametrize("kind", EVERYTHING, ids=lambda kind: kind.__name__)
def test_each_dataclass_mirrors_its_message_field_for_field(kind: type[Any]) -> None:
    module = frame_pb2 if hasattr(frame_pb2, kind.__name__) else session_pb2
    descriptor = getattr(module, kind.__name__).DESCRIPTOR
    assert [field.name for field in fields(kind)] == [field.name for field in descriptor.fields]
    hints = get_type_hints(kind)
    for field in descriptor.fields:
        hint = hints[field.name]
        assert field.is_repeated == (get_origin(hint) is tuple), field.name
        inner = get_args(hint)[0] if field.is_repeated else hint
        inner = getattr(inner, "__supertype__", inner)
        expected = {
            "uint32": int,
            "uint64": int,
            "int32": int,
            "double": float,
            "bool": bool,
            "string": str,
            "bytes": bytes,
        }
        if field.message_type is not None:
            assert inner.__name__ == field.message_type.name
        else:
            code = {field.TYPE_UINT32: "uint32", field.TYPE_UINT64: "uint64", field.TYPE_INT32: "int32"}
            code |= {field.TYPE_DOUBLE: "double", field.TYPE_BOOL: "bool", field.TYPE_STRING: "string"}
            code |= {field.TYPE_BYTES: "bytes"}
            assert issubclass(inner, expected[code[field.type]]), field.name


def test_each_envelope_knows_every_class_and_no_other() -> None:
    for envelope, kinds in ENVELOPES:
        bodies = envelope.DESCRIPTOR.oneofs_by_name["body"].fields
        assert [field.message_type.name for field in bodies] == [kind.__name__ for kind in kinds]


def test_nothing_that_mirrors_a_message_is_left_out() -> None:
    ours = {kind.__name__ for kind in EVERYTHING}
    theirs = set(session_pb2.DESCRIPTOR.message_types_by_name)
    assert theirs - ours == {"Event", "Command", "StoreChunk", "StoreReply", "FetchCall", "FetchChunk"}


@given(st.one_of([instances(kind) for kind in EVENTS]))
def test_events_survive_the_wire(event: Event) -> None:
    assert from_event(parse(session_pb2.Event, to_event(event).SerializeToString())) == event


@given(st.integers(0, 2**63 - 1), st.one_of([instances(kind) for kind in COMMANDS]))
def test_commands_survive_the_wire(epoch: int, command: Command) -> None:
    data = to_command(epoch, command).SerializeToString()
    assert from_command(parse(session_pb2.Command, data)) == (epoch, command)


@given(st.one_of([instances(kind) for kind in HEADERS]), instances(StoreHeader))
def test_headers_survive_the_wire(tensor: TensorHeader, store: StoreHeader) -> None:
    assert from_header(parse(frame_pb2.TensorHeader, to_header(tensor).SerializeToString())) == tensor
    message = to_message(store)
    assert from_message(StoreHeader, parse(type(message), message.SerializeToString())) == store


@given(st.binary(max_size=200), st.sampled_from([(session_pb2.Event, from_event), (session_pb2.Command, from_command)]))
def test_random_bytes_are_a_message_or_a_typed_error(data: bytes, kind: Any) -> None:
    message, translate = kind
    with suppress(Refused):
        translate(parse(message, data))


@given(st.one_of([instances(kind) for kind in EVENTS]), st.data())
def test_damaged_events_are_a_message_or_a_typed_error(event: Event, data: st.DataObject) -> None:
    original = to_event(event).SerializeToString()
    assume(original)
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Refused):
        from_event(parse(session_pb2.Event, bytes(damaged)))


# Which rule was broken is said by name -------------------------------------------------------------------------------

HELLO = Hello(PeerId("p"), 1, 1, "swarm", "a:1", "a:2", "cpu", 1, 1, -1, JobId(""), 0, 0)
ACCUMULATED = Accumulated(Microbatch(0, 1, 2), 0, 0, True, 1.0, 0.1, 0.1, 0.1)
ROUTE = Route(Microbatch(0, 0, 0), 0, (Hop(PeerId("p"), 1, 0, "a:1"),))


def _field(value: object) -> str:
    return value if isinstance(value, str) else ""


BROKEN_EVENTS = [
    (replace(HELLO, peer="../etc"), "Hello.peer"),
    (replace(HELLO, peer="a/b"), "Hello.peer"),
    (replace(HELLO, peer="nul\0"), "Hello.peer"),
    (replace(HELLO, peer="p" * 129), "Hello.peer"),
    (replace(HELLO, device="x" * (mapping.TEXT_BYTES_MAX + 1)), "Hello.device"),
    (replace(HELLO, device="\udcff"), "Hello"),
    (replace(HELLO, incarnation=2**63), "Hello.incarnation"),
    (replace(HELLO, version=-1), "Hello.version"),
    (replace(HELLO, pinned_stage=-2), "Hello.pinned_stage"),
    (replace(ACCUMULATED, loss=math.nan), "Accumulated.loss"),
    (replace(ACCUMULATED, forward_s=math.nan), "Accumulated.forward_s"),
    (replace(ACCUMULATED, wait_s=-1.0), "Accumulated.wait_s"),
    (replace(ACCUMULATED, backward_s=1e308), "Accumulated.backward_s"),
    (replace(ACCUMULATED, microbatch=Microbatch(0, -1, 0)), "Microbatch.step"),
    (Logged(JobId("j"), 1.0, "loud", "x"), "Logged.level"),
    (Heartbeat(2**63), "Heartbeat.sequence"),
    (
        events.Averaged(0, 0, UnitName(""), Round(1, 1), "d", (ParameterNorm("w", -1.0),), 0.1),
        "ParameterNorm.squared_norm",
    ),
]


@pytest.mark.parametrize(("event", "field"), BROKEN_EVENTS, ids=_field)
def test_an_event_that_breaks_a_rule_is_refused_by_name(event: Event, field: str) -> None:
    with pytest.raises(Refused, match=field.replace(".", r"\.")):
        to_event(event)


BROKEN_COMMANDS = [
    (LoadStage(JobId("j"), 0, 0, (1,), 0, "x" * (mapping.SPEC_BYTES_MAX + 1)), "LoadStage.spec_json"),
    (replace(ROUTE, tokens=bytes(mapping.TOKENS_BYTES_MAX + 1)), "Route.tokens"),
    (Welcome(PeerId("p"), math.inf), "Welcome.heartbeat_s"),
]


@pytest.mark.parametrize(
    ("command", "field"), BROKEN_COMMANDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_command_that_breaks_a_rule_is_refused_by_name(command: Command, field: str) -> None:
    with pytest.raises(Refused, match=field.replace(".", r"\.")):
        to_command(1, command)


def test_the_same_rules_hold_for_what_arrives() -> None:
    pb = session_pb2.Event(hello=session_pb2.Hello(peer="../etc"))
    with pytest.raises(Refused, match=r"Hello\.peer"):
        from_event(pb)
    pb = session_pb2.Event(accumulated=session_pb2.Accumulated(microbatch={}, forward_s=math.nan))
    with pytest.raises(Refused, match=r"Accumulated\.forward_s"):
        from_event(pb)
    with pytest.raises(Refused, match=r"Command\.epoch"):
        from_command(session_pb2.Command(epoch=2**63, void={}))


def test_what_is_large_but_allowed_passes() -> None:
    command = LoadStage(JobId("j"), 0, 0, (1,), 0, "x" * mapping.SPEC_BYTES_MAX)
    assert from_command(to_command(1, command)) == (1, command)
    route = replace(ROUTE, tokens=bytes(mapping.TOKENS_BYTES_MAX))
    assert from_command(to_command(1, route)) == (1, route)


def test_a_contribution_that_is_not_finite_may_say_so() -> None:
    event = replace(ACCUMULATED, finite=False, loss=math.inf)
    assert from_event(to_event(event)) == event


def test_an_envelope_without_a_body_is_refused() -> None:
    with pytest.raises(Refused, match=r"Event\.body"):
        from_event(session_pb2.Event())
    with pytest.raises(Refused, match=r"Command\.body"):
        from_command(session_pb2.Command(epoch=1))
    with pytest.raises(Refused, match=r"TensorHeader\.body"):
        from_header(frame_pb2.TensorHeader())


def test_a_missing_part_is_refused() -> None:
    with pytest.raises(Refused, match=r"Accumulated\.microbatch is missing"):
        from_event(session_pb2.Event(accumulated=session_pb2.Accumulated()))
    with pytest.raises(Refused, match=r"Need\.microbatch is missing"):
        from_header(frame_pb2.TensorHeader(need=frame_pb2.Need(direction="forward")))


def test_text_that_is_not_utf8_is_corrupt() -> None:
    with pytest.raises(CorruptFrame, match="Event"):
        parse(session_pb2.Event, b"\x0a\x03\x0a\x01\xff")
