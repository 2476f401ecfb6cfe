"""The order in which ways to a stage server are tried."""

from __future__ import annotations

from collections import Counter

from swarm.rpc.links.dialling import BLAMED_S, DIRECT, KEPT_S, Paths
from swarm.types import PeerId
from swarm.wire.messages import RelayAt

RELAYS = tuple(RelayAt(f"r{number}", f"10.0.0.{number}:7955") for number in range(6))
P, HERE = PeerId("p"), "10.0.0.9:7951"


def two() -> tuple[Paths, RelayAt, RelayAt]:
    paths = Paths(RELAYS)
    one, other = paths.relays_of(P)
    return paths, one, other


def test_all_know_the_same_two_relays_of_a_peer_in_whatever_order_they_heard_of_them() -> None:
    backwards = Paths(RELAYS[::-1])
    assert Paths(RELAYS).relays_of(P) == backwards.relays_of(P)
    assert len({*Paths(RELAYS).relays_of(P)}) == 2
    assert Paths(RELAYS[:1]).relays_of(P) == RELAYS[:1]
    assert Paths().relays_of(P) == ()


def test_peers_are_spread_over_the_relays() -> None:
    first = Counter(Paths(RELAYS).relays_of(PeerId(f"gpu-{number}"))[0].name for number in range(600))
    assert len(first) == len(RELAYS)
    assert max(first.values()) < 2 * min(first.values())


def test_when_a_relay_is_gone_only_its_peers_move() -> None:
    fewer = Paths(RELAYS[1:])
    for number in range(100):
        peer = PeerId(f"gpu-{number}")
        before = Paths(RELAYS).relays_of(peer)
        kept = [relay for relay in before if relay != RELAYS[0]]
        assert [relay for relay in fewer.relays_of(peer) if relay in before] == kept


def test_the_own_address_comes_first_and_without_one_relays_do() -> None:
    paths, one, other = two()
    assert paths.order(HERE, P, 0.0) == [DIRECT, one, other]
    assert paths.order("", P, 0.0) == [one, other]
    assert paths.order(HERE, None, 0.0) == [DIRECT]
    assert Paths().order(HERE, P, 0.0) == [DIRECT]
    assert Paths().order("", P, 0.0) == []


def test_a_relay_that_was_needed_is_kept_for_a_while_and_then_the_own_address_is_tried_again() -> None:
    paths, one, other = two()
    paths.carried(P, other, 0.0)
    assert paths.order(HERE, P, KEPT_S - 1) == [other, DIRECT, one]
    assert paths.order(HERE, PeerId("q"), 1.0)[0] == DIRECT
    paths.carried(P, other, KEPT_S - 1)
    assert paths.order(HERE, P, KEPT_S) == [DIRECT, one, other], "it does not extend itself"
    paths.carried(P, other, KEPT_S)
    assert paths.order(HERE, P, KEPT_S + 1)[0] == other
    paths.carried(P, DIRECT, KEPT_S + 2)
    assert paths.order(HERE, P, KEPT_S + 3)[0] == DIRECT


def test_a_relay_at_which_a_link_broke_comes_last_for_all() -> None:
    paths, one, other = two()
    paths.carried(P, one, 0.0)
    paths.blame(one, 10.0)
    assert paths.order(HERE, P, 11.0) == [DIRECT, other, one]
    assert paths.order("", P, 10.0 + BLAMED_S) == [one, other]
    paths.blame(one, 50.0)
    paths.carried(P, one, 51.0)
    assert paths.order("", P, 52.0) == [one, other], "it carries again"
    paths.blame(DIRECT, 60.0)
    assert paths.order(HERE, PeerId("q"), 61.0)[0] == DIRECT


def test_with_both_blamed_both_are_tried() -> None:
    paths, one, other = two()
    paths.blame(one, 0.0)
    paths.blame(other, 0.0)
    assert paths.order("", P, 1.0) == [one, other]


def test_a_relay_that_is_gone_is_no_way() -> None:
    paths, one, _ = two()
    paths.carried(P, one, 0.0)
    paths.know([relay for relay in RELAYS if relay != one])
    assert one not in paths.order(HERE, P, 1.0)
    assert paths.order(HERE, P, 1.0)[0] == DIRECT


def test_a_proxy_is_on_the_way_to_all_hosts_but_the_own() -> None:
    paths = Paths(proxy="127.0.0.1:3128", host="127.0.1.1")
    assert [paths.proxy_to(f"127.0.{site}.1:7000") for site in (1, 2)] == ["", "127.0.0.1:3128"]
    assert Paths().proxy_to("127.0.2.1:7000") == ""
