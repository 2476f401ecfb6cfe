"""Who may ask at an HTTP port: what a browser says of a request, and whose process of this machine a caller is.

                 a page of another site      another login of this machine      another machine
    /healthz     refused                     answered                           answered
    /readyz      refused                     answered                           answered
    the others   refused                     refused on loopback                the certificate decides

On loopback "local" is not "mine": every login of the machine reaches the port. The kernel lists the connections of the
machine with the login that opened each end, so a caller need not show anything: the login of this process and root are
let in, and the logins that a person named (--http-user). A tunnel such as `ssh -L` is of the login that opened it.

A browser says with each request whether a page of another site asked (Sec-Fetch-Site, Origin), and by which name it
found this port (Host). So a foreign page neither reads nor takes a place, even one that gave its own name this
machine's address.

Not chosen: a key in the page's URL. Prometheus, `curl` and each stage server's metrics would need a key as well, and a
URL stays in histories, logs and command lines. Where a kernel has no such list, nobody is let in without `--http-user`.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
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
# A table may lose a line while it is read, if a connection beside it ends.
LOOKS_MAX = 3
FOREIGN = "a page of another site asked for this: open it yourself"
BY_NAME = "on this machine ask by the name localhost, or by an address"

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


@dataclass(frozen=True, slots=True)
class Logins:
    """The logins of this machine that may look, beside root and that of this process, by user id; or `everybody`."""

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
    for _ in range(LOOKS_MAX):
        for table in _TABLES:
            if (line := _line(table, caller, here)) is not None:
                return _owner(line)
    return None


@dataclass(frozen=True, slots=True)
class Callers:
    """Who may ask at a port; `is_local`: only this machine reaches it."""

    is_local: bool
    logins: Logins = field(default_factory=Logins)

    def fault(self, header: Header, caller: SocketAddress, here: SocketAddress) -> str:
        """Why somebody gets nothing that is for some logins alone; "" if he does."""
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


def _line(table: Path, caller: SocketAddress, here: SocketAddress) -> list[bytes] | None:
    """The fields of a connection in the kernel's table, from its near end on."""
    wide = table.name.endswith("6")
    try:
        known = table.read_bytes()
        place = known.find(b" %s %s " % (_written(caller, wide=wide), _written(here, wide=wide)))
    except (OSError, ValueError):  # no such list here, or an address of another kind
        return None
    return None if place < 0 else known[place : known.find(b"\n", place)].split()


def _owner(line: list[bytes]) -> int | None:
    # An end without an inode has no process any more: its user id is given as 0, which is root's.
    login, inode = int(line[6]), int(line[8])
    return login if inode else None


def _written(address: SocketAddress, *, wide: bool) -> bytes:
    """An address as the kernel writes it: words of 32 bits in the machine's own order; ValueError if it cannot be."""
    if len(address) < 2:
        raise ValueError("not known")
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.version == 4 and wide:
        ip = ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + ip.packed)
    if (ip.version == 6) != wide:
        raise ValueError(ip)
    words = struct.unpack(f"={len(ip.packed) // 4}I", ip.packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{int(str(address[1])):04X}".encode()
