"""Who may ask at an HTTP port: what a browser says of a request, and whose process of this machine a caller is.

                 a page of another site      another login of this machine      another machine
    /healthz     refused                     answered                           answered
    /readyz      refused                     answered                           answered
    the others   refused                     refused on loopback                the certificate decides

On loopback "local" is not "mine": every login of the machine reaches the port. The kernel knows which login opened each
end of a connection, so a caller need not show anything: the login of this process and root are let in, and the logins
that a person named (--http-user). A tunnel such as `ssh -L` is of the login that opened it. Linux is asked for the one
connection (sock_diag(7)), which takes 20 us; where it does not answer, its tables are read, which takes 10 ms and more.

A browser says with each request whether a page of another site asked (Sec-Fetch-Site, Origin), and by which name it
found this port (Host). So a foreign page neither reads nor takes a place, even one that gave its own name this
machine's address.

Not chosen: a key in the page's URL. Prometheus, `curl` and each stage server's metrics would need a key as well, and a
URL stays in histories, logs and command lines. Where a kernel tells nothing, only `--http-user` lets logins in.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from swarm.errors import InvalidConfig
from swarm.text import names_this_machine, printable

# An IP address and a port, and what else a socket's address has; () is not known.
SocketAddress: TypeAlias = tuple[object, ...]
# Gives the value of a header, None if the request has none; capitals make no difference.
Header: TypeAlias = Callable[[str], str | None]

EVERYBODY = "*"
ROOT = 0
LOOKS_MAX = 3  # a table may lose a line while it is read, if a connection beside it ends
ANSWER_S_MAX = 1.0  # the kernel answers at once
FOREIGN = "a page of another site asked for this: open it yourself"
BY_NAME = "on this machine ask by the name localhost, or by an address"

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEAD = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBBBI")
_FACTS = struct.Struct("=4x48x12xII")  # after two ends in 48 bytes and three numbers: the user id and the inode
_ANY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Logins:
    """The logins of this machine that may look, beside root and this process's own, by user id; or `everybody`."""

    others: frozenset[int] = frozenset()
    everybody: bool = False
    own: int = field(default_factory=os.geteuid)

    @classmethod
    def named(cls, names: Iterable[str]) -> Logins:
        """Those of --http-user: names, user ids or "*"; InvalidConfig for a login that this machine does not have."""
        words = set(names)
        return cls(frozenset(_user_id(name) for name in words - {EVERYBODY}), EVERYBODY in words)

    def fault(self, caller: SocketAddress, here: SocketAddress) -> str:
        """Why the process that dialled from `caller` to `here` may not look; "" if it may."""
        if self.everybody:
            return ""
        login = login_of(caller, here)
        if login is not None and login in {self.own, ROOT, *self.others}:
            return ""
        who = "whose process asks is not known" if login is None else f"login {_name(login)} may not look"
        again = EVERYBODY if login is None else _name(login)
        mine = " and ".join(dict.fromkeys((_name(self.own), _name(ROOT))))
        return (
            f"{who}: this is for {mine}\nlet it in with --http-user '{again}' at the start of the process that answers"
        )


def login_of(caller: SocketAddress, here: SocketAddress) -> int | None:
    """The user id that opened the end `caller` of a TCP connection to `here`, both on this machine; None: not known."""
    try:
        ends = _end(caller), _end(here)
    except ValueError:
        return None
    if (found := _DIAG.look(*ends)) is None and not _DIAG.answers:
        found = _in_tables(*ends)
    if found is None:
        return None
    login, inode = found
    return login if inode else None  # without an inode no process holds it: its user id is given as 0, which is root's


@dataclass(frozen=True, slots=True)
class Callers:
    """The callers that may ask at a port; `is_local`: only this machine reaches it."""

    is_local: bool
    logins: Logins = field(default_factory=Logins)

    def fault(self, header: Header, caller: SocketAddress, here: SocketAddress) -> str:
        """Why a caller gets nothing that is for some logins alone; "" if the caller does."""
        return self.site_fault(header) or self.name_fault(header) or self.login_fault(caller, here)

    def site_fault(self, header: Header) -> str:
        """Why a browser gets no answer: a page of another site asks."""
        site, origin = header("sec-fetch-site"), header("origin")
        if site is not None and site.strip().lower() not in ("same-origin", "none"):
            return FOREIGN
        if origin is not None and origin.partition("://")[2].lower() != (header("host") or "").lower():
            return FOREIGN
        return ""

    def name_fault(self, header: Header) -> str:
        """Why a browser gets no answer: it may believe that another site's name leads here."""
        return "" if not self.is_local or names_this_machine(header("host") or "") else BY_NAME

    def login_fault(self, caller: SocketAddress, here: SocketAddress) -> str:
        """Why a process of this machine gets no answer: it is another login's."""
        return self.logins.fault(caller, here) if self.is_local else ""


def _user_id(name: str) -> int:
    try:
        return int(name) if name.isascii() and name.isdigit() else pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise InvalidConfig(
            f"--http-user {printable(name[:80])} is no login of this machine", hint="for example --http-user prometheus"
        ) from None


def _name(login: int) -> str:
    try:
        return pwd.getpwuid(login).pw_name
    except (KeyError, OverflowError):
        return str(login)


@dataclass(frozen=True, slots=True)
class _End:
    """An end of a connection; addresses of version 4 are that also where a socket writes them as version 6."""

    ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


def _end(address: SocketAddress) -> _End:
    """ValueError for what is no address."""
    if len(address) < 2:
        raise ValueError("not known")
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return _End(ip if mapped is None else mapped, int(str(address[1])))


class _Diag:
    """Asks the kernel for one connection."""

    def __init__(self) -> None:
        self.answers = False  # it has found one, so what it does not find is not there

    def look(self, near: _End, far: _End) -> tuple[int, int] | None:
        """The user id and the inode of an end; None if there is no such connection, or the kernel cannot say."""
        if near.ip.version != far.ip.version:
            return None
        family = socket.AF_INET if near.ip.version == 4 else socket.AF_INET6
        ends = struct.pack("!HH16s16s", near.port, far.port, near.ip.packed, far.ip.packed)
        asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY) + ends + struct.pack("=III", 0, _ANY, _ANY)
        head = _HEAD.pack(_HEAD.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as line:
                line.settimeout(ANSWER_S_MAX)
                line.send(head + asked)
                answer = line.recv(4096)
        except (AttributeError, OSError):  # no Linux, or a kernel without it
            return None
        told = answer[_HEAD.size :]
        # An error has another kind. It may find who listens at the near end, in the place of a connection.
        if _HEAD.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY or told[4 : 4 + len(ends)] != ends:
            return None
        self.answers = True
        login, inode = _FACTS.unpack_from(told)
        return login, inode


_DIAG = _Diag()


def _in_tables(near: _End, far: _End) -> tuple[int, int] | None:
    """The same from the tables of all connections."""
    for _ in range(LOOKS_MAX):
        for table in _TABLES:
            wide = table.name.endswith("6")
            if near.ip.version != far.ip.version or (near.ip.version == 6 and not wide):
                continue
            try:
                known = table.read_bytes()
            except OSError:  # no such list here
                continue
            place = known.find(b" %s %s " % (_written(near, wide=wide), _written(far, wide=wide)))
            if place >= 0:
                fields = known[place : known.find(b"\n", place)].split()  # from the near end on
                return int(fields[6]), int(fields[8])
    return None


def _written(end: _End, *, wide: bool) -> bytes:
    """As the kernel writes it: words of 32 bits in the machine's own order."""
    packed = end.ip.packed
    if wide and end.ip.version == 4:
        packed = b"\0" * 10 + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{end.port:04X}".encode()
