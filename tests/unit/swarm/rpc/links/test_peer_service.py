"""swarm.rpc.links.peer_service: receipts that nobody waits for go together, and none waits for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.errors import StaleMessage
from swarm.rpc.links.peer_service import RECEIPT_S, SMALL_BYTES, _is_small, _PeerAnswers
from swarm.types import Direction, JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire import frame_pb2
from swarm.wire.messages import Boundary, Need, Slice, TensorHeader
from tests.support.sim import loop as sim

JOB, PEER = JobId("j"), PeerId("p")


class Stream:
    """Notes when each message of receipts was written, and what was in it."""

    def __init__(self) -> None:
        self.written: list[tuple[float, list[int]]] = []

    async def write(self, data: bytes) -> None:
        receipts = frame_pb2.Receipts.FromString(data).receipts
        self.written.append((asyncio.get_running_loop().time(), [receipt.sequence for receipt in receipts]))

    def done(self) -> bool:
        return False


def test_receipts_that_nobody_waits_for_go_together_and_none_waits_for_long() -> None:
    async def main() -> list[tuple[float, list[int]]]:
        stream: Any = Stream()
        answers = _PeerAnswers(stream)
        async with asyncio.TaskGroup() as tasks:
            for sequence in range(4):
                tasks.create_task(answers.send(sequence, None, hurry=False))
                await asyncio.sleep(RECEIPT_S / 10)
            await asyncio.sleep(1.0)
            tasks.create_task(answers.send(4, None, hurry=False))
            await asyncio.sleep(RECEIPT_S / 10)
            tasks.create_task(answers.send(5, StaleMessage("it has moved on")))
        began_s = stream.written[0][0] - RECEIPT_S
        return [(time_s - began_s, sequences) for time_s, sequences in stream.written]

    (first_s, first), (second_s, second) = sim.run(main(), seed=0)
    assert (first, second) == ([0, 1, 2, 3], [4, 5])
    assert second_s - first_s == pytest.approx(1.0 - 0.5 * RECEIPT_S)


class Deaf(Stream):
    """Its caller reads nothing until the event comes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = asyncio.Event()
        self.received_bytes = 0

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.received_bytes = frame_pb2.Receipts.FromString(data).received_bytes


def test_a_caller_that_sends_and_reads_nothing_makes_few_tasks_and_hears_the_sum_in_the_end() -> None:
    """Each five milliseconds in which it sent something made a task that waited to tell it so, without end."""

    async def main() -> tuple[int, int]:
        stream: Any = Deaf()
        answers = _PeerAnswers(stream)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(300):
                answers.came(10, tasks)
                await asyncio.sleep(2 * RECEIPT_S)
            waiting = len(asyncio.all_tasks()) - 1
            stream.reads.set()
        return waiting, stream.received_bytes

    waiting, received_bytes = sim.run(main(), seed=0)
    assert waiting <= 3, "one that writes, the message that it writes, and one that waits"
    assert received_bytes == 3000


def test_what_a_task_writes_as_its_stream_is_cut_off_leaves_first() -> None:
    """gRPC sends no status while a message leaves, so a neighbour that was revoked heard no reason."""

    class Slow(Stream):
        async def write(self, data: bytes) -> None:
            await asyncio.sleep(0.1)
            await super().write(data)

    async def main() -> list[tuple[float, list[int]]]:
        stream: Any = Slow()
        answers = _PeerAnswers(stream)

        async def exchange() -> None:
            async with asyncio.TaskGroup() as tasks, answers:
                tasks.create_task(answers.send(7, None, in_group=True))
                await asyncio.sleep(1000.0)

        serving = asyncio.ensure_future(exchange())
        await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.wait({serving})
        assert serving.cancelled()
        written: list[tuple[float, list[int]]] = stream.written
        return written

    assert [sequences for _, sequences in sim.run(main(), seed=0)] == [[7]]


def boundary(dtype: str, elements: int, codec: str) -> Boundary:
    return Boundary(JOB, Microbatch(0, 0, 0), Direction.FORWARD, 1, 1, PEER, 1, dtype, (elements,), codec, 9)


@pytest.mark.parametrize(
    ("header", "is_small"),
    [
        (boundary("float32", SMALL_BYTES // 4, "none"), True),
        (boundary("float32", SMALL_BYTES // 4 + 1, "none"), False),
        (boundary("int8", SMALL_BYTES // 4 + 1, "int8"), False),
        (Slice(JOB, 0, 0, UnitName("stage-0"), Round(1, 1), True, 0, PEER, 1, "float32", 1, 4), False),
        (Need(JOB, Microbatch(0, 0, 0), Direction.FORWARD, 0, 1, PEER, 1), False),
    ],
)
def test_a_round_a_question_and_the_measure_of_a_link_wait_for_no_other_receipt(
    header: TensorHeader, is_small: bool
) -> None:
    """A delay would make links look slow, and choose another codec for them."""
    assert _is_small(header) is is_small
