"""Members of a round with compressed slices: what they apply and what they have left over is what they contributed."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from stage_server.ports import ReplicaId
from stage_server.replica.averaging import Mean, run_round
from stage_server.replica.leftovers import Leftovers, together
from stage_server.replica.mailbox import Mailbox
from stage_server.replica.reduction import Reduction
from swarm.events import ParameterNorm
from swarm.messages import Average, Member
from swarm.model.codec import SLICE_CODECS
from swarm.peer_messages import Slice
from swarm.types import JobId, PeerId, Round, UnitName
from tests.support.devices import SimDevice

UNIT = UnitName("stage-0")
ELEMENTS, TOKENS = 1000, 7


class Sums:
    """A stage that has accumulated the same in every step."""

    def __init__(self, seed: int) -> None:
        self.sums = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))

    def part(self, step: int, unit: UnitName) -> Tensor:
        return self.sums

    def squared_norms(self, unit: UnitName, mean: Tensor) -> tuple[ParameterNorm, ...]:
        return ()


class Side:
    """One member, and the links of all to all."""

    def __init__(self, name: str, codec_name: str) -> None:
        self.me = ReplicaId(JobId("job"), PeerId(name), 1, 0)
        self.stage: Any = Sums(Random(name).getrandbits(32))
        self.mailbox = Mailbox(self.me.peer, 0, 1)
        self.leftovers = Leftovers(codec_name)


class Table:
    """Delivers to the mailbox at an address."""

    def __init__(self, *sides: Side) -> None:
        self.sides = {f"at {side.me.peer}": side for side in sides}

    async def send(self, address: str, header: Slice, payload: memoryview, *, to: PeerId) -> None:
        self.sides[address].mailbox.put(header, payload)


def average(step: int, *stops: tuple[str, int]) -> Average:
    """A round of these members; each owns what lies between its stop and the one before."""
    members, start = [], 0
    for name, stop in stops:
        members.append(Member(PeerId(name), 1, f"at {name}", start, stop, ""))
        start = stop
    return Average(0, step, UNIT, Round(1, 1), tuple(members), TOKENS, 3.0)


async def averaged(table: Table, command: Average) -> list[Mean]:
    """All members carry out the round, and commit it."""
    links: Any = table
    device = SimDevice(lambda: 0.0)
    computing = asyncio.ensure_future(device.work_forever())
    sides = [side for side in table.sides.values() if side.me.peer in {member.peer for member in command.members}]
    for side in sides:
        side.mailbox.begin(command)
    means = await asyncio.gather(
        *(
            run_round(command, one.me, one.stage, Reduction(None), device, links, one.mailbox, one.leftovers)
            for one in sides
        )
    )
    computing.cancel()
    for side, mean in zip(sides, means, strict=True):
        assert mean.left is not None
        side.leftovers.committed(command.step, {UNIT: mean.left})
    for side in table.sides.values():
        side.mailbox.close(command.step)
    return means


@pytest.mark.parametrize("codec_name", SLICE_CODECS)
async def test_what_is_applied_and_what_is_left_over_is_what_was_contributed(codec_name: str) -> None:
    """With two owners, then a third member that owns nothing, then one member alone."""
    a, b, c = (Side(name, codec_name) for name in "abc")
    table, applied, contributed = Table(a, b, c), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step in range(12):
        if step < 6:
            stops, sides = (("a", 300), ("b", ELEMENTS)), [a, b]
        else:
            stops, sides = (("a", 700), ("b", ELEMENTS), ("c", ELEMENTS)), [a, b, c]
        means = await averaged(table, average(step, *stops))
        assert len({mean.digest for mean in means}) == 1, "all hold the same bytes"
        applied += TOKENS * means[0].gradient
        contributed += sum(side.stage.sums for side in sides)
        left = torch.zeros(ELEMENTS)
        for side in (a, b, c):
            left = together(left, side.leftovers.lend(UNIT, step + 1))
        assert left.any()
        assert torch.allclose(applied + left, contributed, rtol=0.0, atol=1e-3)
    held = together(torch.zeros(ELEMENTS), a.leftovers.lend(UNIT, 12))
    (alone,) = await averaged(table, average(12, ("a", ELEMENTS)))
    assert torch.allclose(TOKENS * alone.gradient, a.stage.sums + held, atol=1e-4), "nothing is rounded for nobody"
    assert alone.left is not None
    assert not alone.left.any()
