"""What needs no broker: URLs, topics, payloads of strangers, slow readers."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import structlog

from swarm.mqtt import bus as bus_module
from swarm.mqtt.bus import (
    BUFFERED_MAX,
    TOPICS_REMEMBERED_MAX,
    Bus,
    Subscription,
    encode,
)
from swarm.mqtt.discovery import Announcement, parse_announcement
from swarm.process.logs import configure

GOOD = Announcement("127.0.0.1:7950", 1, "0.1.0").payload()


def _subscription() -> Subscription:
    return Subscription("t/+", lambda _: None)


def _offer(subscription: Subscription, topic: str, number: int) -> None:
    payload = {"n": number}
    subscription.offer(topic, payload, encode(payload))


async def test_a_slow_reader_loses_the_oldest() -> None:
    subscription = _subscription()
    for number in range(BUFFERED_MAX + 3):
        _offer(subscription, "t/a", number)
    assert subscription.dropped == 3
    assert (await anext(subscription))[1] == {"n": 3}


def test_memory_of_repeats_is_bounded() -> None:
    subscription = _subscription()
    for number in range(TOPICS_REMEMBERED_MAX + 10):
        _offer(subscription, f"t/{number}", 1)
    assert len(subscription._last) == TOPICS_REMEMBERED_MAX


async def test_closing_ends_a_waiting_reader() -> None:
    subscription = _subscription()
    reading = asyncio.create_task(anext(subscription))
    await asyncio.sleep(0)
    subscription.close()
    with pytest.raises(StopAsyncIteration):
        await reading


@pytest.mark.parametrize(
    "fault",
    [
        *({"address": at} for at in ("nowhere", ":7950", "host:0", "host:70000", "ho st:1", "h" * 300 + ":1", 7)),
        *({"epoch": epoch} for epoch in ("1", -1, True)),
        *({"protocol": None}, {"product": 5}),
    ],
)
def test_a_strange_announcement_is_none(fault: dict[str, object]) -> None:
    assert parse_announcement(GOOD | fault) is None


class Swallowing:
    """An MQTT client whose connecting and disconnecting swallow one cancellation each, as asyncio.wait_for may."""

    entered = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.messages = self._none()

    async def __aenter__(self) -> Swallowing:
        Swallowing.entered += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    async def _none(self) -> object:
        await asyncio.sleep(60)
        yield


async def test_a_bus_ends_when_cancelled_even_if_cancellations_are_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage server that was stopped while it connected to its broker went on for ever."""
    monkeypatch.setattr(bus_module.aiomqtt, "Client", Swallowing)
    monkeypatch.setattr(bus_module, "CANCEL_AGAIN_S", 0.01)
    running = asyncio.create_task(Bus("mqtt://127.0.0.1:1", "test").run())
    while not Swallowing.entered:
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=60.0)
    assert done
    assert running.cancelled()
    assert len(asyncio.all_tasks()) == 1  # its inner task has ended too


def test_an_answer_to_a_subscription_that_was_given_up_is_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever found the scheduler before the broker's answer came logged a traceback of aiomqtt's."""
    configure("info", "json")
    try:
        client = bus_module._client_log
        client.error('Unexpected message ID "%d" in on_subscribe callback', 7)
        client.warning("Message queue is full. Discarding message.")
    finally:
        structlog.reset_defaults()
    shown = capsys.readouterr().err
    assert "Unexpected" not in shown
    assert "Message queue is full" in shown
