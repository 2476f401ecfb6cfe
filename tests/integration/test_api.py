"""Python programs on a swarm of real processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import swarm
from client.api import Client
from client.cli import run
from swarm.errors import InvalidConfig, JobEnded, NotFound
from tests.support.processes import Cluster
from tests.support.simulated import write_text

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_and_watch.py"
JOB: dict[str, Any] = {
    "name": "small",
    "model": {
        "tokenizer": "byte",
        "dtype": "float32",
        "config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
    "data": {"sequence_length": 8, "validation_ratio": 0.1},
    "training": {"steps": 6, "global_batch_sequences": 4, "warmup_steps": 2, "eval_every_steps": 3},
    "pipeline": {"stages": 1},
    "checkpoint": {"every_steps": 3},
}


def test_the_name_of_the_package_loads_the_client_only_for_whoever_asks_for_it() -> None:
    """Stage servers import `swarm` too, and nothing that they stand on may stand on the client."""
    program = "import sys, swarm; print('client' in sys.modules, swarm.Client.__module__)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "client.api"]
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        _ = swarm.Server  # type: ignore[attr-defined]


@pytest.mark.timeout(900)
def test_a_job_is_submitted_watched_resumed_and_fetched_from_python(tmp_path: Path) -> None:
    source = str(write_text(tmp_path))
    with Cluster(tmp_path) as cluster, Client(cluster.address) as client:
        cluster.add_servers(1)
        assert [peer.state for peer in client.peers()] == ["idle"]
        with pytest.raises(InvalidConfig, match=r"training\.stepps"):
            client.submit(JOB, changes={"data.source": source, "training.stepps": 3})
        assert client.jobs(all=True) == []

        job = client.submit(JOB, changes={"data.source": source})
        seen = list(client.watch(job))
        assert (seen[-1].state, seen[-1].step) == ("succeeded", 6)
        assert "source" not in JOB["data"], "what was given stays as it was"
        assert [job.id for job in client.jobs(all=True)] == [job.id]
        assert client.wait(job).weights_sha256 == client.status(job.name).weights_sha256
        assert client.status(job).spec["training"]["steps"] == 6

        steps = client.history(job)
        assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
        assert steps[-1].loss == seen[-1].loss
        assert [step.step for step in steps if math.isfinite(step.evaluation_loss)] == [3, 6]
        assert [record.step for record in client.history(job, every=4)] == [4, 6], "the last one too"
        assert [checkpoint.step for checkpoint in client.checkpoints(job)] == [3, 6]

        pulled = client.pull(job, tmp_path / "model")
        assert (pulled.weights_sha256, (pulled.path / "config.json").exists()) == (seen[-1].weights_sha256, True)
        assert f"| weights sha256 | {pulled.weights_sha256} |" in (pulled.path / "README.md").read_text()
        assert run(["track", job.id, str(tmp_path / "runs"), "--follow", "--scheduler", cluster.address]) == 0
        read: Any = EventAccumulator(str(tmp_path / "runs" / job.id))
        read.Reload()
        assert [scalar.step for scalar in read.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
        assert [scalar.step for scalar in read.Scalars("validation/loss")] == [3, 6]
        assert run(["track", job.id, str(tmp_path / "runs"), "--scheduler", cluster.address]) == 10, "it is there"
        assert any("accepted" in line.message for line in client.logs(job))
        assert client.explain(job).id == job.id

        long = {"name": "long", "data.source": source, "training.steps": 100_000, "checkpoint.every_steps": 0}
        other = client.submit(JOB, changes=long)
        next(view for view in client.watch(other) if view.step >= 2)
        client.cancel(other)
        with pytest.raises(JobEnded):
            client.wait(other)
        (saved,) = client.checkpoints(other)
        client.resume(other, step=saved.step, changes={"training.steps": saved.step + 2})
        assert client.wait(other).step == saved.step + 2
        assert [record.step for record in client.history(other)] == list(range(1, saved.step + 3))
        assert client.remove(other) > 0
        with pytest.raises(NotFound):
            client.status(other)


@pytest.mark.timeout(900)
def test_the_example_for_notebooks_runs(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(1)
        environ = os.environ | {"SWARM_SCHEDULER": cluster.address}
        done = subprocess.run(
            [sys.executable, EXAMPLE], capture_output=True, text=True, env=environ, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:] + cluster.tails()
        assert "running 40/40" in done.stdout or "succeeded 40/40" in done.stdout
        assert (tmp_path / "from-python-model" / "model.safetensors").exists()


@pytest.mark.timeout(900)
def test_the_doctor_finds_what_is_wrong_with_a_swarm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doctor(address: str, *flags: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        """The exit code, and the findings by check."""
        capfd.readouterr()
        code = run(["doctor", "--scheduler", address, "-o", "json", *flags])
        found: dict[str, list[dict[str, Any]]] = {}
        for load in json.loads(capfd.readouterr().out)["data"]:
            found.setdefault(load["check"], []).append(load)
        return code, found

    with Cluster(tmp_path, "--grace", "600") as cluster:  # who is stopped is suspect for as long as it is looked for
        peer = cluster.add_servers(1)[0]
        (tmp_path / "bad.toml").write_text("[model]\n")
        code, found = doctor(cluster.address, "--bundle", str(tmp_path / "bundle.zip"))
        assert code == 0, found
        texts = {check: " ".join(finding["text"] for finding in some) for check, some in found.items()}
        assert "1 of 1 are idle or at work" in texts["stage servers"]
        assert "this machine reaches 1 of 1" in texts["way to stage servers"]
        assert "its database takes writes" in texts["scheduler"]
        assert found["bandwidth"][0]["numbers"]["up_bytes_per_s"] > 1e4
        assert abs(found["clock"][0]["numbers"]["ahead_s"]) < 30
        assert found["certificate"][0]["verdict"] == "ok"
        assert "torch" in texts["device"]
        monkeypatch.setattr("client.doctor.probes._torch", str)  # it was looked at above, and each look takes seconds
        with zipfile.ZipFile(tmp_path / "bundle.zip") as bundle:
            assert json.loads(bundle.read("peers.json"))[0]["id"] == peer
        code, found = doctor(cluster.address, "--job", str(tmp_path / "bad.toml"), "--broker", "mqtt://127.0.0.1:1")
        assert code == 1
        failing = {check for check, some in found.items() if any(finding["verdict"] == "failed" for finding in some)}
        assert failing == {"job file", "broker"}
        cluster.servers[peer].kill(signal.SIGSTOP)
        deadline_s = time.monotonic() + 600
        while not any(check["verdict"] == "warning" for check in doctor(cluster.address)[1]["stage servers"]):
            assert time.monotonic() < deadline_s
        cluster.servers[peer].kill(signal.SIGCONT)
    code, found = doctor(cluster.address)
    assert (code, found["scheduler"][0]["verdict"]) == (1, "failed")
    assert found["scheduler"][0]["hint"].startswith("start one with: swarm up")
    assert doctor("no-such-host.invalid:7950")[1]["name"][0]["verdict"] == "failed"
