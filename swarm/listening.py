"""Where a process of ours can listen on this machine, and why it cannot elsewhere."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from swarm.errors import InvalidConfig, SchedulerUnreachable
from swarm.text import is_loopback

IPV4, IPV6 = "127.0.0.1", "[::1]"
FILES_HINT = "raise the limit of open files: ulimit -n"
_OWN_NAMES = frozenset({"", "localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"})


def names_the_dialler(host: str) -> bool:
    """Whether the host names the machine that dials it, or the link of that machine: another one for each that dials.

    Loopback in any spelling that a resolver takes, no address at all, link-local addresses. Names that DNS leads there
    are unknown here: they are dialled with TLS, and the process that answers must prove its name.
    """
    name = host.strip("[]").partition("%")[0].rstrip(".").lower()
    if name in _OWN_NAMES or name.endswith(".localhost"):
        return True
    found: ipaddress.IPv4Address | ipaddress.IPv6Address
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        try:
            found = ipaddress.IPv4Address(socket.inet_aton(name))  # 127.1, 0x7f000001, 017700000001
        except OSError:
            return False
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    return found.is_loopback or found.is_unspecified or found.is_link_local or found.is_multicast


def bind_fault(host: str, port: int) -> OSError | None:
    """Why no server could listen at this port (0: any) of the host, a name or an address, in brackets or not.

    None if it could at one of the host's addresses.
    """
    fault: OSError | None = None
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # as servers do: ended connections do not matter
                probe.bind(address)
                return None
        except OSError as error:
            fault = error
    return fault


def check_free(address: str) -> None:
    """InvalidConfig unless a server could listen at HOST:PORT now."""
    host, _, port = address.rpartition(":")
    if (fault := bind_fault(host, int(port))) is not None:
        raise cannot_listen(address, fault)


def cannot_listen(address: str, fault: OSError | None, flags: str = "") -> InvalidConfig:
    """The error for a person whose server cannot listen at HOST:PORT, for this reason; None: the probe found none.

    `flags` are those that choose the address.
    """
    if fault is None:
        why, hint = "the port was in use a moment ago", "start it again"
    elif fault.errno == errno.EADDRINUSE:
        why, hint = "the port is in use", "choose another port, or stop the process that holds it"
    elif fault.errno == errno.EADDRNOTAVAIL:
        why, hint = "the address is not this machine's", "choose an address of this machine"
    elif isinstance(fault, PermissionError):
        why, hint = "this user may not listen at that port", "choose a port from 1024 on"
    else:
        why, hint = fault.strerror or str(fault), "choose an address of this machine"
        if fault.errno in (errno.EMFILE, errno.ENFILE):  # no address helps
            hint, flags = FILES_HINT, ""
    return InvalidConfig(f"cannot listen at {address}: {why}", hint=f"{hint}: {flags}" if flags else hint)


def loopback() -> str:
    """The loopback host of this machine, as an address names it: 127.0.0.1, or [::1] where only that can be bound."""
    return IPV6 if bind_fault(IPV4, 0) is not None and bind_fault(IPV6, 0) is None else IPV4


def host_towards(host: str) -> str:
    """This machine's address on the way to the host, a name or an address; in brackets if it is IPv6. OSError.

    A name is looked up; nothing else is sent. A link-local IPv6 address is none: each machine has its own name for the
    link.
    """
    fault: OSError = OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
        except OSError as error:
            fault = error
            continue
        if family == socket.AF_INET:
            return own
        if not ipaddress.ip_address(own).is_link_local:
            return f"[{own}]"
    raise fault


def host_for(scheduler: str) -> str:
    """Where a process listens that the scheduler at HOST:PORT names to others: loopback beside one on loopback, else
    this machine's address on the way there.

    SchedulerUnreachable if there is no way. Not chosen: every address of the machine, because a
    process should open only what it needs.
    """
    host = scheduler.rpartition(":")[0]
    if is_loopback(host):
        return LOOPBACK
    try:
        own = host_towards(host)
    except OSError as error:
        raise SchedulerUnreachable(f"no way leads to {scheduler}: {error.strerror or error}") from None
    return LOOPBACK if is_loopback(own) else own


LOOPBACK = loopback()
