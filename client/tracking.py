"""Steps of a job as TensorBoard's event files, as a run of MLflow and as one of Weights & Biases.

Not chosen: a key of the job file, because the scheduler would need the libraries and accounts of everybody's tracker.
Steps that a rollback undid are written again. MLflow and W&B are written by their own clients, so their logins and
proxies work as people know them. A W&B run that was written offline goes on only once it was sent.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from client.records import Job, Step, file_name
from swarm.errors import InvalidConfig, NotAllowed
from swarm.text import as_date, first_line, without_passwords
from swarm.types import JobState

ALWAYS_WRITTEN = "train/tokens"  # of each step, so what is written is known by it
PROJECT = "swarm"  # MLflow's experiment, and the project at Weights & Biases, unless their own variables name others
MLFLOW_BATCH = 1000  # metrics, the most that its servers take at a time
MLFLOW_PARAMETERS = 100  # and parameters
MLFLOW_TEXT_MAX = 500
MLFLOW_STATES = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}
WANDB_EXIT_CODES = {JobState.FAILED: 1, JobState.CANCELLED: 255}  # the latter as its client does at Ctrl-C


class Tracker(Protocol):
    """Where steps are written. `place` says to a person where to look."""

    place: str

    def write(self, step: Step, tokens: int) -> None:
        """Add a step; `tokens` counts all steps up to it. A step may come again, after a rollback."""

    def flush(self) -> None:
        """Let readers see the written steps."""

    def close(self, ended: JobState | None = None) -> None:
        """The last call; `ended`: how the job did. None: it goes on, as far as is known, and so may who writes it.

        Without `ended` the steps that were not flushed may be lost.
        """


class TensorBoard:
    """Writes steps into DIR/JOB, one event each.

    InvalidConfig if the package is not installed or the folder cannot be written, NotAllowed if there is something.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        target = folder / file_name(job.id)
        if target.is_dir() and any(target.iterdir()):
            raise NotAllowed(
                f"{target} exists already: its curves would be drawn twice", hint=f"remove it: rm -r {target}"
            )
        with _installed("tracking"):
            writers: Any = import_module("tensorboard.summary.writer.event_file_writer")
            self._event: Any = import_module("tensorboard.compat.proto.event_pb2").Event
            self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self.place = f"{target}; see them with: tensorboard --logdir {folder}"
        try:
            target.mkdir(parents=True, exist_ok=True)
            self._writer: Any = writers.EventFileWriter(str(target))
        except OSError as error:
            raise InvalidConfig(f"{target} cannot be written: {error.strerror or error}") from None

    def write(self, step: Step, tokens: int) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(step, tokens).items()]
        event = self._event(wall_time=_moment_s(step), step=step.step, summary=self._summary(value=values))
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, ended: JobState | None = None) -> None:
        self._writer.close()


class MLflow:
    """Writes steps as a run of MLflow: at MLFLOW_TRACKING_URI, or without it into DIR/mlflow.db.

    It goes on with the run of the job that there is. InvalidConfig if the package is not installed or the server does
    not take the run, NotAllowed if there is one of another job with that name.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or _sqlite_uri(folder)
        self.place = f"MLflow at {without_passwords(uri)}"
        with _installed("mlflow"):
            self._entities: Any = import_module("mlflow.entities")
            client: Any = import_module("mlflow.tracking").MlflowClient
        self._pending: list[Any] = []
        self._known_ms: dict[int, int] = {}  # when the steps were made that somebody wrote before
        began_ms = round(as_date(job.created_unix_s) * 1000) or None
        with _taken(self.place):
            if uri.startswith("sqlite:"):
                folder.mkdir(parents=True, exist_ok=True)
            self._client = client(tracking_uri=uri)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._new_experiment(name, uri, folder)
            runs = self._client.search_runs([experiment], filter_string=f"tags.`swarm.job` = '{file_name(job.id)}'")
        if runs and runs[0].info.start_time != began_ms:
            raise NotAllowed(
                f"{self.place} has a run of another job {job.id}: their curves would be drawn as one",
                hint=f"delete run {runs[0].info.run_id} there, or set MLFLOW_EXPERIMENT_NAME",
            )
        with _taken(self.place):
            self._run: str = runs[0].info.run_id if runs else self._begin(job, experiment, began_ms)
            if runs:
                self._go_on()

    def _begin(self, job: Job, experiment: Any, began_ms: int | None) -> str:
        """A new run with the job file; gives its id."""
        run = self._client.create_run(experiment, began_ms, tags={"swarm.job": job.id}, run_name=job.id)
        parameters = [self._entities.Param(key, value[:MLFLOW_TEXT_MAX]) for key, value in _flat(job.spec).items()]
        for at in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=parameters[at : at + MLFLOW_PARAMETERS])
        return str(run.info.run_id)

    def _go_on(self) -> None:
        """Learn what the run has. If a step was made anew, the newest counts."""
        self._client.update_run(self._run, status="RUNNING")
        for metric in self._client.get_metric_history(self._run, ALWAYS_WRITTEN):
            self._known_ms[metric.step] = max(metric.timestamp, self._known_ms.get(metric.step, 0))

    def _new_experiment(self, name: str, uri: str, folder: Path) -> Any:
        """Its artifacts go where its database is, not into a folder that happens to be the present one."""
        artifacts = (folder.absolute() / "mlruns").as_uri() if uri.startswith("sqlite:") else None
        return self._client.create_experiment(name, artifact_location=artifacts)

    def write(self, step: Step, tokens: int) -> None:
        if round(step.committed_unix_s * 1000) <= self._known_ms.get(step.step, -1):
            return
        moment_ms = round(_moment_s(step) * 1000)
        values = scalars(step, tokens).items()
        self._pending += [self._entities.Metric(tag, value, moment_ms, step.step) for tag, value in values]
        if len(self._pending) >= MLFLOW_BATCH:
            self.flush()

    def flush(self) -> None:
        with _taken(self.place):
            for at in range(0, len(self._pending), MLFLOW_BATCH):
                self._client.log_batch(self._run, metrics=self._pending[at : at + MLFLOW_BATCH])
        self._pending.clear()

    def close(self, ended: JobState | None = None) -> None:
        if ended is None:
            return
        self.flush()
        with _taken(self.place):
            self._client.set_terminated(self._run, status=MLFLOW_STATES[ended])


class WandB:
    """Writes steps as a run of Weights & Biases, or with WANDB_MODE=offline below DIR/wandb, for `wandb sync`.

    It goes on with the run of the job that there is. InvalidConfig if the package is not installed or the run cannot be
    begun, NotAllowed if there is one of another job with that name, or one that was not sent yet.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        with _installed("wandb"):
            wandb: Any = import_module("wandb")
        self.place = "Weights & Biases"
        self._known_ms: dict[int, int] = {}  # when the steps were made that somebody wrote before
        name = file_name(job.id)
        kept = sorted(folder.glob(f"wandb/offline-run-*-{name}"))
        # `wandb sync` leaves the folder and notes beside the run that it has sent it.
        if unsent := [run for run in kept if not any(run.glob("*.wandb.synced"))]:
            raise NotAllowed(
                f"{unsent[0]} has steps that were not sent: their curves would be drawn twice",
                hint=f"send it and go on there: wandb sync {unsent[0]}; or remove it: rm -r {unsent[0]}",
            )
        began = {"created_unix_s": str(job.created_unix_s)}
        with _taken(self.place):
            folder.mkdir(parents=True, exist_ok=True)
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                id=name,
                name=job.id,
                dir=str(folder),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
            )
            known = dict(self._run.config).get("created_unix_s") if self._run.resumed else None
        if self._run.resumed and known != began["created_unix_s"]:
            self._run.finish()
            raise NotAllowed(
                f"{self.place} has a run of another job {job.id}: their curves would be drawn as one",
                hint="delete that run there, or set WANDB_PROJECT",
            )
        with _taken(self.place):
            if self._run.resumed:
                self._go_on(wandb)
            self._run.config.update(_flat(job.spec) | began, allow_val_change=True)
        self.place += (
            f": {without_passwords(self._run.url)}"
            if self._run.url
            else f", in {folder / 'wandb'}; send it with: wandb sync"
        )
        # Its own counter of steps only rises, and a job goes back.
        self._run.define_metric("*", step_metric="step")

    def _go_on(self, wandb: Any) -> None:
        """Learn what the run has. If a step was made anew, the newest counts."""
        for row in wandb.Api().run(self._run.path).scan_history(keys=["step", "time"]):
            step, moment_ms = int(row["step"]), round(row["time"] * 1000)
            self._known_ms[step] = max(moment_ms, self._known_ms.get(step, 0))

    def write(self, step: Step, tokens: int) -> None:
        if round(step.committed_unix_s * 1000) <= self._known_ms.get(step.step, -1):
            return
        self._run.log({"step": step.step, "time": _moment_s(step)} | scalars(step, tokens))

    def flush(self) -> None:
        """It sends by itself."""

    def close(self, ended: JobState | None = None) -> None:
        """No run waits to be continued, so a run of a job that goes on is finished too."""
        self._run.finish(exit_code=WANDB_EXIT_CODES.get(ended, 0) if ended else 0)


def _sqlite_uri(folder: Path) -> str:
    """MLflow takes a database only as the text of a URL, and its versions read what is quoted there differently."""
    path = folder.absolute() / "mlflow.db"
    if found := set(str(path)) & set("?%#"):
        raise InvalidConfig(
            f"MLflow keeps no database in {folder.absolute()}: {' '.join(sorted(found))} is no part of a name for it",
            hint="choose another folder, or name a server in MLFLOW_TRACKING_URI",
        )
    return f"sqlite:///{path}"


TRACKERS: Mapping[str, Callable[[Job, Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def scalars(step: Step, tokens: int) -> dict[str, float]:
    """What is known of a step, by tag; what is not finite is left out."""
    values = {
        "train/loss": step.loss,
        "train/gradient_norm": math.nan if step.skipped else step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/skipped": float(step.skipped),
        ALWAYS_WRITTEN: float(tokens),
        "validation/loss": step.evaluation_loss,
    }
    return {tag: value for tag, value in values.items() if math.isfinite(value)}


def _moment_s(step: Step) -> float:
    return step.committed_unix_s or time.time()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The values of a job file by their dotted keys, as text."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": str(value)}
    return flat


@contextmanager
def _installed(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"this needs the Python package {error.name}", hint=f'install it with: pip install "swarm-stages[{extra}]"'
        ) from None


@contextmanager
def _taken(place: str) -> Iterator[None]:
    """Around calls of another's client, which has errors of its own."""
    try:
        yield
    except Exception as error:
        raise InvalidConfig(
            f"{place} does not take it: {first_line(error)}", hint="see to what its own variables and logins say"
        ) from error
