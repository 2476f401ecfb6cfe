"""Into which chunks a slice of averaging is cut, so that its means leave while its parts still arrive.

    slice of b    0 ........ 1,024 ........ 2,048 ........ 3,072 .... 3,500     elements, from where the slice begins
    a -> b        part 0        part 1         part 2         part 3
    b -> a                      mean 0         mean 1         mean 2 ...

All members cut alike, because the cut follows from the slices alone, and these come with the round. A mean is made
element by element, so its bits do not depend on the cut. Chunks begin at multiples of a codec's block, so what is
compressed does not depend on it either. Decision: docs/decisions/043.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarm.wire.messages import Member

CHUNKS_MAX: Final = 16
CHUNK_ELEMENTS_MIN: Final = 1 << 18  # 1 MiB of float32, what one frame carries: smaller ones would cost more messages
FINER: Final = 4  # chunks of unequal slices: a slow link has carried few of them when others are done
ALIKE: Final = 0.9  # of the largest slice
BLOCK_ELEMENTS: Final = 256  # of int8 (swarm/model/codec.py)
CHUNKS_UNDER_WAY_MIN: Final = 2
UNDER_WAY_BYTES: Final = 16 << 20  # to one neighbour, of parts or of means


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a unit."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)

    def within(self, first: Chunk) -> slice:
        """Its place in a tensor that begins with `first`."""
        return slice(self.start - first.start, self.stop - first.start)


def chunks_of(owner: Member, members: Sequence[Member]) -> tuple[Chunk, ...]:
    """The chunks of a member's slice in order, without gaps; none if it owns nothing. `members`: all of the round."""
    elements = owner.stop - owner.start
    if elements <= 0:
        return ()
    sizes = [one.stop - one.start for one in members]
    least = CHUNK_ELEMENTS_MIN if min(sizes) >= ALIKE * max(sizes) else CHUNK_ELEMENTS_MIN // FINER
    count = min(CHUNKS_MAX, max(1, elements // least))
    length = -(-elements // (count * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
    return tuple(Chunk(at, min(owner.stop, at + length)) for at in range(owner.start, owner.stop, length))


def under_way_max(chunk_bytes: int) -> int:
    """How many chunks of this size one member sends another at a time; what is under way alternates, frame by frame.

    Two, so that one travels while the other's receipt does, and more if they are small: a long link needs bytes.
    """
    return max(CHUNKS_UNDER_WAY_MIN, UNDER_WAY_BYTES // max(1, chunk_bytes))
