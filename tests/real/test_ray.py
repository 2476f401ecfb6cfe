"""A job on a Ray cluster of two nodes: one is lost, and another comes in its place."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from swarm.process.children import dying_with_parent
from tests.support.services import free_port, until
from tests.support.simulated import write_text

STEPS = 300  # more than a fast machine makes between its first checkpoint and the loss of a node
JOB = f"""\
name = "tiny"
[model]
tokenizer = "byte"
dtype = "float32"
config = {{ hidden_size = 16, intermediate_size = 32, num_hidden_layers = 2, num_attention_heads = 2 }}
[data]
source = "text.txt"
sequence_length = 8
[training]
steps = {STEPS}
warmup_steps = 1
global_batch_sequences = 4
reproducible = true
[pipeline]
stages = 2
[checkpoint]
every_steps = 10
"""


def swarm(folder: Path, *words: str) -> subprocess.Popen[str]:
    with (folder / f"{words[0]}.err").open("w") as err:
        command = [sys.executable, "-m", "client", *words]
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=err, text=True)


def stage_servers() -> list[psutil.Process]:
    """Those that run below this process: the nodes are its children."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "stage_server" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def actors_are_as_urgent_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has them give way to whatever else computes, and another test does beside this one."""
    monkeypatch.setenv("RAY_worker_niceness", "0")


@pytest.fixture(autouse=True)
def nobody_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that lies in ~/.ray made Ray's server for clients ask for one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Ray on loopback with room for one stage server, so that each further one needs a further node."""
    flags = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=flags)
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def client_of_ray(tmp_path: Path) -> Iterator[str]:
    """Where Ray Client reaches a cluster of one node on loopback, as from a machine that is no part of it."""
    port = free_port()
    head = ["start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1", "--num-cpus=1"]
    head += [f"--ray-client-server-port={port}", "--include-dashboard=false"]
    with (tmp_path / "ray.log").open("w") as log:
        command = dying_with_parent([sys.executable, "-m", "ray.scripts.scripts", *head])
        ray = subprocess.Popen(command, stdout=log, stderr=log)

    def listens() -> bool:
        """The server for clients is a process of its own, which listens some time after Ray says that it started."""
        assert ray.poll() is None, (tmp_path / "ray.log").read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def serves() -> bool:
        """A client that comes in the first second may get no server of its own, and Ray gives it up after 40 s."""
        program = "import ray, sys; ray.init(sys.argv[1], logging_level='CRITICAL')"
        command = [sys.executable, "-c", program, f"ray://127.0.0.1:{port}"]
        return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0

    try:
        until("Ray's server for clients listens", listens, timeout_s=300.0)
        until("Ray serves a client", serves, timeout_s=300.0)
        yield f"ray://127.0.0.1:{port}"
    finally:
        ray.terminate()  # and with it all that it has started
        ray.wait(timeout=60)


def add_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")


@pytest.mark.timeout(900)
def test_a_job_outlives_a_node_of_its_cluster_with_the_bits_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    node = add_node(cluster)
    flags = ("--stages", "2", "--replicas", "1", "--port", "0", "--data-dir", "data", "--job", "job.toml")
    up = swarm(tmp_path, "up", "--ray", cluster.address, *flags)
    alone = swarm(tmp_path, "train-local", "job.toml", "--threads", "1", "--out", "alone")
    try:

        def said() -> str:
            text = (tmp_path / "up.err").read_text()
            assert "Traceback" not in text, text
            assert up.poll() is None or "succeeded" in text, text
            return text

        def has_saved() -> bool:
            said()
            return any((tmp_path / "data" / "scheduler" / "jobs").glob("*/checkpoints/latest"))

        until("the job has a checkpoint", has_saved, timeout_s=300.0)
        assert len(stage_servers()) == 2
        assert "succeeded" not in said(), "it is too late to lose a node"
        cluster.remove_node(node, allow_graceful=False)
        until("its stage server is gone", lambda: len(stage_servers()) == 1)
        add_node(cluster)
        out, _ = up.communicate(timeout=600)
        assert up.returncode == 0, said()
        assert alone.communicate(timeout=300)[0].split()[1] in said()
        assert out.startswith("tiny-")
        assert stage_servers() == []
        assert not list(Path(tempfile.gettempdir()).glob("swarm-ray-*")), "a private key stayed behind"
    finally:
        for process in (up, alone):
            process.kill()
            process.wait()


@pytest.mark.timeout(900)
def test_a_cluster_that_is_reached_through_ray_client_trains_a_job(client_of_ray: str, tmp_path: Path) -> None:
    """It trained, and then printed a traceback of Ray's."""
    write_text(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.replace(f"steps = {STEPS}", "steps = 3").replace("stages = 2", "stages = 1"))
    flags = ("--stages", "1", "--replicas", "1", "--port", "0", "--data-dir", "data", "--job", "job.toml")
    up = swarm(tmp_path, "up", "--ray", client_of_ray, *flags)
    try:
        out, _ = up.communicate(timeout=600)
        said = (tmp_path / "up.err").read_text()
        assert up.returncode == 0, said
        assert out.startswith("tiny-")
        assert "Traceback" not in said, said
        assert stage_servers() == []
    finally:
        up.kill()
        up.wait()
