"""A transcript on disk is bounded, and a disk that takes no more ends the recording, never the job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.brain.inputs import ReplicaRecord, Start, Tick
from scheduler.brain.transcript import Transcript
from scheduler.storage import transcripts
from scheduler.storage.transcripts import FILES_KEPT, record
from tests.support.brain import A, Swarm

SETTINGS = Swarm({A: 0}).brain.settings


def test_what_a_brain_hears_is_written_at_once_up_to_a_bound_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "FILE_BYTES_MAX", 2 << 10)
    recorder = record(tmp_path, SETTINGS, 7)
    recorder.step(Start((ReplicaRecord(A, 1, "at a", 0),)), 0.0)
    (path,) = tmp_path.glob(f"{SETTINGS.job}/brain-0-3.jsonl")
    (first,) = Transcript(path.read_text().splitlines())
    assert isinstance(first.happened, Start), "written at once"
    for number in range(200):
        recorder.step(Tick(), float(number))
    assert path.stat().st_size <= (2 << 10) + 100
    transcript = Transcript(path.read_text().splitlines())
    assert 0 < len(list(transcript)) < 200
    assert "the file has" in transcript.ended


def test_only_the_newest_transcripts_of_a_job_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / SETTINGS.job
    folder.mkdir()
    for number in range(FILES_KEPT + 3):
        path = folder / f"brain-0-{100 + number}.jsonl"
        path.touch()
        os.utime(path, (number, number))
    (folder / "other").touch()
    record(tmp_path, SETTINGS, 7)
    left = {path.name for path in folder.glob("*.jsonl")}
    assert left == {"brain-0-3.jsonl", *(f"brain-0-{104 + number}.jsonl" for number in range(FILES_KEPT - 1))}
    assert (folder / "other").exists()


def test_a_folder_that_cannot_be_written_does_not_harm_the_job(tmp_path: Path) -> None:
    (tmp_path / SETTINGS.job).write_text("a file is in the way")
    recorder = record(tmp_path, SETTINGS, 7)
    assert recorder.step(Start((ReplicaRecord(A, 1, "at a", 0),)), 0.0)
