"""Removes jobs with all that they made, and files that no job names. brain/retention.py says which jobs may go.

remove ─▶ the job is not found ─▶ it is not listed (storage/database.py) ─▶ rows, folders, uploads go
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.brain.retention import HeldJob, check_removable, expired, surplus
from scheduler.jobs.job import Job
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.storage.database import RemovedJob
from swarm.errors import DatabaseRejected, DatabaseUnavailable, InvalidConfig, NotAllowed, NotFound, StorageError
from swarm.limits import ENDED_OF_ONE_MAX, UNUSED_SHARD_KEPT_S
from swarm.types import JobId

TIDY_S = 60.0
CLOCK_S = 900.0  # after a start no job expires: a machine's clock may be years ahead until somebody sets it
UNTOUCHED_S = 3600.0  # what was touched since then may be of a submit that is under way
EXPIRED_AT_ONCE = 100  # jobs that one round removes


@dataclass(frozen=True, slots=True)
class Removed:
    """A job that is gone; `left` tells a person what of it is still there, and why."""

    id: JobId
    freed_bytes: int = 0
    left: str = ""


@dataclass(frozen=True, slots=True)
class Waste:
    """Unneeded data: a "job" that is kept no longer, "uploads" of a person or of everybody, or a "folder" of no job."""

    kind: str
    name: str
    size_bytes: int


@dataclass(eq=False)
class JobRemoval:
    """Ended jobs go when a person removes them, or `keep_s` after their end; 0 keeps them."""

    _ports: SchedulerPorts
    _registry: JobRegistry
    _keep_s: float = 0.0
    _unfinished: dict[JobId, RemovedJob] = field(default_factory=dict)
    _one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)
    _named_s: dict[Path, float] = field(default_factory=dict)  # uploads of removed jobs, and when the youngest came

    async def load(self) -> None:
        """Know what an earlier start has not removed whole."""
        self._unfinished = {job.id: job for job in await self._ports.stores.database.removals()}
        self._registry.on_ended = self._make_room

    async def remove(self, job: Job, *, expires: bool = False) -> Removed:
        """Remove an ended job, with its checkpoints, logs, and the uploads that no other job names.

        Checkpoints in a `checkpoint.dir` stay if the job only `expires`; those at a URL always stay.
        NotAllowed if it has not ended, is in use, or another job may begin at it; DatabaseUnavailable.
        """
        named = await self._ports.stores.files.named_by([job.record])
        record, where = job.record, job.spec.checkpoint.dir
        if self._registry.get(record.id) is not job:
            raise NotFound(f"job {record.id} was removed meanwhile")
        check_removable(_held(job), [_held(other) for other in self._registry.all()])
        if job.uses:
            raise NotAllowed(f"job {record.id} is being stopped, resumed or started from", hint="try again in a moment")
        one = RemovedJob(record.id, "" if expires else where)
        self._registry.remove(job)  # at once: nobody may resume it while its row is being deleted
        try:
            await self._ports.stores.database.begin_removal(one)
        except BaseException:
            self._registry.add(job)
            raise
        self._unfinished[one.id] = one
        self._ports.metrics.forget_job(one.id)
        self._ports.announcer.job_removed(one.id)
        for path in named:
            self._named_s[path] = max(self._named_s.get(path, 0.0), record.created_unix_s)
        freed = await self._free_named()
        done = await self._finish(one)
        stays = bool(where) and (expires or self._ports.stores.checkpoints.is_remote(where))
        left = "; ".join(filter(None, (done.left, f"its checkpoints in {where} stay" if stays else "")))
        removed = Removed(one.id, freed.total() + done.freed_bytes, left)
        self._ports.log.info("job removed", job_id=one.id, freed_bytes=removed.freed_bytes, expired=expires, left=left)
        return removed

    async def _free_named(self) -> Counter[str]:
        """Remove uploads that only removed jobs have named and that were not asked for since; the bytes by owner."""
        used = await self._used()
        over = {path: at_s for path, at_s in self._named_s.items() if path not in used}
        self._named_s = {path: at_s for path, at_s in self._named_s.items() if path in used}
        return await self._ports.stores.files.remove_unused(used, 0.0, over)

    async def _finish(self, one: RemovedJob) -> Removed:
        """Remove the rest of a job that is no longer listed; a failed removal is tried again in the next round."""
        freed, left = 0, ""
        async with self._one_by_one:
            if one.id not in self._unfinished:
                return Removed(one.id)
            try:
                await self._ports.stores.database.delete_rows(one.id)
                freed += await self._ports.stores.files.remove_job(one.id)
                if one.checkpoint_dir:
                    try:
                        freed += await self._ports.stores.checkpoints.remove(one.checkpoint_dir, one.id)
                    except InvalidConfig as error:  # the scheduler was started with other roots
                        left = error.message
                await self._ports.stores.database.end_removal(one.id)
            except (StorageError, DatabaseUnavailable, DatabaseRejected) as error:
                self._ports.log.warning("files of a removed job are still there", job_id=one.id, reason=error.message)
                return Removed(one.id, freed, f"{error.message}; this is tried again every {TIDY_S:.0f} s")
            del self._unfinished[one.id]
        return Removed(one.id, freed, left)

    async def collect(self, *, dry_run: bool) -> list[Waste]:
        """Remove, or only name, the jobs that are kept no longer, and files that no job names."""
        found: list[Waste] = []
        old = self._expired()
        for job in old:
            if dry_run:
                found.append(Waste("job", job.record.id, await self._ports.stores.files.job_bytes(job.record.id)))
                continue
            with suppress(NotAllowed, NotFound):  # it was resumed or removed meanwhile
                removed = await self.remove(job, expires=True)
                found.append(Waste("job", removed.id, removed.freed_bytes))
        before_unix_s = self._ports.wall_s() - UNTOUCHED_S
        used = await self._used({job.record.id for job in old})
        uploads: Counter[str] = await self._ports.stores.files.remove_unused(used, before_unix_s, dry_run=dry_run)
        found += [Waste("uploads", owner or "everybody", size_bytes) for owner, size_bytes in sorted(uploads.items())]
        known = {job.record.id for job in self._registry.all()} | self._unfinished.keys()
        for name, size_bytes in await self._ports.stores.files.strays(known, before_unix_s):
            if not dry_run:
                await self._ports.stores.files.remove_job(JobId(name))
            found.append(Waste("folder", name, size_bytes))
        return found

    async def tidy(self) -> None:
        """Finish removals, and remove what is old, once a minute, forever."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            await self.tidy_once(expires=loop.time() - began_s >= CLOCK_S)
            await asyncio.sleep(TIDY_S)

    async def tidy_once(self, *, expires: bool = True) -> None:
        """Write states and finish removals that failed before; remove jobs that are kept no longer, and uploads that no
        job names for a day.
        """
        await self._registry.put_again()
        for gone in list(self._unfinished.values()):
            await self._finish(gone)
        for job in self._expired() if expires else ():
            await self._try_to_remove(job)
        await self._remove_surplus()
        await self._ports.stores.files.remove_unused(await self._used(), self._ports.wall_s() - UNUSED_SHARD_KEPT_S)

    async def _make_room(self, ended: Job) -> None:
        """Remove the oldest ended jobs without weights of the job's owner beyond ENDED_OF_ONE_MAX; its log says so."""
        for gone in await self._remove_surplus(ended.record.owner):
            told = f"the newest {ENDED_OF_ONE_MAX} ended jobs of a person that have no weights are kept"
            self._registry.say(ended, "info", f"job {gone} was removed: {told}")

    async def _remove_surplus(self, owner: str | None = None) -> list[JobId]:
        """Remove such jobs of one owner, or of all. Returns the removed jobs."""
        jobs = {job.record.id: job for job in self._registry.all()}
        found = surplus([_held(job) for job in jobs.values()], ENDED_OF_ONE_MAX)
        own = [job for job in found if owner in (None, jobs[job].record.owner)][:EXPIRED_AT_ONCE]
        return [job for job in own if await self._try_to_remove(jobs[job])]

    async def _try_to_remove(self, job: Job) -> bool:
        """Remove a job that nobody asked to remove; whether it went."""
        try:
            await self.remove(job, expires=True)
        except (NotAllowed, NotFound, DatabaseUnavailable, DatabaseRejected) as error:
            self._ports.log.warning("job not removed", job_id=job.record.id, reason=error.message)
            return False
        return True

    def _expired(self) -> list[Job]:
        if not self._keep_s:
            return []
        jobs = {job.record.id: job for job in self._registry.all()}
        found = expired([_held(job) for job in jobs.values()], self._keep_s, self._ports.wall_s())
        return [jobs[job] for job in found[:EXPIRED_AT_ONCE]]

    async def _used(self, without: Set[JobId] = frozenset()) -> set[Path]:
        """The uploaded files that jobs name."""
        return await self._ports.stores.files.named_by(
            [job.record for job in self._registry.all() if job.record.id not in without]
        )


def _held(job: Job) -> HeldJob:
    record = job.record
    # After a restart nobody looks for the checkpoints of an ended job in a folder or bucket of its own.
    may_have = bool(job.spec.checkpoint.dir) and job.progress.steps_done > record.first_steps[0]
    return HeldJob(
        record.id,
        record.name,
        record.state,
        record.since_unix_s,
        record.created_unix_s,
        job.spec.checkpoint.resume_from.rpartition(":")[0],
        record.start_where,
        job.spec.checkpoint.dir.rstrip("/"),
        record.owner,
        job.newest is not None or may_have,
    )
