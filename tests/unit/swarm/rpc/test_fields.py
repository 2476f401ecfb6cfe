"""swarm.rpc.fields: what a message may have is counted before protobuf reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import CorruptFrame
from swarm.limits import COUNTS_MAX, MESSAGE_ASIDE_BYTES
from swarm.rpc.channel import MAX_MESSAGE_BYTES
from swarm.rpc.fields import REQUEST_FIELDS_MAX, check_fields
from swarm.rpc.mapping import parse
from swarm.rpc.session import parts
from swarm.wire import jobs_pb2 as pb
from swarm.wire import session_pb2
from tests.support.effort import others
from tests.support.fields import field
from tests.support.turns import UNITS_MAX, cost_s, held_up_units, unit, units_of

SHARDS = pb.ShardList.DESCRIPTOR
LONG = pb.Shard(sha256="a" * MESSAGE_ASIDE_BYTES)  # or a message is short


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.text(max_size=300)), max_size=20))
def test_every_field_counts_once_whatever_its_content(values: list[tuple[int, str]]) -> None:
    shards = [pb.Shard(sha256=text, tokens=number) for number, text in values]
    message = pb.ShardList(shards=[*shards, LONG]).SerializeToString()
    count = 2 + sum(1 + bool(number) + bool(text) for number, text in values)
    check_fields(message, SHARDS, count)
    with pytest.raises(CorruptFrame, match=f"has more than {count - 1} fields"):
        check_fields(message, SHARDS, count - 1)


@pytest.mark.parametrize(
    "end",
    [b"\x0a", b"\x0a\x05ab", b"\x08", b"\x0d\x01", b"\x09\x01", b"\x0b\x0c", b"\xff" * 30, b"\x08" + b"\x80" * 30],
)
def test_a_message_that_ends_too_early_or_never_is_refused(end: bytes) -> None:
    with pytest.raises(CorruptFrame):
        check_fields(pb.ShardList(shards=[LONG]).SerializeToString() + end, SHARDS, 1000)


def test_an_event_may_have_all_its_cells_and_its_batch_as_many() -> None:
    most = COUNTS_MAX["Hello.cells"]
    cell = session_pb2.ReportedCell(
        microbatch=session_pb2.Microbatch(timeline=1, step=1, index=1), attempt=1, accumulated=True, finite=True, loss=1
    )
    event = session_pb2.Event(hello=session_pb2.Hello(cells=[cell] * most))
    (found,) = parts(session_pb2.Event, event.SerializeToString())
    assert len(found.hello.cells) == most


EMPTY = field(SHARDS.fields_by_name["shards"].number, b"")
TWICE = field(pb.Shard.DESCRIPTOR.fields_by_name["sha256"].number, b"")


@pytest.mark.parametrize(
    "message",
    [
        EMPTY * (MAX_MESSAGE_BYTES // 2),
        *others(field(1, TWICE * (MAX_MESSAGE_BYTES // 2 - 8)), field(1, TWICE * 400) * (MAX_MESSAGE_BYTES // 804)),
    ],
    ids=["empty elements", *others("one element", "many elements")],
)
def test_other_threads_have_their_turn_while_the_longest_message_is_read(message: bytes) -> None:
    """protobuf lets none run while it reads: 140 units for a message of empty elements."""

    def read() -> None:
        with pytest.raises(CorruptFrame, match="has more than"):
            check_fields(message, SHARDS, REQUEST_FIELDS_MAX)

    assert held_up_units(read) < UNITS_MAX
    assert cost_s(read, tries=1) / cost_s(unit) < 1000


def test_a_long_message_of_a_stream_is_refused_after_a_few_fields() -> None:
    """It is read on the event loop."""
    with pytest.raises(CorruptFrame, match="has more than"):
        parse(pb.ShardList, EMPTY * (MAX_MESSAGE_BYTES // 2))
    assert units_of(lambda: refused(EMPTY * (MAX_MESSAGE_BYTES // 2))) < UNITS_MAX


def refused(message: bytes) -> None:
    with pytest.raises(CorruptFrame):
        parse(pb.ShardList, message)
