"""Who is drained: until its stage server starts anew, whatever the scheduler and the database do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from scheduler.storage.database import Database, Drain
from scheduler.storage.drains import Drains
from swarm.errors import DatabaseUnavailable
from swarm.process.logs import get_logger
from swarm.types import JobId, PeerId
from swarm.wire.messages import Hello

A = PeerId("a")
LOG = get_logger("test")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Database]:
    made = await Database.open(f"sqlite:///{tmp_path}/a.db", None)
    yield made
    await made.close()


def hello(incarnation: int, peer: PeerId = A) -> Hello:
    return Hello(peer, incarnation, 1, "0", f"address-of-{peer}", "", "cpu", 1, 0, -1, JobId(""), 0, 0)


async def test_a_drain_is_of_one_process_and_outlives_the_scheduler(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    drained = Drains(store := await Database.open(url, None), LOG)
    await drained.load()
    assert drained.reason(hello(5)) == ""
    await drained.keep(hello(5), "too hot")
    await drained.keep(hello(5), "asked twice")
    await store.close()

    drained = Drains(store := await Database.open(url, None), LOG)
    await drained.load()
    assert drained.reason(hello(5)) == "too hot"
    assert drained.reason(hello(4)) == "too hot", "an older process does not free it"
    assert drained.reason(hello(5, PeerId("b"))) == ""
    assert not drained.is_over(hello(5))
    assert drained.is_over(hello(6))
    assert drained.reason(hello(6)) == ""
    await drained.forget(A)
    await drained.forget(A)
    assert not drained.is_over(hello(6))
    assert await store.drains() == {}
    await store.close()


async def test_a_drain_that_the_database_does_not_take_is_known_until_the_scheduler_ends(store: Database) -> None:
    drained = Drains(store, LOG, 0.0)
    with store._engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE drains RENAME TO away"))
    await drained.keep(hello(5), "too hot")
    assert drained.reason(hello(5)) == "too hot"
    await drained.forget(A)
    assert drained.reason(hello(5)) == ""
    with store._engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE away RENAME TO drains"))
    await drained.keep(hello(6), "again")
    assert await store.drains() == {A: Drain(6, "again")}


async def test_an_older_drain_that_was_written_late_does_not_replace_a_newer_one(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_locked = store.put_drain, True

    async def put_drain(peer: PeerId, drain: Drain) -> None:
        if is_locked or (drain.reason == "old" and await store.drains() == {}):  # the old one comes last
            raise DatabaseUnavailable("database is locked")
        await real(peer, drain)

    monkeypatch.setattr(store, "put_drain", put_drain)
    drained = Drains(store, LOG)
    async with asyncio.timeout(20.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(drained.keep(hello(5), "old"))
        await asyncio.sleep(0.05)
        await drained.forget(A)
        tasks.create_task(drained.keep(hello(6), "new"))
        await asyncio.sleep(0.05)
        is_locked = False
    assert await store.drains() == {A: Drain(6, "new")}


async def test_a_drain_that_was_taken_back_while_the_database_was_locked_does_not_return(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`swarm peers undrain` succeeded, and the next start of the scheduler drained the stage server again."""
    real, tries = store.delete_drain, list[int]()

    async def delete_drain(peer: PeerId, incarnation: int) -> None:
        tries.append(incarnation)
        if len(tries) < 3:
            raise DatabaseUnavailable("database is locked")
        await real(peer, incarnation)

    monkeypatch.setattr(store, "delete_drain", delete_drain)
    drained = Drains(store, LOG)
    await drained.keep(hello(5), "too hot")
    await drained.forget(A)
    assert (tries, await store.drains()) == ([5, 5, 5], {})


async def test_a_stage_server_that_is_drained_again_meanwhile_stays_drained(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def delete_drain(peer: PeerId, incarnation: int) -> None:
        asked.set()
        raise DatabaseUnavailable("database is locked")

    drained = Drains(store, LOG)
    await drained.keep(hello(5), "too hot")
    real = store.delete_drain
    monkeypatch.setattr(store, "delete_drain", delete_drain)
    async with asyncio.timeout(20.0):
        over = asyncio.create_task(drained.forget(A))
        await asked.wait()
        await drained.keep(hello(5), "hot again")
        monkeypatch.setattr(store, "delete_drain", real)
        await over
    assert await store.drains() == {A: Drain(5, "hot again")}
