"""What waits for a slow scheduler: every event, and a bounded number of log lines."""

from __future__ import annotations

import asyncio

import pytest

from stage_server.session import event_queue
from stage_server.session.event_queue import EventQueue
from swarm.types import JobId
from swarm.wire.messages import Event, Heartbeat, Logged


def _line(number: int) -> Logged:
    return Logged(JobId("demo-1"), float(number), "info", f"line {number}")


async def _all(queue: EventQueue) -> list[Event]:
    return [await queue.get() for _ in range(len(queue))]


async def test_log_lines_give_way_and_events_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage server that logs on while its link stands still grew without end."""
    monkeypatch.setattr(event_queue, "LINES_WAITING_MAX", 3)
    queue = EventQueue()
    for number in range(10):
        queue.put(Heartbeat(number))
        queue.put(_line(number))
    seen = await _all(queue)
    assert [event for event in seen if isinstance(event, Heartbeat)] == [Heartbeat(number) for number in range(10)]
    assert [event for event in seen if isinstance(event, Logged)] == [_line(0), _line(1), _line(2)]
    queue.put(_line(10))
    told, last = await _all(queue)
    assert isinstance(told, Logged)
    assert (told.level, told.message) == ("warning", "7 log lines were left out: the link to the scheduler is slow")
    assert last == _line(10)
    queue.put(_line(11))
    assert await _all(queue) == [_line(11)]


async def test_a_reader_waits_for_the_next_event() -> None:
    queue = EventQueue()
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not reader.done()
    queue.put(Heartbeat(1))
    assert await reader == Heartbeat(1)
