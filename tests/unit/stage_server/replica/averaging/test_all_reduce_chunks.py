"""Slices that travel in chunks: the bits are those of whole slices, and the means leave while parts still arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from stage_server.brain.slices import CHUNKS_UNDER_WAY_MIN
from stage_server.replica.averaging.all_reduce import Mean
from swarm.errors import Refused, RoundBroken
from swarm.model.exact_sums import mean_of_parts
from swarm.types import JobId, PeerId, Round
from swarm.wire.messages import Average, Slice
from tests.support.fluid_rounds import UNIT, Fleet, average_of
from tests.support.sim.fluid import Line

TOKENS, BITS = 7, 20
ELEMENTS = 64 * 256
EQUAL = {"a": 64, "b": 64, "c": 64, "d": 64}
UNEQUAL = {"a": 100, "b": 0, "c": 31, "d": 125}  # of 256 parts


def average(shares: Mapping[str, int], timeout_s: float = 1e6) -> Average:
    stops = (ELEMENTS * stop // 256 for stop in accumulate(shares.values()))
    return average_of(dict(zip(shares, stops, strict=True)), TOKENS, timeout_s=timeout_s)


def lines_of(*rates: float) -> dict[str, Line]:
    return {name: Line(rate, rate) for name, rate in zip("abcdefgh", rates, strict=False)}


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_server.brain.slices.CHUNKS_MAX", 1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_server.brain.slices.CHUNK_ELEMENTS_MIN", 256)


@pytest.mark.parametrize("shares", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize(("codec_name", "bits"), [("none", None), ("none", BITS), ("bfloat16", None), ("int8", None)])
def test_the_bits_are_those_of_whole_slices(
    monkeypatch: pytest.MonkeyPatch, codec_name: str, bits: int | None, shares: Mapping[str, int]
) -> None:
    lines = lines_of(4e4, 1e4, 4e4, 2e4)
    fleet = Fleet(average(shares), codec_name, bits, lines)
    _, chunked = fleet.run()
    assert len({header.start for header in fleet.arrived}) > 2 * len(shares), "slices were cut"
    whole(monkeypatch)
    uncut = Fleet(average(shares), codec_name, bits, lines)
    _, expected = uncut.run()
    assert len({header.start for header in uncut.arrived}) == sum(share > 0 for share in shares.values())
    assert len({mean.digest for mean in [*chunked.values(), *expected.values()]}) == 1
    for name, mean in chunked.items():
        left = expected[name].left
        assert (mean.left is None) == (left is None) == (codec_name == "none")
        assert left is None or torch.equal(mean.left, left), "what is left over does not depend on the cut"
    if codec_name == "none":
        parts = [stage.sums for stage in fleet.stages.values()]
        assert torch.equal(chunked["a"].gradient, mean_of_parts(parts, TOKENS, bits))
    assert fleet.network.sent_bytes == uncut.network.sent_bytes


def test_false_parts_are_clipped_by_the_whole_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What strays is judged by the length of all of a slice, so chunks of it cannot be reduced alone."""
    members = tuple(replace(member, microbatches=2) for member in average(UNEQUAL).members)

    def clipped() -> dict[str, Mean]:
        fleet = Fleet(replace(average(UNEQUAL), members=members), "none", None, lines_of(4e4, 1e4, 4e4, 2e4))
        fleet.clips = True
        fleet.stages["b"].sums[:300] *= 1e3
        return fleet.run()[1]

    chunked = clipped()
    whole(monkeypatch)
    assert {mean.digest for mean in chunked.values()} == {mean.digest for mean in clipped().values()}
    plain = Fleet(average(UNEQUAL), "none", None, lines_of(4e4, 1e4, 4e4, 2e4))
    plain.stages["b"].sums[:300] *= 1e3
    assert plain.run()[1]["a"].digest != chunked["a"].digest, "something was cut"


def test_chunks_that_arrive_again_change_nothing() -> None:
    fleet = Fleet(average(UNEQUAL), "none", BITS, lines_of(4e4, 1e4, 4e4, 2e4))
    fleet.copies = 3
    _, means = fleet.run()
    expected = mean_of_parts([stage.sums for stage in fleet.stages.values()], TOKENS, BITS)
    assert all(torch.equal(mean.gradient, expected) for mean in means.values())


def test_a_mean_leaves_while_parts_still_arrive() -> None:
    fleet = Fleet(average({"a": 86, "b": 85, "c": 85, "d": 0}), "none", None, lines_of(4e4, 4e4, 4e4, 1e4))
    fleet.run()
    first_mean = next(at for at, header in enumerate(fleet.arrived) if header.averaged)
    assert any(not header.averaged for header in fleet.arrived[first_mean:])


def test_few_large_chunks_are_under_way_to_one_member_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks of a slice were begun at once, and took turns: so all of them arrived at the end."""
    monkeypatch.setattr("stage_server.brain.slices.UNDER_WAY_BYTES", 0)
    fleet = Fleet(average(EQUAL), "none", None, lines_of(*[4e4] * 4))
    under_way = dict.fromkeys(((way, other) for way in (False, True) for other in "bcd"), 0)
    most = 0
    links = fleet.network.links("a")
    sending = links.send

    async def send(address: str, header: Slice, payload: Any, *, to: PeerId | None = None, moved: Any = None) -> None:
        nonlocal most
        under_way[header.averaged, address] += 1
        most = max(most, *under_way.values())
        await sending(address, header, payload, to=to)
        under_way[header.averaged, address] -= 1

    others = fleet.network.links
    monkeypatch.setattr(fleet.network, "links", lambda owner: links if owner == "a" else others(owner))
    monkeypatch.setattr(links, "send", send)
    fleet.run()
    assert most == CHUNKS_UNDER_WAY_MIN


def test_a_member_that_sends_no_chunk_ends_the_round_with_its_name() -> None:
    fleet = Fleet(average(UNEQUAL, timeout_s=30.0), "none", None, lines_of(*[4e4] * 4))
    fleet.silent = "d"
    with pytest.RaisesGroup(pytest.RaisesExc(RoundBroken, match="d sent no", check=lambda error: error.accused == "d")):
        fleet.run()


def test_a_chunk_of_another_cut_is_refused() -> None:
    fleet = Fleet(average(EQUAL), "none", None, {})
    mailbox = fleet.mailboxes["a"]
    mailbox.begin(fleet.command)
    quarter = Slice(JobId("job"), 0, 0, UNIT, Round(1, 1), False, 0, PeerId("b"), 1, "float32", 256, 1024)
    mailbox.admit(quarter)
    for start, elements in ((0, 64 * 64), (128, 256), (64 * 64, 256)):
        header = Slice(
            JobId("job"), 0, 0, UNIT, Round(1, 1), False, start, PeerId("b"), 1, "float32", elements, 4 * elements
        )
        with pytest.raises(Refused, match="no such slice is due"):
            mailbox.admit(header)


# What it is worth, in virtual time -----------------------------------------------------------------------------------

FLEETS: dict[str, tuple[Sequence[float], Mapping[str, int], float]] = {
    "3 of 4, one of 1": ((4e4, 4e4, 4e4, 1e4), {"a": 86, "b": 85, "c": 85, "d": 0}, 1.35),
    "1, 2, 4, 8": ((1e4, 2e4, 4e4, 8e4), {"a": 0, "b": 52, "c": 102, "d": 102}, 1.35),
}


@pytest.mark.parametrize("name", FLEETS)
def test_slices_by_bandwidth_end_rounds_sooner_in_chunks_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rates, shares, gain = FLEETS[name]

    def round_s(of: Mapping[str, int]) -> float:
        return Fleet(average(of), "none", None, lines_of(*rates)).run()[0]

    cut_s, chosen_s = round_s(EQUAL), round_s(shares)
    whole(monkeypatch)
    whole_s, whole_chosen_s = round_s(EQUAL), round_s(shares)
    print(f"{name}: whole {whole_s:.2f} s, by bandwidth {whole_chosen_s:.2f} s; cut {cut_s:.2f} s, {chosen_s:.2f} s")
    assert cut_s <= whole_s * 1.01
    assert whole_chosen_s > whole_s, "a slow member without a slice first only sends, and then only receives"
    assert chosen_s * gain <= whole_s
