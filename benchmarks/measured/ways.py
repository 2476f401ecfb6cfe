"""The ways of training that benchmarks compare, each as real processes: the same job, tokens and first weights.

    Swarm     a scheduler and its stage servers
    Rivals    `benchmarks.baselines.schedules`: one process, or the schedules of torch.distributed.pipelining over gloo

All processes (processes.py) are started once and wait; every `train` trains the job anew. So the ways can take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import psutil

from benchmarks.measured.modelled import Modelled
from benchmarks.processes import Fleet, Hosts
from client.connection import CHUNK_BYTES, Scheduler
from stage_server.options import DEFAULT_SHARE
from swarm.data.corpus import tokenise
from swarm.data.shards import TokenManifest
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, TrainingSection, parse_job, spec_from_json
from swarm.pki.profiles import find_profile
from swarm.wire import jobs_pb2 as pb

HALVED = ("interleaved", "zbv")  # with two stages on each rank
RANKED = ("gpipe", "1f1b", *HALVED)  # with a process per stage and replica
RIVALS = ("local", *RANKED)
READY_S_MAX = 180.0
# Losses of ways that do the same: the same sums in another order, so they differ by rounding.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True)
class Course:
    """One training: when each step ended, and its loss."""

    times_unix_s: Sequence[float]
    losses: Sequence[float]

    def loss_at(self, share: float) -> float:
        """The mean loss of the tenth of the steps that ends at this share of the training."""
        return self._tenth(round(share * len(self.losses)))

    def seconds_to(self, loss: float) -> float | None:
        """From the end of the first step until the last tenth of the steps is no higher on average; None: never."""
        ends = range(len(self.losses) // 10, len(self.losses) + 1)
        stop = next((end for end in ends if end > 1 and self._tenth(end) <= loss), None)
        return None if stop is None else self.times_unix_s[stop - 1] - self.times_unix_s[0]

    def _tenth(self, stop: int) -> float:
        return mean(self.losses[max(0, stop - max(1, len(self.losses) // 10)) : stop])


@dataclass(frozen=True, slots=True)
class Timed:
    """One way in one round."""

    tokens_per_s: float
    step_s: float  # median of the measured steps
    cpu_s_per_step: float  # of all processes together
    loss: float
    weights_sha256: str = ""  # of the swarm's end
    overlap: int = 0  # of the swarm: late microbatches of a step


@dataclass(frozen=True, slots=True)
class Spent:
    """What one process of the swarm did in the measured steps of one round."""

    process: str
    wall_s: float
    cpu_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    averaging_s: float = 0.0


def timed(times_unix_s: Sequence[float], warmup: int, tokens_per_step: int, cpu_s: float, loss: float) -> Timed:
    """Speed after `warmup` steps, from the times at which steps ended; `cpu_s` was spent in those measured."""
    measured = times_unix_s[warmup - 1 :]
    steps_s = [later - earlier for earlier, later in pairwise(measured)]
    return Timed(tokens_per_step * len(steps_s) / sum(steps_s), median(steps_s), cpu_s / len(steps_s), loss)


def _tokens_per_step(spec: JobSpec) -> int:
    return spec.training.global_batch_sequences * spec.data.sequence_length


# The job --------------------------------------------------------------------------------------------------------------


def job_of(
    options: argparse.Namespace,
    folder: Path,
    *,
    config: Mapping[str, object] | None = None,
    training: Mapping[str, object] | None = None,
) -> tuple[JobSpec, TokenManifest]:
    """The resolved job and its tokens: random words, as much text as the steps need.

    `config` and `training` are laid over the keys of these names.
    """
    steps, sequences = options.warmup + options.steps, options.microbatch * options.microbatches
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(500)]
    text = " ".join(rng.choices(words, k=max(20_000, steps * sequences * options.sequence // 4)))
    (folder / "corpus.txt").write_text(text)
    spec = parse_job(
        {
            "name": "bench",
            "model": {
                "dtype": options.dtype,
                "config": {
                    "vocab_size": 512,
                    "hidden_size": options.width,
                    "intermediate_size": 4 * options.width,
                    "num_hidden_layers": options.layers,
                    "num_attention_heads": 4,
                }
                | dict(config or {}),
            },
            "data": {"source": str(folder / "corpus.txt"), "sequence_length": options.sequence},
            "training": {
                "steps": steps,
                "global_batch_sequences": sequences,
                "microbatch_sequences": options.microbatch,
                "schedule": "constant",
                "warmup_steps": 0,
                "lookahead": 0.0,
            }
            | dict(training or {}),
            "pipeline": {"stages": options.stages, "compression": options.compression, "overlap": options.overlap},
            "limits": {"min_replicas": options.replicas},
        }
    )
    return prepared(spec, options.stages, folder)


def prepared(spec: JobSpec, stages: int, folder: Path) -> tuple[JobSpec, TokenManifest]:
    """The spec with every "auto" replaced, and its tokens; `folder` holds what rivals read of them."""
    resolved = resolve(spec, Basis(ByteTokenizer.vocabulary_size, stages=stages))
    (folder / "tokens").mkdir()
    manifest = tokenise(resolved, folder / "tokens")
    assert len(manifest.shards) == 1, "a few steps fit into one shard"
    (folder / "spec.json").write_text(resolved.model_dump_json())
    return resolved, manifest


def changed(spec: JobSpec, **sections: Mapping[str, object]) -> JobSpec:
    """The resolved spec with other values in some sections, resolved again."""
    values = spec.model_dump()
    for section, changes in sections.items():
        values[section] |= changes
    stages = len(spec.pipeline.split)
    return resolve(parse_job(values), Basis(ByteTokenizer.vocabulary_size, stages=stages))


def overlapping(spec: JobSpec, **pipeline: object) -> JobSpec:
    """The resolved job with overlapping steps: as many microbatches late, and as much lookahead, as by default.

    Without lookahead "auto" lets no step overlap.
    """
    lookahead = TrainingSection.model_fields["lookahead"].default
    late = changed(spec, pipeline={"overlap": "auto"} | pipeline, training={"lookahead": lookahead})
    assert late.overlap > 0, "a way with overlap overlaps"
    return late


def narrowed(spec: JobSpec, kind: str, factor: int) -> JobSpec:
    """As `overlapping`, in int8, of a model with narrow places where the stages end."""
    narrow = {"kind": kind, "factor": factor}
    return overlapping(changed(spec, model={"narrow": narrow}), compression="int8")


# Ways -----------------------------------------------------------------------------------------------------------------


class Rivals:
    """The ways that `benchmarks.baselines.schedules` runs: one process for `local`, a process per rank for the others.

    The rank of stage s is at host s + 1, as the swarm's stage server is.
    """

    def __init__(
        self,
        ways: Sequence[str],
        fleet: Fleet,
        folder: Path,
        job: tuple[JobSpec, TokenManifest],
        options: argparse.Namespace,
        hosts: Hosts | None = None,
        modelled: Modelled | None = None,
        device: str = "cpu",
    ) -> None:
        spec, manifest = job
        hosts = hosts or Hosts()
        self._fleet = fleet
        self._tokens_per_step = _tokens_per_step(spec)
        self._local, self._ranks = [], []
        module = "benchmarks.baselines.schedules"
        tokens, spec_json = manifest.shards[0].path, folder / "spec.json"
        common = (str(spec_json), str(tokens), manifest.token_dtype, str(options.threads), device)
        if "local" in ways:
            self._local = [fleet.start("local", module, "local", *common)]
        if set(ways) & set(RANKED):
            halves_json = spec_json
            if set(ways) & set(HALVED):
                halves_json = folder / "halves.json"
                halves = changed(spec, pipeline={"stages": 2 * options.stages, "split": "auto"})
                halves_json.write_text(halves.model_dump_json())
            given = () if modelled is None else modelled.seconds
            world = (str(folder / "rendezvous"), str(options.replicas), str(halves_json), *given)
            self._ranks = [
                fleet.start(
                    f"rank-{rank}",
                    module,
                    "ranks",
                    *common,
                    str(rank),
                    *world,
                    before=hosts.at(rank + 1),
                    GLOO_SOCKET_IFNAME=hosts.device,
                )
                for rank in range(options.stages * options.replicas)
            ]

    def wait_ready(self) -> None:
        for child in (*self._local, *self._ranks):
            assert self._fleet.line(child) == "ready\n"

    def train(self, way: str, warmup: int) -> tuple[Timed, Course]:
        """Train the job anew; a step ends when it has ended in every process."""
        children = self._local if way == "local" else self._ranks
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"{way}\n")
            child.stdin.flush()
        answers = [json.loads(self._fleet.line(child)) for child in children]
        times_unix_s = [max(ended) for ended in zip(*(answer["times_unix_s"] for answer in answers), strict=True)]
        cpu_s = sum(answer["cpu_s"][-1] - answer["cpu_s"][warmup - 1] for answer in answers)
        losses = next(answer["losses"] for answer in answers if answer["losses"])
        found = timed(times_unix_s, warmup, self._tokens_per_step, cpu_s, losses[-1])
        return found, Course(times_unix_s, losses)


class Swarm:
    """A scheduler and its stage servers; at hosts, the scheduler is at host 0, each stage server at the next one."""

    def __init__(
        self,
        fleet: Fleet,
        folder: Path,
        options: argparse.Namespace,
        *,
        device: str = "cpu",
        hosts: Hosts | None = None,
        offers: Sequence[str] = (DEFAULT_SHARE,),
        insecure: bool = False,
        modelled: Modelled | None = None,
    ) -> None:
        """`offers`: the memory that the stage servers of each stage offer, over and over."""
        hosts = hosts or Hosts()
        self._insecure = insecure
        plain = ("--insecure",) if insecure else ()
        program = ("stage_server",) if modelled is None else modelled.stage_server
        self._data_dir = folder / "scheduler"
        self._scheduler = fleet.start(
            "scheduler",
            "scheduler",
            *("--listen", f"{hosts.address(0)}:0", "--http-port", "none", "--broker", "none"),
            *("--data-dir", str(self._data_dir), *plain),
        )
        self._address = json.loads(fleet.line(self._scheduler))["address"]
        self._servers = [
            fleet.start(
                f"server-{number}",
                *program,
                *("--scheduler", self._address, "--listen", f"{hosts.address(number + 1)}:0", "--http-port", "0"),
                *("--threads", str(options.threads), "--device", device),
                *("--stage", str(number % options.stages), "--max-memory", offers[number % len(offers)]),
                *("--data-dir", str(folder / f"server-{number}"), *plain),
                before=hosts.at(number + 1),
            )
            for number in range(options.stages * options.replicas)
        ]
        self._names = [f"stage {number % options.stages}" for number in range(len(self._servers))]
        self._fleet = fleet
        self._sees_metrics = hosts.relay is None  # they are served on the loopback of each host

    def connect(self, spec: JobSpec, manifest: TokenManifest) -> Scheduler:
        """Wait for all processes and upload the tokens; gives the connection, to be closed by the caller."""
        self._http = [json.loads(self._fleet.line(server))["http"] for server in self._servers]
        self._jobs = Scheduler(self._address, 30.0, None if self._insecure else find_profile(self._address))
        deadline_s = time.monotonic() + READY_S_MAX
        while len(self._jobs.peers(state="idle")) < len(self._servers):
            assert time.monotonic() < deadline_s, "the stage servers do not reach the scheduler"
            time.sleep(0.1)
        shard = manifest.shards[0]
        content = shard.path.read_bytes()
        wire = pb.Shard(sha256=shard.sha256, tokens=shard.tokens, size_bytes=shard.size_bytes)
        self._jobs.put_shard(
            wire,
            lambda held: (content[start : start + CHUNK_BYTES] for start in range(held, len(content), CHUNK_BYTES)),
        )
        self._spec, self._tokens_per_step = spec, _tokens_per_step(spec)
        self._request = pb.SubmitRequest(
            spec_json=spec.model_dump_json(),
            shards=[wire],
            token_dtype=manifest.token_dtype,
            vocabulary_size=manifest.vocabulary_size,
            unigram_entropy=manifest.unigram_entropy,
            end_of_text=manifest.end_of_text,
            tokenizer_files=ByteTokenizer().tokenizer_files(),
        )
        return self._jobs

    def train(self, warmup: int, spec: JobSpec | None = None) -> tuple[Timed, list[Spent]]:
        """Train the job anew; a step ends when it is committed. Also what the processes spent after warm-up."""
        found, spent, _ = self.course(warmup, spec)
        return found, spent

    @property
    def pids(self) -> list[int]:
        """The stage servers."""
        return [server.pid for server in self._servers]

    def course(
        self, warmup: int, spec: JobSpec | None = None, look: Callable[[int], None] = lambda step: None
    ) -> tuple[Timed, list[Spent], Course]:
        """The same with every step; `spec` is another job on the same tokens.

        `look` is told how many steps were committed, whenever something changed.
        """
        self._request.spec_json = (spec or self._spec).model_dump_json()
        job = self._jobs.submit(self._request).id
        before: list[Spent] = []
        after: list[Spent] = []
        for view in self._jobs.follow(job, print):
            look(view.step)
            if not before and view.step >= warmup:
                before = self._spent()
            if not after and view.step == view.steps:
                after = self._spent()
        if view.state != "succeeded":
            raise RuntimeError(f"the job {view.state}: {view.reason}")
        spent = [spent_between(early, late) for early, late in zip(before, after, strict=True)]
        # Old weights are not needed, and a run on a small disk should not fail for them.
        shutil.rmtree(self._data_dir / "jobs" / job / "checkpoints", ignore_errors=True)
        cpu_s = sum(process.cpu_s for process in spent)
        course = self._commits(job)
        found = timed(course.times_unix_s, warmup, self._tokens_per_step, cpu_s, view.loss)
        overlap = spec_from_json(self._jobs.get(job).spec_json).overlap
        return replace(found, weights_sha256=view.weights_sha256, overlap=overlap), spent, course

    def _commits(self, job: str) -> Course:
        """From the scheduler's database: what a watcher sees comes later, and may skip a step."""
        database = f"file:{self._data_dir / 'scheduler.db'}?mode=ro"
        with contextlib.closing(sqlite3.connect(database, uri=True)) as connection:
            query = "SELECT committed_unix_s, loss FROM commits WHERE job = ? ORDER BY step"
            rows = connection.execute(query, (job,)).fetchall()
        return Course([at_s for at_s, _ in rows], [loss for _, loss in rows])

    def _spent(self) -> list[Spent]:
        now_s = time.monotonic()
        spent = [Spent("scheduler", now_s, _cpu_s(self._scheduler.pid))]
        for name, server, http in zip(self._names, self._servers, self._http, strict=True):
            text = ""
            if self._sees_metrics:
                with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as reply:
                    text = reply.read().decode()
            compute = r'swarm_stage_compute_seconds_sum\{direction="%s",stage="\d+"\}'
            spent.append(
                Spent(
                    name,
                    now_s,
                    _cpu_s(server.pid),
                    forward_s=sample(text, compute % "forward"),
                    backward_s=sample(text, compute % "backward") + sample(text, compute % "weights"),
                    averaging_s=sample(text, r'swarm_averaging_duration_seconds_sum\{stage="\d+"\}'),
                )
            )
        return spent


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def sample(text: str, pattern: str) -> float:
    """The sum of the series that match, in Prometheus' text format."""
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


def spent_between(before: Spent, after: Spent) -> Spent:
    pairs = zip(seconds_of(after), seconds_of(before), strict=True)
    return Spent(after.process, *(late - early for late, early in pairs))


def seconds_of(spent: Spent) -> tuple[float, ...]:
    return spent.wall_s, spent.cpu_s, spent.forward_s, spent.backward_s, spent.averaging_s
