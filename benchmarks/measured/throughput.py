"""Tokens per second of a swarm on this machine, beside what it stands in for, in one run.

    python -m benchmarks.measured.throughput [--stages 2] [--replicas 1] [--steps 3] [--rounds 5] [--dtype float32] ...

Three ways train the same model on the same tokens, from the same weights, with as many threads per process:

    local   `swarm train-local`: one process, no network
    swarm   a scheduler and stages x replicas stage servers, as real processes on loopback
    1f1b    torch.distributed.pipelining's Schedule1F1B over gloo, stages x replicas processes

All processes are started first and wait. Then the ways take turns, every round in another order, so that a noisy
machine disturbs all alike: compare ratios within a round, not tokens/s of different runs. Speed is counted from commit
to commit after the warm-up steps; starting, loading and saving are left out. The losses must agree, or the ways did not
do the same work.

The second table says where the swarm's time went: device seconds and processor seconds of each of its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from client.connection import CHUNK_BYTES, Scheduler
from swarm.data.shards import TokenManifest, tokenise
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.pki.profiles import find_profile
from swarm.process.children import dying_with_parent
from swarm.wire import jobs_pb2 as pb

WAYS = ("local", "swarm", "1f1b")
READY_S_MAX = 180.0
STOP_S_MAX = 20.0
# Losses of the three ways: the same sums in another order, so they differ by rounding.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True)
class Timed:
    """One way in one round."""

    tokens_per_s: float
    step_s: float  # median of the measured steps
    cpu_s_per_step: float  # of all processes together
    loss: float
    weights_sha256: str = ""  # of the swarm's end


@dataclass(frozen=True, slots=True)
class Spent:
    """What one process of the swarm did in the measured steps of one round."""

    process: str
    wall_s: float
    cpu_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    averaging_s: float = 0.0


@dataclass(slots=True)
class Round:
    """All ways once."""

    ways: dict[str, Timed] = field(default_factory=dict)
    spent: list[Spent] = field(default_factory=list)

    def ratio(self, other: str) -> float:
        """The swarm's speed as a multiple of the other way's."""
        return self.ways["swarm"].tokens_per_s / self.ways[other].tokens_per_s


def main() -> None:
    options = _options()
    console = Console(stderr=options.output == "json")
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        rounds = _measure(options, Path(name), console)
    if options.output == "json":
        print(json.dumps({"options": vars(options), "rounds": [asdict(one) for one in rounds]}, indent=1))
    else:
        console.print(_speeds(rounds))
        console.print(_times(rounds, options.steps))
    alike = WAYS if options.overlap == 0 else WAYS[:2]
    if fault := disagreement(rounds, LOSS_TOLERANCE[options.dtype], alike):
        sys.exit(f"error: {fault}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="stage servers per stage")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each way and round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=tuple(LOSS_TOLERANCE), default="float32")
    codecs = ("auto", "none", "bfloat16", "float16", "int8")
    parser.add_argument("--compression", choices=codecs, default="none", help="swarm only")
    parser.add_argument(
        "--overlap",
        type=int,
        default=0,
        help="microbatches of a step that use weights one step old; 1f1b cannot, so its loss is then not compared",
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if options.stages < 2:
        parser.error("--stages must be at least 2: with one there is no pipeline to compare")
    if options.microbatches % options.replicas:
        parser.error("--replicas must divide --microbatches: 1f1b deals them out evenly")
    if min(options.steps, options.warmup, options.rounds) < 1:
        parser.error("--steps, --warmup and --rounds must be at least 1")
    return options


def _measure(options: argparse.Namespace, folder: Path, console: Console) -> list[Round]:
    spec, manifest = job_of(options, folder)
    with contextlib.ExitStack() as stack, console.status("starting processes") as status:
        fleet = stack.enter_context(Fleet(folder))
        swarm = Swarm(fleet, folder, options)
        rivals = {way: _Rival(way, fleet, folder, spec, manifest, options) for way in ("local", "1f1b")}
        stack.enter_context(swarm.connect(spec, manifest))
        for rival in rivals.values():
            rival.wait_ready()
        rounds = []
        for number in range(options.rounds):
            rounds.append(Round())
            for way in (WAYS * 2)[number % 3 :][:3]:
                status.update(f"round {number + 1} of {options.rounds}: {way}")
                if way == "swarm":
                    rounds[-1].ways[way], rounds[-1].spent = swarm.train(options.warmup)
                else:
                    rounds[-1].ways[way] = rivals[way].train(options.warmup)
    return rounds


def timed(times_unix_s: Sequence[float], warmup: int, tokens_per_step: int, cpu_s: float, loss: float) -> Timed:
    """Speed after `warmup` steps, from the times at which steps ended; `cpu_s` was spent in those measured."""
    measured = times_unix_s[warmup - 1 :]
    steps_s = [later - earlier for earlier, later in pairwise(measured)]
    return Timed(tokens_per_step * len(steps_s) / sum(steps_s), median(steps_s), cpu_s / len(steps_s), loss)


def _tokens_per_step(spec: JobSpec) -> int:
    return spec.training.global_batch_sequences * spec.data.sequence_length


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
    resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=options.stages)
    (folder / "tokens").mkdir()
    manifest = tokenise(resolved, folder / "tokens")
    assert len(manifest.shards) == 1, "a few steps fit into one shard"
    (folder / "spec.json").write_text(resolved.model_dump_json())
    return resolved, manifest


# Processes ------------------------------------------------------------------------------------------------------------


class Fleet:
    """Child processes that speak lines; all end with this one. They run what is in `tree`."""

    def __init__(self, folder: Path, tree: Path | None = None) -> None:
        self._folder = folder
        self._tree = tree
        self._children: list[subprocess.Popen[str]] = []

    def start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("w") as log:
            child = subprocess.Popen(
                dying_with_parent([sys.executable, "-m", module, *arguments]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                cwd=self._tree,
            )
        self._children.append(child)
        return child

    def line(self, child: subprocess.Popen[str]) -> str:
        """The child's next line; with the end of all logs, RuntimeError if it ended instead."""
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            logs = [f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self._folder.glob("*.log"))]
            raise RuntimeError("\n".join([f"a process ended with {child.wait()}", *logs]))
        return line

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            try:
                child.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


class _Rival:
    """A way that `benchmarks.measured.baselines` runs."""

    def __init__(
        self,
        way: str,
        fleet: Fleet,
        folder: Path,
        spec: JobSpec,
        manifest: TokenManifest,
        options: argparse.Namespace,
    ) -> None:
        self._fleet = fleet
        self._tokens_per_step = _tokens_per_step(spec)
        common = (str(folder / "spec.json"), str(manifest.shards[0].path), manifest.token_dtype, str(options.threads))
        if way == "local":
            self._children = [fleet.start("local", "benchmarks.measured.baselines", way, *common)]
        else:
            world = (str(folder / "rendezvous"), str(options.replicas))
            self._children = [
                fleet.start(f"1f1b-{rank}", "benchmarks.measured.baselines", way, *common, str(rank), *world)
                for rank in range(options.stages * options.replicas)
            ]

    def wait_ready(self) -> None:
        for child in self._children:
            assert self._fleet.line(child) == "ready\n"

    def train(self, warmup: int) -> Timed:
        """Train the job anew; a step ends when it has ended in every process."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [json.loads(self._fleet.line(child)) for child in self._children]
        times_unix_s = [max(ended) for ended in zip(*(answer["times_unix_s"] for answer in answers), strict=True)]
        cpu_s = sum(answer["cpu_s"][-1] - answer["cpu_s"][warmup - 1] for answer in answers)
        loss = next(answer["loss"] for answer in answers if answer["loss"] is not None)
        return timed(times_unix_s, warmup, self._tokens_per_step, cpu_s, loss)


class Swarm:
    """A scheduler and its stage servers."""

    def __init__(self, fleet: Fleet, folder: Path, options: argparse.Namespace, device: str = "cpu") -> None:
        self._data_dir = folder / "scheduler"
        self._scheduler = fleet.start(
            "scheduler",
            "scheduler",
            *("--listen", "127.0.0.1:0", "--http-port", "none", "--broker", "none"),
            *("--data-dir", str(self._data_dir)),
        )
        self._address = json.loads(fleet.line(self._scheduler))["address"]
        self._servers = [
            fleet.start(
                f"server-{number}",
                "stage_server",
                *("--scheduler", self._address, "--listen", "127.0.0.1:0", "--http-port", "0"),
                *("--threads", str(options.threads), "--device", device),
                *("--stage", str(number % options.stages)),
                *("--data-dir", str(folder / f"server-{number}")),
            )
            for number in range(options.stages * options.replicas)
        ]
        self._names = [f"stage {number % options.stages}" for number in range(len(self._servers))]
        self._fleet = fleet

    def connect(self, spec: JobSpec, manifest: TokenManifest) -> Scheduler:
        """Wait for all processes and upload the tokens; gives the connection, to be closed by the caller."""
        self._http = [json.loads(self._fleet.line(server))["http"] for server in self._servers]
        self._jobs = Scheduler(self._address, 30.0, find_profile(self._address))
        deadline_s = time.monotonic() + READY_S_MAX
        while len(self._jobs.peers(state="idle")) < len(self._servers):
            assert time.monotonic() < deadline_s, "the stage servers do not reach the scheduler"
            time.sleep(0.1)
        shard = manifest.shards[0]
        content = shard.path.read_bytes()
        wire = pb.Shard(sha256=shard.sha256, tokens=shard.tokens, size_bytes=shard.size_bytes)
        self._jobs.put_shard(
            wire, (content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES))
        )
        self._tokens_per_step = _tokens_per_step(spec)
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

    def train(self, warmup: int) -> tuple[Timed, list[Spent]]:
        """Train the job anew; a step ends when it is committed. Also what the processes spent after warm-up."""
        job = self._jobs.submit(self._request).id
        before: list[Spent] = []
        after: list[Spent] = []
        for view in self._jobs.watch(job):
            if not before and view.step >= warmup:
                before = self._spent()
            if not after and view.step == view.steps:
                after = self._spent()
        if view.state != "succeeded":
            raise RuntimeError(f"the job {view.state}: {view.reason}")
        spent = [spent_between(early, late) for early, late in zip(before, after, strict=True)]
        # Old weights are not needed, and a run on a small disk should not fail for them.
        shutil.rmtree(self._data_dir / "jobs" / job / "checkpoints", ignore_errors=True)
        cpu_s = sum(one.cpu_s for one in spent)
        found = timed(self._commit_times(job), warmup, self._tokens_per_step, cpu_s, view.loss)
        return replace(found, weights_sha256=view.weights_sha256), spent

    def _commit_times(self, job: str) -> list[float]:
        """From the scheduler's database: what a watcher sees comes later, and may skip a step."""
        database = f"file:{self._data_dir / 'scheduler.db'}?mode=ro"
        with contextlib.closing(sqlite3.connect(database, uri=True)) as connection:
            query = "SELECT committed_unix_s FROM commits WHERE job = ? ORDER BY step"
            return [row[0] for row in connection.execute(query, (job,))]

    def _spent(self) -> list[Spent]:
        now_s = time.monotonic()
        spent = [Spent("scheduler", now_s, _cpu_s(self._scheduler.pid))]
        for name, server, http in zip(self._names, self._servers, self._http, strict=True):
            with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as reply:
                text = reply.read().decode()
            compute = r'swarm_stage_compute_seconds_sum\{direction="%s",stage="\d+"\}'
            spent.append(
                Spent(
                    name,
                    now_s,
                    _cpu_s(server.pid),
                    forward_s=sample(text, compute % "forward"),
                    backward_s=sample(text, compute % "backward"),
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
    pairs = zip(_seconds(after), _seconds(before), strict=True)
    return Spent(after.process, *(late - early for late, early in pairs))


def _seconds(spent: Spent) -> tuple[float, ...]:
    return spent.wall_s, spent.cpu_s, spent.forward_s, spent.backward_s, spent.averaging_s


# Tables ---------------------------------------------------------------------------------------------------------------


def _speeds(rounds: Sequence[Round]) -> Table:
    table = Table(title="tokens/s", caption="ratio above 1: the swarm is faster (last row: the swarm costs more)")
    for heading in ("round", *WAYS, "swarm/local", "swarm/1f1b"):
        table.add_column(heading, justify="right")
    for number, one in enumerate(rounds, 1):
        speeds = (f"{one.ways[way].tokens_per_s:.0f}" for way in WAYS)
        table.add_row(str(number), *speeds, *(f"{one.ratio(other):.2f}" for other in ("local", "1f1b")))
    table.add_section()
    middle = (f"{median(one.ways[way].tokens_per_s for one in rounds):.0f}" for way in WAYS)
    ratios = (f"{median(one.ratio(other) for one in rounds):.2f}" for other in ("local", "1f1b"))
    table.add_row("median", *middle, *ratios)
    cpu_s = {way: median(one.ways[way].cpu_s_per_step for one in rounds) for way in WAYS}
    costs = (f"{cpu_s['swarm'] / cpu_s[other]:.2f}" for other in ("local", "1f1b"))
    table.add_row("cpu-s per step", *(f"{cpu_s[way]:.2f}" for way in WAYS), *costs)
    return table


def _times(rounds: Sequence[Round], steps: int) -> Table:
    table = Table(title="where the swarm's time went, ms per step", caption="medians; device = forward + backward")
    for heading in ("process", "wall", "forward", "backward", "averaging", "device busy", "processor"):
        table.add_column(heading, justify="right")
    for place, process in enumerate(one.process for one in rounds[0].spent):
        each = [one.spent[place] for one in rounds]
        wall, cpu, forward, backward, averaging = (
            median(values) * 1e3 / steps for values in zip(*map(_seconds, each), strict=True)
        )
        busy = median((one.forward_s + one.backward_s) / one.wall_s for one in each)
        device = (f"{forward:.0f}", f"{backward:.0f}", f"{averaging:.1f}", f"{busy:.0%}")
        table.add_row(process, f"{wall:.0f}", *(device if forward else ("",) * 4), f"{cpu:.0f}")
    return table


def disagreement(rounds: Sequence[Round], tolerance: float, alike: Sequence[str] = WAYS) -> str:
    """What is wrong with the losses of the ways that must be alike; empty if nothing."""
    for number, one in enumerate(rounds, 1):
        losses = {way: found.loss for way, found in one.ways.items() if way in alike}
        if not all(math.isclose(loss, losses["local"], rel_tol=tolerance) for loss in losses.values()):
            return f"round {number}: the ways trained differently, last losses {losses}"
    return ""


if __name__ == "__main__":
    main()
