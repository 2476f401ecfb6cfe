"""`swarm peers drain` at the scheduler: let a stage server hand its work over, and report its progress.

The hand-over goes on whether anybody listens or not. brain/replicas/departures.py decides its order, storage/drains.py
remembers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from scheduler.brain.explain.facts import why_it_stays
from scheduler.brain.fleet.membership import Membership, Peer
from scheduler.jobs.commands import Jobs
from swarm.errors import NotAllowed
from swarm.types import PeerState

LOOK_S = 0.1


async def drain(jobs: Jobs, membership: Membership, reference: str, reason: str) -> AsyncIterator[tuple[Peer, str]]:
    """The peer and the reason why it is still here: now, after every change, and when it serves no job or is gone.

    NotFound; NotAllowed if it is gone already.
    """
    known = membership.find(reference)
    peer = known.hello.peer
    if known.state is PeerState.GONE:
        raise NotAllowed(f"stage server {peer} is gone: {known.reason}", hint="it has nothing left to hand over")
    await jobs.drain(peer, reason)
    told: tuple[PeerState, str] | None = None
    if known.job:
        await asyncio.sleep(LOOK_S)  # until the job has heard of it
    while known.job:  # this incarnation; when a newer one dials, this one is gone
        job = jobs.registry.get(known.job)
        situation = job.situation() if job is not None else None
        waits_for = why_it_stays(situation, peer) if situation is not None else ""
        if told != (known.state, waits_for):
            told = (known.state, waits_for)
            yield known, waits_for or "it is about to be released"
        await asyncio.sleep(LOOK_S)
    yield known, ""
