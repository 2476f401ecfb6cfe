"""Traces: what happens to the peers of a pool over time, one line of JSON each, in order of time.

    {"schema": "swarm.trace/1", "unit": "s"}
    {"t": 812.4, "event": "die", "peer": "a"}      without a word; "leave": it hands its work over first
    {"t": 900.0, "event": "join", "peer": "a"}     as the pool has it; a new peer needs speed, up and down (bits/s)

The peers of the pool are there when a trace begins.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from scheduler.planning.pool import PeerPool, PoolPeer
from swarm.errors import InvalidConfig
from swarm.text import printable
from swarm.text_file import read_small

HEAD = {"schema": "swarm.trace/1", "unit": "s"}
TRACE_BYTES_MAX = 1 << 26
AWAY_S = 120.0  # until a peer that died by chance is back, on average
KINDS = ("join", "die", "leave")
FACTS = ("site", "device", "memory", "speed", "up", "down")  # of a peer that joins


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """What happens to one peer: `kind` is one of KINDS."""

    at_s: float
    kind: str
    peer: PoolPeer


def read_trace(path: Path, pool: PeerPool) -> tuple[TraceEvent, ...]:
    """The events in a file; InvalidConfig names the line that is wrong."""
    try:
        text = read_small(path, TRACE_BYTES_MAX)
    except FileNotFoundError:
        raise InvalidConfig(f"there is no file {path}", hint="docs/planning.md shows a trace") from None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}", hint="a trace is lines of JSON") from error
    return tuple(_events(path, text.splitlines(), pool))


def _events(path: Path, lines: Sequence[str], pool: PeerPool) -> Iterator[TraceEvent]:
    known, here, before_s = {peer.name: peer for peer in pool.peers}, {peer.name for peer in pool.peers}, 0.0
    for number, line in enumerate(lines or [""], 1):
        reader = _Line(f"{path}, line {number}", line)
        if number == 1:
            if reader.values != HEAD:
                raise reader.refuse(f"it is no {HEAD['schema']}", f"the first line is {json.dumps(HEAD)}")
        elif line.strip():
            event = reader.event(known, here)
            if event.at_s < before_s:
                raise reader.refuse(
                    f"t is {event.at_s:g}, after {before_s:g} in an earlier line", "sort the lines by t"
                )
            before_s, known[event.peer.name] = event.at_s, event.peer
            here ^= {event.peer.name}
            yield event


class _Line:
    """One line, whose errors say where it is."""

    def __init__(self, where: str, line: str) -> None:
        self._where = where
        try:
            self.values: Any = json.loads(line, parse_constant=lambda word: word) if line.strip() else None
        except (ValueError, RecursionError):
            raise self.refuse("it is not JSON", "each line is one object") from None

    def refuse(self, told: str, hint: str) -> InvalidConfig:
        return InvalidConfig(f"{self._where}: {told}", hint=hint)

    def event(self, known: Mapping[str, PoolPeer], here: Set[str]) -> TraceEvent:
        values = self.values if isinstance(self.values, dict) else {}
        kind, name = values.get("event"), values.get("peer")
        if kind not in KINDS:
            raise self.refuse(f"there is no event {printable(repr(kind)[:40])}", f"there are: {', '.join(KINDS)}")
        keys = ("t", "event", "peer", *(FACTS if kind == "join" else ()))
        if unknown := sorted(values.keys() - set(keys)):
            raise self.refuse(f'{kind} has no key "{printable(unknown[0][:40])}"', f"it has: {', '.join(keys)}")
        if not isinstance(name, str) or not 0 < len(name) <= 128:
            raise self.refuse("it names no peer", 'such as "peer": "a"')
        if (kind == "join") is (name in here):
            told = f"{printable(name)} {'is here already' if name in here else 'is not here'}"
            raise self.refuse(told, "a peer of the pool is here until it dies or leaves")
        peer = known.get(name)
        if peer is None or values.keys() & set(FACTS):
            speed, up, down = (self._number(key, 1.0) for key in ("speed", "up", "down"))
            memory, site = int(self._number("memory", 0.0, 0.0)), str(values.get("site", ""))[:128]
            peer = PoolPeer(name, str(values.get("device", "cpu"))[:128], memory, site, speed, up, down)
        return TraceEvent(self._number("t", 0.0), kind, peer)

    def _number(self, key: str, least: float, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < 1e30:
            raise self.refuse(f"{key} is {printable(repr(value)[:40])}", f"a number, {least:g} or more")
        return float(value)


def churn(pool: PeerPool, per_hour: float, hours: float, seed: int) -> tuple[TraceEvent, ...]:
    """A trace in which each peer dies with this chance per hour and is back after a while, both exponential."""
    events = []
    for peer in pool.peers if per_hour else ():
        rng, at_s = Random(f"{seed} {peer.name}"), 0.0
        while (at_s := at_s + rng.expovariate(per_hour / 3600.0)) < 3600.0 * hours:
            events.append(TraceEvent(at_s, "die", peer))
            at_s += rng.expovariate(1.0 / AWAY_S)
            events.append(TraceEvent(at_s, "join", peer))
    return tuple(sorted(events, key=lambda event: (event.at_s, event.peer.name)))


def spans(pool: PeerPool, trace: Sequence[TraceEvent], until_s: float) -> Iterator[tuple[float, Collection[PoolPeer]]]:
    """The peers that are there, and for how many seconds, one span after the other."""
    here, since_s = {peer.name: peer for peer in pool.peers}, 0.0
    for event in trace:
        if event.at_s >= until_s:
            break
        yield event.at_s - since_s, here.values()
        since_s = event.at_s
        if event.kind == "join":
            here[event.peer.name] = event.peer
        else:
            here.pop(event.peer.name, None)
    yield until_s - since_s, here.values()
