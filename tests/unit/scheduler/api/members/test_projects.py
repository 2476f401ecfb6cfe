"""The Projects service: quotas and what is taken of them, for those who see the project."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.api.members.projects import ProjectService
from scheduler.brain.members.projects import Person
from scheduler.storage.database import Database
from scheduler.storage.members.book import Members
from scheduler.storage.members.projects import Projects
from scheduler.storage.stores import Stores
from swarm.errors import NotAllowed
from swarm.pki.authority import Authority
from swarm.pki.identity import Application
from swarm.pki.names import Role
from swarm.types import JobState
from swarm.wire import members_pb2 as pb
from tests.support.members import Clock, database_url


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
    await stores.database.close()
