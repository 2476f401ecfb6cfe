"""Two sites with a slow link between them, and stage servers that die: tokens/s, loss, and the weights of one process.

    python -m benchmarks.sites.two_sites [--minutes 10] [--link 50:100] [--every 15] [--ways diloco] [--sceptic]

    lyon [namespace: scheduler, 4 stage servers] ──── --link: Mbit/s each way, ms there and back ──── berlin [4]

Each way of averaging trains the same small model in two stages with two replicas at each site: first undisturbed for
200 steps, then for as many steps as that makes in --minutes. From then on stage servers, drawn of all that serve, die
by kill -9, every --every seconds on average, and are started again at once. No further one dies while two are away. So
one island may lose a stage, and then is lost as a whole.

"proven": the weights and the last loss of every run are, bit for bit, those of one process that repeats what the swarm
wrote down (`swarm train-local --outer-log`); otherwise this ends with an error. "loss" is that of these weights on
held-out text, in nats per byte; "averaged" beside it is the loss after as many steps if each of them is averaged. What
a lost island was training does not count in tokens/s.

With --sceptic all at berlin computes five times slower in the middle third of --minutes, and the link is cut after a
sixth and after five sixths of them, for a thirtieth each. The islands then have leases by their speeds, and an exchange
takes a tenth of a period, as "auto" would choose for a job that does not ask for reproducible steps.

Needs root, for network namespaces. Seconds are those of this machine: a free core for each process shows the link.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.tables import show
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.outer_log import OuterRecord
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.pki.profiles import ENVIRONMENT
from swarm.reference.trainer import train_local
from swarm.text import counted, size
from tests.chaos.harmed_stage_server import harm_file, write_harm
from tests.chaos.islands import SITES, proves
from tests.chaos.relay import Relay, why_not
from tests.chaos.trial import Broken, Job, Trial, Void
from tests.support.simulated import Tokens, small_spec

WAYS = ("allreduce", "diloco", "streaming")
SLOWER, CUT_SHARE, STATES = 5.0, 1 / 30, 7  # berlin is well, cut off, well, slow, well, cut off, well
HARMED = "tests.chaos.harmed_stage_server"
STAGES, REPLICAS = 2, 2  # at each site
EVERY_STEPS = 20  # between two exchanges
UNDISTURBED_STEPS = 200
SEQUENCES, LENGTH = 16, 16
AWAY_MAX = 2
GRACE_S = 5.0  # the product's own default
TIMES_LONGER_MAX = 10.0  # than undisturbed, until a run is given up


@dataclass(frozen=True, slots=True)
class Run:
    """One way, undisturbed or with deaths."""

    way: str
    kills: int
    steps: int
    tokens_per_s: float
    loss: float
    averaged_loss: float
    link_bytes: int  # both directions
    lost_islands: int


def steps_within(minutes: float, tokens_per_s: float) -> int:
    """How many steps take so long, up to the next exchange."""
    steps = 60 * minutes * tokens_per_s / (SEQUENCES * LENGTH)
    return max(1, -(-round(steps) // EVERY_STEPS)) * EVERY_STEPS


def counted_steps(steps: int, log: Sequence[OuterRecord]) -> float:
    """The steps whose tokens count: what an island trained that was then lost, and while it was away, does not."""
    here = {(record.after_step - 1) // EVERY_STEPS: len(record.islands + record.late) for record in log}
    return steps - EVERY_STEPS * sum(1 - islands / len(SITES) for islands in here.values())


def may_kill(serving: int) -> bool:
    """Whether one more may die."""
    return len(SITES) * STAGES * REPLICAS - serving < AWAY_MAX


def troubles(share: float) -> tuple[bool, bool]:
    """Whether berlin is slow, and whether it is cut off, when this share of the time has passed."""
    return 1 / 3 <= share < 2 / 3, any(begins <= share < begins + CUT_SHARE for begins in (1 / 6, 5 / 6))


def carried_bytes(devices: str) -> int:
    """Both directions of the device to the other site, of /proc/net/dev."""
    counts = next(line for line in devices.splitlines() if "tun0:" in line).partition(":")[2].split()
    return int(counts[0]) + int(counts[8])


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """The table, for people; a run with deaths also says what it kept of the tokens/s without."""
    found = []
    for run in runs:
        calm = next(other for other in runs if other.way == run.way)
        kept = "" if run is calm else f" ({run.tokens_per_s / calm.tokens_per_s:.0%})"
        deaths = f"{run.kills}, {counted(run.lost_islands, 'island')} lost" if run.lost_islands else str(run.kills)
        per_step = size(round(run.link_bytes / run.steps))
        losses = f"{run.loss:.3f}", f"{run.averaged_loss:.3f}"
        found.append([run.way, deaths, str(run.steps), f"{run.tokens_per_s:.0f}{kept}", per_step, *losses, "yes"])
    return found


COLUMNS = ("way", "kill -9", "steps", "tokens/s", "link, per step", "loss", "averaged", "proven")


# Processes ------------------------------------------------------------------------------------------------------------


class Sites(Trial):
    """The sites with a scheduler, as a context manager."""

    def __init__(
        self,
        folder: Path,
        seed: str,
        relay: Relay,
        width: int,
        replicas: int = REPLICAS,
        late: int = 0,
        sceptic_s: float = 0.0,
    ) -> None:
        """`late`: microbatches of an island's step that use weights one step old; `sceptic_s`: the time over which
        `troubles` come in runs with deaths, 0: none come."""
        super().__init__(folder, seed, grace_s=GRACE_S)
        self.relay, self._sceptic_s = relay, sceptic_s
        self._program = HARMED if sceptic_s else "stage_server"
        self._each = each = STAGES * replicas
        self.scheduler_host = relay.hosts[0]
        self.server_hosts = [host for host in relay.hosts for _ in range(each)]
        self.before_servers = [relay.at(host) for host in range(len(SITES)) for _ in range(each)]
        self.text = Path(sysconfig.get_paths()["stdlib"]) / "_pydecimal.py"
        self._width, self._late = width, late
        self.site_of: dict[str, str] = {}

    def fill(self) -> None:
        """Start all stage servers."""
        for site in SITES:
            self.site_of |= dict.fromkeys(self.add_servers(self._each, "--site", site, module=self._program), site)

    def spec_of(self, way: str, steps: int, **outer: object) -> JobSpec:
        """The job; with islands there is one for each site, and [outer] may say more."""
        changes: dict[str, object] = {
            "config__hidden_size": self._width,
            "config__intermediate_size": 2 * self._width,
            "pipeline__stages": STAGES,
            "data__validation_ratio": 0.02,
            "data__sequence_length": LENGTH,
            "training__steps": steps,
            "training__eval_every_steps": steps,
            "training__global_batch_sequences": SEQUENCES,
            "averaging__mode": way,
        }
        if way != "allreduce":
            changes |= {"islands__count": len(SITES), "outer__every_steps": EVERY_STEPS}
            changes |= {"pipeline__overlap": self._late, "pipeline__sync_steps": 0}
            if self._sceptic_s:
                changes |= {"islands__shares": "speed", "outer__overlap_steps": EVERY_STEPS // 10}
            changes |= {f"outer__{key}": value for key, value in outer.items()}
        spec = small_spec(self.text, **changes)
        return resolve(spec, Basis(ByteTokenizer.vocabulary_size, stages=STAGES))

    def train(self, way: str, steps: int, *, every_s: float = 0.0, s_max: float = 600.0) -> Run:
        """Train once, with deaths if `every_s` says how often; Broken if it does not end as it must."""
        spec = self.spec_of(way, steps)
        tokens = Tokens.make(self.folder / f"tokens-{time.monotonic_ns()}", spec)
        job = Job(self.submit(spec, tokens.manifest).id, spec, tokens)
        self.until_step(job, 1)
        before = carried_bytes(devices())
        first, began_s, began_unix_s = self.view(job).step, time.monotonic(), time.time()
        kills = self._harm(job, every_s, began_s + s_max)
        seconds = time.monotonic() - began_s
        link_bytes = carried_bytes(devices()) - before
        if every_s and not kills:
            raise Void(f"nobody died in {seconds:.0f} s: train for longer")
        trained, log = proves(self, job)
        averaged_spec = self.spec_of("allreduce", steps)
        averaged = train_local(averaged_spec, tokens.batches(averaged_spec), device=torch.device("cpu"))
        losses = trained.evaluations[-1].loss, averaged.evaluations[-1].loss
        lost = sum(
            len(self.said(self.scheduler, f"island {island} is lost:", began_unix_s)) for island in range(len(SITES))
        )
        self.until_free(list(self.servers))
        tokens_per_s = (counted_steps(steps, log) - first) * SEQUENCES * LENGTH / seconds
        return Run(way, kills, steps, tokens_per_s, *losses, link_bytes, lost)

    def _harm(self, job: Job, every_s: float, given_up_s: float) -> int:
        """Kill and start again until the job has ended; how many died."""
        kills, began_s = 0, time.monotonic()
        next_s, states = began_s + every_s, [(False, False)]
        while (view := self.view(job)).state not in ("succeeded", "failed", "cancelled"):
            now_s = time.monotonic()
            if now_s > given_up_s:
                raise Broken(f"the job is {view.state} at step {view.step} of {view.steps}: {view.reason}")
            if every_s and self._sceptic_s and (due := troubles((now_s - began_s) / self._sceptic_s)) != states[-1]:
                self._trouble(*due)
                states.append(due)
            if every_s and now_s >= next_s:
                serving = [peer for pool in self.serving(job).values() for peer in pool]
                if may_kill(len(serving)):
                    victim = self.rng.choice(serving)
                    self.servers[victim].kill(signal.SIGKILL)
                    self.respawn(victim, "--site", self.site_of[victim], module=self._program)
                    kills, next_s = kills + 1, now_s + every_s * self.rng.uniform(0.5, 1.5)
            time.sleep(0.2)
        if every_s and self._sceptic_s and len(states) < STATES:
            raise Void("the job had ended before berlin was slow and cut off twice")
        return kills

    def _trouble(self, is_slow: bool, is_cut: bool) -> None:
        """From now on all at berlin is slow, or not, and cut off, or not."""
        self.relay.between(0, 1, cut=is_cut)
        for number in range(self._each, 2 * self._each):
            folder = self.folder / f"server-{number}"
            if is_slow:
                write_harm(folder, slow=SLOWER)
            else:
                harm_file(folder).unlink(missing_ok=True)


def devices() -> str:
    return Path("/proc/thread-self/net/dev").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each way with deaths; 1.5 shows something")
    parser.add_argument("--link", default="50:100", metavar="MBIT:MS", help="each way, and there and back")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two deaths, on average")
    parser.add_argument("--ways", default=",".join(WAYS), help="of averaging, with a comma between")
    parser.add_argument("--width", type=int, default=32, help="of the model")
    parser.add_argument("--overlap", type=int, default=0, help="late microbatches of a step of an island")
    parser.add_argument("--seed", default="0", help="of who dies when")
    parser.add_argument("--sceptic", action="store_true", help="a slow site and a cut link beside the deaths")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    mbit_per_s, rtt_ms = (float(part) for part in options.link.split(":"))
    told, load = Console(stderr=True, width=120), os.getloadavg()[0]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="swarm-two-sites-") as name, Relay(len(SITES), seed=0) as relay:
        folder = Path(name)
        os.environ[ENVIRONMENT] = str(folder / "profiles")
        relay.between(0, 1, delay_s=rtt_ms / 2e3, bytes_per_s=mbit_per_s * 1e6 / 8)
        relay.move_here(0)
        sceptic_s = 60 * options.minutes * options.sceptic
        all_sites = Sites(folder, options.seed, relay, options.width, late=options.overlap, sceptic_s=sceptic_s)
        with contextlib.redirect_stdout(sys.stderr), all_sites as sites:
            sites.fill()
            for way in options.ways.split(","):
                runs.append(sites.train(way, UNDISTURBED_STEPS))
                told.print(runs[-1], highlight=False)
                steps, s_max = steps_within(options.minutes, runs[-1].tokens_per_s), 60 * options.minutes
                runs.append(sites.train(way, steps, every_s=options.every, s_max=TIMES_LONGER_MAX * s_max))
                told.print(runs[-1], highlight=False)
    if options.output == "json":
        about = {"options": vars(options), "load": load, "cores": os.cpu_count()}
        print(json.dumps(about | {"runs": [asdict(run) for run in runs]}, indent=1))
        return 0
    show(COLUMNS, rows(runs))
    print(f"{options.minutes:g} minutes, {options.link} Mbit/s:ms, load {load:.1f} before, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
