"""Messages survive the wire, and what breaks a rule is refused by name."""

import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import assume, given
from hypothesis import strategies as st

from swarm.errors import CorruptFrame, Refused
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
from swarm.types import Hop, JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire import frame_pb2, messages, session_pb2
from swarm.wire.messages import (
    Accumulated,
    Command,
    Event,
    Heartbeat,
    Hello,
    LoadStage,
    Logged,
    ParameterNorm,
    Route,
    StoreHeader,
    TensorHeader,
    Welcome,
)

EVENTS = get_args(Event)
COMMANDS = get_args(Command)
HEADERS = get_args(TensorHeader)
ROOT = Path(__file__).parents[2]

names = st.from_regex(r"[A-Za-z0-9_:@-]{0,20}(\.[a-z]{1,5})?", fullmatch=True)
WORDS = {
    "step_on": ["", "device", "cpu"],
    "harm": ["kill", "freeze", "slow", "partition", "corrupt"],
    "part": ["state", "records"],
    "level": ["debug", "info", "warning", "error", "critical"],
}


def values(kind: Any, name: str, is_short: bool) -> st.SearchStrategy[Any]:
    """Every value of a field that the rules allow; `is_short`: it has 32 bits on the wire."""
    if name in WORDS:
        return st.sampled_from(WORDS[name])
    if hasattr(kind, "__supertype__") or name in ("accused", "site"):
        return names
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    if name == "pinned_stage":
        return st.integers(-1, 2**31 - 1)
    if kind is int:
        return st.integers(0, 2**32 - 1 if is_short else 2**63 - 1)
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
    described = getattr(frame_pb2 if hasattr(frame_pb2, kind.__name__) else session_pb2, kind.__name__).DESCRIPTOR
    parts = {}
    for name, hint in get_type_hints(kind).items():
        is_short = described.fields_by_name[name].type == FieldDescriptor.TYPE_UINT32
        if get_origin(hint) is tuple:
            parts[name] = st.lists(values(get_args(hint)[0], name, is_short), max_size=3).map(tuple)
        else:
            parts[name] = values(hint, name, is_short)
    return st.builds(kind, **parts)


def test_each_dataclass_mirrors_its_message_field_for_field(tmp_path: Path) -> None:
    """What `make protos` writes now is what lies in swarm/wire."""
    subprocess.run([sys.executable, "protos/generate.py", tmp_path], check=True, cwd=ROOT)
    for path in (tmp_path / "swarm" / "wire").iterdir():
        assert path.read_bytes() == (ROOT / "swarm" / "wire" / path.name).read_bytes(), path.name


@given(
    st.one_of([instances(kind) for kind in EVENTS]),
    st.integers(0, 2**63 - 1),
    st.one_of([instances(kind) for kind in COMMANDS]),
    st.one_of([instances(kind) for kind in HEADERS]),
    instances(StoreHeader),
)
def test_events_commands_and_headers_survive_the_wire(
    event: Event, epoch: int, command: Command, tensor: TensorHeader, store: StoreHeader
) -> None:
    assert from_event(parse(session_pb2.Event, to_event(event).SerializeToString())) == event
    data = to_command(epoch, command).SerializeToString()
    assert from_command(parse(session_pb2.Command, data)) == (epoch, command)
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
        messages.Averaged(0, 0, UnitName(""), Round(1, 1), "d", (ParameterNorm("w", -1.0),), 0.1),
        "ParameterNorm.squared_norm",
    ),
]


BROKEN_COMMANDS = [
    (LoadStage(JobId("j"), 0, 0, (1,), 0, "x" * (mapping.SPEC_BYTES_MAX + 1)), "LoadStage.spec_json"),
    (replace(ROUTE, tokens=bytes(mapping.TOKENS_BYTES_MAX + 1)), "Route.tokens"),
    (Welcome(PeerId("p"), math.inf), "Welcome.heartbeat_s"),
]


@pytest.mark.parametrize(("said", "field"), BROKEN_EVENTS + BROKEN_COMMANDS, ids=_field)
def test_an_event_or_command_that_breaks_a_rule_is_refused_by_name(said: Any, field: str) -> None:
    with pytest.raises(Refused, match=field.replace(".", r"\.")):
        to_event(said) if isinstance(said, EVENTS) else to_command(1, said)


def test_the_same_rules_hold_for_what_arrives() -> None:
    pb = session_pb2.Event(hello=session_pb2.Hello(peer="../etc"))
    with pytest.raises(Refused, match=r"Hello\.peer"):
        from_event(pb)
    pb = session_pb2.Event(accumulated=session_pb2.Accumulated(microbatch={}, forward_s=math.nan))
    with pytest.raises(Refused, match=r"Accumulated\.forward_s"):
        from_event(pb)
    with pytest.raises(Refused, match=r"Command\.epoch"):
        from_command(session_pb2.Command(epoch=2**63, void={}))


def test_what_is_large_or_not_finite_but_allowed_passes() -> None:
    for command in (
        LoadStage(JobId("j"), 0, 0, (1,), 0, "x" * mapping.SPEC_BYTES_MAX),
        replace(ROUTE, tokens=bytes(mapping.TOKENS_BYTES_MAX)),
    ):
        assert from_command(to_command(1, command)) == (1, command)
    event = replace(ACCUMULATED, finite=False, loss=math.inf)
    assert from_event(to_event(event)) == event


@pytest.mark.parametrize(
    ("read", "message", "words"),
    [
        (from_event, session_pb2.Event(), r"Event\.body"),
        (from_command, session_pb2.Command(epoch=1), r"Command\.body"),
        (from_header, frame_pb2.TensorHeader(), r"TensorHeader\.body"),
        (from_event, session_pb2.Event(accumulated={}), r"Accumulated\.microbatch is missing"),
        (from_header, frame_pb2.TensorHeader(need={"direction": "forward"}), r"Need\.microbatch is missing"),
    ],
)
def test_an_envelope_without_its_parts_is_refused(read: Callable[[Any], object], message: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read(message)


def test_text_that_is_not_utf8_is_corrupt() -> None:
    with pytest.raises(CorruptFrame, match="Event"):
        parse(session_pb2.Event, b"\x0a\x03\x0a\x01\xff")
