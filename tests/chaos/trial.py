"""One trial: a cluster of real processes, faults at seeded moments, and at the end the proof that nothing was lost.

start ── submit ── faults ── job ends ──▶ bitwise, rows, ledger, logs, memory
                     └── did not hit: Void, which is a failure and not a pass
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Self

import torch

from swarm.job.spec import JobSpec
from swarm.reference.trainer import Trained, train_local
from swarm.wire import jobs_pb2 as pb
from tests.chaos.failpoints import HIT
from tests.chaos.harmed_stage_server import MET, write_harm
from tests.chaos.relay import Relay
from tests.support.processes import Cluster, Process
from tests.support.scenes import resolved
from tests.support.services import whole_lines
from tests.support.simulated import Tokens, small_spec, write_text

MICROBATCHES = 8  # per step, in the jobs of trials
COMMIT_S_MAX = 10.0  # after healing, until a step is committed
RSS_BYTES_MAX = 1 << 30  # of one process
FILES_MAX = 256  # open in one process
JOB_S_MAX = 900.0
POLL_S = 0.05
DATABASE = "scheduler.db"


class Void(Exception):
    """The fault did not hit, so that the trial shows nothing."""


class Broken(Exception):
    """A promise was not kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """A committed step, as the database has it."""

    step: int
    epoch: int
    loss: float
    skip: bool
    committed_unix_s: float
    timeline: int


@dataclass(slots=True)
class Job:
    """A job of a trial."""

    id: str
    spec: JobSpec
    tokens: Tokens


_REFERENCES: dict[str, Trained] = {}  # what one process makes of a spec, by its JSON


class Trial(Cluster):
    """A cluster whose processes come to harm."""

    def __init__(self, folder: Path, seed: str, *scheduler_flags: str, broker: str = "none", grace_s: float = 2.0):
        super().__init__(folder, "--grace", f"{grace_s:g}", *scheduler_flags, broker=broker)
        self.rng = Random(seed)
        self.figures: dict[str, Any] = {}
        self.kills: list[tuple[str, float]] = []  # (peer, Unix time)
        self.text = write_text(folder)
        self.microbatches = 0
        self.inside = Path("/")  # where the scheduler's files are seen, if it has a file system of its own

    @classmethod
    def on_a_network(cls, folder: Path, seed: str, relay: Relay) -> Self:
        """A trial at host 0, whose stage servers are at hosts 1, 2, ..."""
        relay.move_here(0)
        trial = cls(folder, seed, grace_s=3.0)
        trial.scheduler_host, *trial.server_hosts = relay.hosts
        trial.before_servers = [relay.at(host) for host in range(1, len(relay.hosts))]
        return trial

    # Running -----------------------------------------------------------------------------------------------------

    def job(self, stages: int, steps: int, **changes: object) -> Job:
        """Submit a tiny reproducible job."""
        shape = {
            "config__num_hidden_layers": 3,
            "pipeline__stages": stages,
            "training__steps": steps,
            "training__global_batch_sequences": 2 * MICROBATCHES,
        }
        spec = small_spec(self.text, **(shape | changes))
        spec = resolved(spec)
        tokens = Tokens.make(self.folder / f"tokens-{time.monotonic_ns()}", spec)
        return Job(self.submit(spec, tokens.manifest).id, spec, tokens)

    def view(self, job: Job) -> Any:
        return self.jobs.Get(pb.JobRequest(job=job.id), timeout=10)

    def until(self, what: str, met: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Wait until `met` says so; gives the seconds, raises Broken when they are too many."""
        started_s = time.monotonic()
        while not met():
            if time.monotonic() - started_s > timeout_s:
                raise Broken(f"{what}: not within {timeout_s:g} s")
            time.sleep(POLL_S)
        return time.monotonic() - started_s

    def until_step(self, job: Job, step: int, timeout_s: float = 120.0) -> None:
        """Wait until the job has committed so many steps; Void if it ended before."""

        def met() -> bool:
            view = self.view(job)
            if view.state in ("failed", "cancelled"):
                raise Broken(f"the job is {view.state}: {view.reason}")
            if view.state == "succeeded" and view.step < step:
                raise Void(f"the job had ended before step {step}")
            return bool(view.step >= step)

        self.until(f"step {step}", met, timeout_s)

    def serving(self, job: Job) -> dict[int, list[str]]:
        """Peers that serve the job now, by stage."""
        pools: dict[int, list[str]] = {}
        for peer in self.peers():
            if peer.job == job.id and peer.state == "serving":
                pools.setdefault(peer.stage, []).append(peer.id)
        return {stage: sorted(pools[stage]) for stage in sorted(pools)}

    def steps_on(self, job: Job, steps: int = 2) -> None:
        """Traffic above a floor before a fault: so many more steps are committed; Void if the job is at its end."""
        view = self.view(job)
        if view.state != "running":
            raise Void(f"before the fault the job was {view.state}: {view.reason}")
        self.until_step(job, view.step + steps)

    def heals(self, job: Job, steps: int = 2) -> float:
        """Seconds until the job commits steps again; Broken if that takes too long."""
        before = self.view(job).step
        return self.until(
            f"a commit after {before} steps", lambda: self._went_on(job, before + steps), steps * COMMIT_S_MAX
        )

    def _went_on(self, job: Job, step: int) -> bool:
        view = self.view(job)
        if view.state in ("failed", "cancelled"):
            raise Broken(f"the job is {view.state}: {view.reason}")
        return bool(view.step >= step or view.state == "succeeded")

    # Faults ------------------------------------------------------------------------------------------------------

    def kill(self, peer: str) -> None:
        """kill -9 a stage server that serves; Void if it does not."""
        if not any(known.id == peer and known.state == "serving" for known in self.peers()):
            raise Void(f"{peer} was not serving when it was to be killed")
        self.kills.append((peer, time.time()))
        self.servers[peer].kill(signal.SIGKILL)
        self.servers[peer].child.wait()

    def respawn(self, peer: str, *flags: str, module: str = "stage_server") -> Process:
        """Start a dead stage server again under its name, without waiting for it."""
        number = list(self.servers).index(peer)
        self.servers[peer].stop()
        self.servers[peer] = self.start_server(number, *flags, module=module)
        return self.servers[peer]

    def state_of(self, peer: str) -> str:
        """How the scheduler sees a peer now."""
        return next((str(known.state) for known in self.peers() if known.id == peer), "unknown")

    def until_idle(self, peers: list[str]) -> None:
        """Wait until peers are there and free."""
        for peer in peers:
            self.servers[peer].wait_ready()
        self.until_free(peers)

    def until_free(self, peers: list[str]) -> None:
        """Wait until the scheduler lists peers as idle."""
        self.until(
            f"{', '.join(peers)} idle",
            lambda: set(peers) <= {peer.id for peer in self.peers() if peer.state == "idle"},
            timeout_s=120.0,
        )

    @contextlib.contextmanager
    def harmed(self, peer: str, **faults: object) -> Iterator[None]:
        """Faults of a harmed_stage_server.py for as long as the block takes; Void if one of them met nothing."""
        file = write_harm(self.folder / f"server-{list(self.servers).index(peer)}", **faults)
        try:
            yield
        finally:
            file.unlink()
        missed = [fault for fault in faults if f"{MET}{fault}\n" not in self.servers[peer].log.read_text()]
        if missed:
            raise Void(f"{peer}: {missed} met nothing")

    @contextlib.contextmanager
    def frozen(self, peer: str) -> Iterator[None]:
        """SIGSTOP for as long as the block takes."""
        self.servers[peer].kill(signal.SIGSTOP)
        try:
            yield
        finally:
            self.servers[peer].kill(signal.SIGCONT)

    def until_hit(
        self, process: Process, point: str, timeout_s: float = 90.0, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until a process has died at its failpoint; Void if it does not. `meanwhile` keeps it at work."""

        given_up_s = time.monotonic() + timeout_s
        while process.child.poll() is None:
            if time.monotonic() > given_up_s:
                raise Void(f"the failpoint {point} was not hit")
            meanwhile()
            time.sleep(POLL_S)
        if f"{HIT}{point}\n" not in process.log.read_text():
            raise Broken(f"{process.log.name} ended otherwise than at {point}")

    # Proof -------------------------------------------------------------------------------------------------------

    def rows(self, job: Job) -> list[Row]:
        """The commit rows of a job: of a step that was trained again after a rollback, the one of the last timeline."""
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            found = database.execute(
                "select step, epoch, loss, skip, committed_unix_s, timeline from commits where job = ?"
                " order by step, timeline",
                (job.id,),
            )
            rows = [Row(step, epoch, loss, bool(skip), at_s, line) for step, epoch, loss, skip, at_s, line in found]
        return list({row.step: row for row in rows}.values())

    @property
    def database(self) -> Path:
        """The scheduler's database, or a copy of the one in a file system of its own: SQLite follows no such links."""
        if self.inside == Path("/"):
            return self.folder / "scheduler" / DATABASE
        copies = self.folder / "copies"
        copies.mkdir(exist_ok=True)
        for path in (self.inside / self.folder.relative_to("/") / "scheduler").glob(f"{DATABASE}*"):
            shutil.copyfile(path, copies / path.name)
        return copies / DATABASE

    def proves(self, job: Job, *, timeout_s: float = JOB_S_MAX, rollbacks: int = 0) -> list[Row]:
        """The job ends with the weights of one process; every step counted once; nothing else went wrong."""
        view = self.wait(job.id, timeout_s)
        if view.state != "succeeded":
            raise Broken(f"the job is {view.state}: {view.reason}")
        rows = self.rows(job)
        if rows and rows[-1].timeline != rollbacks:
            raise Broken(f"the job was rolled back {rows[-1].timeline} times, not {rollbacks}")
        key = job.spec.model_dump_json()
        if key not in _REFERENCES:
            torch.set_num_threads(1)
            _REFERENCES[key] = train_local(job.spec, job.tokens.batches(job.spec), device=torch.device("cpu"))
        expected = _REFERENCES[key]
        steps, per_step = job.spec.training.steps, job.spec.training.microbatches
        if [row.step for row in rows] != list(range(steps)):
            raise Broken(f"the commit rows are not steps 0 to {steps - 1}, each once")
        wrong = next((row.step for row, loss in zip(rows, expected.losses, strict=True) if row.loss != loss), None)
        if wrong is not None:
            raise Broken(f"the loss of step {wrong} is {rows[wrong].loss!r}, not {expected.losses[wrong]!r}")
        if view.weights_sha256 != expected.sha256:
            raise Broken("the weights are not those of one process")
        if view.microbatches_committed != steps * per_step:
            raise Broken(f"{view.microbatches_committed} microbatches were committed, not {steps * per_step}")
        if sorted(row.epoch for row in rows) != [row.epoch for row in rows]:
            raise Broken("epochs fall")
        self.microbatches += steps * per_step
        self.clean()
        return rows

    def clean(self) -> None:
        """No traceback in any log, no violation in the ledger, no process over its bounds."""
        for path in sorted(self.folder.glob("*.log")):
            if "Traceback (most recent call last)" in (text := path.read_text(errors="replace")):
                where = text.index("Traceback (most recent call last)")
                raise Broken(f"a traceback in {path.name}: {text[max(0, where - 300) : where + 1500]}")
        violations = sum(self.metric("swarm_ledger_violations_total").values())
        if violations:
            raise Broken(f"{violations:g} ledger violations")
        for name, process in [*self.servers.items(), ("scheduler", self.scheduler)]:
            if process.child.poll() is None:
                self._within_bounds(name, process.child.pid)

    def _within_bounds(self, name: str, pid: int) -> None:
        status = Path(f"/proc/{pid}/status").read_text()
        rss_bytes = int(status.partition("VmHWM:")[2].split()[0]) << 10
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        self.figures["rss_mib_max"] = max(self.figures.get("rss_mib_max", 0), rss_bytes >> 20)
        if rss_bytes > RSS_BYTES_MAX or files > FILES_MAX:
            raise Broken(f"{name} has {rss_bytes >> 20} MiB and {files} open files")

    def metric(self, name: str) -> dict[str, float]:
        """The scheduler's series of one name: labels to value."""
        with urllib.request.urlopen(f"http://{self.scheduler.ready['http']}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = {}
        for line in lines:
            if line.startswith((f"{name}{{", f"{name} ")):
                labels, _, value = line.rpartition(" ")
                found[labels[len(name) :]] = float(value)
        return found

    def said(self, process: Process, words: str, since_unix_s: float = 0.0) -> list[float]:
        """When a process logged something, Unix seconds."""
        times_s = (_unix_s(entry["ts"]) for entry in entries(process.log, words))
        return [at_s for at_s in times_s if at_s >= since_unix_s]

    def rerouted_s(self) -> list[float]:
        """Seconds from each kill -9 until the peer's work was given to others, by the scheduler's log.

        The line is written in the same breath as the routes: what follows a lost session is one decision.
        """
        times = []
        for peer, at_s in self.kills:
            said = self.said(self.scheduler, f"{peer} (stage", at_s - 0.001)
            suspect = [suspected_s for suspected_s in said if suspected_s >= at_s - 0.001]
            if not suspect:
                raise Broken(f"the scheduler's log does not say that {peer} is suspect")
            times.append(max(0.0, suspect[0] - at_s))
        return times


def entries(log: Path, words: str = "") -> Iterator[dict[str, Any]]:
    """The entries of a log with some words; without what a process was killed in the middle of."""
    for line in whole_lines(log):
        if words in line and line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


class Work:
    """Jobs of one spec, one after the other, so that one is always at work; one reference serves all of them."""

    def __init__(self, trial: Trial, stages: int, steps: int, **changes: object) -> None:
        self._trial = trial
        self._shape = (stages, steps, changes)
        self._job: Job | None = None
        self.whole: dict[int, int] = {}  # replicas per stage, as the first job starts

    def at_work(self, steps_left: int = 20) -> Job:
        """A job that runs and has so many steps to go; those that came to their end before are proven."""
        trial, (stages, steps, changes) = self._trial, self._shape
        if self._job is not None:
            view = trial.view(self._job)
            if view.state == "running" and view.step + steps_left <= steps:
                return self._job
            self.prove()
        self._until_free()
        self._job = trial.job(stages, steps, **changes)
        trial.until_step(self._job, 2)
        if not self.whole:  # later somebody may have died by now
            self.whole = {stage: len(pool) for stage, pool in trial.serving(self._job).items()}
        return self._job

    def _until_free(self) -> None:
        """Wait until all are idle but those who died meanwhile, at a failpoint."""
        trial = self._trial

        def met() -> bool:
            alive = {peer for peer, process in trial.servers.items() if process.child.poll() is None}
            return alive <= {peer.id for peer in trial.peers() if peer.state == "idle"}

        trial.until("all that live are idle", met, 120.0)

    def until_whole(self) -> float:
        """Seconds until every pool has as many replicas as at the first start, or the job is at its end."""
        job, trial = self._job, self._trial
        assert job is not None

        def met() -> bool:
            pools = {stage: len(pool) for stage, pool in trial.serving(job).items()}
            return pools == self.whole or trial.view(job).state != "running"

        return trial.until("every pool whole", met, 120.0)

    def prove(self) -> None:
        """The job at work ends as it must."""
        if self._job is not None:
            self._trial.proves(self._job)
            self._job = None


def _unix_s(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of all lies; the nearest one, nothing between."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def gaps_s(rows: list[Row]) -> list[float]:
    """Seconds between commits that follow one another."""
    return [after.committed_unix_s - before.committed_unix_s for before, after in pairwise(rows)]
