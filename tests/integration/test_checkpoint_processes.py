"""Pause, resume at another number of stages, list, verify, pull and start anew, with real processes and the command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from client.cli import run
from swarm.job.resolve import Basis, resolve
from swarm.reference.__main__ import train_local as train_local_command
from swarm.reference.trainer import train_local
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster
from tests.support.simulated import Tokens, small_spec, write_text


@dataclass(frozen=True, slots=True)
class Said:
    """What a command gave and wrote."""

    code: int
    out: str
    err: str


@pytest.mark.timeout(900)
def test_a_job_is_paused_and_goes_on_at_another_number_of_stages_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_text(tmp_path)
    draft = small_spec(source, pipeline__stages=2, training__steps=40, checkpoint__every_steps=10)
    spec = resolve(draft, Basis(257))
    tokens = Tokens.make(tmp_path / "data", spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    job_file = tmp_path / "job.toml"
    job_file.write_text(
        f'''name = "rig"
[model]
family = "llama"
dtype = "float32"
[model.config]
num_hidden_layers = 3
hidden_size = 32
intermediate_size = 64
num_attention_heads = 4
num_key_value_heads = 2
[data]
source = "{source}"
sequence_length = 16
[training]
steps = 40
global_batch_sequences = 12
microbatch_sequences = 2
warmup_steps = 1
learning_rate = 1e-2
reproducible = true
fixed_point_bits = 24
[pipeline]
stages = 2
compression = "none"
overlap = 2
[checkpoint]
every_steps = 10
'''
    )
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(2)

        def swarm(*arguments: str) -> Said:
            capsys.readouterr()
            code = run([*arguments, "--scheduler", cluster.address])
            return Said(code, *capsys.readouterr())

        def data(*arguments: str) -> Any:
            done = swarm(*arguments, "-o", "json")
            return json.loads(done.out.splitlines()[-1])["data"]

        job = cluster.submit(spec, tokens.manifest).id
        cluster.wait_for_step(job, 12)
        cluster.jobs.Pause(pb.JobRequest(job=job), timeout=60)  # the command takes longer to start than the job to end
        paused = swarm("pause", job)
        assert paused.code == 0, paused.err
        assert f"go on with: swarm resume {job}" in paused.err
        view = data("status", job)
        assert (view["state"], view["step"] >= 12) == ("paused", True), cluster.tails()
        assert view["checkpoint_step"] == view["step"]

        listed = data("checkpoints", job, "--verify")
        assert {10, view["step"]} <= {row["step"] for row in listed}
        assert all(row["verified"] and row["optimizer"] for row in listed)

        # A scheduler that starts again knows the paused job still.
        cluster.restart_scheduler()
        resumed = swarm("resume", job, "--set", "pipeline.stages=1", "--detach")
        assert resumed.code == 0, resumed.err
        ended = cluster.succeeds(job)
        assert ended.weights_sha256 == expected.sha256
        assert len(ended.stages) == 1
        refused = swarm("resume", job)
        assert refused.code == 10
        assert "--resume-from" in refused.err

        # The same bits again: from a folder of this machine, by a new job and in one process.
        home = tmp_path / "scheduler" / "jobs" / job / "checkpoints"
        step = max(row["step"] for row in listed)
        folder = next(path for path in home.iterdir() if path.name == f"step-{step:08d}")
        again = swarm("submit", str(job_file), "--resume-from", str(folder))
        assert again.code == 0, again.err
        assert f"weights sha256 {expected.sha256}" in again.err
        capsys.readouterr()
        train_local_command(job_file, tmp_path / "local", threads="1", device="cpu", resume_from=folder)
        assert f"weights_sha256 {expected.sha256}" in capsys.readouterr().out
        assert {path.name for path in (tmp_path / "local-checkpoints").iterdir()} == {
            "latest",
            *(f"step-{due:08d}" for due in (10, 20, 30) if due > step),
        }

        # Its model at an earlier step, in another precision.
        pulled = swarm("pull", job, str(tmp_path / "model"), "--step", str(step), "--dtype", "bfloat16")
        assert pulled.code == 0, pulled.err
        kept = load_file(folder / "model" / "model-00001-of-00002.safetensors")
        got = {}
        for path in (tmp_path / "model").glob("*.safetensors"):
            got |= load_file(path)
        assert all(torch.equal(got[name], tensor.bfloat16()) for name, tensor in kept.items())
        assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"

        # A damaged one is named.
        (folder / "optimizer" / "layer-0001.safetensors").write_bytes(b"")
        found = swarm("checkpoints", job, "--verify")
        assert found.code == 1
        assert "layer-0001.safetensors" in found.out
        assert swarm("pull", job, str(tmp_path / "other"), "--step", "7").code == 7
