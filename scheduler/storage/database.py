"""The database: jobs, one row per committed step, and all else that must survive the scheduler.

The row of a commit is the commit point: before it a step can be done again, after it only a declared rollback undoes
it. Every start first takes epoch + 1. Every later write is a transaction that begins by claiming the epoch, so a
scheduler that was superseded can no longer write (`Fenced`).

SQLAlchemy is synchronous, so all of it runs on one worker thread (none in simulation, where the database is in memory).

Decision: docs/decisions/064.
"""

from __future__ import annotations

import asyncio
import json
import math
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import alembic.command
import alembic.config
import alembic.util
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, ProgrammingError, SQLAlchemyError

from scheduler.brain.outputs import CommitRow, EvaluationRow, Exchanged, Fork, OuterRound
from scheduler.storage.executor import run_blocking
from scheduler.storage.job_record import JobRecord, JobTokens, Repeats
from swarm.errors import DatabaseRejected, DatabaseUnavailable, Fenced, InvalidConfig
from swarm.job.leases import Cut
from swarm.job.outer_log import entry_of, line
from swarm.text import counted, without_passwords
from swarm.types import JobId, JobState, PeerId, Round, UnitName
from swarm.wire.messages import StateFile

T = TypeVar("T")
Timed: TypeAlias = Callable[[str, float], None]
"""Hears what the database did ("commit", "read" or "write"), and how long that took, seconds."""

ID_FILE = "data-folder.json"  # with the id that the database has, too
ROWS_AT_ONCE = 10_000  # that one write deletes: commits of other jobs wait behind it
LOOK_S = 5.0  # how often the watch looks at the database
_DRIVERS = ("sqlite", "sqlite+pysqlite", "postgresql", "postgresql+psycopg")
_SQLITE_MAGIC = b"SQLite format 3\0"
_HINT = "write sqlite (a file in --data-dir) or postgresql://USER:PASSWORD@HOST/NAME"

_METADATA = sa.MetaData()


def table(name: str, key: Mapping[str, Any], /, **columns: Any) -> sa.Table:
    """A table of columns of these types; those of `key` are its primary key."""
    keys = (sa.Column(column, kind, primary_key=True) for column, kind in key.items())
    return sa.Table(name, _METADATA, *keys, *(sa.Column(column, kind) for column, kind in columns.items()))


def of_type(kind: Any, *names: str) -> dict[str, Any]:
    """Columns of one type."""
    return dict.fromkeys(names, kind)


_OF_TIMELINE = {"job": sa.Text, "timeline": sa.Integer}
_CONTROL = table("control", {"id": sa.Integer}, epoch=sa.BigInteger)
_JOBS = table(
    "jobs",
    {"id": sa.String(40)},
    **of_type(sa.Text, "name", "state", "reason", "error_code", "hint", "owner", "weights_sha256"),
    **of_type(sa.Text, "spec_json", "tokens_json", "files_json", "start_where", "start_name"),
    **of_type(sa.Text, "first_steps_json", "peers_json", "times_json", "repeats_json"),
    **of_type(sa.Float, "since_unix_s", "created_unix_s", "peer_s", "counted_unix_s"),
    timeline=sa.Integer,
)
_COMMITS = table(
    "commits",
    _OF_TIMELINE | {"step": sa.BigInteger},
    **of_type(sa.BigInteger, "epoch", "tokens"),
    **of_type(sa.Float, "loss", "norm", "scale", "learning_rate", "committed_unix_s"),
    rounds_json=sa.Text,
    skip=sa.Boolean,
)
_EVALUATIONS = table(
    "evaluations",
    _OF_TIMELINE | {"version": sa.BigInteger},
    **of_type(sa.BigInteger, "epoch", "tokens"),
    **of_type(sa.Float, "loss", "evaluated_unix_s"),
)
_FORKS = table("forks", _OF_TIMELINE, origin=sa.Integer, **of_type(sa.BigInteger, "version", "epoch"))
_EXCHANGES = table("exchanges", _OF_TIMELINE | {"step": sa.BigInteger}, exchange_json=sa.Text, epoch=sa.BigInteger)
_DRAINS = table("drains", {"peer": sa.Text}, incarnation=sa.BigInteger, reason=sa.Text)
# As it was called while it had shares of each step; `version`: the number of a row on its timeline.
_LEASES = table("shares", _OF_TIMELINE | {"version": sa.BigInteger}, shares_json=sa.Text, epoch=sa.BigInteger)
_REMOVALS = table("removals", {"job": sa.String(40)}, checkpoint_dir=sa.Text)  # jobs that are listed no more
_FOLDER = table("data_folder", {}, **of_type(sa.Text, "id", "place"))


@dataclass(frozen=True, slots=True)
class Drain:
    """This process of a stage server is to hand its work over, by a person's order."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RemovedJob:
    """A job no longer listed; `checkpoint_dir` as in its file, empty for the data folder or if it is kept."""

    id: JobId
    checkpoint_dir: str = ""


def put(connection: sa.Connection, into: sa.Table, values: Mapping[str, Any]) -> None:
    """Put a row in the place of the row with the same key."""
    connection.execute(sa.delete(into).where(*(column == values[column.name] for column in into.primary_key)))
    connection.execute(sa.insert(into).values(values))


def put_once(connection: sa.Connection, into: sa.Table, values: Mapping[str, Any], *beside: str) -> None:
    """Insert a row, unless it is there by its key and the columns `beside`: a write may be made again."""
    key = (*(column.name for column in into.primary_key), *beside)
    same = (into.c[name] == values[name] for name in key)
    if connection.execute(sa.select(sa.literal(1)).select_from(into).where(*same)).first() is None:
        connection.execute(sa.insert(into).values(values))


@dataclass(eq=False)
class Database:
    """The scheduler's database."""

    _engine: sa.Engine
    epoch: int  # the number of this start
    _executor: ThreadPoolExecutor | None
    name: str = ""  # the id that the database shares with its data folder
    _timed: Timed = lambda *_: None

    @classmethod
    async def open(
        cls,
        url: str | sa.URL,
        executor: ThreadPoolExecutor | None,
        folder: Path | None = None,
        timed: Timed = lambda *_: None,
    ) -> Database:
        """Migrate the database at `url` and take the next epoch; InvalidConfig if it cannot be used.

        No epoch is taken, and no scheduler fenced off, if `folder` does not hold the data of the database's jobs.
        """
        engine = make_engine(url)

        def start() -> tuple[int, str]:
            migrate(engine)
            name = ""
            if folder is not None:
                with engine.begin() as connection:
                    name = _bind(connection, folder)
            return _next_epoch(engine), name

        try:
            epoch, name = await run_blocking(executor, start)
        except (SQLAlchemyError, OSError) as error:
            raise InvalidConfig(
                f"the database {without_passwords(engine.url.render_as_string())} cannot be used: {_cause(error)}",
                hint="check --data-dir: the folder must exist and be writable"
                if engine.dialect.name == "sqlite"
                else "check that the server runs, and the host, user and database in --db",
            ) from error
        return cls(engine, epoch, executor, name, timed)

    async def close(self) -> None:
        await run_blocking(self._executor, self._engine.dispose)

    async def jobs(self) -> list[JobRecord]:
        """All jobs, newest first, without jobs that are being removed."""
        listed = sa.select(_JOBS).where(_JOBS.c.id.not_in(sa.select(_REMOVALS.c.job)))
        return await self.read(listed.order_by(_JOBS.c.created_unix_s.desc()), _record)

    async def put_job(self, record: JobRecord) -> None:
        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(_REMOVALS).where(_REMOVALS.c.job == record.id))  # it is listed
            values = asdict(record) | {"state": record.state.value}
            for name in ("tokens", "files", "first_steps", "peers", "times", "repeats"):
                values[f"{name}_json"] = json.dumps(values.pop(name))
            changed = connection.execute(sa.update(_JOBS).where(_JOBS.c.id == record.id).values(values)).rowcount
            if not changed:
                connection.execute(sa.insert(_JOBS).values(values))

        await self.write(write)

    async def put_commit(self, job: JobId, row: CommitRow, now_unix_s: float) -> None:
        """Write the commit point of a step; writing it again after an unknown outcome changes nothing."""
        await self.put_commits(job, (row,), now_unix_s)

    async def put_commits(
        self,
        job: JobId,
        rows: Sequence[CommitRow],
        now_unix_s: float,
        forks: Sequence[Fork] = (),
        exchanges: Mapping[int, Exchanged] = MappingProxyType({}),
    ) -> None:
        """The same for commit points of several islands, with exchanges by the job's timeline, and what holds behind
        them: all of it, or nothing."""
        mine = {"job": job, "epoch": self.epoch}

        def write(connection: sa.Connection) -> None:
            for row in rows:
                rounds = {unit: [made.epoch, made.number] for unit, made in row.rounds.items()}
                values = mine | asdict(row) | {"rounds_json": json.dumps(rounds), "loss": _or_none(row.loss)}
                del values["rounds"]
                put_once(connection, _COMMITS, values | {"committed_unix_s": now_unix_s}, "epoch")
            for fork in forks:
                put_once(connection, _FORKS, mine | asdict(fork), "epoch")
            for timeline, made in exchanges.items():
                at = {"timeline": timeline, "step": made.step, "exchange_json": json.dumps(asdict(made))}
                put_once(connection, _EXCHANGES, mine | at, "epoch")

        await self.write(write, "commit")

    async def put_leases(self, job: JobId, timeline: int, number: int, cut: Cut) -> None:
        """Write how leases were cut anew, the `number`th time on a timeline; writing it again changes nothing."""
        row = {"job": job, "timeline": timeline, "version": number, "shares_json": line(cut), "epoch": self.epoch}
        await self.write(lambda connection: put_once(connection, _LEASES, row, "epoch"), "commit")

    async def leases(self, job: JobId, timeline: int) -> list[Cut]:
        """How the leases of a job's islands were cut on a timeline, in order."""
        of = _LEASES.c
        query = sa.select(_LEASES).where(of.job == job, of.timeline == timeline).order_by(of.version)
        found = await self.read(query, lambda row: json.loads(row["shares_json"]))
        cuts = (entry_of(values) for values in found if isinstance(values, dict))  # lists: shares of earlier versions
        return [cut for cut in cuts if isinstance(cut, Cut)]

    async def forks(self, job: JobId) -> list[Fork]:
        """The islands of a job that began as copies of others, oldest first."""
        query = sa.select(_FORKS).where(_FORKS.c.job == job).order_by(_FORKS.c.timeline)
        return await self.read(query, lambda row: Fork(row["timeline"], row["origin"], row["version"]))

    async def exchanges(self, job: JobId, timeline: int) -> list[Exchanged]:
        """The exchanges of a job's islands on a timeline of the job, oldest first."""
        of = _EXCHANGES.c
        query = sa.select(_EXCHANGES).where(of.job == job, of.timeline == timeline).order_by(of.step)
        return await self.read(query, _exchanged)

    async def rows(self, job: JobId, timeline: int) -> tuple[CommitRow, ...]:
        """The commit rows of a timeline, oldest first."""
        return await self.last_rows(job, timeline, None)

    async def last_rows(self, job: JobId, timeline: int, count: int | None) -> tuple[CommitRow, ...]:
        """The newest `count` commit rows of a timeline, oldest first; all without `count`."""
        query = sa.select(_COMMITS).where(_COMMITS.c.job == job, _COMMITS.c.timeline == timeline)
        rows = await self.read(query.order_by(_COMMITS.c.step.desc()).limit(count), _commit_row)
        return tuple(reversed(rows))

    async def commits(
        self,
        job: JobId,
        after: tuple[int, int] = (-1, -1),
        first: int = 0,
        count: int | None = None,
        every: int = 1,
    ) -> list[dict[str, Any]]:
        """The commit rows of a job in order, as plain values: at most `count`, behind the (timeline, step) `after`, of
        steps from `first` on.

        With `every`, only those after which the number of committed steps is a multiple of it.
        """
        of = _COMMITS.c
        behind = sa.or_(of.timeline > after[0], sa.and_(of.timeline == after[0], of.step > after[1]))
        query = sa.select(_COMMITS).where(of.job == job, behind, of.step >= first)
        if every > 1:
            query = query.where((of.step + 1) % every == 0)
        return await self.select(query.order_by(of.timeline, of.step).limit(count))

    async def put_evaluation(self, job: JobId, row: EvaluationRow, now_unix_s: float) -> None:
        """Write the result of an evaluation; writing it again changes nothing."""
        values = asdict(row) | {"job": job, "epoch": self.epoch, "evaluated_unix_s": now_unix_s}
        values["loss"] = _or_none(row.loss)
        await self.write(lambda connection: put_once(connection, _EVALUATIONS, values))

    async def evaluations(self, job: JobId) -> list[EvaluationRow]:
        """The results of a job's evaluations, in order."""
        of = _EVALUATIONS.c
        query = sa.select(_EVALUATIONS).where(of.job == job).order_by(of.timeline, of.version)
        return await self.read(
            query, lambda row: EvaluationRow(row["timeline"], row["version"], _or_nan(row["loss"]), row["tokens"])
        )

    async def put_drain(self, peer: PeerId, drain: Drain) -> None:
        """Store that the peer is drained; this replaces the row of an earlier incarnation."""
        row = {"peer": peer, **asdict(drain)}
        await self.write(lambda connection: put(connection, _DRAINS, row))

    async def delete_drain(self, peer: PeerId, incarnation: int) -> None:
        """Forget the drain of this incarnation, if there is one."""
        row = sa.delete(_DRAINS).where(_DRAINS.c.peer == peer, _DRAINS.c.incarnation == incarnation)
        await self.write(lambda connection: connection.execute(row))

    async def drains(self) -> dict[PeerId, Drain]:
        rows = await self.select(sa.select(_DRAINS))
        return {PeerId(row["peer"]): Drain(row["incarnation"], row["reason"]) for row in rows}

    # Removals: a listed job has its files, and a job that is not listed loses them.
    #
    # a note comes: the job is listed no more ─▶ its commit rows go, some at a time ─▶ its files go ─▶ row and note go
    #
    # A scheduler that ends in between goes on at its next start. Writing the job's row again takes the note away.

    async def begin_removal(self, job: RemovedJob) -> None:
        """Take the job from the list; from here on it is gone for good."""
        row = {"job": job.id, "checkpoint_dir": job.checkpoint_dir}
        await self.write(lambda connection: put(connection, _REMOVALS, row))

    async def delete_rows(self, job: JobId) -> None:
        """Delete what the job committed and measured."""
        by_version = ((found, "version") for found in (_FORKS, _LEASES, _EVALUATIONS))
        for found, at in ((_COMMITS, "step"), (_EXCHANGES, "step"), *by_version):
            key = found.c.job == job
            first = sa.select(sa.func.min(found.c[at]).label("at")).where(key)
            while (least := (await self.select(first))[0]["at"]) is not None:
                some = sa.delete(found).where(key, found.c[at] < least + ROWS_AT_ONCE)
                await self.write(partial(_execute, some))

    async def end_removal(self, job: JobId) -> None:
        """Nothing else is left of the job."""

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(_JOBS).where(_JOBS.c.id == job))
            connection.execute(sa.delete(_REMOVALS).where(_REMOVALS.c.job == job))

        await self.write(write)

    async def removals(self) -> list[RemovedJob]:
        """The jobs of which something may be left."""
        return await self.read(sa.select(_REMOVALS), lambda row: RemovedJob(JobId(row["job"]), row["checkpoint_dir"]))

    async def check_epoch(self) -> None:
        """Fenced if another scheduler has taken the database over, DatabaseUnavailable if it does not answer."""
        if await self.select(sa.select(_CONTROL.c.epoch)) != [{"epoch": self.epoch}]:
            raise self._fenced()

    def _fenced(self) -> Fenced:
        return Fenced(
            f"another scheduler took this database over (mine was epoch {self.epoch})",
            hint="only one scheduler may run on a database: stop this one",
        )

    async def write(self, change: Callable[[sa.Connection], object], operation: str = "write") -> None:
        """Make a change in a transaction that first claims the epoch; Fenced, DatabaseRejected, DatabaseUnavailable."""

        def transaction() -> None:
            with self._engine.begin() as connection:
                claim = sa.update(_CONTROL).where(_CONTROL.c.id == 1, _CONTROL.c.epoch == self.epoch)
                if connection.execute(claim.values(epoch=self.epoch)).rowcount != 1:
                    raise self._fenced()
                change(connection)

        try:
            await self._run(operation, transaction)
        except (IntegrityError, ProgrammingError, DataError) as error:
            raise DatabaseRejected(
                f"the database refused a write: {_cause(error)}", hint="report this as a bug, with the scheduler's log"
            ) from error
        except SQLAlchemyError as error:
            raise DatabaseUnavailable(
                f"the database did not take a write: {_cause(error)}", hint="check disk space and the database's log"
            ) from error

    async def select(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        """The rows that a query gives; DatabaseUnavailable."""
        return await self.read(query, dict)

    async def read(self, query: sa.Select[Any], make: Callable[[sa.RowMapping], T]) -> list[T]:
        """What `make` gives for each row, made on the database's thread; DatabaseUnavailable."""

        def read() -> list[T]:
            with self._engine.connect() as connection:
                return [make(row) for row in connection.execute(query).mappings()]

        try:
            return await self._run("read", read)
        except SQLAlchemyError as error:
            raise DatabaseUnavailable(
                f"the database could not be read: {_cause(error)}", hint="check the disk and the database's log"
            ) from error

    async def _run(self, operation: str, work: Callable[[], T]) -> T:
        began_s = time.monotonic()
        try:
            return await run_blocking(self._executor, work)
        finally:
            self._timed(operation, time.monotonic() - began_s)


class DatabaseWatch:
    """Notices that the database is away, or that another scheduler took it over, also while nothing is written."""

    def __init__(self, database: Database, on_link: Callable[[bool], None] = lambda is_there: None) -> None:
        """`on_link` hears after each look whether the database answers."""
        self._database = database
        self._on_link = on_link
        self._fault = ""
        self._asked_s = math.inf  # when the look began that has no answer yet

    def not_ready(self) -> list[str]:
        """Why the scheduler is not ready."""
        silent_s = asyncio.get_running_loop().time() - self._asked_s
        if silent_s > LOOK_S:
            return [f"the database has not answered for {silent_s:.0f} s"]
        return [self._fault] if self._fault else []

    async def run(self) -> None:
        """Look, for ever. Raises Fenced once another scheduler has taken the database over; this ends the process."""
        while True:
            self._asked_s = asyncio.get_running_loop().time()
            try:
                await self._database.check_epoch()
                self._fault = ""
            except DatabaseUnavailable as error:
                self._fault = error.message
            self._asked_s = math.inf
            self._on_link(not self._fault)
            await asyncio.sleep(LOOK_S)


def migrate(engine: sa.Engine) -> None:
    """Make the missing tables; InvalidConfig for tables of another version of swarm."""
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _tune_sqlite)
    with engine.begin() as connection:
        config = alembic.config.Config()
        config.set_main_option("script_location", str(resources.files("scheduler.storage") / "migrations"))
        config.attributes["connection"] = connection
        try:
            alembic.command.upgrade(config, "head")
        except alembic.util.CommandError as error:  # it knows no such revision
            raise InvalidConfig(
                f"another version of swarm wrote the database {without_passwords(engine.url.render_as_string())}",
                hint="end or pull its jobs with that version, then start with an empty --data-dir (and --db, if there "
                "is one), and submit with --resume-from what shall go on",
            ) from error


def _bind(connection: sa.Connection, folder: Path) -> str:
    """Check that the folder holds the data of this database's jobs, and give the id that both hold.

    With the wrong folder a scheduler would find no data and fail every running job: InvalidConfig. A database without
    an id, or without jobs, takes the folder's.
    """
    present, place = _folder_id(folder), f"{platform.node()}:{folder.resolve()}"
    known = connection.execute(sa.select(_FOLDER.c.id, _FOLDER.c.place)).first()
    if known is not None and known.id != present:
        jobs = connection.execute(sa.select(sa.func.count()).select_from(_JOBS)).scalar_one()
        if jobs:
            raise InvalidConfig(
                f"{folder} does not hold the data of the {counted(jobs, 'job')} in this database: "
                f"they are in {known.place}",
                hint=f"start with that --data-dir; if it moved, copy it whole, with {ID_FILE}",
            )
    one = present or secrets.token_hex(8)
    connection.execute(sa.delete(_FOLDER))
    connection.execute(sa.insert(_FOLDER).values(id=one, place=place))
    if present:
        return one
    try:
        (folder / ID_FILE).write_text(json.dumps({"id": one}) + "\n")
    except OSError as error:
        raise InvalidConfig(f"{folder} cannot be used: {error.strerror or error}", hint="check --data-dir") from None
    return one


def _folder_id(folder: Path) -> str:
    try:
        found = json.loads((folder / ID_FILE).read_text())["id"]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{folder / ID_FILE} cannot be used: {error}", hint="restore it, or choose another --data-dir"
        ) from None
    if not (isinstance(found, str) and 0 < len(found) <= 64):
        raise InvalidConfig(f"{folder / ID_FILE} holds no id", hint="restore it, or choose another --data-dir")
    return found


def database_in(folder: Path) -> sa.URL:
    """The SQLite file in a data folder, whose name may hold what means something in the text of a URL: ? % #.

    InvalidConfig if an earlier version, which wrote the path into such a text, put the database elsewhere.
    """
    path = folder.absolute() / "scheduler.db"
    before = Path(sa.make_url(f"sqlite:///{path}").database or "")
    if before != path and not path.exists() and _is_sqlite(before):
        raise InvalidConfig(
            f"the database of {folder} is at {before}, where an earlier version put it",
            hint=f"move it, with {before}-wal if there is one: mv {before} {path}",
        )
    return sa.URL.create("sqlite", database=str(path))


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def make_engine(url: str | sa.URL) -> sa.Engine:
    """An engine that has not connected yet; InvalidConfig if the URL or its driver cannot be used."""
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        shown = without_passwords(str(url).rpartition("@")[2])[:100]  # what comes before may be a password
        raise InvalidConfig(f'--db "{shown}" is no database URL', hint=_HINT) from None
    if parsed.drivername not in _DRIVERS:
        raise InvalidConfig(f"--db {parsed.drivername} is not supported", hint=_HINT)
    try:
        return sa.create_engine(parsed)
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"--db {parsed.drivername} needs the Python package {error.name}",
            hint='install it with: pip install "swarm-stages[postgres]"',
        ) from None
    except ArgumentError as error:
        shown = without_passwords(parsed.render_as_string())
        raise InvalidConfig(f"--db {shown} cannot be used: {_cause(error)}", hint=_HINT) from None


def _next_epoch(engine: sa.Engine) -> int:
    with engine.begin() as connection:
        if not connection.execute(sa.update(_CONTROL).values(epoch=_CONTROL.c.epoch + 1)).rowcount:
            connection.execute(sa.insert(_CONTROL).values(id=1, epoch=1))
        return int(connection.execute(sa.select(_CONTROL.c.epoch)).scalar_one())


def _tune_sqlite(connection: Any, _record: object) -> None:
    # WAL: readers do not wait for the writer. FULL: a committed row survives a power cut.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _record(found: sa.RowMapping) -> JobRecord:
    row = dict(found)
    tokens = json.loads(row.pop("tokens_json"))
    tokens["shards"] = tuple(tokens["shards"])
    row["state"] = JobState(row["state"])
    row["first_steps"] = tuple(json.loads(row.pop("first_steps_json")))
    row["peers"] = json.loads(row.pop("peers_json"))
    row["times"] = json.loads(row.pop("times_json"))
    row["repeats"] = Repeats(**json.loads(row.pop("repeats_json")))
    files = tuple(StateFile(**file) for file in json.loads(row.pop("files_json")))
    return JobRecord(tokens=JobTokens(**tokens), files=files, **row)


def _commit_row(row: sa.RowMapping) -> CommitRow:
    rounds = {UnitName(unit): Round(*made) for unit, made in json.loads(row["rounds_json"]).items()}
    same = {name: row[name] for name in ("timeline", "step", "norm", "scale", "learning_rate", "skip", "tokens")}
    return CommitRow(rounds=rounds, loss=_or_nan(row["loss"]), **same)


def _exchanged(row: sa.RowMapping) -> Exchanged:
    values: dict[str, Any] = json.loads(row["exchange_json"])
    values |= {name: tuple(of) for name, of in values.items() if isinstance(of, list)}
    rounds = (OuterRound(UnitName(of["unit"]), Round(**of["round"]), tuple(of["envoys"])) for of in values["rounds"])
    return Exchanged(**values | {"rounds": tuple(rounds)})


def _execute(statement: sa.Delete, connection: sa.Connection) -> None:
    connection.execute(statement)


def _or_none(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None  # databases have no NaN


def _or_nan(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _cause(error: Exception) -> str:
    return without_passwords(str(getattr(error, "orig", None) or error))
