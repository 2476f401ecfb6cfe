"""A stage server process between jobs: what an ended job took is given back to the system."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from swarm.data.corpus import tokenise
from tests.support.processes import Cluster
from tests.support.simulated import small_spec, write_text

JOBS = 5
GROWTH_BYTES_MAX = 100 << 20  # from the first job to the last; each of the four after it would have left some 60 MB
IDLE_S_MAX = 60.0


def test_five_jobs_one_after_the_other_leave_no_more_behind_than_one(tmp_path: Path) -> None:
    spec = small_spec(
        write_text(tmp_path),
        config__hidden_size=128,
        config__intermediate_size=512,
        data__sequence_length=32,
        training__steps=10,
        training__global_batch_sequences=4,
    )
    manifest = tokenise(spec, tmp_path / "tokens")
    held_bytes: list[int] = []
    with Cluster(tmp_path) as cluster:
        cluster.before_servers = [("env",)]  # started anew: a forked one shares its imports, and memory with them
        (peer,) = cluster.add_servers(1)
        process = psutil.Process(cluster.servers[peer].child.pid)
        for _ in range(JOBS):
            job = cluster.submit(spec, manifest)
            cluster.succeeds(job.id)
            held_bytes.append(least_rss(process))
    assert held_bytes[-1] - held_bytes[0] < GROWTH_BYTES_MAX, [size >> 20 for size in held_bytes]


def least_rss(process: psutil.Process) -> int:
    """The process's memory once it has stopped shrinking."""
    deadline_s = time.monotonic() + IDLE_S_MAX
    least = process.memory_info().rss
    still = 0
    while still < 10 and time.monotonic() < deadline_s:
        time.sleep(0.2)
        now = process.memory_info().rss
        still = 0 if now < least else still + 1
        least = min(least, now)
    return least
