"""Strangers flood every port of a swarm while a job trains: it goes on, and who asks is answered."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from swarm.wire import jobs_pb2 as pb
from tests.support.floods import flooding
from tests.support.processes import Cluster
from tests.support.scenes import Task

RATE = 100.0  # connections a second, at each of five ports
ANSWER_S_MAX = 60.0
STEPS = 60


@pytest.mark.timeout(900)
def test_a_job_trains_to_the_weights_of_one_process_while_strangers_flood_all_ports(tmp_path: Path) -> None:
    """Handshakes that never end, bytes that mean nothing and slow requests, at scheduler and stage servers alike."""
    task = Task.make(tmp_path, training__steps=STEPS)
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(2)
        ready = cluster.scheduler.ready
        ports = [ready["address"], ready["joins"], ready["http"], *(peer.address for peer in cluster.peers())]
        with flooding(RATE, ports):
            job = cluster.submit(task.spec, task.tokens.manifest)
            view, probed = job, 0
            while view.state not in ("succeeded", "failed", "paused", "cancelled") or not probed:
                with contextlib.suppress(OSError):  # whoever connects and is slow to ask makes room for others
                    probed += cluster.scheduler.probe() in (200, 503)
                view = cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=ANSWER_S_MAX)
                time.sleep(0.1)
        assert view.state == "succeeded", f"{view.reason}\n{cluster.tails()}"
        assert view.weights_sha256 == task.sha256
        logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert "Traceback" not in logs
        assert len(logs) < 1 << 20, "strangers do not fill the disk with logs"
