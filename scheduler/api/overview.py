"""Jobs and stage servers as one caller sees them, for the Jobs service and the page alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.api.members.relays import RelayDesk
from scheduler.api.views import guarded_view, job_view, peer_view
from scheduler.brain.explain.facts import Fact, JobQueue, explain_job
from scheduler.brain.fleet.membership import Membership, Peer
from scheduler.brain.members.persons import Person
from scheduler.jobs.commands import Jobs
from scheduler.jobs.job import Job
from swarm.pki.names import Role
from swarm.wire import jobs_pb2 as pb


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that is shown of jobs, stage servers and relays; `asks` says who looks."""

    jobs: Jobs
    membership: Membership
    asks: Callable[[], Person]
    wall_s: Callable[[], float]
    relays: RelayDesk | None = None

    def queue(self) -> JobQueue:
        return self.jobs.registry.queue()

    def job(self, job: Job, *, spec: bool = True, queue: JobQueue | None = None) -> pb.JobView:
        """The job as the caller sees it; of one that waits, also its place among others."""
        view = job_view(job, self.wall_s(), spec=spec)
        if job.waiting is not None and (told := (queue or self.queue()).text(job.record.id)):
            view.reason = f"{view.reason}; {told}"
        return view

    def job_facts(self, job: Job) -> list[Fact]:
        """Why the job waits, or what limits its speed."""
        peers = [one for one in self.membership.peers() if one.job == job.record.id]
        facts = explain_job(self.jobs.standing(job), job.situation(), self.jobs.idle(), job.clock_s(), peers)
        if job.waiting is not None:
            facts += self.queue().facts(job.record.id)
        return facts

    def peer(self, peer: Peer) -> pb.PeerView:
        now_s = asyncio.get_running_loop().time()
        view = peer_view(peer, self.jobs.registry.get(peer.job), now_s, self.wall_s())
        return view if self.asks().role is Role.ADMIN else guarded_view(view)

    def relay_views(self) -> list[pb.PeerView]:
        views = [] if self.relays is None else self.relays.views()
        return views if self.asks().role is Role.ADMIN else list(map(guarded_view, views))
