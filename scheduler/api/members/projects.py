"""Answers `swarm project`: the Projects service."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import grpc.aio

from scheduler.api.seen_jobs import SeenJobs
from scheduler.brain.members.projects import Quota, check_removable, sees
from scheduler.storage.members.book import Members
from scheduler.storage.members.projects import unknown
from scheduler.storage.members.usage import day_of
from scheduler.storage.stores import Stores
from swarm.limits import USAGE_DAYS_MAX
from swarm.rpc import channel
from swarm.wire import members_pb2 as pb
from swarm.wire import members_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
# It never swallows an error, which its own type does not say.
_answering = cast(Callable[[Context], AbstractAsyncContextManager[None, None]], channel.answering)


class ProjectService(members_pb2_grpc.ProjectsServicer):
    """Every SwarmError travels with its code and hint."""

    def __init__(
        self,
        stores: Stores,
        seen: SeenJobs,
        peers_of: Callable[[str], int],
        members: Members | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`peers_of` counts the stage servers of a project. Without `members` everybody may do everything."""
        self._peers_of = peers_of
        self._members = members
        self._projects, self._usage = stores.projects, stores.usage
        self._files = stores.files
        self._seen = seen
        self._wall_s = wall_s

    async def ListProjects(self, request: pb.ListProjectsRequest, context: Context) -> pb.ProjectList:
        async with _answering(context):
            person = self._seen.person()
            names = [name for name in self._projects.all() if sees(person, name)]
            return pb.ProjectList(projects=map(self._view, names))

    async def CreateProject(self, request: pb.ProjectRequest, context: Context) -> pb.ProjectView:
        async with _answering(context):
            await self._projects.create(request.name, _changed(Quota(), request))
            return self._view(request.name)

    async def SetProject(self, request: pb.ProjectRequest, context: Context) -> pb.ProjectView:
        async with _answering(context):
            await self._projects.set(request.name, _changed(self._projects.quota(request.name), request))
            return self._view(request.name)

    async def RemoveProject(self, request: pb.RemoveProjectRequest, context: Context) -> pb.ProjectView:
        async with _answering(context):
            shown = self._view(request.name)
            await self._projects.remove(request.name, lambda: self._check_removable(request.name))
            return shown

    async def ProjectUsage(self, request: pb.UsageRequest, context: Context) -> pb.UsageList:
        async with _answering(context):
            person, only = self._seen.person(), request.project
            names = [name for name in self._projects.all() if sees(person, name) and only in ("", name)]
            if only and not names:
                raise unknown(only)
            first_day = day_of(self._wall_s()) + 1 - min(request.days, USAGE_DAYS_MAX)
            rows = await (self._usage.of(only, first_day) if only else self._usage.sums(names, first_day))
            return pb.UsageList(rows=[pb.UsageRow(**row) for row in rows])

    def _check_removable(self, name: str) -> None:
        jobs = sum(job.record.project == name for job in self._seen.all())
        people, tokens = (0, 0) if self._members is None else self._members.of_project(name)
        check_removable(name, jobs, people, tokens)
        self._usage.forget(name)

    def _view(self, name: str) -> pb.ProjectView:
        quota = self._projects.quota(name)
        jobs = [job for job in self._seen.all() if job.record.project == name and not job.record.state.is_final]
        return pb.ProjectView(
            name=name,
            quota_jobs=quota.jobs,
            quota_bytes=quota.upload_bytes,
            open_jobs=len(jobs),
            upload_bytes=self._files.held_bytes(name),
            quota_peers=quota.peers,
            peers=self._peers_of(name),
        )


def _changed(quota: Quota, request: pb.ProjectRequest) -> Quota:
    return Quota(
        request.quota_jobs if request.HasField("quota_jobs") else quota.jobs,
        request.quota_bytes if request.HasField("quota_bytes") else quota.upload_bytes,
        request.quota_peers if request.HasField("quota_peers") else quota.peers,
    )
