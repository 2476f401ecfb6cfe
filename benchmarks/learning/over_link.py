"""What benchmarks of learning over slow links share: their flags, their hosts, and the job of each seed."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sysconfig
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.convergence import small_llama
from benchmarks.measured.throughput import link_of
from benchmarks.measured.ways import prepared
from benchmarks.processes import Hosts, hosts_behind
from swarm.data.shards import TokenManifest
from swarm.job.spec import JobSpec, parse_job
from tests.chaos.relay import why_not

STAGES = 2


@dataclass(frozen=True, slots=True)
class Seed:
    """One seed's job in two stages, a folder for it, and the hosts of its processes."""

    number: int
    folder: Path
    spec: JobSpec
    manifest: TokenManifest
    hosts: Hosts

    def order(self, *ways: str) -> tuple[str, ...]:
        """The ways in turns: which is first depends on the seed."""
        first = self.number % len(ways)
        return (*ways[first:], *ways[:first])


def options_of(description: str, link: tuple[float, float], seeds: int, steps: int) -> Namespace:
    """Flags with these defaults; `link` is Mbit/s each way and the round-trip time in ms."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--link", type=link_of, default=link, metavar="MBIT:MS")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if lack := why_not():
        parser.error(lack)
    return options


@contextlib.contextmanager
def seeds_over_link(options: Namespace, processes: int, **sections: dict[str, Any]) -> Iterator[Iterator[Seed]]:
    """The seeds, with so many hosts behind the link while it lasts; `sections` are added to the job file."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    source = f"{sysconfig.get_paths()['stdlib']}/[a-d]*.py"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        mbit, ms = options.link
        hosts = stack.enter_context(hosts_behind(processes, mbit, ms / 1e3))

        def seed(number: int) -> Seed:
            place = folder / f"seed-{number}"
            place.mkdir()
            values = small_llama(number, options.rate, options.steps, source)
            values |= {"pipeline": {"stages": STAGES}, **sections}
            return Seed(number, place, *prepared(parse_job(values), STAGES, place), hosts)

        yield map(seed, range(options.seeds))
