"""What one caller's message costs of the event loop: no more than 50 ms (tests/support/turns.py)."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from swarm.limits import COUNTS_MAX, MESSAGE_ASIDE_BYTES
from swarm.rpc import session
from swarm.rpc.mapping import to_event
from swarm.rpc.session import INBOX_LIMIT, TOGETHER_MAX, Pipe
from swarm.wire.messages import Event, Heartbeat, Hello
from tests.support.nonsense import SAID
from tests.support.sim import loop as sim
from tests.support.turns import UNITS_MAX, units_of

KEY_BYTES = 5  # of a message in a batch, at most


def full(event: Event) -> bytes:
    """A message of such events, as long as one may be that is read on the event loop, and no longer."""
    if isinstance(event, Hello):
        event = replace(event, address="10.0.0.1:7950")
    long = to_event(event)
    lists = [field.name for field in fields(event) if isinstance(getattr(event, field.name), tuple)]
    for name in lists:
        elements = getattr(event, name)
        count = COUNTS_MAX[f"{type(event).__name__}.{name}"]
        while elements and count:
            long = to_event(replace(event, **{name: (elements * count)[:count]}))  # type: ignore[arg-type]
            if long.ByteSize() < MESSAGE_ASIDE_BYTES:
                break
            count = count * 3 // 4
    one, room = long.SerializeToString(), MESSAGE_ASIDE_BYTES - 1 - long.ByteSize()
    long.more.extend([one] * min(TOGETHER_MAX - 1, room // (len(one) + KEY_BYTES)))
    return long.SerializeToString()


@pytest.mark.parametrize("event", SAID, ids=lambda event: type(event).__name__)
def test_the_largest_message_that_is_read_on_the_event_loop_costs_less_than_fifty_units(event: Event) -> None:
    data = full(event)
    assert len(data) < MESSAGE_ASIDE_BYTES
    units = units_of(lambda: session._events(data))
    assert units <= UNITS_MAX, f"{units:.1f} for {len(data)} bytes"


def test_a_flood_of_events_lets_others_have_their_turn_after_sixty_four() -> None:
    """Counted in turns of the event loop: what is ready of one session is taken in portions."""
    flood = 50 * INBOX_LIMIT
    taken = 0
    seen: list[int] = []

    async def main() -> None:
        events: Pipe[Event] = Pipe(INBOX_LIMIT)

        async def write() -> None:
            for number in range(flood):
                await events.put(Heartbeat(number))
            events.end()

        async def read() -> None:
            nonlocal taken
            async for _ in events:
                taken += 1

        async def others() -> None:
            while taken < flood:
                seen.append(taken)
                await asyncio.sleep(0)

        await asyncio.gather(write(), read(), others())

    sim.run(main(), seed=1)
    assert max(later - earlier for earlier, later in pairwise(seen)) <= INBOX_LIMIT
