"""The machines of a plan: peers, sites, links and prices, from a file that a person writes or `swarm peers pool` did.

    schema = "swarm.pool/1"
    [[peer]]                                [links]
    name = "a"                              delay_ms = "delay.csv"
    count = 8           # a-0 ... a-7       bandwidth_gbps = "bandwidth.csv"
    device = "cuda"                         measured = "2026-11-20"
    memory = "24GiB"
    host_memory = "64GiB"                   a matrix of numbers: a row and a column for each peer, in the order above;
    site = "oregon"                         or with names as first row and column: for each site.
    speed = 2.1e12                          A row sends to a column. The diagonal of sites is the link within a site.
    up = "200Mbit"
    down = "200Mbit"
    price_per_hour = 0.35

What the file leaves out is assumed, and `PeerPool.assumed` says so. Speed is in multiply-adds of a forward per second
of forward and backward, as a stage server measures it. Peers without a site are at one unnamed site.
Decision: docs/decisions/240.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from swarm.errors import InvalidConfig
from swarm.job.placement import Candidate
from swarm.limits import PEERS_MAX
from swarm.text import bandwidth, counted, parse_size, printable
from swarm.text_file import read_small
from swarm.types import Memory, PeerId

DELAY_MS_MAX, BANDWIDTH_GBPS_MAX = 60_000.0, 10_000.0
SHOWN_MAX = 3  # names in a note
_BITS = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(kbit|Mbit|Gbit)(?:/s)?")
_BIT_UNITS = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}


@dataclass(frozen=True, slots=True)
class PoolPeer:
    """A machine that may serve a stage; `memory_bytes` 0: not known, so it holds anything; a price of None: not known.

    `up_bits_per_s` and `down_bits_per_s` are its own line, whoever it speaks with.
    """

    name: str
    device: str
    memory_bytes: int
    site: str
    speed: float  # multiply-adds of a forward per second of forward and backward
    up_bits_per_s: float
    down_bits_per_s: float
    price_per_hour: float | None = None
    host_bytes: int = 0  # beside the device; 0: the device is the host

    @property
    def offer(self) -> Memory:
        return Memory(self.memory_bytes, self.host_bytes)


@dataclass(frozen=True, slots=True)
class PoolLink:
    """The way from one end to another, without the ends' own lines."""

    delay_s: float
    bits_per_s: float


NEAR, FAR = PoolLink(0.001, 1e9), PoolLink(0.05, 1e8)  # assumed within a site, and between sites


@dataclass(frozen=True, slots=True)
class PeerPool:
    """The peers, by name each once, and the links between them.

    `links` are between names of peers if `by_peer`, else between sites; what they lack is assumed. `assumed` says in
    words what was, `measured` when the links were measured (YYYY-MM-DD, or empty).
    """

    peers: tuple[PoolPeer, ...]
    links: Mapping[tuple[str, str], PoolLink] = field(default_factory=dict)
    by_peer: bool = False
    assumed: tuple[str, ...] = ()
    measured: str = ""
    _by_name: dict[str, PoolPeer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {peer.name: peer for peer in self.peers})
        assert len(self._by_name) == len(self.peers), "a peer is there once"

    def peer(self, name: str) -> PoolPeer:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def end_of(self, peer: PoolPeer) -> str:
        """Where its links begin: peers with the same end have the same links."""
        return peer.name if self.by_peer else peer.site

    def link(self, a: PoolPeer, b: PoolPeer) -> PoolLink:
        """The link from one peer to another, measured or assumed."""
        return self.links.get((self.end_of(a), self.end_of(b))) or (NEAR if a.site == b.site else FAR)

    def delay_s(self, a: str, b: str) -> float:
        """Seconds until the first bit that peer `a` sends is at peer `b`."""
        return self.link(self.peer(a), self.peer(b)).delay_s

    def bits_per_s(self, a: str, b: str) -> float:
        """What the link from peer `a` to peer `b` carries; their own lines may carry less."""
        return self.link(self.peer(a), self.peer(b)).bits_per_s


def candidates(peers: Iterable[PoolPeer]) -> list[Candidate]:
    """The peers as a scheduler places them."""
    return [Candidate(PeerId(peer.name), speed=peer.speed, offer=peer.offer, site=peer.site) for peer in peers]


# The file -------------------------------------------------------------------------------------------------------------


_NAMED = "a name of letters, digits and . _ : -, in quotation marks"
_WANTED = {  # the keys of the file, and what each should be
    "schema": '"swarm.pool/1"',
    "peer": "[[peer]], a table for each machine",
    "links": "one table [links]",
    "name": _NAMED,
    "count": f"a whole number from 1 to {PEERS_MAX}",
    "device": _NAMED,
    "memory": 'a size above 0 with its unit, such as "24GiB"',
    "host_memory": 'a size above 0 with its unit, such as "64GiB"',
    "site": _NAMED,
    "speed": "a number from 1e6 on: multiply-adds per second, such as 2.1e12",
    "up": 'a rate in kbit, Mbit or Gbit, such as "200Mbit"',
    "down": 'a rate in kbit, Mbit or Gbit, such as "200Mbit"',
    "price_per_hour": "a number that is not below 0",
    "delay_ms": 'the name of a file, such as "delay.csv"',
    "bandwidth_gbps": 'the name of a file, such as "bandwidth.csv"',
    "measured": 'a day in quotation marks, such as "2026-11-20"',
}


def _bytes(value: object) -> object:
    if not isinstance(value, str) or not value.endswith("B") or not (size := parse_size(value)):
        raise ValueError
    return size


def _bits(value: object) -> object:
    found = _BITS.fullmatch(value) if isinstance(value, str) else None
    if found is None or not float(found[1]):
        raise ValueError
    return float(found[1]) * _BIT_UNITS[found[2]]


def _day(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError
    return date.fromisoformat(value).isoformat()


Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Bytes: TypeAlias = Annotated[int, BeforeValidator(_bytes)]
Bits: TypeAlias = Annotated[float, BeforeValidator(_bits)] | None


class _PoolTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _PeerTable(_PoolTable):
    name: Name
    count: Annotated[int, Field(ge=1, le=PEERS_MAX)] | None = None
    device: Name = "cpu"
    memory: Bytes = 0
    host_memory: Bytes = 0
    site: Name | Literal[""] = ""
    speed: Annotated[float, Field(ge=1e6, le=1e30)] | None = None
    up: Bits = None
    down: Bits = None
    price_per_hour: Annotated[float, Field(ge=0, le=1e9)] | None = None


class _LinksTable(_PoolTable):
    delay_ms: str = ""
    bandwidth_gbps: str = ""
    measured: Annotated[str, BeforeValidator(_day)] = ""


class _PoolFile(_PoolTable):
    schema_: Literal["swarm.pool/1"] = Field(alias="schema")
    peer: list[_PeerTable] = Field(min_length=1)
    links: _LinksTable = _LinksTable()


def read_pool(path: Path, text: str | None = None) -> PeerPool:
    """The pool in a file, "-" for stdin, or in the text of one; InvalidConfig names the line or cell that is wrong, and
    what to write."""
    if text is None:
        text = sys.stdin.read() if str(path) == "-" else _text(path, "write it with: swarm peers pool > pool.toml")
        text = text.removeprefix("\ufeff")
    try:
        content = _PoolFile.model_validate(tomllib.loads(text))
    except ValidationError as error:
        raise _refused(path, text, error) from None
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} is not TOML: {error}", hint="docs/planning.md has an example") from error
    lines = _lines_of(text)
    peers, seen = list[_PeerTable](), dict[str, int]()
    for number, table in enumerate(content.peer):
        names = [table.name] if table.count is None else [f"{table.name}-{at}" for at in range(table.count)]
        for name in names:
            if name in seen:
                told = f"peer {name} is there twice"
                raise InvalidConfig(
                    f"{path}{lines(number, 'name')}: {told}",
                    hint=f"give it another name than the first{lines(seen[name], 'name')}",
                )
            seen[name] = number
        peers += (table.model_copy(update={"name": name}) for name in names)
    if len(peers) > PEERS_MAX:
        raise InvalidConfig(f"{path} has {len(peers)} peers, a scheduler knows {PEERS_MAX}", hint="lower count of some")
    links = content.links
    delay = _matrix(path, links.delay_ms, peers, DELAY_MS_MAX, "ms")
    rates = _matrix(path, links.bandwidth_gbps, peers, BANDWIDTH_GBPS_MAX, "Gbit/s")
    if None not in (delay.by_peer, rates.by_peer) and delay.by_peer != rates.by_peer:
        told = f"{links.delay_ms} and {links.bandwidth_gbps} differ in size"
        raise InvalidConfig(told, hint="write both for each peer, or both for each site")
    if all(peer.speed is None for peer in peers):
        told = f"{path}: no peer has a speed"
        raise InvalidConfig(told, hint="give one at least: multiply-adds of a forward per second")
    return _completed(peers, delay, rates, links.measured)


def _refused(path: Path, text: str, error: ValidationError) -> InvalidConfig:
    """The first fault, with its line."""
    fault = error.errors(include_url=False)[0]
    loc = [part for part in fault["loc"] if isinstance(part, int) or not re.search(r"[\[(-]", part)]
    number = next((part for part in loc if isinstance(part, int)), None)
    is_unknown = fault["type"] == "extra_forbidden"
    key = str(fault["loc"][-1]) if is_unknown else next(part for part in reversed(loc) if isinstance(part, str))
    where = f"{path}{_lines_of(text)(number, key) if number is not None else ''}"
    if is_unknown:
        tables: dict[str, type[_PoolTable]] = {"peer": _PeerTable, "links": _LinksTable}
        known = tables.get(str(loc[0]) if loc[1:] else "", _PoolFile).model_fields
        near = difflib.get_close_matches(key, known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known)}"
        return InvalidConfig(f'{where}: unknown key "{printable(key[:40])}"', hint=hint)
    is_one = key == "peer" and isinstance(fault["input"], dict)
    told = "is one table" if is_one else f"is {printable(repr(fault['input'])[:40])}"
    if fault["type"] == "missing" or fault["input"] == []:
        told = "is missing"
    return InvalidConfig(f"{where}: {key} {told}", hint=f"it should be {_WANTED[key]}")


def _lines_of(text: str) -> Any:
    """A function that gives ", line N" for a key of the peer's table of a number; "" if it cannot be told."""
    lines = text.splitlines()
    tables = [at for at, line in enumerate(lines) if re.match(r"\s*\[\[\s*peer\s*\]\]", line)]

    def line(number: int, key: str) -> str:
        if number >= len(tables):
            return ""
        start, end = tables[number], (*tables, len(lines))[number + 1]
        same = (at for at in range(start, end) if re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", lines[at]))
        return f", line {next(same, start) + 1}"

    return line


@dataclass(frozen=True, slots=True)
class _LinkCells:
    """The numbers of one file by ends, without what is assumed; `by_peer` None: there is no file."""

    by_peer: bool | None = None
    cells: Mapping[tuple[str, str], float] = field(default_factory=dict)


def _matrix(pool: Path, name: str, peers: Sequence[_PeerTable], most: float, unit: str) -> _LinkCells:
    if not name:
        return _LinkCells()
    lines = csv.reader(_text(pool.parent / name, "write it, or leave it out of [links]").splitlines())
    try:
        rows = [[cell.strip() for cell in row] for row in lines if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise InvalidConfig(f"{name}, line {lines.line_num}: {error}", hint="a cell is a number or a name") from None
    ends, sites = [peer.name for peer in peers], sorted({peer.site for peer in peers})
    is_named = rows[1:] and [row[0] for row in rows[1:]] == rows[0][1:] and {*rows[0][1:]} <= {*sites}
    by_peer = not is_named and not (rows and rows[0][1:] and all(math.isnan(_number(cell)) for cell in rows[0]))
    if not by_peer:
        ends, heads = rows[0][1:], [row[0] for row in rows[1:]]
        strange = next((site for site in ends if site not in sites or ends.count(site) > 1), None)
        if strange is not None or heads != ends:
            named = "other sites in its first column than in its first row" if strange is None else f'site "{strange}"'
            known = ", ".join([site for site in sites if site][:8])
            hint = f"name each once: {known}" if known else "no peer in the pool has a site: give each peer its site"
            raise InvalidConfig(f"{name} names {printable(named[:60])}", hint=hint)
        rows = [row[1:] for row in rows[1:]]
    widths = {len(row) for row in rows} or {0}
    if widths != {len(ends)} or len(rows) != len(ends):
        wrong = min(widths - {len(rows)} or widths)
        raise InvalidConfig(
            f"{name} has {counted(len(rows), 'row')} and {counted(wrong, 'column')}",
            hint=f"a row and a column for each of {counted(len(ends), 'peer' if by_peer else 'site')}; "
            "sites need their names as first row and column",
        )
    cells = {}
    for row, (a, line) in enumerate(zip(ends, rows, strict=True), 1):
        for column, (b, cell) in enumerate(zip(ends, line, strict=True), 1):
            value = _number(cell)
            if not cell or (a == b and value == 0):
                continue  # it is assumed
            if not 0 < value <= most:
                is_more = most < value < math.inf
                told = f", of at most {most:g} {unit}" if is_more else f" is not a number of {unit} above 0"
                where = f"{name}, row {row}, column {column} ({a} to {b})"
                hint = f"is it in {unit}?" if is_more else "leave a cell empty if its number is not known"
                raise InvalidConfig(f'{where}: "{printable(cell[:40])}"{told}', hint=hint)
            cells[a, b] = value
    return _LinkCells(by_peer, cells)


def _number(text: str) -> float:
    """The number in a cell; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# What is assumed ------------------------------------------------------------------------------------------------------


def _completed(tables: Sequence[_PeerTable], delay: _LinkCells, rates: _LinkCells, measured: str) -> PeerPool:
    """The pool with assumptions where the file says nothing."""
    known = [table.speed for table in tables if table.speed is not None]
    by_peer = bool(delay.by_peer or rates.by_peer)
    ends = {table.name if by_peer else table.site: table.site for table in tables}
    links: dict[tuple[str, str], PoolLink] = {}
    out, into = dict.fromkeys(ends, NEAR.bits_per_s), dict.fromkeys(ends, NEAR.bits_per_s)
    for a, b in sorted({*delay.cells, *rates.cells}):
        assumed = NEAR if ends[a] == ends[b] else FAR
        delay_s = delay.cells[a, b] / 1e3 if (a, b) in delay.cells else assumed.delay_s
        links[a, b] = PoolLink(delay_s, rates.cells.get((a, b), assumed.bits_per_s / 1e9) * 1e9)
        out[a], into[b] = max(out[a], links[a, b].bits_per_s), max(into[b], links[a, b].bits_per_s)
    speeds = {
        device: median([table.speed for table in tables if table.device == device and table.speed is not None] or known)
        for device in {table.device for table in tables}
    }
    peers = []
    for table in tables:
        end = table.name if by_peer else table.site
        speed, up, down = table.speed or speeds[table.device], table.up or out[end], table.down or into[end]
        facts = (table.name, table.device, table.memory, table.site, speed, up, down, table.price_per_hour)
        peers.append(PoolPeer(*facts, table.host_memory))
    notes = (
        *_assumed_links(tables, ends, delay.cells.keys() & rates.cells.keys()),
        *_note("memory", "enough for any stage", [table.name for table in tables if not table.memory]),
        *_note("speed", "median of its device, or of all", [table.name for table in tables if table.speed is None]),
        *_note("line", "as fast as its links", [table.name for table in tables if None in (table.up, table.down)]),
    )
    return PeerPool(tuple(peers), links, by_peer, notes, measured)


def _assumed_links(tables: Sequence[_PeerTable], ends: Mapping[str, str], whole: set[tuple[str, str]]) -> list[str]:
    """What was assumed of links, in words; a pair of ends counts once, whichever way lacks a number."""
    sites = [table.site for table in tables]
    order = sorted(ends)
    lacking = [
        (a, b) for at, a in enumerate(order) for b in order[at:] if not whole.issuperset(((a, b), (b, a)))
        if a != b or (a == ends[a] and sites.count(a) > 1)
    ]  # fmt: skip
    said = []
    for link, name, is_near in ((FAR, "between", False), (NEAR, "within", True)):
        count = sum((ends[a] == ends[b]) == is_near for a, b in lacking)
        rate = f"{1e3 * link.delay_s:g} ms, {bandwidth(link.bits_per_s / 8.0)}"
        said += [f"{counted(count, 'link')} {name} sites ({rate})"] if count else []
    return said


def _note(what: str, how: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - SHOWN_MAX} more" if names[SHOWN_MAX:] else ""
    return [f"{what} of {', '.join(names[:SHOWN_MAX])}{more} ({how})"] if names else []


def _text(path: Path, hint: str) -> str:
    try:
        return read_small(path)
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else error
        hint = "many peers need links by site" if "MiB" in str(error) else hint
        raise InvalidConfig(f"{path} cannot be read: {told}", hint=hint) from error
