"""What TensorBoard reads of what was written for it."""

from __future__ import annotations

import sys
from math import nan
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from client.records import Job, Step
from client.tracking import TRACKERS, TensorBoard, scalars
from swarm.errors import InvalidConfig, NotAllowed


def test_tensorboard_reads_each_step_with_its_time(tmp_path: Path) -> None:
    board = TensorBoard(Job(id="job"), tmp_path)
    board.write(Step(step=1, loss=3.0, tokens=32, committed_unix_s=1000.0), 32)
    board.write(Step(step=2, loss=2.5, evaluation_loss=2.75, tokens=32, committed_unix_s=1002.0), 64)
    board.close()
    read: Any = EventAccumulator(str(tmp_path / "job"))
    read.Reload()
    assert [(scalar.step, scalar.value, scalar.wall_time) for scalar in read.Scalars("train/loss")] == [
        (1, 3, 1000),
        (2, 2.5, 1002),
    ]
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("validation/loss")] == [(2, 2.75)]
    assert [scalar.value for scalar in read.Scalars("train/tokens")] == [32, 64]


def test_what_is_not_finite_is_left_out() -> None:
    values = scalars(Step(step=1, loss=nan, grad_norm=0.0, skipped=True), 0)
    assert set(values) == {"train/learning_rate", "train/skipped", "train/tokens"}
    assert values["train/skipped"] == 1.0


def test_without_the_extra_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(InvalidConfig, match="tensorboard") as error:
        TensorBoard(Job(id="job"), tmp_path)
    assert "swarm-stages[tracking]" in error.value.hint


def test_the_password_of_mlflow_is_never_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(tracking_uri: str) -> None:
        raise ConnectionError(f"no answer from {tracking_uri}")

    monkeypatch.setitem(sys.modules, "mlflow.entities", ModuleType("entities"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lost))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:SECRET@db/mlflow")
    with pytest.raises(InvalidConfig) as error:
        TRACKERS["mlflow"](Job(id="job"), tmp_path)
    shown = "postgresql://…@db/mlflow"
    assert error.value.message == f"MLflow at {shown} does not take it: no answer from {shown}"


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be written"):
        TensorBoard(Job(id="job"), tmp_path / "file")


@pytest.mark.parametrize("name", ["what?", "a%41b", "c#"])
def test_a_folder_that_mlflow_would_read_as_another_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --to mlflow into what?/ the database was the file `what` beside the folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(InvalidConfig, match="MLflow keeps no database"):
        TRACKERS["mlflow"](Job(id="job"), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("to", "package"), [("mlflow", "mlflow.entities"), ("wandb", "wandb")])
def test_without_its_package_each_tracker_names_its_extra(
    to: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidConfig, match=to) as error:
        TRACKERS[to](Job(id="job"), tmp_path)
    assert f"swarm-stages[{to}]" in error.value.hint


def test_curves_are_never_drawn_twice(tmp_path: Path) -> None:
    TensorBoard(Job(id="job"), tmp_path).close()
    with pytest.raises(NotAllowed, match="exists already"):
        TensorBoard(Job(id="job"), tmp_path)


class _Config(dict[str, str]):
    def __init__(self, kept: dict[str, str]) -> None:
        super().__init__(kept)
        self._kept = kept

    def update(self, values: Any, *, allow_val_change: bool) -> None:  # type: ignore[override]
        self._kept.update(values)


class FakeWandB(ModuleType):
    """The calls of its client that a run is made with, and one run at its service."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.rows: list[dict[str, float]] = []
        self.config: dict[str, str] = {}
        self.began = self.finished = 0
        self.Settings = dict

    def init(self, **flags: Any) -> Any:
        assert flags["resume"] == "allow"
        self.began += 1
        return SimpleNamespace(
            resumed=self.began > 1,
            config=_Config(self.config),
            path="me/swarm/job",
            url="https://wandb.ai/me/swarm/runs/job",
            log=self.rows.append,
            define_metric=lambda *_, **__: None,
            finish=self._finish,
        )

    def _finish(self, **_: Any) -> None:
        self.finished += 1

    def Api(self) -> Any:
        return SimpleNamespace(run=lambda path: SimpleNamespace(scan_history=lambda keys: list(self.rows)))


def test_weights_and_biases_goes_on_with_the_run_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `swarm track` was refused, and so a run that was followed ended with a lost connection."""
    service = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", service)
    job = Job(id="job", created_unix_s=900.0)
    steps = [Step(step=number, loss=3.0, committed_unix_s=1000.0 + number) for number in (1, 2, 3)]
    first = TRACKERS["wandb"](job, tmp_path)
    for step in steps[:2]:
        first.write(step, 0)
    first.close()
    again = TRACKERS["wandb"](job, tmp_path)
    for step in [*steps, Step(step=2, loss=2.0, committed_unix_s=2000.0)]:  # the last one was made anew
        again.write(step, 0)
    assert [(row["step"], row["time"]) for row in service.rows] == [(1, 1001), (2, 1002), (3, 1003), (2, 2000)]
    with pytest.raises(NotAllowed, match="has a run of another job job"):
        TRACKERS["wandb"](Job(id="job", created_unix_s=901.0), tmp_path)
    assert (service.began, service.finished) == (3, 2)


def test_steps_that_were_not_sent_to_weights_and_biases_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB())
    run = tmp_path / "wandb" / "offline-run-20260101_000000-job"
    (run / "files").mkdir(parents=True)
    (run / "files" / "requirements.txt").write_text("")
    (run / "run-job.wandb").write_bytes(b"steps")
    with pytest.raises(NotAllowed, match="were not sent") as caught:
        TRACKERS["wandb"](Job(id="job"), tmp_path)
    assert "wandb sync" in caught.value.hint
    (run / "run-job.wandb.synced").write_bytes(b"")  # what `wandb sync` leaves
    TRACKERS["wandb"](Job(id="job"), tmp_path)
