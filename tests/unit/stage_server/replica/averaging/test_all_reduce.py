"""Members of a round with compressed slices: what they apply and what they have left over is what they contributed."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from stage_server.device import Device, ThreadDevice
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import STRETCH_MAX, Deadline, Mean, Reduction, run_round
from stage_server.replica.averaging.error_feedback import ErrorFeedback, together
from stage_server.replica.averaging.mailbox import Mailbox
from swarm.model.codec import SLICE_CODECS
from swarm.rpc.links.peers import Moved
from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Average, Member, Slice
from tests.support.devices import SimDevice, noted_threads
from tests.support.fluid_rounds import UNIT, Sums, average_of
from tests.support.sim import loop as sim

ELEMENTS, TOKENS = 1000, 7


class Side:
    """One member, and the links of all to all."""

    def __init__(self, name: str, codec_name: str) -> None:
        self.me = ReplicaId(JobId("job"), PeerId(name), 1, 0)
        self.stage: Any = Sums(name, ELEMENTS)
        self.mailbox = Mailbox(self.me.peer, 0, 1)
        self.leftovers = ErrorFeedback(codec_name)


class Table:
    """Delivers to the mailbox at an address."""

    def __init__(self, *sides: Side) -> None:
        self.sides = {f"at {side.me.peer}": side for side in sides}

    async def send(
        self, address: str, header: Slice, payload: memoryview, *, to: PeerId, moved: Moved | None = None
    ) -> None:
        self.sides[address].mailbox.put(header, payload)


def average(step: int, *stops: tuple[str, int]) -> Average:
    return average_of(dict(stops), TOKENS, step=step, at="at {}")


async def averaged(table: Table, command: Average, *, clips: bool = False, device: Device | None = None) -> list[Mean]:
    """All members carry out the round, and commit it."""
    links: Any = table
    simulated = SimDevice(lambda: 0.0)
    works, reduction = device or simulated, Reduction(None, clips)
    computing = asyncio.ensure_future(simulated.work_forever())
    sides = [side for side in table.sides.values() if side.me.peer in {member.peer for member in command.members}]
    for side in sides:
        side.mailbox.begin(command)
    own = [(works, links, side.mailbox, side.leftovers, Deadline(command.timeout_s)) for side in sides]
    means = await asyncio.gather(
        *(run_round(command, one.me, one.stage, reduction, *its) for one, its in zip(sides, own, strict=True))
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


@pytest.mark.parametrize("codec_name", SLICE_CODECS)
@pytest.mark.parametrize("idle", ["a", "c"], ids=["owner", "no owner"])
async def test_a_member_without_microbatches_keeps_what_it_has_left_over_where_parts_are_clipped(
    codec_name: str, idle: str
) -> None:
    """Its part is left out, so what it would have added would never come. Sums stray equally, so nothing is cut."""
    sides = [Side(name, codec_name) for name in "abc"]
    table, applied, contributed = Table(*sides), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    held = {side.me.peer: side.stage.sums for side in sides}
    for step in range(6):
        command = average(step, ("a", 600), ("b", ELEMENTS), ("c", ELEMENTS))
        idle_now = {idle} if step % 2 else set()
        counts = [0 if member.peer in idle_now else 2 for member in command.members]
        members = tuple(
            replace(member, microbatches=count) for member, count in zip(command.members, counts, strict=True)
        )
        for side in sides:
            side.stage.sums = torch.zeros(ELEMENTS) if side.me.peer in idle_now else held[side.me.peer]
        means = await averaged(table, replace(command, members=members), clips=True)
        assert len({mean.digest for mean in means}) == 1
        applied += TOKENS * means[0].gradient
        contributed += sum(side.stage.sums for side in sides)
        left = torch.zeros(ELEMENTS)
        for side in sides:
            left = together(left, side.leftovers.lend(UNIT, step + 1))
        assert left.any()
        assert torch.allclose(applied + left, contributed, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("clips", [False, True], ids=["added", "clipped"])
async def test_chunks_are_put_together_beside_the_event_loop(clips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where parts are clipped, the event loop copied all parts of a slice before it was reduced."""
    monkeypatch.setattr("stage_server.brain.slices.CHUNK_ELEMENTS_MIN", 256)
    device = ThreadDevice(torch.device("cpu"), 1)
    joining = noted_threads(monkeypatch, torch, "cat")
    try:
        await averaged(
            Table(Side("a", "bfloat16"), Side("b", "bfloat16")),
            average(0, ("a", ELEMENTS), ("b", ELEMENTS)),
            clips=clips,
            device=device,
        )
    finally:
        device.close()
    assert joining
    assert threading.main_thread() not in joining


def order(*microbatches: int) -> Average:
    members = tuple(
        Member(PeerId(f"peer-{at}"), 1, "", 0, 0, "", stage=1, microbatches=count)
        for at, count in enumerate(microbatches)
    )
    return Average(0, 0, UnitName("stage-1"), Round(1, 1), members, 8, 3.0)


def test_parts_are_added_unless_the_job_wants_them_clipped() -> None:
    parts = [torch.ones(64), torch.full((64,), 1.5), torch.ones(64) * 1.25, torch.full((64,), 1e9)]
    assert Reduction(None).reduce(parts, order(1, 1, 1, 1))[0] > 1e8
    assert Reduction(None, clips=True).reduce(parts, order(1, 1, 1, 1))[0] < 2.0


def test_how_many_microbatches_a_part_is_of_the_scheduler_says() -> None:
    """Each of these is a sum of gradients of 1: nothing strays."""
    parts = [torch.full((64,), float(count)) for count in (1, 100, 2)]
    assert torch.equal(Reduction(None, clips=True).reduce(parts, order(1, 100, 2)), torch.full((64,), 103 / 8))


async def waited_s(deadline: Deadline, moves_s: list[float]) -> float:
    """How long a wait under the deadline takes if the round moves at these times."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    deadline.begin()
    for at_s in moves_s:
        loop.call_at(began_s + at_s, deadline.moved)
    with pytest.raises(TimeoutError):
        async with deadline.limit():
            await asyncio.Event().wait()
    return loop.time() - began_s


@pytest.mark.parametrize(
    ("moves_s", "expected_s"),
    [
        ([], 60.0),
        ([50.0], 110.0),
        ([50.0, 100.0], 160.0),
        ([61.0], 60.0),
        ([float(at) for at in range(0, 900, 9)], 600.0),
    ],
)
def test_what_makes_progress_has_its_seconds_again_but_not_for_ever(moves_s: list[float], expected_s: float) -> None:
    """8 MiB take more than a minute over 1 Mbit/s, and a round had a minute: it failed for ever."""
    assert STRETCH_MAX == 10
    assert sim.run(waited_s(Deadline(60.0), moves_s), seed=0) == pytest.approx(expected_s, abs=0.5)


def test_progress_before_the_step_is_full_starts_no_clock() -> None:
    async def main() -> None:
        deadline = Deadline(1.0)
        deadline.moved()
        async with deadline.limit():
            await asyncio.sleep(5.0)

    sim.run(main(), seed=0)
