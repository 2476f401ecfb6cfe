"""Which peer serves which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.job import placement
from swarm.job.placement import Candidate, at_home, homes_of, place, sites_for_islands, whole_sites
from swarm.types import Decision, Memory, PeerId
from tests.support.memories import memories


def peers(*names: str) -> list[Candidate]:
    return [Candidate(PeerId(name)) for name in names]


def test_a_pin_is_obeyed_and_the_others_fill_up_around_it() -> None:
    candidates = [Candidate(PeerId("a"), pinned_stage=1), Candidate(PeerId("b"), pinned_stage=1), *peers("c", "d")]
    assert place(candidates, stages=2, min_replicas=1).plan == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_the_reason_names_the_stages_that_lack_replicas() -> None:
    decision = place([Candidate(PeerId("a"), pinned_stage=0), *peers("b")], stages=3, min_replicas=1)
    assert decision.plan is None
    assert decision.reason == "stage 2 needs 1 replica more (2 idle, 3 needed)"
    nobody = place([], stages=2, min_replicas=2)
    assert nobody.reason == "stage 0 needs 2 replicas more, stage 1 needs 2 replicas more (0 idle, 4 needed)"


def test_a_peer_pinned_to_a_stage_that_the_job_lacks_stays_idle_and_is_named() -> None:
    decision = place([Candidate(PeerId("a"), pinned_stage=7), *peers("b")], stages=1, min_replicas=1)
    assert decision.plan == {"b": 0}
    assert "a is pinned to stage 7, which this job lacks" in decision.reason


def test_faster_peers_are_spread_before_slower_ones() -> None:
    speeds = {"a": 1.0, "b": 8.0, "c": 1.0, "d": 8.0}
    plan = place([Candidate(PeerId(name), speed=speed) for name, speed in speeds.items()], 2, 1).plan
    assert plan is not None
    assert plan["b"] != plan["d"]


@given(st.lists(st.integers(-1, 4), max_size=12), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_without_pins_stages_differ_by_one_and_order_does_not_matter(pins, stages, min_replicas, rng) -> None:
    candidates = [Candidate(PeerId(f"p{number}"), pin) for number, pin in enumerate(pins)]
    decision = place(candidates, stages, min_replicas)
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    assert place(shuffled, stages, min_replicas).plan == decision.plan
    sizes = [0] * stages
    for candidate in candidates:
        if 0 <= candidate.pinned_stage < stages:
            sizes[candidate.pinned_stage] += 1
    pinned = list(sizes)
    for _ in range(pins.count(-1)):
        sizes[sizes.index(min(sizes))] += 1
    if decision.plan is None:
        assert min(sizes) < min_replicas
        return
    assert [list(decision.plan.values()).count(stage) for stage in range(stages)] == sizes
    assert all(
        decision.plan[candidate.peer] == candidate.pinned_stage
        for candidate in candidates
        if 0 <= candidate.pinned_stage < stages
    )
    assert sum(pinned) <= len(decision.plan)


# Sites ---------------------------------------------------------------------------------------------------------------


def at(**sites: int) -> list[Candidate]:
    """So many peers at each site, named for it; `nowhere` is none."""
    return [
        Candidate(PeerId(f"{site}-{number}"), site="" if site == "nowhere" else site)
        for site, count in sites.items()
        for number in range(count)
    ]


def islands(candidates: list[Candidate], count: int, stages: int = 2, min_replicas: int = 1) -> list[list[str]]:
    """The peers of each island, by name without its number; no islands if the job cannot start."""
    homes = homes_of(candidates, count, min_replicas, memories(0) * stages)
    plan = place(candidates, stages * count, min_replicas, homes=homes).plan or {}
    of = [[peer.rpartition("-")[0] for peer, at in plan.items() if at // stages == island] for island in range(count)]
    return of if plan else []


def test_those_of_a_site_serve_one_island() -> None:
    assert islands(at(lyon=3, berlin=2), 2) == [["berlin"] * 2, ["lyon"] * 3]
    assert islands(at(lyon=3, berlin=2, nowhere=2), 2) == [["berlin"] * 2 + ["nowhere"] * 2, ["lyon"] * 3]
    assert homes_of(at(nowhere=4), 2, 1, memories(0, 0)) == (), "sites do not matter where nobody has one"
    assert homes_of(at(lyon=4, berlin=2, rome=5), 1, 1, memories(0, 0)) == ("rome", "rome"), (
        "the largest site has the only one"
    )


def test_a_site_that_is_too_small_is_completed_by_those_without_one_but_not_by_another() -> None:
    assert islands(at(lyon=2, berlin=1, nowhere=1), 2) == [["berlin", "nowhere"], ["lyon"] * 2]
    assert islands(at(lyon=3, berlin=1), 2) == []
    homes = homes_of(at(lyon=3, berlin=1), 2, 1, memories(0, 0))
    decision = place(at(lyon=3, berlin=1), 4, 1, homes=homes)
    assert decision.reason.startswith("stage 1 needs 1 replica more")
    assert decision.reason.endswith("the stage servers of an island are of one site, here berlin, lyon")


def test_the_largest_sites_have_the_islands_and_the_others_none() -> None:
    candidates = at(rome=2, lyon=3, berlin=4)
    decision = place(candidates, 4, 1, homes=homes_of(candidates, 2, 1, memories(0, 0)))
    assert {peer.rpartition("-")[0] for peer in decision.plan or {}} == {"lyon", "berlin"}
    assert decision.reason.count("no island is at rome") == 1


def test_a_site_has_several_islands_where_there_are_not_enough_others() -> None:
    assert islands(at(lyon=4), 2) == [["lyon"] * 2] * 2
    assert islands(at(lyon=5, berlin=2), 3) == [["berlin"] * 2, ["lyon"] * 3, ["lyon"] * 2]


def test_a_pinned_peer_serves_its_stage_at_its_site() -> None:
    homes = homes_of(at(berlin=2, lyon=2), 2, 1, memories(0, 0))
    pinned = Candidate(PeerId("p"), 1, site="lyon")
    assert at_home(pinned, homes, 2).pinned_stage == 3
    assert at_home(replace(pinned, site=""), homes, 2).pinned_stage == 1
    assert at_home(replace(pinned, site="rome"), homes, 2).pinned_stage == 1
    assert at_home(replace(pinned, pinned_stage=-1), homes, 2).pinned_stage == -1


def test_an_island_that_is_left_goes_to_a_site_whose_peers_hold_some_stage() -> None:
    small = [replace(peer, offer=Memory(1)) for peer in at(rome=5)]
    candidates = [*at(lyon=2, berlin=1, nowhere=1), *small]
    homes = homes_of(candidates, 2, 1, memories(10, 10))
    assert homes == ("berlin", "berlin", "lyon", "lyon")
    assert place(candidates, 4, 1, memories(10) * 4, homes).plan is not None


def test_a_site_is_asked_no_further_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job waits on the loop that all peers are served by."""
    asked: list[int] = []

    def counting(peers: Sequence[Candidate], stages: int, *rest: Any) -> Decision[dict[PeerId, int]]:
        asked.append(stages)
        return place(peers, stages, *rest)

    monkeypatch.setattr(placement, "place", counting)
    homes_of(at(lyon=9, berlin=5, rome=1, oslo=1), 3, 1, memories(0, 0))
    assert asked == [2, 2, 4, 4], "rome and oslo are too small for one, and three islands are found"


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=14), st.integers(2, 3), st.integers(1, 2), st.randoms())
def test_no_island_has_two_sites_and_order_does_not_matter(sites, count, stages, rng) -> None:
    candidates = [Candidate(PeerId(f"p{number:02}"), site=site) for number, site in enumerate(sites)]
    homes = homes_of(candidates, count, 1, memories(0) * stages)
    decision = place(candidates, count * stages, 1, homes=homes)
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    assert homes_of(shuffled, count, 1, memories(0) * stages) == homes
    assert place(shuffled, count * stages, 1, homes=homes).plan == decision.plan
    site_of = {candidate.peer: candidate.site for candidate in candidates}
    for island in range(count):
        members = [peer for peer, place in (decision.plan or {}).items() if place // stages == island]
        assert len({site_of[peer] for peer in members} - {""}) <= 1
    whole = [site for site in {*sites} - {""} if sites.count(site) >= stages]
    if len(whole) >= count:
        assert decision.plan is not None


def test_the_sites_that_can_serve_an_island_alone_are_those_with_enough_that_is_large_enough() -> None:
    sited = [*at(lyon=3, berlin=2, rome=1, nowhere=5), *(replace(peer, offer=Memory(5)) for peer in at(oslo=4))]
    asked = []

    def needs_at(site) -> tuple[Memory, ...]:
        asked.append({peer.site for peer in site})
        return memories(10, 10) if site[0].site != "berlin" else ()

    assert [site[0].site for site in whole_sites(sited, needs_at, 1)] == ["lyon"]
    assert asked == [{"lyon"}, {"berlin"}, {"rome"}, {"oslo"}], "each alone"
    assert [site[0].site for site in whole_sites(sited, lambda site: memories(5), 1)] == [
        "oslo",
        "lyon",
        "berlin",
        "rome",
    ]
    assert [site[0].site for site in whole_sites(sited, lambda site: memories(5), 3)] == ["oslo", "lyon"]


def test_a_job_has_an_island_for_each_site_that_can_serve_the_cut_of_one_of_them_as_far_as_it_divides() -> None:
    sited = [*at(lyon=4, berlin=3), *(replace(peer, offer=Memory(5)) for peer in at(oslo=2)), *at(rome=1)]
    asked: list[tuple[int, str, int]] = []

    def needs_for(count: int, site, peers: int) -> tuple[Memory, ...]:
        asked.append((count, site[0].site, peers))
        return () if site[0].site == "rome" else memories(4, 4) if site[0].site == "oslo" else memories(10, 10)

    chosen = sites_for_islands(sited, lambda able: able, needs_for, 1)
    assert chosen is not None
    assert (chosen[0], chosen[1][0].site) == (3, "oslo"), "all three can serve the cut that suits the smallest"
    assert asked == [(1, "lyon", 4), (1, "berlin", 3), (1, "oslo", 2), (1, "rome", 1), (3, "oslo", 3)]
    two = sites_for_islands(sited, lambda able: min(able, 2), needs_for, 1)
    assert two is not None
    assert (two[0], two[1][0].site) == (2, "berlin"), "the smallest of the two largest"
    assert sites_for_islands(sited, lambda able: min(able, 1), needs_for, 1) is None
    assert sites_for_islands(sited, lambda able: able, lambda count, site, peers: (), 1) is None
