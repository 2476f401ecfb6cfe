"""The projects of a scheduler and their quotas: in memory, where each submit asks, and in the database first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict

import sqlalchemy as sa

from scheduler.brain.members.projects import Quota, check_quota
from scheduler.storage.database import Database
from scheduler.storage.members.usage import USAGE
from swarm.errors import NotAllowed, NotFound, Refused
from swarm.limits import PROJECTS_MAX
from swarm.pki.names import check_name
from swarm.types import DEFAULT_PROJECT

_PROJECTS = sa.Table(
    "projects",
    sa.MetaData(),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("jobs", sa.Integer),
    sa.Column("upload_bytes", sa.BigInteger),
    sa.Column("peers", sa.Integer),
)


class Projects:
    """All projects by name. There is always the default one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._quotas: dict[str, Quota] = {DEFAULT_PROJECT: Quota()}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read what earlier starts wrote."""
        for row in await self._database.select(sa.select(_PROJECTS)):
            self._quotas[row["name"]] = Quota(row["jobs"], row["upload_bytes"], row["peers"])

    def all(self) -> dict[str, Quota]:
        """Every project, by name."""
        return dict(sorted(self._quotas.items()))

    def quota(self, project: str) -> Quota:
        """The project's quota; NotFound for a project that was never created."""
        if (quota := self._quotas.get(project)) is None:
            raise unknown(project)
        return quota

    async def create(self, project: str, quota: Quota) -> None:
        """UsageError for a name or a quota that is none, NotAllowed for a name that is taken."""
        check_name(project)
        async with self._changing:
            if project in self._quotas:
                raise NotAllowed(
                    f"there is a project {project} already", hint=f"change it with: swarm project set {project}"
                )
            if len(self._quotas) >= PROJECTS_MAX:
                raise Refused(f"there are {PROJECTS_MAX} projects already")
            await self._put(project, quota)

    async def set(self, project: str, quota: Quota) -> None:
        """Give the project another quota. Jobs and files beyond it stay; NotFound, UsageError."""
        async with self._changing:
            self.quota(project)
            await self._put(project, quota)

    async def remove(self, project: str, check: Callable[[], None]) -> None:
        """Forget the project and what it used, if `check` does not raise; NotFound."""

        def delete(connection: sa.Connection) -> None:
            connection.execute(sa.delete(_PROJECTS).where(_PROJECTS.c.name == project))
            connection.execute(sa.delete(USAGE).where(USAGE.c.project == project))

        async with self._changing:
            quota = self.quota(project)
            check()
            del self._quotas[project]  # at once: nothing more comes to be of it meanwhile
            try:
                await self._database.write(delete)
            except BaseException:
                self._quotas[project] = quota
                raise

    async def _put(self, project: str, quota: Quota) -> None:
        check_quota(quota)

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(_PROJECTS).where(_PROJECTS.c.name == project))
            connection.execute(sa.insert(_PROJECTS).values(name=project, **asdict(quota)))

        await self._database.write(write)
        self._quotas[project] = quota


def unknown(project: str) -> NotFound:
    """The error for a project that is none, or of which the caller may know nothing."""
    return NotFound(f'there is no project "{project[:80]}"', hint="an admin makes one: swarm project create P")
