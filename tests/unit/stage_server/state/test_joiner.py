"""stage_server.state.joiner: when donors are asked again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from stage_server.state.donor import Donor
from stage_server.state.joiner import JoinClient
from swarm.errors import PeerUnavailable
from swarm.model.stage import Stage
from swarm.rpc.links.peers import PeerLinks
from swarm.types import Hop, JobId, PeerId
from swarm.wire.messages import Event, Follow, Loaded, StateReply, StateRequest
from tests.support.devices import InlineDevice
from tests.support.ports import assignment_of, ports_of
from tests.support.scenes import resolved
from tests.support.sim.loop import run
from tests.support.simulated import small_spec, write_text

JOB, JOIN = JobId("job"), 7
DONOR = Hop(PeerId("donor"), 1, 0, "at donor")


class BadLinks:
    """Links to one donor whose first answers are lost."""

    def __init__(self, donor: Donor, lost: int) -> None:
        self._donor, self._lost = donor, lost

    async def pull(
        self, address: str, request: StateRequest, limit_bytes: int, *, to: PeerId | None = None
    ) -> tuple[StateReply, memoryview]:
        if self._lost:
            self._lost -= 1
            await asyncio.sleep(1.0)
            raise PeerUnavailable(f"{address} does not answer")
        reply, payload = await self._donor.give(request)
        return reply, memoryview(payload)


def test_a_donor_is_asked_again_although_the_job_stands_still(tmp_path: Path) -> None:
    """All asks to the only donor had failed, and the end of its pause was waited for only once a commit was made."""
    spec = resolved(small_spec(write_text(tmp_path), pipeline__stages=1))
    device = InlineDevice(lambda: 0.001)
    stage = Stage(spec, 0, torch.device("cpu"))
    assignment = assignment_of(spec, join=JOIN)
    told: list[Event] = []

    async def join() -> None:
        links: PeerLinks = BadLinks(Donor(assignment, stage, device, 1 << 20), lost=2)  # type: ignore[assignment]
        async with asyncio.TaskGroup() as tasks:
            ports = ports_of(device, links, told.append, tasks)
            client = JoinClient(assignment, ports)
            client.follow(Follow(JOB, 0, JOIN, 0, 0, stage.digest(), (DONOR,), 0))
            await asyncio.sleep(60.0)
            await ports.work.close()

    run(join(), seed=0)
    assert [(event.version, event.digest) for event in told if isinstance(event, Loaded)] == [(0, stage.digest())]
