"""Targets for Prometheus at /sd: the scheduler and every stage server whose metrics other machines can reach.

The format is that of http_sd_configs: groups of targets with labels. A label that begins with two underscores steers
the scrape; the others stand on every series.

Not chosen: a proxy in the scheduler for the others, because every reader of metrics could then make it dial.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler.brain.fleet.membership import Peer
from swarm.pki.names import Role
from swarm.text import is_loopback, is_wildcard
from swarm.types import PeerState


def targets(own: str, address: str, peers: Iterable[Peer], *, insecure: bool) -> list[dict[str, Any]]:
    """All targets of the moment: this scheduler, which serves HTTP at `own` and is dialled at `address`, and its peers.

    A process that listens at every address is scraped where it is dialled. One that listens on loopback only, on
    another machine than this scheduler's, is left out: only its own machine reaches it.
    """
    found = [_target(Role.SCHEDULER, "scheduler", "", _reached(own, address), insecure=insecure)]
    for peer in sorted(peers, key=lambda one: one.hello.peer):
        hello = peer.hello
        if peer.state is PeerState.GONE or not hello.http_address:
            continue
        where = _reached(hello.http_address, hello.address)
        is_here = is_loopback(_host(hello.address)) and is_loopback(_host(own))
        if where and (is_here or not is_loopback(_host(where))):
            found.append(_target(Role.STAGE_SERVER, hello.peer, hello.peer, where, insecure=insecure))
    return found


def _reached(listens: str, dialled: str) -> str:
    """Where others reach what listens there; "" if that is not known."""
    if not is_wildcard(_host(listens)):
        return listens
    return f"{_host(dialled)}:{listens.rpartition(':')[2]}" if dialled else ""


def _target(role: Role, instance: str, peer: str, where: str, *, insecure: bool) -> dict[str, Any]:
    labels = {"role": role.value, "instance": instance, "peer": peer}
    scheme = "http" if insecure or is_loopback(_host(where)) else "https"
    return {"targets": [where], "labels": labels | {"__scheme__": scheme}}


def _host(address: str) -> str:
    return address.rpartition(":")[0]
