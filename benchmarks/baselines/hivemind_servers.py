"""Tokens per second of a swarm beside hivemind's expert servers as the two stages of the same model, in one run.

    python -m benchmarks.baselines.hivemind_servers [--rounds 5] [--steps 3] [--in-flight 4] [--width 256] ...

hivemind has no pipeline of its own: a trainer sends each microbatch through one expert after the other, and the
gradients back, as many at a time as `--in-flight` says. Its servers keep no graphs between the two, so they compute
every forward twice.

hivemind runs in an environment of its own (`--environment`, made on first use): hivemind and what it needs that is not
here, with torch and the model's code from this one. All processes are started first and wait; then the ways take turns.
The losses must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

import psutil

from benchmarks.measured.ways import Swarm, Timed, job_of, overlapping, timed
from benchmarks.processes import Fleet
from swarm.data.shards import TokenManifest
from swarm.job.spec import JobSpec

ROOT = Path(__file__).parents[2]
SIDE = "benchmarks.baselines.hivemind_side"
# hivemind, and what it needs that the project does not; hivemind's generated code wants an older protobuf.
PACKAGES = (
    *("hivemind==1.1.12", "protobuf==6.33.6", "scipy==1.17.1", "uvloop==0.23.0", "prefetch_generator==1.0.3"),
    *("configargparse==1.9.0", "py-multihash==3.0.0", "py-cid==0.5.0", "base58==2.1.1", "varint==1.0.2"),
    *("netaddr==1.3.0", "blake3==1.0.11", "mmh3==5.3.1"),
    *("py-multibase==2.0.0", "py-multicodec==1.0.0", "python-baseconv==1.2.2", "morphys==1.0"),
)
WAYS = ("hivemind", "swarm", "overlap")
LOSS_TOLERANCE = 1e-3


class Hivemind:
    """Two expert servers and a trainer."""

    def __init__(
        self, python: Path, fleet: Fleet, folder: Path, job: tuple[JobSpec, TokenManifest], options: argparse.Namespace
    ) -> None:
        spec, manifest = job
        self._fleet = fleet
        self._steps = spec.training.steps
        self._tokens_per_step = spec.training.global_batch_sequences * spec.data.sequence_length
        self._servers: list[subprocess.Popen[str]] = []
        addresses: list[str] = []
        for stage in range(options.stages):
            words = ("server", str(folder / "spec.json"), str(stage), str(options.threads), *addresses)
            server = fleet.start(f"hivemind-{stage}", SIDE, *words, python=python)
            addresses += json.loads(fleet.line(server))
            self._servers.append(server)
        self._trainer = fleet.start(
            "hivemind-trainer",
            SIDE,
            *("trainer", str(folder / "spec.json"), str(manifest.shards[0].path), manifest.token_dtype),
            *(str(options.threads), str(options.in_flight), *addresses),
            python=python,
        )
        assert fleet.line(self._trainer) == "ready\n"

    def train(self, warmup: int) -> Timed:
        """The processor time of steps is the mean over all of them, also those of the warm-up."""
        assert self._trainer.stdin is not None
        before_s = self._cpu_s()
        self._trainer.stdin.write("go\n")
        self._trainer.stdin.flush()
        answer = json.loads(self._fleet.line(self._trainer))
        cpu_s = (self._cpu_s() - before_s) * (self._steps - warmup) / self._steps
        return timed(answer["times_unix_s"], warmup, self._tokens_per_step, cpu_s, answer["losses"][-1])

    def _cpu_s(self) -> float:
        """Of all its processes: it starts several for each server, and one for the trainer."""
        started = [psutil.Process(child.pid) for child in (*self._servers, self._trainer)]
        processes = [process for child in started for process in (child, *child.children(recursive=True))]
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    python = environment(options.environment)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        rounds = _measure(options, python, Path(name))
    if options.output == "json":
        ways = [{way: asdict(found) for way, found in round_.items()} for round_ in rounds]
        print(json.dumps({"load": load, "rounds": [{"ways": way} for way in ways]}, indent=1))
    else:
        for way in WAYS:
            speeds = [round_[way].tokens_per_s for round_ in rounds]
            ratios = [round_[way].tokens_per_s / round_["hivemind"].tokens_per_s for round_ in rounds]
            spread = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of hivemind"
            cpu_s = median(round_[way].cpu_s_per_step for round_ in rounds)
            print(f"{way}: {median(speeds):.0f} tokens/s, {spread}, {cpu_s:.2f} s of processors for a step")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "hivemind")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each way and round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=4, help="microbatches that hivemind's trainer sends at a time")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--late", type=int, help="microbatches of a step that are late with overlap (auto)")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.set_defaults(stages=2, replicas=1, dtype="float32", compression="none", overlap=0)
    return parser.parse_args()


def environment(folder: Path) -> Path:
    """The Python of the environment with hivemind; makes it if there is none."""
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        # After the environment's own: torch, as pinned here, and all that the model's code needs.
        (_packages(python) / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, *PACKAGES], check=True, stdout=sys.stderr)
        (folder / ".made").touch()
    return python


def _packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def _measure(options: argparse.Namespace, python: Path, folder: Path) -> list[dict[str, Timed]]:
    job = spec, manifest = job_of(options, folder, training={"grad_clip_norm": 0.0})  # experts clip by themselves only
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(folder))
        swarm = Swarm(fleet, folder, options)
        other = Hivemind(python, fleet, folder, job, options)
        stack.enter_context(swarm.connect(spec, manifest))
        specs = {"swarm": spec, "overlap": overlapping(spec, overlap="auto" if options.late is None else options.late)}
        rounds: list[dict[str, Timed]] = []
        for number in range(options.rounds):
            rounds.append({})
            first = number % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                if way == "hivemind":
                    rounds[-1][way] = other.train(options.warmup)
                else:
                    rounds[-1][way] = swarm.train(options.warmup, specs[way])[0]
        # Only the first training of hivemind's experts begins with the first weights: they keep what they have learnt.
        ours, theirs = rounds[0]["swarm"].loss, rounds[0]["hivemind"].loss
        if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE):
            raise RuntimeError(f"the ways trained differently, last losses {ours} and {theirs}")
    return rounds


if __name__ == "__main__":
    main()
