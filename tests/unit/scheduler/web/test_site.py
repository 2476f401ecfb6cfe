"""/sd names whoever can be scraped from where Prometheus may be, with an address that works there."""

from __future__ import annotations

import pytest

from scheduler.brain.fleet.membership import Membership
from scheduler.web.site import targets
from swarm.types import PeerId
from swarm.wire.messages import Hello


def members(*peers: tuple[str, str, str]) -> Membership:
    """A pool of (id, address, HTTP address)."""
    membership = Membership()
    for peer, address, http in peers:
        membership.hello(Hello(PeerId(peer), 1, 1, "0.1", address, http, "cpu", 1, 1 << 30, -1), 0.0)
    return membership


def found(membership: Membership, own: str = "127.0.0.1:9464", address: str = "127.0.0.1:7950") -> dict[str, str]:
    """Where each instance is scraped."""
    groups = targets(own, address, membership.peers(), insecure=False)
    return {group["labels"]["instance"]: f"{group['labels']['__scheme__']}://{group['targets'][0]}" for group in groups}


def test_all_processes_of_one_machine_are_targets_in_order() -> None:
    pool = members(("b", "127.0.0.1:2", "127.0.0.1:12"), ("a", "127.0.0.1:1", "127.0.0.1:11"))
    groups = targets("127.0.0.1:9464", "127.0.0.1:7950", pool.peers(), insecure=False)
    assert [group["targets"] for group in groups] == [["127.0.0.1:9464"], ["127.0.0.1:11"], ["127.0.0.1:12"]]
    assert groups[0]["labels"] == {"role": "scheduler", "instance": "scheduler", "peer": "", "__scheme__": "http"}
    assert groups[1]["labels"] == {"role": "stage-server", "instance": "a", "peer": "a", "__scheme__": "http"}


@pytest.mark.parametrize(
    ("address", "http", "scraped"),
    [
        ("10.0.0.2:7951", "10.0.0.2:9464", "https://10.0.0.2:9464"),
        ("10.0.0.2:7951", "0.0.0.0:9464", "https://10.0.0.2:9464"),
        ("gpu-1.lan:7951", "[::]:9464", "https://gpu-1.lan:9464"),
        ("10.0.0.2:7951", "127.0.0.1:9464", None),
        ("10.0.0.2:7951", "", None),
        ("", "0.0.0.0:9464", None),
        ("127.0.0.1:7951", "127.0.0.1:9464", None),
    ],
)
def test_a_process_is_scraped_where_others_reach_it_or_left_out(address: str, http: str, scraped: str | None) -> None:
    pool = members(("a", address, http))
    assert found(pool, own="10.0.0.1:9464").get("a") == scraped
    assert found(pool, "0.0.0.0:9464", "10.0.0.1:7950")["scheduler"] == "https://10.0.0.1:9464", "where it is dialled"
    plaintext = targets("10.0.0.1:9464", "10.0.0.1:7950", pool.peers(), insecure=True)
    assert {group["labels"]["__scheme__"] for group in plaintext} == {"http"}


def test_whoever_is_gone_is_no_target() -> None:
    pool = members(("a", "127.0.0.1:1", "127.0.0.1:11"))
    pool.disconnected(PeerId("a"), 1, 1.0)
    assert "a" in found(pool), "a suspect may come back"
    pool.tick(1000.0)
    assert "a" not in found(pool)
