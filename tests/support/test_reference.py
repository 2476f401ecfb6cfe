"""The reference weights that tests share: trained once, and never read for another job, code or number of threads."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from swarm.job.leases import Cut
from swarm.job.outer_log import OuterRecord
from swarm.job.spec import JobSpec
from tests.support import reference as references
from tests.support.reference import reference, surroundings
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    trained = Mock(wraps=references.train_local)
    monkeypatch.setattr(references, "train_local", trained)
    monkeypatch.setattr(references, "FOLDER", tmp_path / "references")
    return trained


def job(folder: Path, **changes: object) -> tuple[JobSpec, Tokens]:
    folder.mkdir()
    values = {"training__steps": 1, "training__eval_every_steps": 1, "data__validation_ratio": 0.005, **changes}
    spec = resolved(small_spec(write_text(folder), **values))
    return spec, Tokens.make(folder, spec)


def test_a_job_is_trained_once_wherever_its_data_lies(tmp_path: Path, training: Mock) -> None:
    first, again = (reference(*job(tmp_path / name)) for name in ("here", "there"))
    assert training.call_count == 1
    assert first == again
    spec, tokens = job(tmp_path / "anew")
    made = references.train_local(spec, tokens.batches(spec))
    assert (first.sha256, first.losses, first.evaluations) == (made.sha256, made.losses, made.evaluations)
    assert first.evaluations


def test_another_job_is_not_taken_for_it(tmp_path: Path, training: Mock) -> None:
    seen = {reference(*job(tmp_path / "one")).sha256, reference(*job(tmp_path / "other", training__seed=2)).sha256}
    spec, _ = job(tmp_path / "text")
    text = tmp_path / "text" / "text.txt"
    text.write_text(text.read_text().upper())
    seen.add(reference(spec, Tokens.make(tmp_path / "text", spec)).sha256)
    assert (training.call_count, len(seen)) == (3, 3)


def test_what_other_code_or_other_threads_made_is_not_read(
    tmp_path: Path, training: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, tokens = job(tmp_path / "one")
    reference(spec, tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    reference(spec, tokens)
    monkeypatch.setattr(references, "surroundings", lambda _: "other code")
    reference(spec, tokens)
    assert training.call_count == 3


def test_another_log_of_islands_is_another_key(tmp_path: Path) -> None:
    spec, tokens = job(tmp_path / "one")
    cut = Cut({0: 0, 1: 0}, {0: ((0, 3),), 1: ((3, 4),)})
    logs = [(), (OuterRecord(2, (0,)),), (OuterRecord(2, (1,)),), (cut, OuterRecord(2, (0,)))]
    assert len({references._key(spec, tokens, log) for log in logs}) == 4


def test_any_change_of_the_code_is_noticed(tmp_path: Path) -> None:
    def of(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return surroundings(folder)

    assert of(a="x = 1", b="") == of(a="x = 1", b="")
    assert len({of(a="x = 1", b=""), of(a="x = 2", b=""), of(a="", b="x = 1"), of(a="x = 1"), of(c="x = 1", b="")}) == 5


def test_a_job_that_begins_with_files_of_somebody_else_is_trained_each_time(tmp_path: Path, training: Mock) -> None:
    spec, tokens = job(tmp_path / "one")
    for _ in range(2):
        reference(spec.having("checkpoint", resume_from=str(tmp_path)), tokens)
    assert training.call_count == 2
