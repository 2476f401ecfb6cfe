"""The bus: announcements and hints over an MQTT broker that may come and go.

MQTT 3.1.1 through aiomqtt, which does not reconnect by itself. `run` keeps connecting, and repeats all announcements
and subscriptions after every reconnection. Nothing here raises because the broker is away. Messages that arrive are
treated as written by strangers: only small JSON objects on subscribed topics are accepted, and any other message reads
as an empty one, because it took the place of what was retained.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import random
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias

import aiomqtt
from paho.mqtt.client import topic_matches_sub

from swarm.errors import InvalidConfig, leaves
from swarm.mqtt.endpoint import parse_url
from swarm.mqtt.key import USER, key_of
from swarm.process.logs import get_logger

Payload: TypeAlias = dict[str, Any]

PAYLOAD_BYTES_MAX = 64 << 10
BUFFERED_MAX = 1024  # messages waiting per subscription; the oldest is dropped
TOPICS_REMEMBERED_MAX = 4096  # per subscription, to know repeats
KEEPALIVE_S = 10
CALL_S_MAX = 5.0
BACKOFF_FIRST_S = 0.1
BACKOFF_S_MAX = 5.0
FAREWELL_S_MAX = 1.0
CANCEL_AGAIN_S = 2.0  # longer than a farewell and a disconnect take: a second cancellation would cut them short

_log = get_logger(__name__)
# aiomqtt's own messages. An answer to a subscription that was given up meanwhile is no fault, but it shows a traceback:
# who looks for the scheduler has its address from the retained message, which may come before the broker's answer.
_client_log = logging.getLogger(f"{__name__}.client")
_client_log.addFilter(lambda record: not str(record.msg).startswith("Unexpected message ID"))


class Bus:
    """One client of the broker at `url` (swarm/mqtt/endpoint.py).

    `will` is published, retained, when the connection dies and also when `run` is cancelled; an empty one clears the
    topic. `on_connected` is called with True and False as the link comes and goes. Raises InvalidConfig if the URL is
    not valid.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        *,
        will: tuple[str, Payload] | None = None,
        on_connected: Callable[[bool], None] | None = None,
    ) -> None:
        self.url = url
        self.endpoint = parse_url(url)
        self._client_id = client_id
        self._will = (will[0], _retained(will[1])) if will else None
        self._on_connected = on_connected
        self._client: aiomqtt.Client | None = None
        self._announced: dict[str, bytes] = {}
        self._unsent: dict[str, bytes] = {}
        self._subscriptions: list[Subscription] = []
        self._unsubscribed: set[str] = set()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._dice = random.Random(client_id)
        self.refused = 0  # messages received that are no small JSON objects

    @property
    def connected(self) -> bool:
        return self._client is not None

    def announce(self, topic: str, payload: Mapping[str, Any]) -> None:
        """Keep `payload` as the retained message of `topic`, after reconnections too; an empty one clears it once."""
        self._announced[topic] = self._unsent[topic] = _retained(payload)
        self._wake.set()

    def subscribe(self, topic_filter: str) -> Subscription:
        """Messages of matching topics, from now on; retained ones come first."""
        subscription = Subscription(topic_filter, self._forget)
        self._subscriptions.append(subscription)
        self._unsubscribed.add(topic_filter)
        self._settled.clear()
        self._wake.set()
        return subscription

    async def settled(self) -> None:
        """Wait until the broker has acknowledged every subscription."""
        await self._settled.wait()

    async def run(self) -> None:
        """Hold the link until cancelled; never returns, and never raises because of the broker."""
        link, cancelled = asyncio.create_task(self._hold()), False
        while not link.done():
            try:
                await asyncio.wait({link}, timeout=CANCEL_AGAIN_S if cancelled else None)
            except asyncio.CancelledError:
                cancelled = True
            if cancelled:
                # Again, if need be: connecting and disconnecting, aiomqtt waits with asyncio.wait_for, which on
                # Python 3.11 swallows a cancellation that comes together with the answer.
                link.cancel()
        link.result()
        raise asyncio.CancelledError

    async def _hold(self) -> None:
        backoff_s, complaint = BACKOFF_FIRST_S, ""
        while True:
            try:
                async with self._new_client() as client:
                    backoff_s, complaint = BACKOFF_FIRST_S, ""
                    await self._serve(client)
                reason = "the connection ended"
            except* (aiomqtt.MqttError, OSError, TimeoutError, InvalidConfig) as group:
                first = next(leaves(group))
                reason = str(first) or type(first).__name__
            if reason != complaint:
                complaint = reason
                _log.warning("broker not connected", broker=self.endpoint.shown, reason=reason)
            await asyncio.sleep(backoff_s * self._dice.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, BACKOFF_S_MAX)

    def _new_client(self) -> aiomqtt.Client:
        end, key = self.endpoint, key_of(self.endpoint)
        return aiomqtt.Client(
            end.host,
            end.port,
            username=end.username if key is None else USER,
            password=end.password if key is None else key,
            tls_context=None if end.tls is None else end.tls.context(),
            # A broker may not take a session over from a connection that it still believes in: every id is new.
            identifier=f"{self._client_id}-{secrets.token_hex(4)}",
            protocol=aiomqtt.ProtocolVersion.V311,
            will=aiomqtt.Will(self._will[0], self._will[1], qos=1, retain=True) if self._will else None,
            clean_session=True,
            timeout=CALL_S_MAX,
            keepalive=KEEPALIVE_S,
            max_queued_incoming_messages=BUFFERED_MAX,
            logger=_client_log,
        )

    async def _serve(self, client: aiomqtt.Client) -> None:
        self._client = client
        self._unsent = dict(self._announced)
        self._unsubscribed = {subscription.topic_filter for subscription in self._subscriptions}
        self._wake.set()
        self._tell(True)
        _log.info("broker connected", broker=self.endpoint.shown)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(client))
                tasks.create_task(self._receive(client))
        except asyncio.CancelledError:
            await self._say_farewell(client)
            raise
        finally:
            self._client = None
            self._settled.clear()
            self._tell(False)

    async def _send(self, client: aiomqtt.Client) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsubscribed:
                topic_filter = next(iter(self._unsubscribed))
                # Deadlines are ours: aiomqtt's use asyncio.wait_for, which on Python 3.11 swallows a cancellation that
                # comes together with the answer, and then this task would never end.
                async with asyncio.timeout(CALL_S_MAX):
                    await client.subscribe(topic_filter, qos=1, timeout=math.inf)
                self._unsubscribed.discard(topic_filter)
            self._settled.set()
            while self._unsent:
                topic, data = next(iter(self._unsent.items()))
                async with asyncio.timeout(CALL_S_MAX):
                    await client.publish(topic, data, qos=1, retain=True, timeout=math.inf)
                if self._unsent.get(topic) is data:  # else a newer value came meanwhile
                    del self._unsent[topic]
                    if not data:  # the topic is clear, and need not be cleared after each reconnection
                        self._announced.pop(topic, None)

    async def _receive(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            topic, data = str(message.topic), message.payload
            takers = [
                subscription
                for subscription in self._subscriptions
                if topic_matches_sub(subscription.topic_filter, topic)
            ]
            if not takers or not isinstance(data, bytes):
                continue
            payload = decode(data) if data else {}  # an empty message clears what was retained
            if payload is None:
                self.refused += 1
                payload, data = {}, b""
            for subscription in takers:
                subscription.offer(topic, payload, data)

    async def _say_farewell(self, client: aiomqtt.Client) -> None:
        """A clean disconnect makes the broker forget the will, so it is published by hand."""
        if self._will is None:
            return
        with contextlib.suppress(aiomqtt.MqttError, OSError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S_MAX):
                await client.publish(self._will[0], self._will[1], qos=1, retain=True)

    def _forget(self, subscription: Subscription) -> None:
        with contextlib.suppress(ValueError):
            self._subscriptions.remove(subscription)

    def _tell(self, connected: bool) -> None:
        if self._on_connected is not None:
            self._on_connected(connected)


class Subscription(AsyncIterator[tuple[str, Payload]]):
    """Messages of one topic filter: `async for topic, payload in subscription`. One reader at a time.

    Holds at most 1,024 messages for a slow reader (`dropped` counts the rest). A message equal to the last one of its
    topic is left out: brokers repeat retained messages.
    """

    def __init__(self, topic_filter: str, on_close: Callable[[Subscription], None]) -> None:
        self.topic_filter = topic_filter
        self.dropped = 0
        self._on_close = on_close
        self._waiting: deque[tuple[str, Payload]] = deque()
        self._arrived = asyncio.Event()
        self._last: OrderedDict[str, bytes] = OrderedDict()
        self._closed = False

    def offer(self, topic: str, payload: Payload, data: bytes) -> None:
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if self._last.get(topic) == digest:
            return
        self._last[topic] = digest
        self._last.move_to_end(topic)
        if len(self._last) > TOPICS_REMEMBERED_MAX:
            self._last.popitem(last=False)
        if len(self._waiting) >= BUFFERED_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append((topic, payload))
        self._arrived.set()

    def close(self) -> None:
        """End the iteration and take no further messages."""
        self._closed = True
        self._on_close(self)
        self._arrived.set()

    async def __anext__(self) -> tuple[str, Payload]:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()


def encode(payload: Mapping[str, Any]) -> bytes:
    """The payload as JSON bytes; an AssertionError if it is too large to be accepted by a reader."""
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()
    assert len(data) <= PAYLOAD_BYTES_MAX, f"payload of {len(data)} bytes"
    return data


def _retained(payload: Mapping[str, Any]) -> bytes:
    """The retained message of a payload; an empty one clears the topic."""
    return encode(payload) if payload else b""


def decode(data: bytes) -> Payload | None:
    """The JSON object in `data`; None if it is not one, or too large."""
    if len(data) > PAYLOAD_BYTES_MAX:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
