"""Everything that outlives the scheduler: the database, and the files in the data folder."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scheduler.storage.checkpoints.catalog import CheckpointCatalog
from scheduler.storage.database import Database
from scheduler.storage.job_files import JobFiles
from scheduler.storage.job_log import JobLogs
from scheduler.storage.stamps import Stamps


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of one scheduler.

    The database has a thread of its own, so no commit waits for a file. `threads` do the work on files, others that of
    checkpoints, whose storage may hang; None does it at once, as simulation wants it.
    """

    database: Database
    files: JobFiles
    checkpoints: CheckpointCatalog
    logs: JobLogs
    stamps: Stamps
    transcripts: Path | None  # where brains are recorded, if they are
    threads: ThreadPoolExecutor | None

    @classmethod
    def under(
        cls,
        root: Path,
        database: Database,
        threads: ThreadPoolExecutor | None = None,
        log_readers: ThreadPoolExecutor | None = None,
        checkpoint_threads: ThreadPoolExecutor | None = None,
        *,
        record: bool = False,
        checkpoint_roots: Sequence[Path | str] = (),
    ) -> Stores:
        catalog = CheckpointCatalog(root, checkpoint_threads or threads, checkpoint_roots)
        transcripts = root / "jobs" if record else None
        return cls(
            database,
            JobFiles(root, threads),
            catalog,
            JobLogs(root / "jobs", log_readers),
            Stamps.open(root),
            transcripts,
            threads,
        )
