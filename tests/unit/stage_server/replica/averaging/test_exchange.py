"""stage_server.replica.averaging.exchange: envoys that tell each other bytes make one mean, or say who is to blame."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import xxhash
from torch import Tensor

from stage_server.ports import ReplicaId
from stage_server.replica.averaging import exchange
from stage_server.replica.averaging.all_reduce import Deadline, Mean
from stage_server.replica.averaging.mailbox import Mailbox
from stage_server.replica.packing import proposal
from swarm.errors import PeerUnavailable, Refused, RoundBroken
from swarm.model import codec
from swarm.rpc.links.peers import Moved, PeerLinks
from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Envoy, Exchange, ParameterNorm, Slice
from tests.support.devices import InlineDevice
from tests.support.sim import loop as sim

UNIT, STEP, ELEMENTS = UnitName("tied"), 50, 300


class Island:
    """A stage whose one parameter is so far behind the outer weights."""

    def __init__(self, seed: int, code: str, *, are_filtered: bool = False) -> None:
        self.far = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))
        self.far[: 100 * seed if are_filtered else 0] = 0.0
        self.code, self.are_filtered = code, are_filtered
        self.parameters: tuple[tuple[str, int, tuple[int, ...]], ...] = (("w", 0, (ELEMENTS,)),)

    @property
    def proposals(self) -> Island:
        return self

    def size_bytes(self, name: str) -> int:
        return codec.CODECS[self.code].payload_bytes(ELEMENTS)

    def coded(self, name: str) -> Tensor:
        return codec.encode_there(self.far, self.code)

    def decoded(self, name: str, coded: Tensor) -> Tensor:
        return codec.decode(codec.readable(coded), codec.dtype_of(self.code), (ELEMENTS,), self.code)

    def places_at(self, step: int) -> Island:
        return self

    def parameters_of(self, unit: UnitName) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        return self.parameters

    def squared_norms(self, unit: UnitName, delta: Tensor) -> tuple[ParameterNorm, ...]:
        return (ParameterNorm("w", float(delta.double().square().sum())),)


class Side:
    """One envoy: of an island, with its part of a shared weight or the copy of that."""

    def __init__(self, name: str, island: int, tokens: int, code: str = "none", *, are_filtered: bool = False) -> None:
        self.me = ReplicaId(JobId("job"), PeerId(name), 1, 0)
        self.stage: Any = Island(island, code, are_filtered=are_filtered)
        self.mailbox = Mailbox(self.me.peer, STEP, 1)
        self.envoy = Envoy(self.me.peer, 1, f"at {name}", 6 + island, tokens)


class Table:
    """Delivers to mailboxes; whoever is `away` is not reached."""

    def __init__(self, *sides: Side, away: str = "") -> None:
        self.sides = {f"at {side.me.peer}": side for side in sides}
        self.away = away
        self.sent: list[tuple[PeerId, PeerId, int]] = []
        self.bytes: list[int] = []  # of each of them

    async def send(
        self, address: str, header: Slice, payload: memoryview, *, to: PeerId, moved: Moved | None = None
    ) -> None:
        if to == self.away:
            raise PeerUnavailable(f"{to} does not answer")
        self.sent.append((header.sender, to, header.timeline))
        self.bytes.append(header.total_bytes)
        self.sides[address].mailbox.put(header, payload)


async def exchanged(table: Table, timeout_s: float = 3.0) -> list[Mean]:
    links: Any = table
    device = InlineDevice(lambda: 0.0)
    envoys = tuple(side.envoy for side in table.sides.values())
    sizes = exchange.proposal_sizes(next(iter(table.sides.values())).stage, UNIT, STEP)

    async def one(side: Side) -> Mean:
        command = Exchange(side.envoy.timeline, STEP, UNIT, Round(1, 1), envoys, timeout_s)
        side.mailbox.begin(command, sizes)
        return await exchange.run_exchange(
            command, side.me, side.stage, device, links, side.mailbox, Deadline(timeout_s)
        )

    return await asyncio.gather(*map(one, table.sides.values()))


@pytest.mark.parametrize(
    ("code", "are_filtered"),
    [*((code, False) for code in ("none", "bfloat16", "int8", "fp4")), ("none", True), ("int8", True)],
)
async def test_all_envoys_hold_the_same_mean_of_what_each_island_proposed_once(code: str, are_filtered: bool) -> None:
    named = [("a0", 0, 30), ("z0", 0, 0), ("b1", 1, 50), ("y1", 1, 0), ("c2", 2, 20)]
    sides = [Side(*words, code, are_filtered=are_filtered) for words in named]
    table = Table(*sides)
    means = await exchanged(table)
    proposals = [
        exchange.decoded(side.stage, UNIT, STEP, exchange.proposed(side.stage, UNIT, STEP))
        for side in (sides[0], sides[2], sides[4])
    ]
    expected = exchange.mean_proposal(proposals, [30, 50, 20])
    assert all(torch.equal(mean.gradient, expected) for mean in means)
    assert {mean.digest for mean in means} == {xxhash.xxh3_128_hexdigest(expected.numpy().data)}
    assert means[0].norms[0].squared_norm > 0.0
    timelines = {side.me.peer: side.envoy.timeline for side in sides}
    assert {(sender, to) for sender, to, _ in table.sent} == {
        (sender, to) for sender in ("a0", "b1", "c2") for to in timelines if timelines[to] != timelines[PeerId(sender)]
    }
    assert all(timeline == timelines[to] for _, to, timeline in table.sent), "of the receiver's island"
    assert len(set(table.bytes)) == (3 if are_filtered else 1), "one proposes all of 300, the others 200 and 100"
    for peer, mean in zip(timelines, means, strict=True):
        ways = list(zip(table.sent, table.bytes, strict=True))
        assert mean.travelled == tuple(sum(size for way, size in ways if way[end] == peer) for end in (0, 1))


def test_all_envoys_that_an_envoy_does_not_get_through_to_are_named() -> None:
    """It named the first one and gave up, so others lacked its proposal and accused it: a healthy island was lost."""

    async def main() -> None:
        a, away, reached, deaf = sides = [Side(f"{name}{n}", n, 30) for n, name in enumerate("abcd")]
        table = Table(a, reached, deaf, away="b1")
        envoys, own = tuple(side.envoy for side in sides), exchange.proposed(reached.stage, UNIT, STEP)
        for side in (a, reached, deaf):
            side.mailbox.begin(
                Exchange(side.envoy.timeline, STEP, UNIT, Round(1, 1), envoys, 10.0),
                range(own.numel(), own.numel() + 1),
            )
        command, links = Exchange(6, STEP, UNIT, Round(1, 1), envoys, 10.0), cast(PeerLinks, table)
        letter = proposal(reached.me, command, a.envoy, own)
        await links.send("at a0", letter.header, letter.payload, to=a.me.peer)
        # What cannot be delivered is given up after DELIVERY_S_MAX, before what does not come.
        with_whom = (InlineDevice(lambda: 0.0), links, a.mailbox, Deadline(10.0))
        with pytest.raises(ExceptionGroup) as broken:
            await exchange.run_exchange(command, a.me, a.stage, *with_whom)
        accused = {error.accused: error.message for error in broken.value.exceptions if isinstance(error, RoundBroken)}
        assert accused.keys() == {away.me.peer, deaf.me.peer}
        assert accused["d3"] == "d3 sent no proposal within 10 s"
        assert {to for sender, to, _ in table.sent if sender == "a0"} == {"c2", "d3"}, "also behind one that is away"

    sim.run(main(), seed=1, limit_s=60.0)


async def test_an_envoy_whose_short_proposal_contradicts_itself_is_accused() -> None:
    a, b = Side("a0", 0, 30, are_filtered=True), Side("b1", 1, 50, are_filtered=True)
    command = Exchange(6, STEP, UNIT, Round(1, 1), (a.envoy, b.envoy), 3.0)
    a.mailbox.begin(command, exchange.proposal_sizes(a.stage, UNIT, STEP))
    letter = proposal(b.me, command, a.envoy, torch.full((100,), 255, dtype=torch.uint8))
    a.mailbox.put(cast(Slice, letter.header), memoryview(letter.payload))
    links: Any = Table(b)
    b.mailbox.begin(replace(command, timeline=7), exchange.proposal_sizes(b.stage, UNIT, STEP))
    with pytest.raises(ExceptionGroup) as broken:
        await exchange.run_exchange(command, a.me, a.stage, InlineDevice(lambda: 0.0), links, a.mailbox, Deadline(3.0))
    (error,) = broken.value.exceptions
    assert isinstance(error, RoundBroken)
    assert error.accused == "b1"
    assert "does not list the codes" in error.message


async def test_whoever_is_no_envoy_takes_no_part() -> None:
    a, b = Side("a0", 0, 30), Side("b1", 1, 50)
    command = Exchange(7, STEP, UNIT, Round(1, 1), (a.envoy,), 1.0)
    links: Any = Table(a, b)
    with_whom = (InlineDevice(lambda: 0.0), links, b.mailbox, Deadline(1.0))
    with pytest.raises(Refused, match="b1 is no envoy"):
        await exchange.run_exchange(command, b.me, b.stage, *with_whom)


async def test_of_a_unit_that_the_step_does_not_merge_nothing_travels() -> None:
    a, b = Side("a0", 0, 30), Side("b1", 1, 50)
    for side in (a, b):
        side.stage.parameters = ()
    table = Table(a, b)
    means = await exchanged(table)
    assert [mean.gradient.numel() for mean in means] == [0, 0]
    assert (len({mean.digest for mean in means}), table.sent) == (1, [])
