"""What the Jobs service tells of stage servers to admins and to others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from scheduler.api.job_service import JobService
from scheduler.brain.explain.facts import IdlePeer
from scheduler.brain.fleet.membership import Membership
from scheduler.brain.fleet.quarantine import TrustRecord
from scheduler.brain.members.persons import Person
from scheduler.storage.database import Database
from scheduler.storage.stores import Stores
from swarm.pki.names import Role
from swarm.types import PROTOCOL_VERSION, JobId, Memory, PeerId
from swarm.wire import jobs_pb2 as pb
from swarm.wire.messages import Hello

ANNS, EVES = JobId("demo-a1"), JobId("test-b2")
SERVING, IDLE = PeerId("gpu-1"), PeerId("gpu-2")


class Registry:
    """Two jobs: ann's is at work, eve's waits."""

    def __init__(self) -> None:
        self.jobs = {
            id_: SimpleNamespace(
                record=SimpleNamespace(id=id_, reason="needs two more"),
                brain=None,
                spec=SimpleNamespace(has_outer_steps=False),
                situation=lambda: None,
            )
            for id_ in (ANNS, EVES)
        }

    def get(self, job: JobId) -> Any:
        return self.jobs.get(job)

    def all(self) -> list[Any]:
        return list(self.jobs.values())

    def waiting(self) -> list[Any]:
        return [self.jobs[EVES]]


def hello(peer: PeerId) -> Hello:
    return Hello(peer, 1, PROTOCOL_VERSION, "0", f"{peer}:7951", f"{peer}:9464", "cpu", 1, 1 << 30, -1)


def service(person: Person, folder: Path) -> JobService:
    membership = Membership()
    for peer in (SERVING, IDLE):
        membership.hello(hello(peer), 0.0)
    membership.assign(SERVING, ANNS, 2, 0.0)
    registry: Any = Registry()
    why_not = {ANNS: f"it is kept for {EVES}, which waits for peers"}
    stores = Stores.under(folder, Database(sa.create_engine("sqlite://"), 1, None))
    idle = [IdlePeer(IDLE, Memory(1 << 30), why_not)]
    jobs: Any = SimpleNamespace(registry=registry, stores=stores, idle=lambda: idle, trust=lambda peer: TrustRecord())
    return JobService(jobs, membership, "0", lambda: 0.0, lambda: person)


async def shown(person: Person, folder: Path) -> tuple[dict[str, pb.PeerView], list[int], str]:
    """The views by id, how many of stage 2 there are, and all words of the explanations."""
    one, context = service(person, folder), SimpleNamespace()
    views = (await one.Peers(pb.PeersRequest(stage=-1), context)).peers  # type: ignore[arg-type]
    of_stage = (await one.Peers(pb.PeersRequest(stage=2), context)).peers  # type: ignore[arg-type]
    told = [await one.Explain(pb.ExplainRequest(about=peer), context) for peer in (SERVING, IDLE)]  # type: ignore[arg-type]
    return {view.id: view for view in views}, [view.stage for view in of_stage], str(told)


async def test_nobody_sees_addresses_but_admins(tmp_path: Path) -> None:
    views, of_stage, told = await shown(Person(Role.ADMIN, "root"), tmp_path)
    assert (views[SERVING].address, views[SERVING].job, views[SERVING].stage, of_stage) == ("gpu-1:7951", ANNS, 2, [2])
    assert {ANNS, EVES} == {job for job in (ANNS, EVES) if job in told}

    for person in (Person(Role.VIEWER, "vera"), Person(Role.SUBMITTER, "eve")):
        views, of_stage, words = await shown(person, tmp_path)
        assert (views[SERVING].address, views[SERVING].http_address) == ("", "")
        assert (views[SERVING].job, views[SERVING].stage, of_stage) == (ANNS, 2, [2])
        assert (ANNS in words, EVES in words, "gpu-1:7951" in words) == (True, True, False)
