"""Words for people: numbers, sizes, times and names as every program of the swarm writes them.

Standard library only: the deciding modules explain themselves with these.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

_CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/\"'<>]{1,500}@")
_SECRET_IN_QUERY = re.compile(
    r"([?&;#][\w.~%-]{0,40}(?:passw(?:or)?d|passphrase|pwd|secret|token|key|sig|signature|credential|auth)=)[^\s&;#\"'<>\\]{1,4096}",
    re.IGNORECASE | re.ASCII,
)
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(B|KiB|MiB|GiB|TiB)?")
_UNIT_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BIT_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))
_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,15})?\]):(?P<port>[0-9]{1,5})"
)
_TARGET_KINDS = frozenset({"dns", "google-c2p", "ipv4", "ipv6", "passthrough", "unix", "unix-abstract", "vsock", "xds"})
UNIX_S_MAX = 253_402_300_799.0  # the last second that has a date


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 replica, 2 replicas, 3 microbatches."""
    plural = f"{noun}es" if noun.endswith(("ch", "sh", "s", "x")) else f"{noun}s"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        plural = f"{noun[:-1]}ies"
    return f"{number} {noun if number == 1 else plural}"


def listed(names: Iterable[str]) -> str:
    """Names in order: a, b, c; "nobody" if there are none."""
    return ", ".join(sorted(names)) or "nobody"


def either(names: Sequence[str]) -> str:
    """Names to choose from, at least one: a, b or c."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def is_address(text: str) -> bool:
    """Whether this is a HOST:PORT that can be dialled: a name, an IPv4 address or an IPv6 address in brackets.

    Names that gRPC takes for the kind of a target, as in unix:80, are none.
    """
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found["port"]) < 65536 and found["host"].lower() not in _TARGET_KINDS


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    host = host.strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(host: str) -> bool:
    """Whether no other site can have pointed an HTTP request with this Host here; a browser always sends one."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return not host or is_loopback(name)


def is_wildcard(host: str) -> bool:
    """Whether a process that listens there is reached at every address of its machine."""
    try:
        return ipaddress.ip_address(host.strip("[]") or "0.0.0.0").is_unspecified
    except ValueError:
        return False


def first_line(error: BaseException) -> str:
    """The text of a library's error, in one line; libraries tell whole URLs, so without the passwords in them."""
    return without_passwords((str(error).strip().splitlines() or [type(error).__name__])[0])


def printable(text: str) -> str:
    """The text of others as it may be printed: nothing in it moves the cursor, hides, or runs from right to left."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


def without_passwords(text: str) -> str:
    """The text without the secrets of each URL: mqtt://…@host, postgresql://host/name?sslpassword=…"""
    text = _CREDENTIALS.sub(r"\1…@", text) if "@" in text else text
    return _SECRET_IN_QUERY.sub(r"\1…", text) if "=" in text else text


def size(count: float) -> str:
    """A number of bytes: 512 B, 1.5 MiB."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def bandwidth(bytes_per_s: float) -> str:
    """What a link carries: 512 kbit/s, 12.4 Mbit/s, 3.1 Gbit/s."""
    bits = 8 * bytes_per_s
    factor, unit = next(((factor, unit) for factor, unit in _BIT_UNITS if bits >= factor), _BIT_UNITS[-1])
    return f"{bits / factor:.{0 if bits >= 100 * factor else 1}f} {unit}"


def parse_size(text: str) -> int:
    """Bytes of a size that a person wrote: 64MiB, 1.5 TiB, 0; ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f'"{printable(text[:40])}" is not a size: write bytes, or a number with KiB, MiB, GiB or TiB such as 64MiB'
        )
    return int(float(found[1]) * _UNIT_BYTES[found[2] or "B"])


def as_date(unix_s: float) -> float:
    """The given time, if it has a date; else 0."""
    return unix_s if 0 <= unix_s <= UNIX_S_MAX else 0.0


def utc(unix_s: float) -> str:
    """A moment as people of all time zones read it: 2026-11-23 04:50:12 UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def seconds(text: str) -> float | None:
    """The time span that a person wrote: 90s, 10m, 2h, 1.5d; None for anything else."""
    found = _SPAN.fullmatch(text)
    return float(found[1]) * _UNIT_S[found[2]] if found is not None else None


def duration(seconds: float) -> str:
    """A time span in a table: 4.2s, 3m05s, 2h10m, 3d04h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def spoken_duration(seconds: float) -> str:
    """A time span in a sentence: 4.2 s, 3 min 05 s, 2 h 10 min."""
    seconds = max(0.0, seconds)
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
