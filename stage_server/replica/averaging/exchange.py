"""An outer round of one unit: the envoys of all islands exchange their proposals and compute one mean of them.

    envoy of island 0    P0 ──▶ envoy of island 1        each sends all that it proposes to all others: in two islands
    envoy of island 1    P1 ──▶ envoy of island 0        that is half of what a reduce-scatter in float32 would send
    both                 D = share 0 * P0 + share 1 * P1

Proposals count in order of islands, so all envoys hold the same bytes. A weight that the first and the last stage share
has two envoys per island, of which the first contributes. An envoy that does not get through to one goes on with the
others, and accuses all that it missed: from that the scheduler learns which islands reach each other.

Decision: docs/decisions/065.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import xxhash
from torch import Tensor

from stage_server.device import Device
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import Deadline, Mean, send_slice
from stage_server.replica.averaging.mailbox import Mailbox, SliceKey
from stage_server.replica.packing import proposal
from swarm.errors import CorruptFrame, Refused, RoundBroken
from swarm.model.islands.exchange import decoded, mean_proposal, proposal_sizes, proposed, restored, shortened
from swarm.model.stage import Stage
from swarm.rpc.links.peers import PeerLinks
from swarm.wire.messages import Envoy, Exchange


async def run_exchange(
    command: Exchange,
    me: ReplicaId,
    stage: Stage,
    device: Device,
    links: PeerLinks,
    mailbox: Mailbox,
    deadline: Deadline,
) -> Mean:
    """Take part in an outer round as an envoy; gives the mean proposal of the unit.

    A group of RoundBroken, one for each envoy that it did not get through to by the deadline, which begins here.
    """
    mine = next((envoy for envoy in command.envoys if envoy.peer == me.peer), None)
    if mine is None:
        raise Refused(f"{me.peer} is no envoy of this round")
    deadline.begin()
    own = await device.run(lambda: proposed(stage, command.unit, command.step))  # behind the commit that came before
    sizes = proposal_sizes(stage, command.unit, command.step)
    sent = own if len(sizes) == 1 else await device.aside(lambda: shortened(stage, own))
    came = {envoy.peer: own for envoy in command.envoys if envoy.timeline == mine.timeline or not own.numel()}
    came_bytes, missed = 0, list[RoundBroken]()

    async def arrived(envoy: Envoy) -> None:
        nonlocal came_bytes
        key = SliceKey(
            command.timeline, command.step, command.unit, command.round, False, envoy.peer, envoy.incarnation, 0
        )
        try:
            async with deadline.limit():
                short = coded = (await mailbox.get(key)).values()
            came_bytes += short.numel()
            if short.numel() < own.numel():
                coded = await device.aside(lambda: restored(stage, command.unit, command.step, short))
            came[envoy.peer] = coded
        except TimeoutError:
            message = f"{envoy.peer} sent no proposal within {command.timeout_s:g} s"
            raise RoundBroken(message, accused=envoy.peer) from None
        except CorruptFrame as error:
            raise RoundBroken(str(error), accused=envoy.peer) from error

    async def exchange_with(envoy: Envoy) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                if mine.tokens:
                    letter = proposal(me, command, envoy, sent)
                    both.create_task(send_slice(links, envoy, letter, deadline, "proposal"))
                if envoy.tokens:
                    both.create_task(arrived(envoy))
        except* RoundBroken as group:
            missed.append(next(error for error in group.exceptions if isinstance(error, RoundBroken)))

    others = [envoy for envoy in command.envoys if envoy.timeline != mine.timeline and own.numel()]
    async with asyncio.TaskGroup() as tasks:  # of a unit of which the step merges nothing, nothing travels
        for envoy in others:
            tasks.create_task(exchange_with(envoy))
    if missed:
        raise ExceptionGroup("envoys that were missed", missed)
    contributors = [envoy for envoy in command.envoys if envoy.tokens]
    proposals = [came[envoy.peer] for envoy in contributors]
    mean = await device.aside(lambda: _mean(stage, command, proposals, [envoy.tokens for envoy in contributors]))
    return replace(mean, travelled=(sent.numel() * len(others) * (mine.tokens > 0), came_bytes))


def _mean(stage: Stage, command: Exchange, came: Sequence[Tensor], tokens: Sequence[int]) -> Mean:
    delta = mean_proposal((decoded(stage, command.unit, command.step, proposal) for proposal in came), tokens)
    digest = xxhash.xxh3_128_hexdigest(delta.numpy().data)
    return Mean(delta, digest, stage.places_at(command.step).squared_norms(command.unit, delta))
