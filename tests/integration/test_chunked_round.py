"""A round over real links: slices of several chunks, unequal ones, and one member that owns nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch

from stage_server.brain.slices import CHUNK_ELEMENTS_MIN, chunks_of
from stage_server.device import ThreadDevice
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import Deadline, Mean, Reduction, run_round
from stage_server.replica.averaging.error_feedback import ErrorFeedback
from stage_server.replica.averaging.mailbox import Mailbox
from swarm.model.exact_sums import mean_of_parts
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.types import JobId, PeerId
from swarm.wire.messages import Average, Slice, StateReply, StateRequest, TensorHeader
from tests.support.fluid_rounds import Sums, average_of

TOKENS, BITS = 7, 20


class Side:
    """One member: a stage with sums, and a mailbox behind a port."""

    def __init__(self, name: str, elements: int, device: ThreadDevice) -> None:
        self.stage: Any = Sums(name, elements, BITS)
        self.me = ReplicaId(JobId("job"), PeerId(name), 1, 0)
        self.mailbox = Mailbox(self.me.peer, 0, 1)
        self.links = GrpcPeerLinks()
        self.server = new_server()
        add_peer_service(self.server, self)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1:0')}"
        self._device = device

    def admit(self, header: TensorHeader) -> None:
        assert isinstance(header, Slice)
        self.mailbox.admit(header)

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        assert isinstance(header, Slice)
        self.mailbox.put(header, payload)

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes | memoryview]:
        raise NotImplementedError

    async def average(self, command: Average) -> Mean:
        self.mailbox.begin(command)
        leftovers = ErrorFeedback("none")
        reduction = Reduction(BITS)
        own = (self._device, self.links, self.mailbox, leftovers, Deadline(command.timeout_s))
        return await run_round(command, self.me, self.stage, reduction, *own)


async def test_unequal_slices_in_chunks_have_the_bits_of_the_sum_of_all() -> None:
    stops = {"a": 5 * CHUNK_ELEMENTS_MIN, "b": 5 * CHUNK_ELEMENTS_MIN, "c": 7 * CHUNK_ELEMENTS_MIN + 100}
    device = ThreadDevice(torch.device("cpu"), 1)
    sides = [Side(name, stops["c"], device) for name in stops]
    for side in sides:
        await side.server.start()
    drafted = average_of(stops, TOKENS, timeout_s=60.0)
    members = [replace(member, address=side.address) for member, side in zip(drafted.members, sides, strict=True)]
    assert [len(chunks_of(member, members)) for member in members] == [16, 0, 8]
    try:
        for step in range(2):
            command = replace(drafted, step=step, members=tuple(members))
            means = await asyncio.gather(*(side.average(command) for side in sides))
            expected = mean_of_parts([side.stage.sums for side in sides], TOKENS, BITS)
            assert all(torch.equal(mean.gradient, expected) for mean in means)
            assert all(1e6 < rate < 1e11 for mean in means for rate in mean.rates)
            for side in sides:
                side.mailbox.close(step)
    finally:
        for side in sides:
            await side.links.close()
            await side.server.stop(None)
        device.close()
