"""benchmarks.models.line_search against what can be worked out by hand, and against looking at everything."""

from __future__ import annotations

from itertools import pairwise, permutations
from random import Random

import pytest

from benchmarks.models.line_search import (
    PeerPairs,
    in_order,
    lined_up,
    peer_pairs,
    search,
    shortest_way,
    slowest_matched,
)
from swarm.errors import InvalidConfig


def pairs_of(peers: int, members: int, rng: Random) -> PeerPairs:
    delay_s, bits_per_s = ([[rng.uniform(0.1, 1.0) for _ in range(peers)] for _ in range(peers)] for _ in range(2))
    return peer_pairs(delay_s, bits_per_s, members, 0.01, 0.1)


def test_a_line_costs_its_slowest_member_and_each_hop_forth_and_back() -> None:
    """Two machines of two: 1 s within, 3 s between, and 8 bits a second everywhere."""
    delay_s = [[1.0 if number // 2 == other // 2 else 3.0 for other in range(4)] for number in range(4)]
    pairs = peer_pairs(delay_s, [[8.0] * 4] * 4, 2, gradient_bytes=4.0, hop_bytes=5.0)
    line = lined_up(pairs, in_order(range(4), 2))
    assert (line.averaging_s, line.hops_s) == (2.0 * (1.0 + 4.0 / 2.0), 2.0 * (3.0 + 5.0))
    assert search(pairs, 2, seed=0, trials=50).cost_s == 2.0 * (3.0 + 2.0) + 2.0 * (1.0 + 5.0), "a peer of each machine"


def test_both_directions_of_a_pair_count_alike() -> None:
    rng = Random(0)
    delay_s, rates = ([[rng.random() + 0.1 for _ in range(6)] for _ in range(6)] for _ in range(2))
    turned = [[list(column) for column in zip(*table, strict=True)] for table in (delay_s, rates)]
    one, other = peer_pairs(delay_s, rates, 2, 1.0, 1.0), peer_pairs(*turned, 2, 1.0, 1.0)
    assert lined_up(one, in_order(range(6), 3)) == lined_up(other, in_order(range(6), 3))


def test_matchings_and_ways_are_the_best_of_all() -> None:
    rng = Random(0)
    for size in range(1, 6):
        seconds = [[rng.random() for _ in range(size)] for _ in range(size)]
        orders = list(permutations(range(size)))
        assert slowest_matched(seconds) == min(max(seconds[a][b] for a, b in enumerate(order)) for order in orders)
        both = [[seconds[min(a, b)][max(a, b)] for b in range(size)] for a in range(size)]
        way, length_s = shortest_way(both)
        assert sorted(way) == list(range(size))
        assert length_s == pytest.approx(sum(both[a][b] for a, b in pairwise(way)))
        assert length_s == pytest.approx(min(sum(both[a][b] for a, b in pairwise(order)) for order in orders))


@pytest.mark.parametrize(("peers", "groups"), [(4, 1), (4, 4), (6, 2), (6, 3)])
def test_the_search_finds_the_best_of_all_lines_of_a_few_peers(peers: int, groups: int) -> None:
    for seed in range(3):
        pairs = pairs_of(peers, peers // groups, Random(seed))
        best_s = min(lined_up(pairs, in_order(order, groups)).cost_s for order in permutations(range(peers)))
        assert search(pairs, groups, seed, trials=200).cost_s == best_s


def test_a_seed_gives_the_same_line_and_never_a_dearer_one_than_the_peers_in_order() -> None:
    for seed in range(3):
        pairs = pairs_of(20, 4, Random(seed))
        found = search(pairs, 5, seed, trials=20)
        assert found == search(pairs_of(20, 4, Random(seed)), 5, seed, trials=20)
        assert sorted(peer for group in found.groups for peer in group) == list(range(20))
        assert found.cost_s <= lined_up(pairs, in_order(range(20), 5)).cost_s


@pytest.mark.parametrize(("peers", "groups"), [(7, 2), (3, 4), (4, 0), (34, 17)])
def test_what_has_no_cost_is_refused(peers: int, groups: int) -> None:
    with pytest.raises(InvalidConfig, match=f"no cost for {peers} peers in {groups} groups"):
        in_order(range(peers), groups)
