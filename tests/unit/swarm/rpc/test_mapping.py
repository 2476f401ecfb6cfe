"""Messages from others: what is too much is refused before anything is made of it."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from swarm.errors import Refused
from swarm.limits import COUNTS_MAX
from swarm.rpc.mapping import WORDS_BYTES_MAX, WORDS_CUT_BYTES, from_event, from_message, to_message
from swarm.wire import frame_pb2, messages, session_pb2
from tests.support.nonsense import SAID


def _repeated() -> dict[str, Any]:
    kinds = [
        kind for kind in vars(messages).values() if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")
    ]
    return {
        f"{kind.__name__}.{field.name}": kind
        for kind in kinds
        for field in fields(kind)
        if get_origin(get_type_hints(kind)[field.name]) is tuple
    }


def test_every_repeated_field_has_a_limit() -> None:
    assert _repeated().keys() == COUNTS_MAX.keys()


@pytest.mark.parametrize("field", COUNTS_MAX)
def test_too_many_elements_are_refused_at_once(field: str) -> None:
    kind = _repeated()[field]
    name = field.partition(".")[2]
    inner = get_args(get_type_hints(kind)[name])[0]
    pb = getattr(frame_pb2 if hasattr(frame_pb2, kind.__name__) else session_pb2, kind.__name__)()
    if hasattr(pb, "direction"):
        pb.direction = "forward"
    for part in pb.DESCRIPTOR.fields:  # so that nothing else is missing
        if part.message_type is not None and not part.is_repeated:
            getattr(pb, part.name).SetInParent()
    content = getattr(pb, name)
    count = COUNTS_MAX[field] + 1
    if hasattr(content, "add"):
        for _ in range(count):
            content.add()
    else:
        content.extend([inner()] * count)
    began_s = time.process_time()
    with pytest.raises(Refused, match=f"{field} has {count} elements"):
        from_message(kind, pb)
    assert time.process_time() - began_s < 0.1


def test_a_hello_of_a_million_cells_costs_nothing_but_its_bytes() -> None:
    bomb = session_pb2.Event(hello=session_pb2.Hello(peer="p"))
    bomb.hello.cells.extend([session_pb2.ReportedCell()] * 900_000)
    data = bomb.SerializeToString()
    assert len(data) < 4 << 20  # it fits a message
    parsed = session_pb2.Event.FromString(data)
    began_s = time.process_time()
    with pytest.raises(Refused, match=r"Hello\.cells has 900000 elements"):
        from_event(parsed)
    assert time.process_time() - began_s < 0.1


def test_what_lists_show_of_a_stage_server_is_short() -> None:
    """A stage server called its device by 60,000 letters, and everybody who looked at the list was sent them."""
    for field in ("device", "product", "address", "http_address"):
        told = session_pb2.Hello(peer="p", **{field: "x" * (WORDS_BYTES_MAX + 1)})
        with pytest.raises(Refused, match=rf"Hello\.{field}"):
            from_event(session_pb2.Event(hello=told))


def test_we_do_not_send_what_the_other_side_would_refuse() -> None:
    shape = (1,) * (COUNTS_MAX["ParameterHash.shape"] + 1)
    with pytest.raises(Refused, match=r"ParameterHash\.shape"):
        to_message(messages.ParameterHash("w", "float32", shape, ""))


TEXTS = [
    (kind, field.name)
    for kind in get_args(messages.Event)
    for field in fields(kind)
    if field.name in ("reason", "message", "hint", "fault", "refusal")
]


@pytest.mark.parametrize(("kind", "name"), TEXTS)
@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600"])
def test_texts_for_people_are_cut_by_both_sides(kind: type[Any], name: str, letter: str) -> None:
    """A stage server could send 64 KiB in each, which lists, logs and the page then showed of it."""
    said = next(event for event in SAID if isinstance(event, kind))
    sent = to_message(replace(said, **{name: letter * (1 << 15)}))
    assert 0 < len(getattr(sent, name).encode()) <= WORDS_CUT_BYTES < len(getattr(sent, name).encode()) + 4
    setattr(sent, name, letter * (1 << 15))
    taken = getattr(from_message(kind, sent), name)
    assert 0 < len(taken.encode()) <= WORDS_CUT_BYTES
    assert set(taken) == {letter}
