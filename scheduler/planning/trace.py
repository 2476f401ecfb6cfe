"""Traces: what happens to the peers of a pool over time, one line of JSON each, in order of time.

    {"schema": "swarm.trace/1", "unit": "s"}
    {"t": 812.4, "event": "die", "peer": "a"}      without a word; "leave": it hands its work over first
    {"t": 900.0, "event": "join", "peer": "a"}

The peers of the pool are there when a trace begins: a peer that comes later dies at 0. Decision: docs/decisions/240.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from random import Random

from scheduler.planning.pool import PeerPool, PoolPeer
from swarm.errors import InvalidConfig
from swarm.text import printable
from swarm.text_file import read_small

HEAD = {"schema": "swarm.trace/1", "unit": "s"}
TRACE_BYTES_MAX = 1 << 26
AWAY_S = 120.0  # until a peer that died by chance is back, on average
KINDS = ("join", "die", "leave")
KEYS = ("event", "peer", "t")


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

        def refuse(told: str, hint: str, number: int = number) -> InvalidConfig:
            return InvalidConfig(f"{path}, line {number}: {told}", hint=hint)

        try:
            values = json.loads(line.strip() or "null", parse_constant=lambda word: word)
        except (ValueError, RecursionError):
            raise refuse("it is not JSON", "each line is one object") from None
        if number == 1 and values != HEAD:
            raise refuse(f"it is no {HEAD['schema']}", f"the first line is {json.dumps(HEAD)}")
        if number == 1 or values is None:
            continue
        event = values if isinstance(values, dict) else {}
        if lacking := [key for key in KEYS if key not in event]:
            raise refuse(f'it has no "{lacking[0]}"', 'for example: {"t": 812.4, "event": "die", "peer": "a"}')
        kind, name, at_s = (event[key] for key in KEYS)
        if kind not in KINDS:
            raise refuse(f'"event" is {printable(json.dumps(kind)[:40])}', f"it is one of: {', '.join(KINDS)}")
        if unknown := sorted(event.keys() - set(KEYS)):
            raise refuse(f'{kind} has no key "{printable(unknown[0][:40])}"', f"it has: {', '.join(KEYS)}")
        if not isinstance(name, str) or name not in known:
            hint = "add it to the pool; a peer that comes later than the others has a line before that lets it die at 0"
            raise refuse(f"the pool has no peer {printable(json.dumps(name)[:40])}", hint)
        if (kind == "join") is (name in here):
            told = f"{name} {'is here already' if name in here else 'is not here'}"
            raise refuse(told, "a peer of the pool is here until it dies or leaves")
        if not isinstance(at_s, int | float) or isinstance(at_s, bool) or not 0 <= at_s < 1e12:
            raise refuse(f'"t" is {printable(json.dumps(at_s)[:40])}', "it is a number of seconds, 0 or more")
        if at_s < before_s:
            raise refuse(f"t is {at_s:g}, before {before_s:g} of the line above", "sort the lines by t")
        before_s = float(at_s)
        here ^= {name}
        yield TraceEvent(before_s, kind, known[name])


@dataclass(frozen=True, slots=True)
class Churn:
    """A trace in which each peer dies with this chance per hour and is back after a while, both exponential.

    It is drawn as far as it is read, and each time the same.
    """

    pool: PeerPool
    per_hour: float
    seed: int

    def __iter__(self) -> Iterator[TraceEvent]:
        peers = self.pool.peers if self.per_hour else ()
        return merge(*map(self._of, peers), key=lambda event: (event.at_s, event.peer.name))

    def _of(self, peer: PoolPeer) -> Iterator[TraceEvent]:
        rng, at_s = Random(f"{self.seed} {peer.name}"), 0.0
        while True:
            at_s += rng.expovariate(self.per_hour / 3600.0)
            yield TraceEvent(at_s, "die", peer)
            at_s += rng.expovariate(1.0 / AWAY_S)
            yield TraceEvent(at_s, "join", peer)


def spans(pool: PeerPool, trace: Iterable[TraceEvent], until_s: float) -> Iterator[tuple[float, Collection[PoolPeer]]]:
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
