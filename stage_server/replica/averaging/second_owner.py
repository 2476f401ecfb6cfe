"""Reduces a slice of a round once more, at another member than its owner, for comparison.

    every member ──its part of the slice, once more──▶ verifier: reduces them, and looks at the mean that it was given
    the owner ────what it took in the round───────────▶ the scheduler

Both report by hash (`Rechecked`) the parts by sender, their mean, and the mean that all members hold. The parts lie in
the sums until the commit; the parts that the owner took lie in its mailbox.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from stage_server.brain.slices import SliceChunk, chunks_of
from stage_server.device import Device
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import Deadline, Reduction, joined
from stage_server.replica.averaging.error_feedback import coded
from stage_server.replica.averaging.mailbox import Mailbox, SliceKey
from stage_server.replica.packing import Letter, deliver, round_slice
from swarm.errors import Refused
from swarm.model.state import raw_bytes
from swarm.rpc.links.peers import PeerLinks
from swarm.wire.messages import Average, Member, Recheck, Rechecked

AGAIN_S = 0.2  # the verifier hears of the slice about when the others do: what comes sooner is sent again
TIMES = 10


async def send_part(
    average: Average, command: Recheck, me: ReplicaId, device: Device, links: PeerLinks, part: Callable[[], Tensor]
) -> None:
    """Send the verifier our part of the slice once more; PeerUnavailable or Refused if it does not take it."""
    owner, to = _of(average, command.owner), _of(average, command.verifier)
    chunks = chunks_of(owner, average.members)

    def cut() -> list[Tensor]:
        whole = part()  # a copy of the whole unit, if its sums lie on a GPU
        return [whole[chunk.span].clone() for chunk in chunks]

    values = await device.run(cut)
    for chunk, one in zip(chunks, values, strict=True):
        await _deliver(links, to, round_slice(me, average, chunk, coded(one, "none"), averaged=False))


async def _deliver(links: PeerLinks, to: Member, letter: Letter) -> None:
    for left in reversed(range(TIMES)):
        try:
            await deliver(links, to, letter)
        except Refused:
            if not left:
                raise
            await asyncio.sleep(AGAIN_S)
        else:
            return


async def reduce_again(
    average: Average,
    command: Recheck,
    me: ReplicaId,
    reduction: Reduction,
    device: Device,
    mailbox: Mailbox,
    deadline: Deadline,
    part: Callable[[], Tensor],
    held: Tensor,
) -> Rechecked:
    """Reduce the slice from the parts that came for it, as its owner or as the verifier; `held` is the unit's mean.

    The deadline begins here.
    """
    owner = _of(average, command.owner)
    span = slice(owner.start, owner.stop)
    came: list[list[Tensor]] = []
    deadline.begin()
    try:
        async with deadline.limit():
            for member in average.members:
                if member.peer == me.peer:
                    came.append([await device.run(lambda: part()[span].clone())])
                else:
                    chunks = chunks_of(owner, average.members)
                    came.append([(await mailbox.get(key_of(average, member, chunk))).values() for chunk in chunks])
    except TimeoutError:
        return answer_to(
            command, fault=f"{len(came)} of {len(average.members)} parts came within {average.timeout_s:g} s"
        )

    def compared() -> tuple[tuple[str, ...], str, str]:
        parts = [joined(chunk) for chunk in came]
        mean = reduction.reduce(parts, average)
        return tuple(map(_sha256, parts)), _sha256(mean), _sha256(held[span])

    took, computed, mean = await device.aside(compared)
    return replace(answer_to(command), took=took, computed=computed, held=mean)


def key_of(average: Average, sender: Member, chunk: SliceChunk) -> SliceKey:
    """The part of a member that goes into a chunk of a slice."""
    of_round = (average.timeline, average.step, average.unit, average.round)
    return SliceKey(*of_round, False, sender.peer, sender.incarnation, chunk.start)


def _of(average: Average, peer: str) -> Member:
    for member in average.members:
        if member.peer == peer:
            return member
    raise Refused(f"{peer} is no member of this round")


def answer_to(command: Recheck, fault: str = "") -> Rechecked:
    """An answer without any hash."""
    return Rechecked(command.timeline, command.step, command.unit, command.round, command.number, (), "", "", fault)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()
