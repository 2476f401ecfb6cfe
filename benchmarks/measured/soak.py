"""Whether anything grows: many small jobs, one after the other, on one fleet that is never started again.

    python -m benchmarks.measured.soak [--jobs 100] [--keep 10] [--virtual-hours 24]

A scheduler with its own broker and two stage servers train one job after the other; of those that have ended, the last
`--keep` stay and the rest is removed, as `--keep-jobs` does by age. Every tenth job the table has a line: memory, open
files, threads, and what lies in the scheduler's folder and on its page of metrics. Exit status 1 if one of them grew by
more than a tenth, and by more than its slack, from the second line to the last: the first jobs load what stays.

Then the simulated system lives through a day, with a job every hour, in this process: its objects are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import structlog

from swarm.data.corpus import tokenise
from swarm.data.tokenizer import ByteTokenizer
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster
from tests.support.scenes import SavingTask, play
from tests.support.simulated import Rig, small_spec, write_text

EVERY = 10
SETTLES_S = 3.0  # what a job has left behind goes within this
# What may come and go: an allocator's arena in MB, a few files, a thread pool, a write-ahead log, one series per job.
SLACK = {"scheduler MB": 16, "servers MB": 32, "files": 12, "threads": 6, "folder MB": 8, "metrics kB": 40}


def measure(cluster: Cluster, folder: Path) -> dict[str, float]:
    scheduler = psutil.Process(cluster.scheduler.child.pid)
    servers = [psutil.Process(server.child.pid) for server in cluster.servers.values()]
    with urllib.request.urlopen(f"http://{cluster.scheduler.ready['http']}/metrics", timeout=10) as page:
        scraped = page.read()
    return {
        "scheduler MB": scheduler.memory_info().rss / 1e6,
        "servers MB": sum(server.memory_info().rss for server in servers) / 1e6,
        "files": sum(process.num_fds() for process in [scheduler, *servers]),
        "threads": sum(process.num_threads() for process in [scheduler, *servers]),
        "folder MB": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6,
        "metrics kB": len(scraped) / 1e3,
    }


def grown(first: dict[str, float], last: dict[str, float]) -> list[str]:
    """The names of those that grew by more than a tenth and their slack."""
    return [name for name, slack in SLACK.items() if last[name] - first[name] > max(slack, first[name] / 10)]


def soak(jobs: int, keep: int) -> list[dict[str, float]]:
    """What was measured behind each tenth job."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = small_spec(write_text(folder), pipeline__stages=2, training__steps=10)
        manifest = tokenise(spec, folder / "tokens")
        fleet = Cluster(folder, broker="embedded")
        fleet.before_scheduler = ("env",)  # processes of their own: a forked one shares memory with this one
        fleet.before_servers = [("env",)] * 2
        with fleet as cluster:
            cluster.add_servers(2)
            ended: list[str] = []
            print("jobs  seconds  " + "  ".join(SLACK))
            for number in range(1, jobs + 1):
                began_s = time.monotonic()
                job = cluster.submit(spec, manifest).id
                view = cluster.wait(job)
                took_s = time.monotonic() - began_s
                if view.state != "succeeded":
                    raise SystemExit(f"job {number} is {view.state}: {view.reason}\n{cluster.tails()}")
                ended.append(job)
                if len(ended) > keep:
                    cluster.jobs.Remove(pb.JobRequest(job=ended.pop(0)), timeout=60)
                if number % EVERY == 0:
                    time.sleep(SETTLES_S)
                    lines.append(measure(cluster, folder / "scheduler"))
                    cells = "  ".join(f"{lines[-1][name]:{len(name)}.1f}" for name in SLACK)
                    print(f"{number:4}  {took_s:7.1f}  {cells}", flush=True)
    return lines


def live(hours: int) -> list[int]:
    """How many objects there are at the end of each hour of a simulated day; an ended job stays for two hours."""
    counts = []

    async def act(rig: Rig) -> None:
        ended = []
        for hour in range(1, hours + 1):
            job = await rig.jobs.submit(task.spec, task.tokens.of_job(), ByteTokenizer().tokenizer_files())
            await rig.finished(job)
            ended.append(job)
            await asyncio.sleep(3600 - asyncio.get_running_loop().time() % 3600)
            if len(ended) > 2:
                await rig.jobs.removal.remove(ended.pop(0))
            gc.collect()
            counts.append(len(gc.get_objects()))
            print(f"{hour:4}  {counts[-1]:7}", flush=True)

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as name:
        task = SavingTask.make(Path(name))
        print("hour  objects")
        play(task.tokens, 4, act, limit_s=3600.0 * (hours + 1))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--keep", type=int, default=10)
    parser.add_argument("--virtual-hours", type=int, default=24)
    options = parser.parse_args()
    lines = soak(options.jobs, options.keep)
    names = grown(lines[1], lines[-1]) if len(lines) > 2 else []
    counts = live(options.virtual_hours)
    if len(counts) > 4 and counts[-1] > 1.01 * counts[3]:
        names.append("objects")
    if names:
        print(f"grew: {', '.join(names)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
