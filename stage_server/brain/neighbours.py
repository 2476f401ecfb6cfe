"""The neighbours that may deliver an input of a microbatch or ask for its outputs: its newest route names them.

    tensor, question ──▶ judge ──▶ NAMED   by the newest route, at exactly its attempt: the cell may have it
                               ──▶ EARLY   perhaps by a route that is under way to us: it waits outside the cell
                               ──▶ FALSE   by no route that can come: refused

A message says itself who sent it, and cannot prove it. So nothing of it reaches a cell (cell.py) before the scheduler
has named exactly that peer, incarnation and attempt for exactly that side.

Inputs that came before their route: each is kept under the name that its sender claims.

    tensor ──▶ put ──▶ held under (subject, claim) ── a route names the claim ──▶ take
                └──▶ no room: to be sent again               └── else ──▶ drop

A sender cannot prove who it is. So an input counts only once a route names its peer, incarnation and attempt exactly,
and inputs of different claims stand beside each other: a false one neither replaces nor hides the true one. If there is
no room, inputs of peers that no route has named go first, then the inputs farthest ahead. An input that was dropped is
asked for again (R5 of cell.py). Slices of averaging are kept the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeAlias, TypeVar

from swarm.types import Direction, Hop, Microbatch, PeerId
from swarm.wire.messages import Route

EARLY_ASKERS_MAX = 8  # of one output, whose route is not here yet


class ClaimStatus(Enum):
    """The standing of a claim."""

    NAMED = auto()
    EARLY = auto()
    FALSE = auto()


@dataclass(slots=True)
class _Known:
    """The newest route of a microbatch, as far as it concerns this stage."""

    newest: int  # greatest attempt of its hops
    hops: dict[Direction, Hop]  # FORWARD: the hop before ours, which x comes from; BACKWARD: the one behind
    askers: dict[Direction, list[Hop]] = field(default_factory=lambda: {side: [] for side in Direction})  # early ones


class Neighbours:
    """The neighbours of a replica of `stage`, by microbatch."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._known: dict[Microbatch, _Known] = {}

    def learn(self, route: Route) -> list[tuple[Direction, Hop]]:
        """Note a route unless a newer one is known; gives earlier questions that it answers, with their askers."""
        newest = max(hop.attempt for hop in route.hops)
        before = self._known.get(route.microbatch)
        if before is not None and newest <= before.newest:
            return []
        hops = {}
        if self._stage > 0:
            hops[Direction.FORWARD] = route.hops[self._stage - 1]
        if self._stage + 1 < len(route.hops):
            hops[Direction.BACKWARD] = route.hops[self._stage + 1]
        known = self._known[route.microbatch] = _Known(newest, hops)
        if before is None:
            return []
        for output, askers in before.askers.items():
            known.askers[output] = [asker for asker in askers if asker.attempt > newest]
        return [
            (output, hops[_towards(output)])
            for output, askers in before.askers.items()
            if any(self._is_named(known, _towards(output), Claim.of(asker)) for asker in askers)
        ]

    def forget(self, step: int) -> None:
        """The step is committed: no peer has a place in it or in earlier steps any more."""
        for microbatch in [known for known in self._known if known.step <= step]:
            del self._known[microbatch]

    def named(self, microbatch: Microbatch) -> dict[Direction, Claim]:
        """The only claims under which inputs of the microbatch may come, as far as a route has said."""
        known = self._known.get(microbatch)
        return {} if known is None else {side: Claim.of(hop) for side, hop in known.hops.items()}

    def judge(self, microbatch: Microbatch, direction: Direction, claim: Claim) -> ClaimStatus:
        """The standing of an input that came under a claim: FORWARD x, BACKWARD g."""
        known = self._known.get(microbatch)
        if known is None:
            return ClaimStatus.EARLY
        if self._is_named(known, direction, claim):
            return ClaimStatus.NAMED
        # A hop that is new on a newer route has a greater attempt than all hops of the older.
        return ClaimStatus.EARLY if claim.attempt > known.newest else ClaimStatus.FALSE

    def asks(self, microbatch: Microbatch, output: Direction, asker: Hop) -> ClaimStatus:
        """The standing of a question for an output: FORWARD y, BACKWARD dx. An early one is remembered, within bounds.

        Without any route nothing is remembered: with the first one, outputs go to the neighbours by themselves.
        """
        standing = self.judge(microbatch, _towards(output), Claim.of(asker))
        known = self._known.get(microbatch)
        if known is not None and standing is ClaimStatus.EARLY and len(known.askers[output]) < EARLY_ASKERS_MAX:
            known.askers[output].append(asker)
        return standing

    def __len__(self) -> int:
        return len(self._known)

    def _is_named(self, known: _Known, side: Direction, claim: Claim) -> bool:
        return side in known.hops and claim == Claim.of(known.hops[side])


def _towards(output: Direction) -> Direction:
    """The side of the stage that receives an output: y goes to the sender of g, dx to the sender of x."""
    return Direction.BACKWARD if output is Direction.FORWARD else Direction.FORWARD


EARLY_MAX = 1024  # inputs that wait for their route
EARLY_BYTES_MAX = 256 << 20
EARLY_OF_SENDER_MAX = 256  # of one claimed sender
EARLY_BYTES_OF_SENDER_MAX = 64 << 20

_Subject = TypeVar("_Subject")
_Held = TypeVar("_Held")


@dataclass(frozen=True, slots=True)
class Claim:
    """The sender that a message claims: a peer, its incarnation, and the attempt of its hop."""

    peer: PeerId
    incarnation: int
    attempt: int

    @classmethod
    def of(cls, hop: Hop) -> Claim:
        """The one claim that a route allows for a hop."""
        return cls(hop.peer, hop.incarnation, hop.attempt)


@dataclass(frozen=True, slots=True)
class _Early(Generic[_Held]):
    held: _Held
    size_bytes: int
    is_known: bool


_Sender: TypeAlias = tuple[PeerId, int]


class EarlyInputs(Generic[_Subject, _Held]):
    """Early inputs by subject and claim. One input always has room, however large it is.

    `distance` of a subject says how far ahead it is; with one distance for all, nothing that was taken gives way to
    another of the same standing.
    """

    def __init__(self, distance: Callable[[_Subject], Any]) -> None:
        self._distance = distance
        self.size_bytes = 0
        self._held: dict[tuple[_Subject, Claim], _Early[_Held]] = {}
        self._count: Counter[_Sender] = Counter()
        self._bytes: Counter[_Sender] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, subject: _Subject, claim: Claim, held: _Held, size_bytes: int, *, is_known: bool) -> bool:
        """Keep an input, or drop others for it; False if there is no room. An input that is here already stays as it
        is.

        `is_known`: a route has named this peer and incarnation before.
        """
        key = (subject, claim)
        if key in self._held:
            return True
        sender = (claim.peer, claim.incarnation)
        while self._is_full_for(sender, size_bytes):
            if not self._drop_farther(subject, is_known, sender):
                return False
        while len(self._held) >= EARLY_MAX or self.size_bytes + size_bytes > max(EARLY_BYTES_MAX, 4 * size_bytes):
            if not self._drop_farther(subject, is_known, None):
                return False
        self._held[key] = _Early(held, size_bytes, is_known)
        self.size_bytes += size_bytes
        self._count[sender] += 1
        self._bytes[sender] += size_bytes
        return True

    def get(self, subject: _Subject, claim: Claim) -> _Held | None:
        """The input that came under this claim, which stays."""
        early = self._held.get((subject, claim))
        return None if early is None else early.held

    def take(self, subject: _Subject, claim: Claim) -> _Held | None:
        """The input that came under this claim, if it is here."""
        return self._remove((subject, claim)).held if (subject, claim) in self._held else None

    def drop(self, is_over: Callable[[_Subject, Claim], bool]) -> None:
        """Forget what no route will name any more."""
        for key in [key for key in self._held if is_over(*key)]:
            self._remove(key)

    def _is_full_for(self, sender: _Sender, size_bytes: int) -> bool:
        limit_bytes = max(EARLY_BYTES_OF_SENDER_MAX, size_bytes)
        return self._count[sender] >= EARLY_OF_SENDER_MAX or self._bytes[sender] + size_bytes > limit_bytes

    def _drop_farther(self, subject: _Subject, is_known: bool, sender: _Sender | None) -> bool:
        """Drop the least wanted input (of one sender, or of all), unless a new one of `subject` is wanted less."""
        among = [key for key in self._held if sender is None or (key[1].peer, key[1].incarnation) == sender]
        least = max(among, key=lambda key: (not self._held[key].is_known, self._distance(key[0])))
        if (not self._held[least].is_known, self._distance(least[0])) <= (not is_known, self._distance(subject)):
            return False
        self._remove(least)
        return True

    def _remove(self, key: tuple[_Subject, Claim]) -> _Early[_Held]:
        early = self._held.pop(key)
        sender = (key[1].peer, key[1].incarnation)
        self.size_bytes -= early.size_bytes
        self._bytes[sender] -= early.size_bytes
        self._count[sender] -= 1
        if not self._count[sender]:
            del self._count[sender], self._bytes[sender]
        return early
