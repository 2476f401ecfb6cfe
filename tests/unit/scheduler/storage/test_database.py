from __future__ import annotations

import asyncio
import math
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from scheduler.brain.outputs import CommitRow, EvaluationRow, Exchanged, Fork, OuterRound
from scheduler.storage import database
from scheduler.storage.database import ID_FILE, Database, Drain, RemovedJob, database_in
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.members.book import Members
from swarm.errors import DatabaseRejected, Fenced, InvalidConfig
from swarm.job.leases import Cut
from swarm.job.spec import spec_from_json
from swarm.pki.authority import Authority
from swarm.pki.names import Role
from swarm.types import JobId, JobState, PeerId, Round, UnitName
from tests.support.databases import BEFORE_ONE_MIGRATION, fresh_engine

JOB = JobId("demo-1")
PRAGMAS = {"synchronous": 2, "journal_mode": "wal", "foreign_keys": 1}  # 2: FULL, an fsync for every commit


def record(job: JobId = JOB, **changes: object) -> JobRecord:
    values = {
        "id": job,
        "name": "demo",
        "state": JobState.QUEUED,
        "reason": "waits",
        "since_unix_s": 1.0,
        "created_unix_s": 1.0,
        "spec_json": "{}",
        "tokens": JobTokens(("aa", "bb"), "uint16", 257, 3.5),
    }
    return JobRecord(**(values | changes))  # type: ignore[arg-type]


def row(step: int) -> CommitRow:
    return CommitRow(
        timeline=0,
        step=step,
        rounds={UnitName("stage-0"): Round(1, 2)},
        loss=1.25,
        norm=2.0,
        scale=0.5,
        learning_rate=1e-3,
        skip=False,
        tokens=64,
    )


Opened = Callable[[], Awaitable[Database]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    """The database a.db, as one more start of a scheduler finds it."""
    stores = []

    async def again() -> Database:
        stores.append(await Database.open(f"sqlite:///{tmp_path}/a.db", None))
        return stores[-1]

    yield again
    for store in stores:
        await store.close()


async def test_a_job_is_read_as_it_was_written(opened: Opened) -> None:
    store = await opened()
    await store.put_job(record())
    await store.put_job(record().entered(JobState.FAILED, "why", 9.0, error_code="E0100", hint="do this"))
    assert await store.jobs() == [record().entered(JobState.FAILED, "why", 9.0, error_code="E0100", hint="do this")]


async def test_a_job_from_before_documents_had_an_end_is_read(tmp_path: Path, opened: Opened) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    store = await opened()
    await store.put_job(record(tokens=JobTokens(("aa", "bb"), "uint16", 257, 3.5, end_of_text=256)))
    old = '{"shards": ["aa"], "token_dtype": "uint16", "vocabulary_size": 257, "unigram_entropy": 3.5}'
    (kept,) = await store.jobs()
    assert kept.tokens.end_of_text == 256
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("UPDATE jobs SET tokens_json = :old"), {"old": old})
    (read,) = await store.jobs()
    assert read.tokens == JobTokens(("aa",), "uint16", 257, 3.5, end_of_text=-1)


async def test_a_superseded_scheduler_can_write_nothing(opened: Opened) -> None:
    old = await opened()
    await old.put_job(record())
    new = await opened()
    assert (old.epoch, new.epoch) == (1, 2)
    for late in (
        old.put_commit(JOB, row(0), 1.0),
        old.put_job(record(reason="late")),
        old.begin_removal(RemovedJob(JOB)),
    ):
        with pytest.raises(Fenced):
            await late
    await new.put_commit(JOB, row(0), 2.0)
    assert [stored["committed_unix_s"] for stored in await new.commits(JOB)] == [2.0]
    assert (await new.jobs())[0].reason == "waits"


async def test_writing_a_commit_again_after_an_unknown_outcome_changes_nothing(opened: Opened) -> None:
    store = await opened()
    await store.put_job(record())
    await store.put_commit(JOB, row(0), 1.0)
    await store.put_commit(JOB, row(0), 5.0)
    stored = await store.commits(JOB)
    assert [(commit["step"], commit["committed_unix_s"], commit["epoch"]) for commit in stored] == [(0, 1.0, 1)]


EXCHANGED = Exchanged(4, (OuterRound(UnitName("all"), Round(1, 2), (PeerId("a"), PeerId("b"))),), True, 0.5, (0, 3))


async def test_rows_of_several_islands_are_written_all_or_none(opened: Opened) -> None:
    old = await opened()
    await old.put_job(record())
    rows = [replace(row(0), timeline=island) for island in range(3)]
    await old.put_commit(JOB, rows[2], 1.0)
    new = await opened()
    with pytest.raises(DatabaseRejected):
        await new.put_commits(JOB, rows, 2.0, (Fork(9, 0, 1),), {0: EXCHANGED})
    assert await new.rows(JOB, 0) == (), "the row of the third island is another scheduler's"
    assert (await new.forks(JOB), await new.exchanges(JOB, 0)) == ([], [])
    await new.put_commits(JOB, rows[:2], 3.0, (), {0: EXCHANGED})
    await new.put_commits(JOB, rows[:2], 4.0, (), {0: EXCHANGED})
    assert await new.exchanges(JOB, 0) == [EXCHANGED]
    await new.delete_rows(JOB)
    assert await new.exchanges(JOB, 0) == []
    await new.put_commits(JOB, rows[:2], 4.0)
    assert [await new.rows(JOB, island) for island in range(2)] == [(rows[0],), (rows[1],)]


async def test_what_is_committed_is_on_the_disk(opened: Opened) -> None:
    store = await opened()
    with store._engine.connect() as connection:
        pragmas = {name: connection.execute(sa.text(f"PRAGMA {name}")).scalar_one() for name in PRAGMAS}
    assert pragmas == PRAGMAS


async def test_a_database_that_cannot_be_used_is_an_error_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="unable to open database file"):
        await Database.open(f"sqlite:///{tmp_path}/missing/a.db", None)
    (tmp_path / "text.db").write_text("this is no database, whatever its name says")
    with pytest.raises(InvalidConfig, match="not a database"):
        await Database.open(f"sqlite:///{tmp_path}/text.db", None)


@pytest.mark.parametrize("name", ["what?1", "what?a=b", "a%41b", "100%", "c#d", "e:f@g", "file:h"])
async def test_the_database_is_in_its_data_folder_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    """The path was written into a URL: what?1 and what?2 shared one database, the file `what` beside them."""
    (tmp_path / name).mkdir()
    store = await Database.open(database_in(tmp_path / name), None, tmp_path / name)
    await store.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "scheduler.db").is_file()
    again = await Database.open(database_in(tmp_path / name), None, tmp_path / name)
    await again.close()
    assert (again.name, again.epoch) == (store.name, store.epoch + 1)


async def test_a_database_that_an_earlier_version_put_elsewhere_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "what?1"
    folder.mkdir()
    before = await Database.open(f"sqlite:///{folder}/scheduler.db", None)
    await before.close()
    with pytest.raises(InvalidConfig, match=f"is at {tmp_path}/what, where") as error:
        database_in(folder)
    assert error.value.hint.endswith(f"mv {tmp_path}/what {folder}/scheduler.db")
    (tmp_path / "what").rename(folder / "scheduler.db")
    assert database_in(folder).database == f"{folder}/scheduler.db"
    (tmp_path / "what").write_text("notes of somebody")
    (folder / "scheduler.db").unlink()
    assert database_in(folder).database == f"{folder}/scheduler.db"


async def test_a_drain_is_kept_until_a_later_one_or_its_own_end(opened: Opened) -> None:
    peer, other = PeerId("a"), PeerId("b")
    first = await opened()
    await first.put_drain(peer, Drain(7, "old"))
    await first.put_drain(peer, Drain(8, "hot"))
    await first.put_drain(other, Drain(1, "idle"))
    second = await opened()
    with pytest.raises(Fenced):
        await first.put_drain(peer, Drain(9, "late"))
    with pytest.raises(Fenced):
        await first.delete_drain(peer, 8)
    await second.delete_drain(peer, 7)
    assert await second.drains() == {peer: Drain(8, "hot"), other: Drain(1, "idle")}
    await second.delete_drain(peer, 8)
    assert await second.drains() == {other: Drain(1, "idle")}


async def test_evaluations_are_kept_in_order_and_written_once() -> None:
    store = await Database.open("sqlite://", None)
    await store.put_job(record())
    for evaluation in (EvaluationRow(0, 4, 1.5, 10), EvaluationRow(0, 2, math.nan, 10), EvaluationRow(0, 4, 9.0, 10)):
        await store.put_evaluation(JOB, evaluation, 1.0)
    found = await store.evaluations(JOB)
    assert [(evaluation.version, evaluation.tokens) for evaluation in found] == [(2, 10), (4, 10)]
    assert math.isnan(found[0].loss)
    assert found[1].loss == 1.5
    await store.close()


# Which database, which folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "is no database URL"),
        ("/var/lib/swarm.db", "is no database URL"),
        ("mysql://me:secret@host/swarm", "mysql is not supported"),
        ("postgresql+asyncpg://me:secret@host/swarm", r"postgresql\+asyncpg is not supported"),
    ],
)
async def test_a_database_url_that_cannot_be_used_is_refused_with_what_can(url: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match=told) as caught:
        await Database.open(url, None)
    assert "postgresql://USER" in caught.value.hint
    assert "secret" not in str(caught.value)


async def test_a_missing_driver_is_named_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidConfig, match="needs the Python package psycopg") as caught:
        await Database.open("postgresql://me:secret@host/swarm", None)
    assert "swarm-stages[postgres]" in caught.value.hint


async def test_a_database_does_not_start_with_the_folder_of_another(tmp_path: Path) -> None:
    """A scheduler with the right database and another data folder failed every running job."""
    url = f"sqlite:///{tmp_path}/a.db"
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.mkdir()
    other.mkdir()
    first = await Database.open(url, None, other)
    await first.close()
    moved = await Database.open(url, None, ours)
    await moved.put_job(record())
    with pytest.raises(InvalidConfig, match=f"of the 1 job in this database: they are in .*:{ours}"):
        await Database.open(url, None, other)
    await moved.check_epoch()
    await moved.put_job(record())
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / ID_FILE).write_bytes((ours / ID_FILE).read_bytes())
    copied = await Database.open(url, None, tmp_path / "copy")
    assert (copied.name, copied.epoch) == (moved.name, 3)
    await copied.close()
    await moved.close()


async def test_a_database_that_nineteen_migrations_made_is_taken_over(tmp_path: Path) -> None:
    """`before_one_migration.sql` is what the last version with them wrote."""
    store = await Database.open(_written(tmp_path / "a.db"), None)
    jobs = {(job.name, job.owner, job.state) for job in await store.jobs() if not job.state.is_final}
    assert jobs == {("rig", f"submitter/{name}", JobState.QUEUED) for name in ("ada", "bob")}
    assert {spec_from_json(job.spec_json).name for job in await store.jobs()} == {"rig"}
    members = Members(Authority.new(0.0), store, lambda: 1.0)
    await members.load()
    assert [(member.role, member.name) for member in members.members()] == [(Role.SUBMITTER, "bob")]
    assert [token.role for token in members.tokens()] == [Role.VIEWER]
    assert store.epoch == 2
    await store.close()


@pytest.mark.parametrize("revision", ["0018", "0021"])
async def test_a_database_of_another_version_is_refused_and_stays_as_it_is(tmp_path: Path, revision: str) -> None:
    url = _written(tmp_path / "a.db", revision)
    with pytest.raises(InvalidConfig, match=r"another version of swarm wrote the database .*a\.db") as caught:
        await Database.open(url, None)
    assert "end or pull its jobs with that version" in caught.value.hint
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert connection.execute("SELECT epoch FROM control").fetchall() == [(1,)]
    connection.close()


def _written(path: Path, revision: str = "0019") -> str:
    with sqlite3.connect(path) as connection:
        connection.executescript(BEFORE_ONE_MIGRATION.read_text())
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.close()
    return f"sqlite:///{path}"


async def test_leases_come_back_as_they_were_written_and_go_with_the_job() -> None:
    engine = fresh_engine()
    store = Database(engine, database._next_epoch(engine), None)
    await store.put_job(record())
    cuts = [Cut({0: 4, 1: 4}), Cut({0: 5, 1: 6}, {0: ((3, 9), (20, 21)), 1: ()})]
    for number, cut in enumerate(cuts):
        for _ in range(2):
            await store.put_leases(JOB, 2, number, cut)
    earlier = {"job": JOB, "timeline": 2, "version": 10, "shares_json": "[6, 2]", "epoch": 1}
    await store.write(lambda connection: connection.execute(sa.insert(database._LEASES).values(earlier)))
    assert await store.leases(JOB, 2) == cuts, "shares of each step, from before there were leases, are none"
    assert [await store.leases(JOB, 4), await store.leases(JobId("b-1"), 2)] == [[], []]
    await store.delete_rows(JOB)
    assert await store.leases(JOB, 2) == []


async def test_an_idle_scheduler_notices_that_another_one_took_its_database(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOOK_S", 0.01)
    first = await opened()
    watch = database.DatabaseWatch(first)
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    assert not watching.done()
    assert watch.not_ready() == []
    await opened()
    with pytest.raises(Fenced, match="mine was epoch 1"):
        await asyncio.wait_for(watching, 60)


async def test_an_error_about_a_database_leaves_out_its_passwords(tmp_path: Path) -> None:
    """A driver takes passwords in the query as well, and sqlalchemy shows those."""
    at = f"sqlite:///file:{tmp_path}/missing/a.db?uri=true&sslpassword=SECRET"
    for url in (at, "nothing u:SECRET@h/x?password=SECRET"):
        with pytest.raises(InvalidConfig) as caught:
            await Database.open(url, None)
        assert "SECRET" not in str(caught.value)


# Removals ------------------------------------------------------------------------------------------------------------

A, B = JobId("a-1"), JobId("b-1")


async def two_jobs() -> Database:
    engine = fresh_engine()
    store = Database(engine, database._next_epoch(engine), None)
    for job in (A, B):
        await store.put_job(record(job))
        for timeline, step in ((0, 0), (0, 7), (1, 3)):
            await store.put_commit(job, replace(row(step), timeline=timeline), 1.0)
        await store.put_evaluation(job, EvaluationRow(0, 5, 1.0, 10), 1.0)
    return store


async def test_a_job_goes_with_all_of_its_rows_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.storage.database.ROWS_AT_ONCE", 3)
    store = await two_jobs()
    await store.begin_removal(RemovedJob(A, "/mnt/runs"))
    assert [job.id for job in await store.jobs()] == [B]
    assert await store.removals() == [RemovedJob(A, "/mnt/runs")]
    assert len(await store.commits(A)) == 3, "nobody looks at them, and they may be many"
    await store.delete_rows(A)
    assert [await store.commits(A), await store.evaluations(A)] == [[], []]
    assert [len(await store.commits(B)), len(await store.evaluations(B))] == [3, 1]
    assert rows_of(store, A) == 1, "the row goes last, with the note: other rows refer to it"
    await store.end_removal(A)
    assert await store.removals() == []
    assert rows_of(store, A) == 0


def rows_of(store: Database, job: JobId) -> int:
    """How many rows of the table of jobs are of this one, listed or not."""
    with store._engine.connect() as connection:
        found = connection.execute(sa.text("SELECT count(*) FROM jobs WHERE id = :job"), {"job": job})
        return int(found.scalar_one())


async def test_a_job_that_is_listed_is_not_being_removed() -> None:
    """Its row was written once more, by whoever did not hear that the removal had begun."""
    store = await two_jobs()
    await store.begin_removal(RemovedJob(A))
    await store.put_job(record(A))
    assert await store.removals() == []
    assert {job.id for job in await store.jobs()} == {A, B}
    await store.begin_removal(RemovedJob(A, "/elsewhere"))
    assert await store.removals() == [RemovedJob(A, "/elsewhere")]
