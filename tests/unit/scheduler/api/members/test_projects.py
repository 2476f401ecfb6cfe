"""The Projects service: quotas and what is taken of them, for those who see the project."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.api.members.projects import ProjectService
from scheduler.brain.members.projects import Person, Quota
from scheduler.storage.database import Database
from scheduler.storage.members.book import Members
from scheduler.storage.members.projects import Projects
from scheduler.storage.members.usage import DAY_S
from scheduler.storage.stores import Stores
from swarm.errors import NotAllowed, NotFound
from swarm.pki.authority import Authority
from swarm.pki.identity import Application
from swarm.pki.names import Role
from swarm.types import JobState
from swarm.wire import members_pb2 as pb
from tests.support.members import Clock, database_url

NOW_S = 1_700_000_000.0


class Seen:
    """Three jobs, of which one has ended."""

    def __init__(self, person: Person) -> None:
        self._person = person

    def person(self) -> Person:
        return self._person

    def all(self) -> list[Any]:
        states = [("red", JobState.RUNNING), ("red", JobState.PAUSED), ("red", JobState.FAILED)]
        return [SimpleNamespace(record=SimpleNamespace(project=project, state=state)) for project, state in states]


async def test_a_project_is_made_changed_in_part_and_shown_to_its_people(tmp_path: Path) -> None:
    stores = Stores.under(tmp_path, await Database.open(database_url(tmp_path), None))
    stores.files.took("red", 77)
    context: Any = SimpleNamespace()
    admin, ann = (
        ProjectService(stores, Seen(Person(role, "a", "red")), lambda name: 3)  # type: ignore[arg-type]
        for role in (Role.ADMIN, Role.SUBMITTER)
    )
    made = await admin.CreateProject(pb.ProjectRequest(name="red", quota_jobs=4), context)
    assert made == pb.ProjectView(name="red", quota_jobs=4, open_jobs=2, upload_bytes=77, peers=3)
    changed = await admin.SetProject(pb.ProjectRequest(name="red", quota_bytes=9), context)
    assert (changed.quota_jobs, changed.quota_bytes) == (4, 9)
    changed = await admin.SetProject(pb.ProjectRequest(name="red", quota_jobs=0), context)
    assert (changed.quota_jobs, changed.quota_bytes) == (0, 9)
    asked = pb.ListProjectsRequest()
    assert [one.name for one in (await admin.ListProjects(asked, context)).projects] == ["default", "red"]
    assert [one.name for one in (await ann.ListProjects(asked, context)).projects] == ["red"]
    await stores.database.close()


async def test_a_project_goes_when_nothing_is_of_it_any_more(tmp_path: Path) -> None:
    """Whoever is given a project of the same name later must not come upon the jobs or people of this one."""
    stores = Stores.under(tmp_path, await Database.open(database_url(tmp_path), None))
    context: Any = SimpleNamespace()
    seen, clock = Seen(Person(Role.ADMIN, "a", "red")), Clock()
    members = Members(Authority.new(clock()), stores.database, clock)
    service = ProjectService(stores, seen, lambda name: 0, members)  # type: ignore[arg-type]
    check = service._check_removable
    await service.CreateProject(pb.ProjectRequest(name="red", quota_peers=4), context)
    for tokens in (1, 2):
        stores.usage.add(NOW_S, "red", "", tokens=tokens)
        await stores.usage.write(NOW_S)
    stores.usage.add(NOW_S, "red", "", tokens=4)
    with pytest.raises(NotAllowed, match="project red still has 3 jobs"):
        check("red")
    seen.all = list  # type: ignore[method-assign]
    line, token = await members.create_token(Role.VIEWER, 60.0, 2, "", "admin me", "127.0.0.1:1", "red")
    with pytest.raises(NotAllowed, match="project red still has 1 token"):
        check("red")
    await members.join(line.id, line.secret, "ann", Application("ann").request_pem)
    await members.revoke_token(token.id)
    with pytest.raises(NotAllowed, match="project red still has 1 member"):
        check("red")
    await members.revoke("ann", "left")
    with pytest.raises(NotAllowed, match="project default is that of whoever names none"):
        check("default")
    assert (await service.RemoveProject(pb.RemoveProjectRequest(name="red"), context)).quota_peers == 4
    assert list(stores.projects.all()) == ["default"]
    again = Projects(stores.database)
    await again.load()
    assert list(again.all()) == ["default"]
    await again.create("red", Quota())
    await stores.usage.write(NOW_S)
    assert await stores.usage.of("red", 0) == []
    await stores.database.close()


async def test_people_are_told_what_their_own_project_used_and_admins_what_all_did(tmp_path: Path) -> None:
    stores = Stores.under(tmp_path, await Database.open(database_url(tmp_path), None))
    for name in ("red", "blue"):
        await stores.projects.create(name, Quota())
        for days in range(3):
            stores.usage.add(NOW_S - days * DAY_S, name, "submitter/x", peer_s=1.5, tokens=10, relay_bytes=1 << 40)
    await stores.usage.write(NOW_S)

    async def abort(code: object, words: str, metadata: object) -> None:
        raise NotFound(words)

    context: Any = SimpleNamespace(abort=abort)

    async def told(role: Role, project: str = "", days: int = 30) -> list[tuple[int, str, str, float]]:
        seen: Any = Seen(Person(role, "a", "red"))
        service = ProjectService(stores, seen, lambda name: 0, wall_s=lambda: NOW_S)
        reply = await service.ProjectUsage(pb.UsageRequest(project=project, days=days), context)
        return [(row.day, row.project, row.owner, row.tokens) for row in reply.rows]

    assert await told(Role.ADMIN) == [(0, "blue", "", 30), (0, "red", "", 30)]
    today = int(NOW_S // DAY_S)
    for role in (Role.VIEWER, Role.SUBMITTER):
        assert await told(role) == [(0, "red", "", 30)]
        assert await told(role, days=1) == [(0, "red", "", 10)]
        assert await told(role, "red", (1 << 32) - 1) == [(today - d, "red", "submitter/x", 10) for d in range(3)]
        for name in ("blue", "none"):
            with pytest.raises(NotFound, match=f'there is no project "{name}"'):
                await told(role, name)
    assert await told(Role.ADMIN, "blue", 1) == [(today, "blue", "submitter/x", 10)]
    assert await told(Role.ADMIN, "default") == []
    with pytest.raises(NotFound, match='there is no project "none"'):
        await told(Role.ADMIN, "none")
    await stores.database.close()
