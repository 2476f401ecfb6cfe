"""A job goes on to the bits of one process while all that proves who is who changes under it."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from client.cli import run
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.reference.trainer import StepReport, sha256_of, train_local
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster, Process
from tests.support.services import until
from tests.support.simulated import Tokens, small_spec, write_text

LIFE_S = 9.0  # of a certificate
PHASE_S_MAX = 120.0
STEPS = 100_000  # more than it makes meanwhile, on any machine
SAVES = 20


class Reached(Exception):
    """One process is as far as the swarm was."""


def weights_of_one_process(spec: JobSpec, tokens: Tokens, steps: int) -> str:
    """The hash of its weights after so many steps of the job."""
    found = ""

    def look(islands: Sequence[Sequence[Stage]], report: StepReport) -> None:
        nonlocal found
        if report.step + 1 == steps:
            found = sha256_of(islands[0])
            raise Reached

    with contextlib.suppress(Reached):
        train_local(spec, tokens.batches(spec), device=torch.device("cpu"), on_commit=look)
    return found


class Watch:
    """A job at work, and the authority meanwhile as `swarm ca` shows it."""

    def __init__(self, cluster: Cluster, job: str, capfd: pytest.CaptureFixture[str]) -> None:
        self._cluster = cluster
        self._job = job
        self._capfd = capfd

    def swarm(self, *words: str) -> tuple[int, Any]:
        self._capfd.readouterr()
        code = run([*words, "--scheduler", self._cluster.address, "-o", "json", "-q"])
        told = json.loads(self._capfd.readouterr().out)
        return code, told.get("data", told.get("error"))

    def goes_on(self, steps: int = 5) -> None:
        """Some more steps are committed, and the job still runs."""
        self.redial()  # this test's own certificate changes as well
        view = self._cluster.jobs.Get(pb.JobRequest(job=self._job), timeout=60)
        self._cluster.wait_for_step(self._job, view.step + steps)
        view = self._cluster.jobs.Get(pb.JobRequest(job=self._job), timeout=60)
        assert view.state == "running", f"{view.state} {view.reason}\n{self._cluster.tails()}"

    def next_checkpoint(self) -> Any:
        """The first one of a step that is not made yet."""
        self.redial()
        step = self._cluster.jobs.Get(pb.JobRequest(job=self._job), timeout=60).step

        def saved() -> Any:
            found = self._cluster.jobs.Checkpoints(pb.CheckpointsRequest(job=self._job), timeout=60).checkpoints
            return min((one for one in found if one.step > step), key=lambda one: one.step, default=None)

        return until("a checkpoint", saved)

    def until_phase(self, phase: str) -> None:
        deadline_s = time.monotonic() + PHASE_S_MAX
        while self.swarm("ca", "show")[1]["phase"] != phase:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)

    def redial(self) -> None:
        self._cluster.channel.close()
        self._cluster.redial()


def start_relay(cluster: Cluster, number: int) -> Process:
    relay = Process.start(
        cluster.folder / f"relay-{number}.log",
        "swarm.relay",
        *("--listen", "127.0.0.1:0", "--scheduler", cluster.address, "--http-port", "none"),
        *("--data-dir", str(cluster.folder / f"relay-{number}")),
    )
    relay.wait_ready()
    return relay


@pytest.mark.timeout(900)
def test_the_authority_rotates_while_a_relay_dies_a_replica_is_killed_and_a_peer_is_revoked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Certificates of nine seconds; a stage of which two are reached through relays only, so with TLS on loopback."""
    spec = small_spec(
        write_text(tmp_path),
        pipeline__stages=2,
        training__steps=STEPS,
        limits__min_replicas=1,
        checkpoint__every_steps=SAVES,
    )
    spec = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    tokens = Tokens.make(tmp_path / "tokens", spec)
    relays: list[Process] = []
    with Cluster(tmp_path, "--grace", "8", "--certificate-life", f"{LIFE_S / 3600:.6f}") as cluster:
        try:
            relays += [start_relay(cluster, number) for number in range(2)]
            peers = [*cluster.add_servers(3, "--via-relay"), *cluster.add_servers(2)]
            cluster.redial()
            job = cluster.submit(spec, tokens.manifest)
            watch = Watch(cluster, job.id, capfd)
            watch.goes_on()
            old = watch.swarm("ca", "show")[1]["pins"]
            code, shown = watch.swarm("ca", "rotate")
            assert (code, shown["phase"], shown["pins"][:1]) == (0, "shown", old)
            relays[0].kill(signal.SIGKILL)
            watch.goes_on()

            watch.until_phase("signs")
            cluster.servers[peers[4]].kill()
            watch.goes_on()
            cluster.servers[peers[4]].stop()
            cluster.servers[peers[4]] = cluster.start_server(4)
            cluster.servers[peers[4]].wait_ready()
            relays.append(start_relay(cluster, 2))
            watch.goes_on()

            watch.until_phase("ended")
            assert watch.swarm("identity", "revoke", peers[0], "--reason", "stolen")[0] == 0
            assert cluster.servers[peers[0]].child.wait(timeout=60) == 5
            assert watch.swarm("ca", "retire")[1]["pins"] == shown["pins"][1:]
            watch.goes_on(20)
            log = tmp_path / "server-1.log"
            until("certificates change", lambda: log.read_text().count("certificate renewed") >= 3)
            saved = watch.next_checkpoint()
            assert watch.swarm("cancel", job.id)[0] == 0
            view = cluster.wait(job.id)
            assert view.step >= saved.step
            assert view.microbatches_committed == view.step * spec.training.microbatches
        finally:
            for relay in relays:
                relay.stop()
    assert saved.weights_sha256 == weights_of_one_process(spec, tokens, saved.step)
