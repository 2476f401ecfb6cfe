"""Inputs that came before their route: each is kept under the name that its sender claims.

    tensor ──▶ put ──▶ held under (subject, claim) ── a route names the claim ──▶ take
                └──▶ no room: to be sent again               └── else ──▶ drop

A sender cannot prove who it is. So an input counts only once a route names its peer, incarnation and attempt exactly,
and inputs of different claims stand beside each other: a false one neither replaces nor hides the true one. If there is
no room, inputs of peers that no route has named go first, then those that are farthest ahead. An input that was dropped
is asked for again (R5 of cell.py). Slices of averaging are kept the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from swarm.types import Hop, PeerId

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
