"""A round over real links: slices of several chunks, unequal ones, and one member that owns nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

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
from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Average, Member, ParameterNorm, Slice, StateReply, StateRequest, TensorHeader

UNIT, TOKENS, BITS = UnitName("stage-0"), 7, 20


class Side:
    """One member: a stage with sums, and a mailbox behind a port."""

    def __init__(self, name: str, elements: int, device: ThreadDevice) -> None:
        drawn = torch.randn(elements, generator=torch.Generator().manual_seed(ord(name)), dtype=torch.float64)
        self.sums = (drawn * 2.0**BITS).round_()
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

    def part(self, step: int, unit: UnitName) -> Tensor:
        return self.sums

    @property
    def places(self) -> Side:
        return self

    def squared_norms(self, unit: UnitName, mean: Tensor) -> tuple[ParameterNorm, ...]:
        return ()

    async def average(self, command: Average) -> Mean:
        stage: Any = self
        self.mailbox.begin(command)
        leftovers = ErrorFeedback("none")
        reduction = Reduction(BITS)
        own = (self._device, self.links, self.mailbox, leftovers, Deadline(command.timeout_s))
        return await run_round(command, self.me, stage, reduction, *own)


async def test_unequal_slices_in_chunks_have_the_bits_of_the_sum_of_all() -> None:
    stops = {"a": 5 * CHUNK_ELEMENTS_MIN, "b": 5 * CHUNK_ELEMENTS_MIN, "c": 7 * CHUNK_ELEMENTS_MIN + 100}
    device = ThreadDevice(torch.device("cpu"), 1)
    sides = [Side(name, stops["c"], device) for name in stops]
    for side in sides:
        await side.server.start()
    members, start = [], 0
    for side, stop in zip(sides, stops.values(), strict=True):
        members.append(Member(side.me.peer, 1, side.address, start, stop, ""))
        start = stop
    assert [len(chunks_of(member, members)) for member in members] == [16, 0, 8]
    try:
        for step in range(2):
            command = Average(0, step, UNIT, Round(1, 1), tuple(members), TOKENS, 60.0)
            means = await asyncio.gather(*(side.average(command) for side in sides))
            expected = mean_of_parts([side.sums for side in sides], TOKENS, BITS)
            assert all(torch.equal(mean.gradient, expected) for mean in means)
            assert all(1e6 < rate < 1e11 for mean in means for rate in mean.rates)
            for side in sides:
                side.mailbox.close(step)
    finally:
        for side in sides:
            await side.links.close()
            await side.server.stop(None)
        device.close()
