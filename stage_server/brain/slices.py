"""How a slice of averaging is cut into chunks, and how fast a member's links carried a round.

Means of a slice's first chunks leave while parts of its last still arrive:

    slice of b    0 ........ 1,024 ........ 2,048 ........ 3,072 .... 3,500     elements, from where the slice begins
    a -> b        part 0        part 1         part 2         part 3
    b -> a                      mean 0         mean 1         mean 2 ...

All members cut alike, because the cut follows from the slices alone, and these come with the round. A mean is made
element by element, so its bits do not depend on the cut. Chunks begin at multiples of a codec's block, so what is
compressed does not depend on it either.

The speed is what a member sent to and took from all others, over the time that it had.

    bytes  |            ....---      what follows waits for others, and says nothing of the link
           |     ...---
           |  .--                    the steepest line from the beginning to a point past a quarter of all bytes
           +----------------- s

The line begins with the round: whatever held bytes up makes it flatter, and receipts that come all at once do not make
it steeper. So it is a lower bound: a fast member is as fast as the others take from it, and looks slower in a round in
which it waits for others that still compute.

Source: the delivery rate of BBR (Cardwell et al., ACM Queue 14-5, 2016), with all of a round as one flight.

Decision: docs/decisions/043.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.types import PeerId
from swarm.wire.messages import Member

CHUNKS_MAX: Final = 16
CHUNK_ELEMENTS_MIN: Final = 1 << 18  # 1 MiB of float32, what one frame carries: smaller ones would cost more messages
FINER: Final = 4  # chunks of unequal slices: a slow link has carried few of them when others are done
ALIKE: Final = 0.9  # of the largest slice
BLOCK_ELEMENTS: Final = 256  # of int8 (swarm/model/codec.py)
CHUNKS_UNDER_WAY_MIN: Final = 2
UNDER_WAY_BYTES: Final = 16 << 20  # to one neighbour, of parts or of means


@dataclass(frozen=True, slots=True)
class SliceChunk:
    """Elements [start, stop) of a unit."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)

    def within(self, first: SliceChunk) -> slice:
        """Its place in a tensor that begins with `first`."""
        return slice(self.start - first.start, self.stop - first.start)


def chunks_of(owner: Member, members: Sequence[Member]) -> tuple[SliceChunk, ...]:
    """The chunks of a member's slice in order, without gaps; none if it owns nothing. `members`: all of the round."""
    elements = owner.stop - owner.start
    if elements <= 0:
        return ()
    sizes = [member.stop - member.start for member in members]
    least = CHUNK_ELEMENTS_MIN if min(sizes) >= ALIKE * max(sizes) else CHUNK_ELEMENTS_MIN // FINER
    count = min(CHUNKS_MAX, max(1, elements // least))
    length = -(-elements // (count * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
    return tuple(SliceChunk(at, min(owner.stop, at + length)) for at in range(owner.start, owner.stop, length))


def has_room(under_way_bytes: Sequence[int], chunk_bytes: int) -> bool:
    """Whether a member sends another a chunk beside those that are under way; these alternate, frame by frame.

    Two, so that one travels while the other's receipt does, and more if they are small: a long link needs bytes.
    """
    return len(under_way_bytes) < CHUNKS_UNDER_WAY_MIN or sum(under_way_bytes) + chunk_bytes <= UNDER_WAY_BYTES


MEASURED_BYTES_MIN: Final = 1 << 20  # rounds with less to send or to take say more of delays than of bandwidth
SHARE_MIN: Final = 0.25  # of the bytes of a round


@dataclass(slots=True)
class RoundMeter:
    """The deliveries of one round; what came before `begin` does not count, nor what stays in this member's group."""

    group_of: Mapping[PeerId, str] = field(default_factory=dict)  # of members that have one
    group: str = ""  # of this member
    start_s: float | None = None
    _first_s: dict[str, float] = field(default_factory=dict)  # when the first chunk of each member or other group came
    _sent: list[tuple[float, int]] = field(default_factory=list)
    _taken: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, now_s: float) -> None:
        self.start_s = now_s

    def sent(self, to: PeerId, size_bytes: int, now_s: float) -> None:
        """A member has said that it has a chunk."""
        if not self._is_near(to):
            self._sent.append((now_s, size_bytes))

    def taken(self, sender: PeerId, size_bytes: int, now_s: float) -> None:
        """A chunk has arrived."""
        is_near = self._is_near(sender)
        self._first_s.setdefault(sender if is_near else self.group_of.get(sender, sender), now_s)
        if self.start_s is not None and not is_near:
            self._taken.append((now_s, size_bytes))

    def _is_near(self, peer: PeerId) -> bool:
        return bool(self.group) and self.group_of.get(peer) == self.group

    @property
    def all_began_s(self) -> float | None:
        """When this member and all that have sent it anything had begun; None before it has.

        The sum of a group tells that all of the group had begun.
        """
        return None if self.start_s is None else max((self.start_s, *self._first_s.values()))

    @property
    def up_bytes_per_s(self) -> float:
        """0 if there was too little to tell."""
        return self._steepest(self._sent)

    @property
    def down_bytes_per_s(self) -> float:
        """0 if there was too little to tell."""
        return self._steepest(self._taken)

    def _steepest(self, deliveries: list[tuple[float, int]]) -> float:
        total_bytes = sum(size_bytes for _, size_bytes in deliveries)
        if self.start_s is None or total_bytes < MEASURED_BYTES_MIN:
            return 0.0
        best, so_far_bytes = 0.0, 0
        for at_s, size_bytes in deliveries:  # in order of time, as they were noted
            so_far_bytes += size_bytes
            if at_s > self.start_s and so_far_bytes >= SHARE_MIN * total_bytes:
                best = max(best, so_far_bytes / (at_s - self.start_s))
        return best
