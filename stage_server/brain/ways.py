"""Which way each chunk of a round takes: the members of a site add up their parts before these leave it.

    lyon: a b c      a, c ──part──▶ b ──one sum──▶ e             b carries this chunk in lyon; e owns it
    berlin: d e      d ──part──▶ e         e ──mean──▶ d, b      b ──mean──▶ a, c

Parts go up a tree to the owner of the chunk, and the mean comes down the same way. The tree follows from the members of
the round, so no message says it. In a flat round no member has a group, and all send to the owner. The members of a
group carry in turn, so they share what there is to add and to send. Where all groups have one size, the carrier has the
owner's rank in its own group: then a member's neighbours are its row and its column, 10 of 35 in a grid of 36.

Decision: docs/decisions/230.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from stage_server.brain.slices import SliceChunk, chunks_of
from swarm.types import PeerId
from swarm.wire.messages import Member


@dataclass(frozen=True, slots=True)
class ChunkWay:
    """One chunk of a round as one member sees it."""

    chunk: SliceChunk
    above: Member | None  # gets this member's sum and gives it the mean; None: this member owns the chunk
    below: tuple[Member, ...]  # in the round's order: this member adds their parts, and gives them the mean


def ways_of(me: PeerId, members: Sequence[Member]) -> list[ChunkWay]:
    """The ways of all chunks of a round, the first chunks of all owners first; none if `me` is no member.

    A member alone has one chunk, which does not travel.
    """
    places = {member.peer: place for place, member in enumerate(members)}
    if me not in places:
        return []
    if len(members) == 1:
        return [ChunkWay(SliceChunk(members[0].start, members[0].stop), None, ())]
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.group or f"/{member.peer}", []).append(member)  # the name of a site has no "/"
    group_of = {member.peer: group for group in groups.values() for member in group}
    mine, alike = group_of[me], len({len(group) for group in groups.values()}) == 1

    def carrier(group: list[Member], owner: Member, number: int) -> Member:
        if group is group_of[owner.peer]:
            return owner
        turn = group_of[owner.peer].index(owner) if alike else places[owner.peer] + number
        return group[turn % len(group)]

    ways = []
    for number, in_turn in enumerate(zip_longest(*(chunks_of(owner, members) for owner in members))):
        for owner, chunk in zip(members, in_turn, strict=True):
            if chunk is None:
                continue
            above = carrier(mine, owner, number)
            if above.peer != me:
                ways.append(ChunkWay(chunk, above, ()))
                continue
            below = [member for member in mine if member.peer != me]
            if owner.peer == me:
                below += [carrier(group, owner, number) for group in groups.values() if group is not mine]
            below.sort(key=lambda member: places[member.peer])
            ways.append(ChunkWay(chunk, None if owner.peer == me else owner, tuple(below)))
    return ways
