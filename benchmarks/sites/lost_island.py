"""What the loss of an island costs the other one, and how soon the island trains again.

    python -m benchmarks.sites.lost_island [--every 20] [--link 50:100]

The sites are those of `benchmarks.sites.kept_speed`, with diloco. All stage servers of berlin die by kill -9; lyon's
speed in a whole period, from the next exchange on, is compared with that before. Then they are started again. The next
exchange waits until lyon's island has sent them its state over the slow link. Behind it they are an island of their
own. "again" is how long that exchange took, and what passed from it to the first step of that island. Beside it stands
what so many bytes take on the link. Needs root.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.sites.kept_speed import FIRST_STEPS, Modelled, modelled_sites, parsed, parser_of, speed_of
from benchmarks.sites.two_sites import carried_bytes, devices
from swarm.job.islands import job_timeline
from tests.chaos.islands import SITES

VICTIM = SITES[1]
PERIODS_MAX = 30
WAIT_S_MAX = 240.0


@dataclass(frozen=True, slots=True)
class Found:
    """What one run found."""

    kept: float  # of lyon's speed
    ready_s: float  # from the moment the two could be used until lyon was in front of an exchange
    state_s: float  # that the exchange then took
    state_bytes: int  # that crossed the link until both served
    first_step_s: float  # of the new island, from the exchange behind which it began
    rollbacks: int

    def again_s(self) -> float:
        return self.state_s + self.first_step_s

    def aim_s(self, mbit_per_s: float) -> float:
        return self.state_bytes * 8 / (mbit_per_s * 1e6) + 10.0


def kept_of(commits_s: Sequence[float], every: int, lost_s: float) -> float:
    """The speed of a period that begins with the first exchange after `lost_s`, as a share of that of the first one."""
    steps = sum(at_s <= lost_s for at_s in commits_s)
    begins = -(-steps // every) * every
    before, after = (speed_of(commits_s, first, every, ()).steps_per_s for first in (FIRST_STEPS, begins + FIRST_STEPS))
    return after / before


def play(sites: Modelled, every: int) -> Found:
    job = sites.start("diloco", PERIODS_MAX * every, {"every_steps": every, "compression": "int8"})
    sites.until_step(job, every + FIRST_STEPS + 2)
    victims = [peer for peer in sites.servers if sites.site_of[peer] == VICTIM]
    for peer in victims:
        sites.servers[peer].kill(signal.SIGKILL)
    lost_s = time.time()
    before = set(sites.commits(job))
    sites.until_step(job, 3 * every + FIRST_STEPS + 1, WAIT_S_MAX)
    for peer in victims:
        sites.respawn(peer, "--site", VICTIM)
    for peer in victims:
        sites.servers[peer].wait_ready()
    ready_s, carried = time.time(), carried_bytes(devices())
    sites.until("both serve", lambda: all(sites.state_of(victim) == "serving" for victim in victims), WAIT_S_MAX)
    state_bytes = carried_bytes(devices()) - carried
    sites.until("the island trains again", lambda: bool(set(sites.commits(job)) - before), WAIT_S_MAX)
    commits = sites.commits(job)
    (anew,) = set(commits) - before
    alive = max(before, key=lambda timeline: commits[timeline][-1])
    exchanged_s = max(at_s for at_s in sites.commits(job, outer=True)[alive] if at_s <= commits[anew][0])
    front_s = max(at_s for at_s in commits[alive] if at_s <= exchanged_s)
    rollbacks = max(job_timeline(job.spec, timeline) for timeline in commits)
    took_s = (front_s - ready_s, exchanged_s - front_s)
    first_step_s = commits[anew][0] - exchanged_s
    return Found(kept_of(commits[alive], every, lost_s), *took_s, state_bytes, first_step_s, rollbacks)


def line_of(found: Found, mbit_per_s: float) -> Mapping[str, str]:
    """The figures for people."""
    return {
        "lyon's speed, of that before": f"{found.kept:.3f}",
        "before the exchange": f"{found.ready_s:.1f} s",
        "state and exchange": f"{found.state_bytes / 1e6:.1f} MB in {found.state_s:.1f} s",
        "first step behind the exchange": f"{found.first_step_s:.1f} s",
        "again": f"{found.again_s():.1f} s, aim {found.aim_s(mbit_per_s):.1f} s",
        "rollbacks": str(found.rollbacks),
    }


def main() -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--every", type=int, default=20, help="steps between two exchanges")
    options, load = parsed(parser), os.getloadavg()[0]
    with modelled_sites(options) as sites:
        sites.slow(True)
        found = play(sites, options.every)
    for name, value in line_of(found, float(options.link.partition(":")[0])).items():
        Console(width=100).print(f"{name}: {value}", highlight=False)
    print(f"H {options.every}, {options.link} Mbit/s:ms, load {load:.1f} before, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
