"""One round: the members of a unit turn their sums into one averaged gradient that all of them hold, bit for bit.

    member a    [ part a0 | part a1 ]        owner of slice 0 = a, of slice 1 = b
    member b    [ part b0 | part b1 ]

    a -> b: part a1     b -> a: part b0                      reduce-scatter
    a: mean 0 = (a0 + b0) / tokens    b: mean 1 = (a1 + b1) / tokens
    a -> b: mean 0      b -> a: mean 1                       all-gather

The owner adds the parts in order of peer id, or clips them (`Reduction`), and sends out the resulting bytes. So the
result does not depend on the order of arrival, and all members hold the same bytes. Nothing here decides: members and
slices come with the command, and the scheduler aborts a round that a member reports as failed.

Only reading the sums needs the compute thread, where sums are forgotten too. The rest happens beside it, on the CPU: a
round that overlaps with the next step would otherwise wait for one of its microbatches each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from stage_server.device import Device
from stage_server.ports import ReplicaId
from stage_server.replica.leftovers import Coded, Leftovers, coded, together
from stage_server.replica.mailbox import Mailbox, SliceKey
from stage_server.replica.packing import Letter, deliver, round_slice
from stage_server.replica.reduction import Reduction
from swarm.errors import NoWay, Refused, RoundBroken, SwarmError
from swarm.events import ParameterNorm
from swarm.messages import Average, Envoy, Member
from swarm.model.stage import Stage
from swarm.rpc.links.peers import PeerLinks
from swarm.types import PeerId, UnitName


@dataclass(frozen=True, slots=True)
class Mean:
    """The averaged gradient of a unit as one round produced it."""

    gradient: Tensor  # float32, 1-D, the unit's flat layout
    digest: str
    norms: tuple[ParameterNorm, ...]
    left: Tensor | None = None  # what this replica's slices left out, in the unit of the sums; None: nothing


async def run_round(
    command: Average,
    me: ReplicaId,
    stage: Stage,
    reduction: Reduction,
    device: Device,
    links: PeerLinks,
    mailbox: Mailbox,
    leftovers: Leftovers,
) -> Mean:
    """Carry out one round as a member; gives the averaged gradient of the unit.

    RoundBroken if a member does not deliver within `command.timeout_s`, Refused if the sizes contradict the unit's
    layout; both may come in a group.
    """
    left, codec_name = leftovers.lend(command.unit, command.step), leftovers.codec_name
    part = await device.run(lambda: stage.part(command.step, command.unit))  # behind any Void that came before
    mine = _own(command.members, me.peer)
    if command.members[-1].stop != part.numel():
        raise Refused(f"the round covers {command.members[-1].stop} elements, unit {command.unit} has {part.numel()}")
    lossy, lost = codec_name != "none", None
    if lossy:
        part, lost = await device.aside(lambda: (together(part, left), torch.zeros_like(part)))
    others = [member for member in command.members if member.peer != me.peer]
    owners = [member for member in command.members if member.stop > member.start]

    async def arrived(sender: Member, owner: Member, *, averaged: bool) -> Tensor:
        try:
            async with asyncio.timeout_at(deadline_s):
                came = await mailbox.get(_key(command, sender, owner, averaged=averaged))
        except TimeoutError:
            message = f"{sender.peer} sent no {_word(averaged=averaged)} within {command.timeout_s:g} s"
            raise RoundBroken(message, accused=sender.peer) from None
        return await device.aside(came.values) if lossy else came.values()

    async def encoded(values: Tensor, owner: Member, tokens: int) -> Coded:
        """The coded values to send; `tokens` turns an error of a mean into one of a sum."""

        def encode() -> Coded:
            made = coded(values, codec_name)
            if lost is not None:
                torch.sub(values, made.received, out=lost[_span(owner)]).mul_(tokens)
            return made

        return await device.aside(encode) if lossy else encode()

    deadline_s = asyncio.get_running_loop().time() + command.timeout_s
    async with asyncio.TaskGroup() as tasks:
        for owner in owners:
            if owner.peer != me.peer:
                letter = round_slice(me, command, owner, await encoded(part[_span(owner)], owner, 1), averaged=False)
                tasks.create_task(send_slice(links, owner, letter, deadline_s, _word(averaged=False)))
        mean = torch.empty(0)
        if mine in owners:
            parts = [
                part[_span(mine)] if member.peer == me.peer else await arrived(member, mine, averaged=False)
                for member in command.members
            ]
            mean = await device.aside(lambda: reduction.reduce(parts, command))
            if others:  # nobody else would get what is left out
                made = await encoded(mean, mine, command.tokens)
                mean = made.received
            for member in others:
                letter = round_slice(me, command, mine, made, averaged=True)
                tasks.create_task(send_slice(links, member, letter, deadline_s, _word(averaged=True)))
        slices = [mean if owner.peer == me.peer else await arrived(owner, owner, averaged=True) for owner in owners]
    return await device.aside(lambda: _assemble(stage, command.unit, slices, lost))


def _assemble(stage: Stage, unit: UnitName, slices: Sequence[Tensor], left: Tensor | None) -> Mean:
    gradient = slices[0] if len(slices) == 1 else torch.cat(list(slices))
    digest = xxhash.xxh3_128_hexdigest(gradient.cpu().numpy().data)
    return Mean(gradient, digest, stage.squared_norms(unit, gradient), left)


def _own(members: Sequence[Member], peer: PeerId) -> Member:
    for member in members:
        if member.peer == peer:
            return member
    raise Refused(f"{peer} is no member of this round")


def _span(member: Member) -> slice:
    return slice(member.start, member.stop)


def _word(*, averaged: bool) -> str:
    return "mean" if averaged else "part"


def _key(command: Average, sender: Member, owner: Member, *, averaged: bool) -> SliceKey:
    return SliceKey(
        command.timeline,
        command.step,
        command.unit,
        command.round,
        averaged,
        sender.peer,
        sender.incarnation,
        owner.start,
    )


async def send_slice(links: PeerLinks, to: Member | Envoy, letter: Letter, deadline_s: float, what: str) -> None:
    """Send a slice until the deadline; raises RoundBroken, naming the receiver."""
    try:
        async with asyncio.timeout_at(deadline_s):
            await deliver(links, to, letter)
    except TimeoutError:
        raise RoundBroken(f"{to.peer} took no {what} in time", accused=to.peer) from None
    except SwarmError as error:
        told = f"{to.peer} took no {what}: {error.message}"
        raise RoundBroken(told, accused=to.peer, lacks_relay=isinstance(error, NoWay)) from error
