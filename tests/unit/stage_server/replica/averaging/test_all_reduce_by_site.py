"""Rounds by site beside flat ones, in the members' own code: bytes and seconds between sites, and bits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from random import Random

import pytest
import torch

from scheduler.brain.commit.slices import plan_round
from scheduler.brain.inputs import ReplicaRecord
from stage_server.brain.slices import CHUNKS_UNDER_WAY_MIN
from stage_server.replica.averaging.all_reduce import Mean
from swarm.model.exact_sums import mean_of_parts
from swarm.types import PeerId, Round
from swarm.wire.messages import Average, Slice
from tests.support.effort import seeds
from tests.support.fluid_rounds import UNIT, Fleet
from tests.support.sim.fluid import Line

TOKENS, BITS = 7, 20
NEAR, FAR = Line(1e9, 1e9), Line(1e5, 1e5)  # within a site, and between sites


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_server.brain.slices.CHUNK_ELEMENTS_MIN", 256)
    monkeypatch.setattr("stage_server.brain.slices.UNDER_WAY_BYTES", 1 << 16)


def places(*sizes: int) -> dict[str, str]:
    """So many members at each site."""
    return {f"{chr(97 + site)}{number}": f"site-{site}" for site, size in enumerate(sizes) for number in range(size)}


def fleet(
    site_of: Mapping[str, str], *, by_site: bool, codec: str = "none", bits: int | None = BITS, elements: int = 1 << 14
) -> Fleet:
    """A round by site, whose slices are shared by site first; or a flat one with equal slices."""
    sizes = Counter(site_of.values())
    replicas = [ReplicaRecord(PeerId(name), 1, name, 0, site=site) for name, site in sorted(site_of.items())]
    members = plan_round(
        replicas, {}, elements, [1 / sizes[replica.site] for replica in replicas] if by_site else None, by_site=by_site
    )
    lines = dict.fromkeys(site_of, NEAR) | dict.fromkeys(sizes, FAR)
    return Fleet(Average(0, 0, UNIT, Round(1, 1), members, TOKENS, 1e6), codec, bits, lines, site_of)


def between(made: Fleet, site_of: Mapping[str, str]) -> int:
    """Bytes that have crossed from a site to another."""
    return sum(sent for (a, b), sent in made.network.bytes_between.items() if site_of[a] != site_of[b])


def one_of(means: Mapping[str, Mean]) -> Mean:
    """The mean of all, who must agree."""
    assert len({mean.digest for mean in means.values()}) == 1
    return next(iter(means.values()))


@pytest.mark.parametrize(
    ("sizes", "fewer_bytes", "faster"),
    [
        ((8, 8), 8.00, 8.00),
        ((4, 4, 4, 4), 4.00, 4.00),
        ((8, 2, 1), 2.37, 2.74),
        ((8, 1), 1.78, 1.78),
        ((1, 1, 1), 1.00, 1.00),
    ],
    ids=str,
)
def test_between_sites_a_round_sends_once_what_a_flat_round_sends_for_each_member(
    sizes: tuple[int, ...], fewer_bytes: float, faster: float
) -> None:
    site_of = places(*sizes)
    flat, grouped = (fleet(site_of, by_site=by_site, elements=1 << 15) for by_site in (False, True))
    (flat_s, flat_means), (grouped_s, means) = flat.run(), grouped.run()
    bytes_ratio = between(flat, site_of) / between(grouped, site_of)
    print(f"{sizes}: bytes {bytes_ratio:.2f}, seconds {flat_s / grouped_s:.2f}")
    assert bytes_ratio == pytest.approx(fewer_bytes, rel=0.02)
    assert flat_s / grouped_s == pytest.approx(faster, rel=0.05)
    expected = mean_of_parts([stage.sums for stage in flat.stages.values()], TOKENS, BITS)
    assert torch.equal(one_of(means).gradient, expected)
    assert one_of(means).digest == one_of(flat_means).digest


@pytest.mark.parametrize("seed", seeds(200, 0, 1, 2))
def test_on_the_grid_the_bits_are_those_of_a_flat_round(seed: int) -> None:
    rng = Random(seed)
    sites = [rng.choice(("", "lyon", "berlin", "oslo")) for _ in range(rng.randint(2, 7))]
    replicas = [ReplicaRecord(PeerId(f"{seed}-{at}"), 1, f"{seed}-{at}", 0, site=site) for at, site in enumerate(sites)]
    shares = [rng.choice((0.0, 0.3, 1.0)) for _ in sites[1:]] + [1.0]
    members = plan_round(replicas, {}, rng.randint(1, 4000), shares, by_site=True)
    made = Fleet(
        Average(0, 0, UNIT, Round(1, 1), members, TOKENS, 1e6),
        "none",
        rng.choice((BITS, 40)),
        dict.fromkeys([replica.address for replica in replicas], NEAR),
    )
    made.copies = rng.choice((1, 2))
    _, means = made.run()
    expected = mean_of_parts([stage.sums for stage in made.stages.values()], TOKENS, made.bits)
    assert torch.equal(one_of(means).gradient, expected)


def test_few_bytes_are_under_way_to_a_carrier_whatever_the_sizes_of_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk, which was small, decided how many are under way at a time: the others were large."""
    most_bytes = 1 << 13
    monkeypatch.setattr("stage_server.brain.slices.UNDER_WAY_BYTES", most_bytes)
    site_of = places(3, 3)
    replicas = [ReplicaRecord(PeerId(name), 1, name, 0, site=site) for name, site in site_of.items()]
    members = plan_round(replicas, {}, 1 << 16, [1, 16, 16, 16, 16, 16], by_site=True)
    made = Fleet(Average(0, 0, UNIT, Round(1, 1), members, TOKENS, 1e6), "none", BITS, dict.fromkeys(site_of, NEAR))
    carry, under_way, seen = made.network.carry, defaultdict[tuple[str, str, bool], list[int]](list), set[int]()

    async def watched(owner: str, to: str, header: Slice, payload: bytes | memoryview) -> None:
        sizes = under_way[owner, to, header.averaged]
        sizes.append(header.total_bytes)
        seen.add(header.total_bytes)
        assert len(sizes) <= CHUNKS_UNDER_WAY_MIN or sum(sizes) <= most_bytes
        await carry(owner, to, header, payload)
        sizes.remove(header.total_bytes)

    monkeypatch.setattr(made.network, "carry", watched)
    made.run()
    assert max(seen) >= 4 * min(seen)


@pytest.mark.parametrize("codec", ["none", "bfloat16", "int8"])
def test_in_ordinary_mode_all_hold_one_mean_that_is_nearly_the_flat_one(codec: str) -> None:
    """A carrier keeps what its code left out: what is applied and left over is what was contributed."""
    site_of = places(3, 2, 1)
    made = fleet(site_of, by_site=True, codec=codec, bits=None)
    _, means = made.run()
    mean = one_of(means).gradient
    total = sum(stage.sums.double() for stage in made.stages.values())
    left = sum(mean.left.double() for mean in means.values() if mean.left is not None)
    assert torch.allclose(TOKENS * mean.double() + left, total, rtol=0.0, atol=2e-5)
    assert codec != "none" or float((mean * TOKENS - total).abs().max() / total.abs().max()) < 2e-7
