from __future__ import annotations

import asyncio
import json

import pytest

from swarm.mqtt import discovery, topics
from swarm.mqtt.discovery import Announcement, find_scheduler

CONNECT, SUBSCRIBE = 1, 8


class ForgetfulBroker:
    """Speaks just enough MQTT 3.1.1, and sends what it retains only to the subscription number `answers_at`."""

    def __init__(self, announcement: Announcement, answers_at: int) -> None:
        topic = topics.scheduler().encode()
        content = len(topic).to_bytes(2, "big") + topic + json.dumps(announcement.payload()).encode()
        assert len(content) < 128
        self._publish = bytes([0x31, len(content)]) + content
        self._answers_at = answers_at
        self.subscriptions = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                kind, length = await reader.readexactly(2)
                body = await reader.readexactly(length)
                if kind >> 4 == CONNECT:
                    writer.write(b"\x20\x02\x00\x00")
                elif kind >> 4 == SUBSCRIBE:
                    self.subscriptions += 1
                    writer.write(b"\x90\x03" + body[:2] + b"\x01")
                    if self.subscriptions == self._answers_at:
                        writer.write(self._publish)
        except asyncio.IncompleteReadError:
            writer.close()


async def found_through(broker: ForgetfulBroker, timeout_s: float) -> Announcement:
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await find_scheduler(f"mqtt://127.0.0.1:{port}", timeout_s=timeout_s)


async def test_an_announcement_that_the_broker_forgot_to_send_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "ASK_AGAIN_S", 0.05)
    announcement = Announcement("127.0.0.1:7950", 3, "0.1.0")
    broker = ForgetfulBroker(announcement, answers_at=3)
    assert await found_through(broker, timeout_s=60.0) == announcement
    assert broker.subscriptions == 3


async def test_an_announcement_that_comes_with_the_subscriptions_answer_ends_the_search() -> None:
    """The link was cancelled while the answer was being taken; the cancellation was swallowed, the search hung."""
    announcement = Announcement("127.0.0.1:7950", 3, "0.1.0")
    for _ in range(40):
        async with asyncio.timeout(60.0):
            found = await found_through(ForgetfulBroker(announcement, answers_at=1), timeout_s=30.0)
        assert found == announcement
