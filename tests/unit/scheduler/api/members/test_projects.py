"""The Projects service: quotas and what is taken of them, for those who see the project."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scheduler.api.members.projects import ProjectService
from scheduler.brain.projects import Person
from scheduler.storage.database import Database
from scheduler.storage.stores import Stores
from swarm.pki.names import Role
from swarm.types import JobState
from swarm.wire import members_pb2 as pb
from tests.support.members import database_url


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
        ProjectService(stores, Seen(Person(role, "a", "red")))  # type: ignore[arg-type]
        for role in (Role.ADMIN, Role.SUBMITTER)
    )
    made = await admin.CreateProject(pb.ProjectRequest(name="red", quota_jobs=4), context)
    assert made == pb.ProjectView(name="red", quota_jobs=4, open_jobs=2, upload_bytes=77)
    changed = await admin.SetProject(pb.ProjectRequest(name="red", quota_bytes=9), context)
    assert (changed.quota_jobs, changed.quota_bytes) == (4, 9)
    changed = await admin.SetProject(pb.ProjectRequest(name="red", quota_jobs=0), context)
    assert (changed.quota_jobs, changed.quota_bytes) == (0, 9)
    asked = pb.ListProjectsRequest()
    assert [one.name for one in (await admin.ListProjects(asked, context)).projects] == ["default", "red"]
    assert [one.name for one in (await ann.ListProjects(asked, context)).projects] == ["red"]
    await stores.database.close()
