"""Projects and their quotas outlive the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.brain.members.projects import Quota
from scheduler.storage.database import Database
from scheduler.storage.members import projects as module
from scheduler.storage.members.projects import Projects
from swarm.errors import NotAllowed, NotFound, Refused, UsageError
from tests.support.members import database_url


async def test_a_project_is_read_as_it_was_written(tmp_path: Path) -> None:
    database = await Database.open(database_url(tmp_path), None)
    made = Projects(database)
    await made.load()
    await made.create("red", Quota(jobs=4, peers=3))
    await made.set("default", Quota(upload_bytes=1 << 50))
    again = Projects(database)
    await again.load()
    assert again.all() == made.all() == {"default": Quota(0, 1 << 50), "red": Quota(4, 0, 3)}
    await database.close()


async def test_a_project_is_made_once_and_known_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await Database.open(database_url(tmp_path), None)
    made = Projects(database)
    with pytest.raises(NotFound, match='there is no project "red"'):
        await made.set("red", Quota())
    await made.create("red", Quota())
    with pytest.raises(NotAllowed, match="there is a project red already"):
        await made.create("red", Quota())
    for name in ("", "Red", "a/b", "../x", "x.bin"):
        with pytest.raises(UsageError):
            await made.create(name, Quota())
    for quota in (Quota(jobs=(1 << 32) - 1), Quota(upload_bytes=(1 << 64) - 1)):
        with pytest.raises(UsageError, match="too large"):
            await made.set("red", quota)
    assert made.quota("red") == Quota()
    monkeypatch.setattr(module, "PROJECTS_MAX", 2)
    with pytest.raises(Refused, match="2 projects"):
        await made.create("blue", Quota())
    with pytest.raises(NotFound, match="swarm project create"):
        made.quota("blue")
    await database.close()
