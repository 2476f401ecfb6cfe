"""Transcripts of jobs' brains on disk: jobs/JOB/brain-TIMELINE-EPOCH.jsonl, the newest few of each job.

A transcript can be replayed from its beginning only, so a full file is not rotated: recording stops and says so.
"""

from __future__ import annotations

from pathlib import Path

from scheduler.brain.settings import BrainSettings
from scheduler.brain.transcript import Recorder, ended
from swarm.process.logs import get_logger

FILE_BYTES_MAX = 64 << 20
FILES_KEPT = 8  # of one job: each start and each resume begins a new one

_log = get_logger("scheduler")


def record(jobs: Path, settings: BrainSettings, seed: int) -> Recorder:
    """A brain whose inputs are written down under `jobs`."""
    name = f"brain-{settings.timeline}-{settings.epoch}"
    return Recorder(settings, seed, _TranscriptFile(jobs / settings.job, name).write)


class _TranscriptFile:
    """One transcript. A full disk ends the recording, never the job."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.jsonl"
        self._room = FILE_BYTES_MAX
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            older = sorted(folder.glob("brain-*.jsonl"), key=lambda path: path.stat().st_mtime)
            for path in older[: 1 - FILES_KEPT]:
                path.unlink()
        except OSError as error:
            self._stop(str(error))

    def write(self, line: str) -> None:
        """Add a line. The file is closed in between, so a scheduler that is killed leaves whole lines."""
        if self._room <= 0:
            return
        self._room -= len(line) + 1
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write((line if self._room > 0 else ended(f"the file has {FILE_BYTES_MAX} bytes")) + "\n")
        except OSError as error:
            self._stop(str(error))
        else:
            if self._room <= 0:
                self._stop("the file is full")

    def _stop(self, reason: str) -> None:
        self._room = 0
        _log.warning("recording of a brain ended", path=str(self._path), reason=reason)
