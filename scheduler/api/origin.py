"""Whence a caller dials, as gRPC names it: ipv4:192.0.2.7:41234, or ipv6:%5B2001:db8::1%5D:41234."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import unquote

from swarm.text import is_loopback


def host_of(peer: str) -> str:
    """The address of a caller; empty if it is not known."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]").removeprefix("::ffff:") if kind in ("ipv4", "ipv6") else ""


def is_here(peer: str, own_addresses: Collection[str]) -> bool:
    """Whether the caller is on this machine, also where it dials by another of its addresses; so is one not known."""
    host = host_of(peer)
    return not host or is_loopback(host) or host in own_addresses
