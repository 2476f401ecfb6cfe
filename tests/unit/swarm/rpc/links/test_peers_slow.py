"""Links and pulls over a line of 1 Mbit/s and 200 ms, whose buffers take all that is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from swarm.errors import PeerUnavailable
from swarm.rpc.channel import PATIENT, new_server
from swarm.rpc.links import peers
from swarm.rpc.links.memory import FileCount
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import PATIENCE_S_MIN, PROBE_S, GrpcPeerLinks
from swarm.rpc.links.state import state_reply
from swarm.rpc.window import QUEUE_HIGH_S, START_BYTES, Window
from swarm.types import JobId, PeerId
from swarm.wire.messages import StateReply, StateRequest, TensorHeader
from tests.support.deep import DeepLine, deep
from tests.support.headers import header_of
from tests.support.serving import serving

RATE, DELAY_S = 125_000.0, 0.1  # 1 Mbit/s, 100 ms each way
SIZE_BYTES = 200_000
STATE = bytes(range(250)) * 2400  # 600 kB
ASKED = StateRequest(JobId("job"), 0, 0, "state", 0, 0, 0, PeerId("joiner"), 1)


class Receiver:
    """Takes tensors, and gives the same state to whoever asks."""

    def __init__(self) -> None:
        self.arrived = self.parts = self.given = 0

    def admit(self, header: TensorHeader) -> peers.Moved:
        return self._moved

    def _moved(self) -> None:
        self.parts += 1

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        self.arrived += 1

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        self.given += 1
        return state_reply(1, 0, STATE), STATE


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ends are on two hosts: no memory is shared."""
    monkeypatch.setattr(peers, "lent_files", lambda: FileCount(0))


@asynccontextmanager
async def behind_a_line(receiver: Receiver, bytes_per_s: float = RATE) -> AsyncIterator[tuple[DeepLine, GrpcPeerLinks]]:
    server, links = new_server(more=PATIENT), GrpcPeerLinks()  # as stage_server/app.py
    add_peer_service(server, receiver, None, receiver)
    async with serving(server) as address:
        async with deep(address, bytes_per_s, DELAY_S) as line:
            yield line, links
            await links.close()


async def test_tensors_pass_a_slow_line_once_and_its_buffers_stay_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes filled the buffers in front of a slow line. Pings waited behind them, so the link broke every two
    seconds, and each break cost all tensors that were under way."""
    monkeypatch.setattr(peers, "PATIENCE_S_MIN", 1.0)
    receiver, moved = Receiver(), []
    async with behind_a_line(receiver) as (line, links):
        headers = [header_of(SIZE_BYTES, index) for index in range(5)]
        sending = (
            links.send(line.address, header, bytes(SIZE_BYTES), moved=lambda: moved.append(1)) for header in headers
        )
        await asyncio.gather(*sending)
    assert receiver.arrived == 5
    assert line.carried_bytes <= 1.2 * 5 * SIZE_BYTES
    assert line.connections == 1
    assert line.longest_s < 1.5 * (QUEUE_HIGH_S + START_BYTES / RATE)
    assert len(moved) > 50, "progress is seen in small parts on this side"
    assert receiver.parts > 50, "and on the other"


async def test_state_passes_a_slow_line_once_with_all_joiners_patience_left() -> None:
    receiver = Receiver()
    async with behind_a_line(receiver) as (line, links):
        reply, payload = await links.pull(line.address, ASKED, len(STATE))
    assert (bytes(payload), reply.total_bytes) == (STATE, len(STATE))
    assert line.carried_back_bytes <= 1.2 * len(STATE)
    assert line.longest_s < 1.5 * (QUEUE_HIGH_S + START_BYTES / RATE)


async def test_the_next_pull_of_a_joiner_begins_with_the_window_that_the_last_one_ended_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the many chunks of a stage's state began as small as the first one on that line."""
    made: list[int] = []

    class Counted(Window):
        def __init__(self, now_s: float) -> None:
            super().__init__(now_s)
            made.append(self.size_bytes)

    monkeypatch.setattr("swarm.rpc.links.peer_service.Window", Counted)
    receiver = Receiver()
    async with behind_a_line(receiver, 100 * RATE) as (line, links):
        for chunk, joiner in enumerate(("one", "one", "other", "one")):
            asked = replace(ASKED, chunk=chunk, sender=PeerId(joiner))
            await links.pull(line.address, asked, len(STATE))
    assert receiver.given == 4
    assert len(made) == 2, "one for each joiner"


async def test_a_pull_that_breaks_goes_on_from_the_byte_that_came() -> None:
    """What had come of a chunk of 8 MiB was thrown away whenever the connection broke, and a line that takes a minute
    for it breaks now and then."""
    receiver = Receiver()
    async with behind_a_line(receiver) as (line, links):
        pulling = asyncio.create_task(links.pull(line.address, ASKED, len(STATE)))
        for part in (0.3, 0.7):
            while line.carried_back_bytes < part * len(STATE):
                await asyncio.sleep(0.02)
            line.cut()
        _, payload = await pulling
    assert bytes(payload) == STATE
    assert (receiver.given, line.connections) == (1, 3)
    assert line.carried_back_bytes <= 1.2 * len(STATE) + 2 * line.held_bytes_max


async def test_a_line_that_carries_nothing_any_more_breaks_the_link_in_a_few_seconds() -> None:
    receiver = Receiver()
    loop = asyncio.get_running_loop()
    async with behind_a_line(receiver) as (line, links):
        await links.send(line.address, header_of(4), b"abcd")
        line.hold()
        held_s = loop.time()
        with pytest.raises(PeerUnavailable, match="has answered nothing for"):
            await links.send(line.address, header_of(4), b"abcd")
        took_s = loop.time() - held_s
    assert PATIENCE_S_MIN <= took_s <= PATIENCE_S_MIN + 4 * 4 * DELAY_S + 2 * PROBE_S + 1.0


async def test_a_receiver_that_takes_its_time_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read while as many tensors as may be are with the receiver; that is no silence."""
    monkeypatch.setattr(peers, "PATIENCE_S_MIN", 1.0)
    monkeypatch.setattr("swarm.rpc.links.peer_service.MAX_RECEIVING", 1)
    opened = asyncio.Event()

    class Slow(Receiver):
        async def receive(self, header: TensorHeader, payload: memoryview) -> None:
            await opened.wait()
            self.arrived += 1

    receiver, links = Slow(), GrpcPeerLinks()
    server = new_server()
    add_peer_service(server, receiver)
    async with serving(server) as address:
        sending = [asyncio.create_task(links.send(address, header_of(30_000, i), bytes(30_000))) for i in range(9)]
        done, _ = await asyncio.wait(sending, timeout=2.5)
        assert not done
        opened.set()
        await asyncio.gather(*sending)
        await links.close()


async def test_what_is_on_its_way_to_a_neighbour_never_passes_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    excess: list[int] = []
    sent = Window.sent

    def noted(self: Window, count_bytes: int, now_s: float) -> None:
        excess.append(count_bytes - self.room_bytes if self.unacknowledged_bytes else count_bytes - self.size_bytes)
        sent(self, count_bytes, now_s)

    monkeypatch.setattr(Window, "sent", noted)
    receiver = Receiver()
    async with behind_a_line(receiver) as (line, links):
        await asyncio.gather(*(links.send(line.address, header_of(50_000, index), bytes(50_000)) for index in range(6)))
    assert len(excess) > 20
    assert max(excess) <= 8 << 10, "a header, and the least piece"
