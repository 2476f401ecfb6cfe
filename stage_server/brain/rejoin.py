"""Snapshot and log: the state that a joiner of a stage still lacks, and the donor that it asks for each part.

      chunk 0   donor a ── v 7 ──▶ ─ replay 7 ─ replay 8 ─▶ v 9 ┐
      chunk 1   donor b ── v 8 ────────────────── replay 8 ─▶ v 9 ├─▶ digest of version 9 ─▶ admitted
      chunk 2   donor a ✕ donor c ── v 9 ───────────────────▶ v 9 ┘

Donors go on training, so chunks may arrive at different versions. Each is brought up to date by the records of the
donors' logs (the averaged gradient of a step, and its Commit). The donors' own optimizers used the same numbers, so the
result equals theirs bit for bit. A chunk is pulled again if no donor's log reaches back to it, or if that is fewer
bytes than the records. A donor that dies or is busy costs only the chunks that it was asked for.

Rules for the flow that carries the orders out
----------------------------------------------
1. `StoreChunk`, `Replay`, `Drop`, `Digest` and `ReadyToJoin` are carried out in the order given, on one thread.
   `StoreChunk` and `Replay` belong to the answer that was just handed in. An answer that leads to neither is dropped.
2. Each ask ends in exactly one of `pulled`, `recorded`, `out_of_reach` and `failed`: the flow watches deadlines and
   checksums. Answers to asks that are no longer open are ignored.
3. Between admission and the first round in which the replica is a member it goes on following. New state then goes
   into the buffer of the older version, which becomes the newest one with the next `ReadyToJoin`. A `Drop` after
   admission means that this replica must leave its stage. Once it is a member, nothing is handed in any more.
4. When `due_s(now_s)` comes, the flow calls `tick`.

Each joiner asks the donor that it asked least, so that hundreds of joiners do not ask the same one. Ties, and the order
of chunks, are decided by hashes of the joiner's own id.

How the state of a stage is cut, so that a joiner can fetch it from several donors and update each part.

      tensors    |      a      | b |        c         |      in the stage's order, flat
      chunks     |   0   |   1   |   2   |   3   | 4  |      fixed size; with `whole_tensors` cut at tensors only

A chunk is a range of parameters together with their optimizer state (and the older weights, if two versions are kept),
because a commit changes these together and element by element. Per-tensor state of the optimizer (a counter of updates)
travels with each chunk that has a part of the tensor. Optimizers that look at a whole tensor (LAMB) need
`whole_tensors`. Cutting the same tensors by the same sizes gives the same chunks, so an index names a chunk.

Donors cut at tensors only: a vector loop treats the end of an array otherwise than its middle, and bits must not depend
on where a chunk ends.

A replica's log of past commits, bounded in bytes: per step the averaged gradient and the Commit.

      record of step   4   5   6   7        takes a state from version 4 to 5, ..., 7 to 8
                       └ reach              a state of version 4 or newer can be brought up to date

It keeps nothing until another replica may need it. A joiner's first request comes before the chunk is read that the
records bring up to date, so the log begins early enough. The oldest records go when the bytes run out. The log knows
only their sizes; the flow keeps their contents.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swarm.types import PeerId

MISSING = -1  # version of a chunk that has not arrived
DIGESTS_KEPT = 8  # versions whose agreed digests are remembered
WANTED_COMMITS = 10  # a chunk that lacks more is pulled again, since that is fewer bytes


@dataclass(frozen=True, slots=True)
class RejoinSettings:
    """Bounds of a joiner."""

    staleness: int = 1  # 1: a replica keeps the version before the newest too
    asks_max: int = 8  # open at one time
    asks_per_donor_max: int = 2
    backoff_s: float = 0.1  # after a donor's first failure; doubles with each in a row
    backoff_max_s: float = 5.0
    mismatches_max: int = 3  # states that turned out wrong, then it gives up


@dataclass(frozen=True, slots=True)
class AskChunk:
    """Ask the donor for its present state of a chunk, and the version of that state."""

    ticket: int
    donor: PeerId
    chunk: int


@dataclass(frozen=True, slots=True)
class AskRecords:
    """Ask the donor for a chunk's part of the records of steps [start, stop), or as many of them as it has."""

    ticket: int
    donor: PeerId
    chunk: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Take over the state that was pulled."""

    chunk: int
    version: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Run the optimizer of `step` over one chunk, with the gradient that came."""

    chunk: int
    step: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget all chunks: together they are not the state that the others hold."""


@dataclass(frozen=True, slots=True)
class Digest:
    """All chunks are of `version`: digest parameters and optimizer state, and say `digested`."""

    ticket: int
    version: int


@dataclass(frozen=True, slots=True)
class ReadyToJoin:
    """The state equals the other replicas': the replica may serve steps from `first_step` on.

    Given again for each newer version that is reached."""

    version: int
    first_step: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Joining failed for good; the reason is for a person."""

    reason: str


Ask: TypeAlias = AskChunk | AskRecords
Order: TypeAlias = Ask | StoreChunk | Replay | Drop | Digest | ReadyToJoin | GiveUp


@dataclass(slots=True)
class _HeldPart:
    """The part of a chunk that has arrived."""

    chunk: Chunk
    version: int = MISSING
    previous: bool = False  # the weights of the version before are here too
    ticket: int | None = None


@dataclass(slots=True)
class _DonorUse:
    asked: int = 0
    open: int = 0
    failures: int = 0  # in a row
    resume_s: float = 0.0
    reach: int | None = None  # of its log, when it last said


class Rejoin:
    """One joiner of one stage on one timeline; a new timeline takes a new one."""

    def __init__(self, joiner: PeerId, chunks: Sequence[Chunk], settings: RejoinSettings) -> None:
        assert chunks
        self._joiner = joiner
        self._settings = settings
        self._mismatches = 0
        self._held = [_HeldPart(chunk) for chunk in chunks]
        self._order = sorted(range(len(chunks)), key=lambda index: self._hash("chunk", index))
        self._donors: dict[PeerId, _DonorUse] = {}
        self._asks: dict[int, Ask] = {}
        self._tickets = 0
        self._newest = MISSING
        self._agreed: dict[int, str] = {}
        self._own: tuple[int, str] | None = None  # newest version digested here
        self._announced = MISSING  # version for which Digest was ordered
        self._admitted = MISSING  # newest version that was admitted
        self._digesting: dict[int, int] = {}  # ticket -> version
        self._over = False

    @property
    def newest(self) -> int:
        """The newest committed version that this joiner has heard of; -1 if none."""
        return self._newest

    def due_s(self, now_s: float) -> float | None:
        """When to call `tick` if nothing else happens: a donor may then be asked again."""
        if self._over or self._settled():
            return None
        return min((donor.resume_s for donor in self._donors.values() if donor.resume_s > now_s), default=None)

    # What happened --------------------------------------------------------------------------------------------------

    def donors(self, peers: Iterable[PeerId], now_s: float) -> list[Order]:
        """Only these can be asked from now on; open asks of others are asked elsewhere."""
        present = set(peers) - {self._joiner}
        for peer in self._donors.keys() - present:
            del self._donors[peer]
        for ticket in [ticket for ticket, ask in self._asks.items() if ask.donor not in present]:
            self._held[self._asks.pop(ticket).chunk].ticket = None
        for peer in sorted(present - self._donors.keys()):
            self._donors[peer] = _DonorUse()
        return self.tick(now_s)

    def committed(self, version: int, now_s: float) -> list[Order]:
        """The job's newest version, from the scheduler or a donor; older news is ignored."""
        self._newest = max(self._newest, version)
        return self.tick(now_s)

    def agreed(self, version: int, digest: str, now_s: float) -> list[Order]:
        """All replicas of the stage have this digest at `version`."""
        self._agreed[version] = digest
        for old in sorted(self._agreed)[:-DIGESTS_KEPT]:
            del self._agreed[old]
        return self.tick(now_s)

    def pulled(self, ticket: int, version: int, *, previous: bool, reach: int, now_s: float) -> list[Order]:
        """A checked chunk arrived; `previous`: with the previous weights; `reach`: of the donor's log."""
        ask = self._answered(ticket)
        if ask is None:
            return []
        assert isinstance(ask, AskChunk), "an answer to another question"
        held, donor = self._held[ask.chunk], self._donors[ask.donor]
        donor.reach = reach
        self._newest = max(self._newest, version)
        if version <= held.version:  # the donor lags behind; the chunk that is here is newer
            self._failed(donor, ask.donor, now_s)
            return self.tick(now_s)
        donor.failures, donor.resume_s = 0, 0.0
        held.version, held.previous = version, previous
        return [StoreChunk(ask.chunk, version), *self.tick(now_s)]

    def recorded(self, ticket: int, stop: int, *, reach: int, now_s: float) -> list[Order]:
        """The records from `start` up to `stop` arrived; none if the donor has not committed any yet."""
        ask = self._answered(ticket)
        if ask is None:
            return []
        assert isinstance(ask, AskRecords), "an answer to another question"
        assert ask.start <= stop <= ask.stop, "records that nobody asked for"
        held, donor = self._held[ask.chunk], self._donors[ask.donor]
        donor.reach = reach
        if stop == ask.start:
            self._failed(donor, ask.donor, now_s)
            return self.tick(now_s)
        donor.failures, donor.resume_s = 0, 0.0
        held.version, held.previous = stop, True
        return [*(Replay(ask.chunk, step) for step in range(ask.start, stop)), *self.tick(now_s)]

    def out_of_reach(self, ticket: int, *, reach: int, now_s: float) -> list[Order]:
        """The donor's log begins at `reach`, later than the records that were asked for."""
        ask = self._answered(ticket)
        if ask is None:
            return []
        self._donors[ask.donor].reach = reach
        return self.tick(now_s)

    def failed(self, ticket: int, now_s: float) -> list[Order]:
        """The ask failed (broken, late, busy or damaged): it is repeated, at another donor if there is one."""
        ask = self._answered(ticket)
        if ask is None:
            return []
        self._failed(self._donors[ask.donor], ask.donor, now_s)
        return self.tick(now_s)

    def digested(self, ticket: int, digest: str, now_s: float) -> list[Order]:
        version = self._digesting.pop(ticket, MISSING)  # missing: that state was dropped meanwhile
        if version != MISSING and (self._own is None or version >= self._own[0]):
            self._own = (version, digest)
        return self.tick(now_s)

    # What follows ---------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Order]:
        """The orders that follow from all that happened until `now_s`."""
        if self._over:
            return []
        orders = self._judge()
        if not self._over:
            orders += self._ask(now_s)
        return orders

    def _judge(self) -> list[Order]:
        """Order a digest, an admission or a new start, as far as the chunks allow it."""
        if self._own is not None and self._own[0] > self._admitted:
            version, digest = self._own
            agreed = self._agreed.get(version)
            if agreed is not None and agreed != digest:
                return self._start_over(version)
            if agreed is not None and version == self._newest and self._settled():
                self._admitted, self._mismatches = version, 0
                return [ReadyToJoin(version, self._first_step())]
        if self._announced == self._newest or not self._settled():
            return []
        self._announced = self._newest
        self._tickets += 1
        self._digesting[self._tickets] = self._newest
        return [Digest(self._tickets, self._newest)]

    def _settled(self) -> bool:
        """All chunks are of the newest version, and the newest version is known."""
        return self._newest != MISSING and all(held.version == self._newest for held in self._held)

    def _first_step(self) -> int:
        """With staleness 1, step t computes with version max(0, t - 1)."""
        if self._settings.staleness == 0 or self._newest == 0 or all(held.previous for held in self._held):
            return self._newest
        return self._newest + 1

    def _start_over(self, version: int) -> list[Order]:
        self._mismatches += 1
        self._own, self._announced, self._admitted = None, MISSING, MISSING
        self._asks.clear()
        self._digesting.clear()
        for held in self._held:
            held.version, held.previous, held.ticket = MISSING, False, None
        for donor in self._donors.values():
            donor.open = 0
        if self._mismatches >= self._settings.mismatches_max:
            self._over = True
            times = f"{self._mismatches} times" if self._mismatches > 1 else "once"
            return [
                Drop(),
                GiveUp(f"the state of version {version} differs from the other replicas', {times} in a row"),
            ]
        return [Drop()]

    def _ask(self, now_s: float) -> list[Order]:
        orders: list[Order] = []
        free = {peer for peer, donor in self._donors.items() if donor.resume_s <= now_s}
        while len(self._asks) < self._settings.asks_max:
            free = {peer for peer in free if self._donors[peer].open < self._settings.asks_per_donor_max}
            held = self._next() if free else None
            if held is None:
                break
            orders.append(self._ask_for(held, free))
        return orders

    def _next(self) -> _HeldPart | None:
        """The next chunk to ask for: one that the logs may soon forget, a missing one, or the one furthest behind."""
        idle = [held for index in self._order if (held := self._held[index]).ticket is None]
        missing = next((held for held in idle if held.version == MISSING), None)
        behind = min(
            (held for held in idle if MISSING != held.version < self._newest),
            key=lambda held: held.version,
            default=None,
        )
        if missing is None or behind is None:
            return missing or behind
        shortest = max((donor.reach for donor in self._donors.values() if donor.reach is not None), default=MISSING)
        urgent = behind.version >= shortest and 2 * (self._newest - behind.version) >= self._newest - shortest
        return behind if urgent else missing

    def _ask_for(self, held: _HeldPart, free: set[PeerId]) -> Ask:
        index, start, stop = held.chunk.index, held.version, self._newest
        reaching = {peer for peer in free if (reach := self._donors[peer].reach) is None or reach <= start}
        replay = (
            start != MISSING and bool(reaching) and (stop - start) * held.chunk.record_bytes <= held.chunk.size_bytes
        )
        donor = min(
            reaching if replay else free,
            key=lambda peer: (self._donors[peer].asked, self._hash(peer, index), peer),
        )
        self._tickets += 1
        ask = AskRecords(self._tickets, donor, index, start, stop) if replay else AskChunk(self._tickets, donor, index)
        held.ticket = ask.ticket
        self._asks[ask.ticket] = ask
        self._donors[donor].asked += 1
        self._donors[donor].open += 1
        return ask

    def _answered(self, ticket: int) -> Ask | None:
        """Close and give the open ask of this ticket."""
        ask = self._asks.pop(ticket, None)
        if ask is not None:
            self._held[ask.chunk].ticket = None
            self._donors[ask.donor].open -= 1
        return ask

    def _failed(self, donor: _DonorUse, peer: PeerId, now_s: float) -> None:
        donor.failures += 1
        pause_s = min(self._settings.backoff_max_s, self._settings.backoff_s * 2.0 ** min(donor.failures - 1, 30))
        donor.resume_s = now_s + pause_s * (0.5 + self._hash(peer, donor.failures) / 2**64)

    def _hash(self, *what: object) -> int:
        """64 bits that differ between joiners."""
        text = "|".join(map(str, (self._joiner, self._mismatches, *what)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class TensorSize:
    name: str
    elements: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a parameter, flat."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """`size_bytes` is the size of its snapshot, `record_bytes` its share of one averaged gradient."""

    index: int
    pieces: tuple[Piece, ...]
    size_bytes: int
    record_bytes: int


def cut(
    tensors: Sequence[TensorSize],
    *,
    chunk_bytes: int,
    element_bytes: int,
    gradient_bytes: int,
    whole_tensors: bool = False,
) -> tuple[Chunk, ...]:
    """Chunks of at most `chunk_bytes` (one element or, with `whole_tensors`, one tensor may be more), in order.

    `element_bytes` is the size of an element in a snapshot, `gradient_bytes` that in a record of the log.
    """
    assert min(chunk_bytes, element_bytes, gradient_bytes) >= 1
    assert len({tensor.name for tensor in tensors}) == len(tensors), "a tensor is listed once"
    room = max(1, chunk_bytes // element_bytes)
    groups: list[list[Piece]] = []
    filled = room
    for tensor in tensors:
        start = 0
        while start < tensor.elements:
            left = room - filled
            if left <= 0 or (whole_tensors and tensor.elements > left):
                groups.append([])
                filled, left = 0, room
            stop = tensor.elements if whole_tensors else min(tensor.elements, start + left)
            groups[-1].append(Piece(tensor.name, start, stop))
            filled += stop - start
            start = stop
    return tuple(
        Chunk(index, tuple(pieces), elements * element_bytes, elements * gradient_bytes)
        for index, pieces in enumerate(groups)
        for elements in (sum(piece.stop - piece.start for piece in pieces),)
    )


class CommitLog:
    def __init__(self, limit_bytes: int, version: int = 0) -> None:
        assert limit_bytes >= 0
        self._limit_bytes = limit_bytes
        self._sizes: deque[int] = deque()
        self._version = self._wanted_until = version
        self.size_bytes = 0

    def want(self) -> None:
        """Another replica may need records: keep those of the next WANTED_COMMITS."""
        self._wanted_until = self._version + WANTED_COMMITS

    @property
    def version(self) -> int:
        """The newest version: a replay of the whole log leads there."""
        return self._version

    @property
    def reach(self) -> int:
        """The oldest version that the log can bring up to date; equal to `version` if the log is empty."""
        return self._version - len(self._sizes)

    def append(self, step: int, size_bytes: int) -> range:
        """Remember a commit; gives the steps whose records must be dropped, perhaps the new one too."""
        assert step == self._version, f"the log is at version {self._version}, its next record is not of step {step}"
        assert size_bytes >= 0
        before = self.reach
        self._version = step + 1
        self._sizes.append(size_bytes)
        self.size_bytes += size_bytes
        is_wanted = step < self._wanted_until
        while self._sizes and (self.size_bytes > self._limit_bytes or not is_wanted):
            self.size_bytes -= self._sizes.popleft()
        return range(before, self.reach)

    def steps(self, start: int, stop: int) -> range | None:
        """The steps whose records bring version `start` towards `stop`; None if the log does not reach back."""
        if start < self.reach:
            return None
        return range(start, max(start, min(stop, self._version)))
