"""Rounds of real members in virtual time, on links of so many bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import Deadline, Mean, Reduction, run_round
from stage_server.replica.averaging.error_feedback import ErrorFeedback
from stage_server.replica.averaging.mailbox import Mailbox
from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Average, Member, ParameterNorm, Slice, TensorHeader
from tests.support.devices import SimDevice
from tests.support.sim import loop as sim
from tests.support.sim.fluid import FluidNetwork, Line

UNIT = UnitName("stage-0")


class Sums:
    """A stage that has accumulated what its name says, the same in every step."""

    def __init__(self, name: str, elements: int, bits: int | None = None) -> None:
        drawn = torch.randn(elements, generator=torch.Generator().manual_seed(Random(name).getrandbits(32)))
        self.sums = drawn if bits is None else (drawn.double() * 2.0**bits).round()

    def part(self, step: int, unit: UnitName) -> Tensor:
        return self.sums

    def expect(self, unit: UnitName, mean: Tensor) -> Tensor:
        return mean

    @property
    def places(self) -> Sums:
        return self

    def squared_norms(self, unit: UnitName, mean: Tensor) -> tuple[ParameterNorm, ...]:
        return ()


def average_of(
    stops: Mapping[str, int], tokens: int, *, step: int = 0, timeout_s: float = 3.0, at: str = "{}"
) -> Average:
    """A round of these members; each owns what lies between its stop and the one before."""
    starts = [0, *stops.values()]
    members = (
        Member(PeerId(name), 1, at.format(name), start, stop, "")
        for start, (name, stop) in zip(starts, stops.items(), strict=False)
    )
    return Average(0, step, UNIT, Round(1, 1), tuple(members), tokens, timeout_s)


class Fleet:
    """The members of a round, and what their links did."""

    def __init__(
        self,
        command: Average,
        codec_name: str,
        bits: int | None,
        lines: Mapping[str, Line],
        site_of: Mapping[str, str] | None = None,
    ) -> None:
        self.command, self.bits = command, bits
        self.names = [str(member.peer) for member in command.members]
        self.stages = {name: Sums(name, command.members[-1].stop, bits) for name in self.names}
        self.mailboxes = {name: Mailbox(PeerId(name), 0, 1) for name in self.names}
        self.leftovers = {name: ErrorFeedback(codec_name) for name in self.names}
        self.arrived: list[Slice] = []
        self.copies = 1
        self.silent = ""
        self.clips = False
        self.network = FluidNetwork(lines, self._take, site_of)

    def run(self) -> tuple[float, dict[str, Mean]]:
        """Seconds of the round, and what each member that is not silent makes of it."""
        return sim.run(self._round(), seed=0)

    async def _round(self) -> tuple[float, dict[str, Mean]]:
        device = SimDevice(lambda: 0.0)
        computing = asyncio.ensure_future(device.work_forever())
        for mailbox in self.mailboxes.values():
            mailbox.begin(self.command)
        try:
            able = [name for name in self.names if name != self.silent]
            means = await asyncio.gather(*(self._member(name, device) for name in able))
            return asyncio.get_running_loop().time(), dict(zip(able, means, strict=True))
        finally:
            computing.cancel()

    async def _member(self, name: str, device: SimDevice) -> Mean:
        me, stage, links = ReplicaId(JobId("job"), PeerId(name), 1, 0), self.stages[name], self.network.links(name)
        simulated: tuple[Any, Any] = stage, links
        mailbox, leftovers = self.mailboxes[name], self.leftovers[name]
        reduction = Reduction(self.bits, self.clips)
        own = (device, simulated[1], mailbox, leftovers, Deadline(self.command.timeout_s))
        return await run_round(self.command, me, simulated[0], reduction, *own)

    def _take(self, address: str, header: TensorHeader, payload: memoryview) -> None:
        assert isinstance(header, Slice)
        self.arrived.append(header)
        for _ in range(self.copies):
            self.mailboxes[address].put(header, payload)
