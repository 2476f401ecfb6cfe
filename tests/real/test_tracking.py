"""MLflow and Weights & Biases take the steps of a job, as they are installed by whoever wants them."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# What `swarm track` does once it knows the job: two steps, then a rollback that makes the second anew, and a third if
# the job ended.
WRITE = """
import os, sys
from pathlib import Path
from client.records import Job, Step
from client.tracking import TRACKERS
from swarm.errors import SwarmError
from swarm.types import JobState
created_unix_s = float(os.environ.get("CREATED", "900"))
job = Job(id="demo-1", created_unix_s=created_unix_s, spec_json='{"training": {"steps": 3}, "name": "demo"}')
try:
    tracker = TRACKERS[sys.argv[1]](job, Path(sys.argv[2]))
except SwarmError as error:
    sys.exit(f"error[{error.code}]: {error.message}")
tracker.write(Step(step=1, loss=3.25, committed_unix_s=1000.0), 32)
tracker.write(Step(step=2, loss=2.5, committed_unix_s=1001.0), 64)
tracker.flush()
tracker.write(Step(step=2, loss=2.75, evaluation_loss=2.875, committed_unix_s=1002.0), 64)
if sys.argv[3:]:
    tracker.write(Step(step=3, loss=2.0, committed_unix_s=1003.0), 96)
    tracker.close(JobState(sys.argv[3]))
else:
    tracker.flush()
    tracker.close()
print(tracker.place)
"""
READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("swarm").experiment_id])
losses = client.get_metric_history(run.info.run_id, "train/loss")
print(json.dumps({
    "losses": [(one.step, one.value, one.timestamp) for one in losses],
    "last": run.data.metrics, "parameters": run.data.params, "state": run.info.status, "name": run.info.run_name,
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with both packages, which are too large for everybody; the rest is that of the tests."""
    home = tmp_path_factory.mktemp("trackers")
    venv.create(home, with_pip=True, symlinks=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    done = subprocess.run(
        [*install, *extras["mlflow"], *extras["wandb"]], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"the packages cannot be installed:\n{done.stderr[-2000:]}"
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT}\n")
    return home / "bin" / "python"


def call(python: Path, code: str, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "WANDB_", "PYTHON"))}
    command = [str(python), "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=kept | variables, timeout=300
    )


@pytest.mark.timeout(900)
def test_mlflow_has_each_step_the_job_file_and_how_it_ended(python: Path, tmp_path: Path) -> None:
    written = call(python, WRITE, "mlflow", "runs", cwd=tmp_path)
    assert written.returncode == 0, written.stderr[-2000:]
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert written.stdout.strip() == f"MLflow at {uri}"
    read = call(python, READ_MLFLOW, uri, cwd=tmp_path)
    assert read.returncode == 0, read.stderr[-2000:]
    found: dict[str, Any] = json.loads(read.stdout)
    assert sorted(found["losses"]) == [[1, 3.25, 1_000_000], [2, 2.5, 1_001_000], [2, 2.75, 1_002_000]]
    assert (found["last"]["train/loss"], found["last"]["validation/loss"]) == (2.75, 2.875)
    assert found["parameters"] == {"training.steps": "3", "name": "demo"}
    assert (found["state"], found["name"]) == ("RUNNING", "demo-1")
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}, "nothing is left where somebody happened to be"
    for ended, state in (("failed", "FAILED"), ("cancelled", "KILLED"), ("succeeded", "FINISHED")):
        again = call(python, WRITE, "mlflow", "runs", ended, cwd=tmp_path)
        assert again.returncode == 0, again.stderr[-2000:]
        found = json.loads(call(python, READ_MLFLOW, uri, cwd=tmp_path).stdout)
        assert found["state"] == state
        assert len(found["losses"]) == 4, "each step that was made is there once"
        assert found["last"]["train/loss"] == 2.0
    other = call(python, WRITE, "mlflow", "runs", cwd=tmp_path, CREATED="901")
    assert other.returncode == 1
    assert "has a run of another job demo-1: their curves would be drawn as one" in other.stderr


def test_a_server_of_mlflow_that_does_not_answer_is_said(python: Path, tmp_path: Path) -> None:
    nobody = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    refused = call(python, WRITE, "mlflow", "runs", cwd=tmp_path, **nobody)
    assert refused.returncode == 1
    assert "error[E0300]: MLflow at http://127.0.0.1:9 does not take it" in refused.stderr


def test_weights_and_biases_keeps_a_run_to_be_sent_later(python: Path, tmp_path: Path) -> None:
    written = call(python, WRITE, "wandb", "runs", "cancelled", cwd=tmp_path, WANDB_MODE="offline")
    assert written.returncode == 0, written.stderr[-2000:]
    assert written.stdout.strip() == "Weights & Biases, in runs/wandb; send it with: wandb sync"
    (kept,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/run-demo-1.wandb")
    record = kept.read_bytes()
    for part in (b"train/loss", b"validation/loss", b"3.25", b"2.5", b"2.75", b"2.875", b"training.steps"):
        assert part in record
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    again = call(python, WRITE, "wandb", "runs", "cancelled", cwd=tmp_path, WANDB_MODE="offline")
    assert again.returncode == 1
    assert "has steps that were not sent: their curves would be drawn twice" in again.stderr
