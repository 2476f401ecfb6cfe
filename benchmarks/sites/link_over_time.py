"""What crosses a slow link between two sites every half second, for each way of averaging: a picture.

    python -m benchmarks.sites.link_over_time [--picture docs/islands-link.svg] [--steps 60] [--save BYTES.json]

The sites are those of `benchmarks.sites.two_sites`, with one replica per stage, and nobody dies. The bytes are those
that the kernel counts at the link, in both directions. Everything is in them: tensors, proposals, and what stage
servers of the far site say to the scheduler. They are read from the first step to the last, so checkpoints are not
among them. With --save each way is kept when it is measured, and the picture can be drawn anew from that.

Needs root, for network namespaces. Seconds are those of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.learning.kept import Kept
from benchmarks.sites.two_sites import EVERY_STEPS, STAGES, WAYS, Sites, carried_bytes, devices
from swarm.pki.profiles import ENVIRONMENT
from tests.chaos.islands import SITES
from tests.chaos.relay import Relay, why_not
from tests.chaos.trial import Job
from tests.support.simulated import Tokens

LOOK_S = 0.5
MORE_STEPS = 2  # the exchange behind the last step that is shown is shown too, and the closing one is not
FRAGMENTS = 3  # with streaming: one for each layer, as a larger model would have several
RUN_S_MAX = 900.0
SETTINGS = {"svg.hashsalt": "swarm", "svg.fonttype": "none", "font.size": 9}
MIB = 1 << 20


def between_looks(total_bytes: Sequence[int]) -> list[int]:
    """What was carried from each look to the next."""
    return [after - before for before, after in itertools.pairwise(total_bytes)]


class Watched(Sites):
    """Sites whose link is looked at while they train. Each has every stage, so a gradient is averaged over the link."""

    def fill(self) -> None:
        for site in SITES:
            for stage in range(STAGES):
                self.add_servers(1, "--site", site, "--stage", str(stage))

    def watch(self, way: str, steps: int) -> list[int]:
        """Train; what the link had carried at each look, from the first step to the last."""
        spec = self.spec_of(way, steps + MORE_STEPS, **({"fragments": FRAGMENTS} if way == "streaming" else {}))
        tokens = Tokens.make(self.folder / f"tokens-{time.monotonic_ns()}", spec)
        job = Job(self.submit(spec, tokens.manifest).id, spec, tokens)
        self.until_step(job, 1)
        looks: list[int] = []
        ended = threading.Event()
        looking = threading.Thread(target=_look, args=(looks, ended))  # it inherits the network of this thread
        looking.start()
        try:
            self.until_step(job, steps + MORE_STEPS - 1, RUN_S_MAX)
        finally:
            ended.set()
            looking.join()
        self.until("the job ends", lambda: self.view(job).state == "succeeded")
        self.until_free(list(self.servers))
        return looks


def _look(looks: list[int], ended: threading.Event) -> None:
    next_s = time.monotonic()
    while True:
        looks.append(carried_bytes(devices()))
        next_s += LOOK_S
        if ended.wait(max(0.0, next_s - time.monotonic())):
            return


def draw(carried: dict[str, list[int]], steps: int, mbit_per_s: float, path: Path) -> None:
    """One row for each way, all with the same axes."""
    figure = Figure(figsize=(8, 1.0 + 1.3 * len(carried)), layout="constrained")
    rows = figure.subplots(len(carried), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (way, looks) in zip(rows, carried.items(), strict=True):
        mib_per_s = [each / LOOK_S / MIB for each in between_looks(looks)]
        edges = [LOOK_S * place for place in range(len(looks))]
        axes.stairs(mib_per_s, edges, fill=True, color="#4a6fa5")
        per_step = sum(between_looks(looks)) / steps / 1024
        axes.set_title(f"{way}: {per_step:,.0f} KiB per step", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("MiB/s")
    rows[-1].set_xlabel(f"seconds since the first of {steps} steps; the link carries {mbit_per_s:g} Mbit/s each way")
    rows[0].set_xlim(left=0.0)
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3 * EVERY_STEPS)
    parser.add_argument("--link", default="50:100", metavar="MBIT:MS", help="each way, and there and back")
    parser.add_argument("--ways", default=",".join(WAYS), help="of averaging, with a comma between")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--save", type=Path, help="a JSON file that keeps what was carried")
    parser.add_argument("--picture", type=Path, default=Path("islands-link.svg"))
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    mbit_per_s, rtt_ms = (float(part) for part in options.link.split(":"))
    kept, names = Kept(options.save), {}
    for way in options.ways.split(","):
        names[way] = f"{way}, {options.steps} steps, {options.link}, width {options.width}"
    with tempfile.TemporaryDirectory(prefix="swarm-link-") as name, Relay(len(SITES), seed=0) as relay:
        folder = Path(name)
        os.environ[ENVIRONMENT] = str(folder / "profiles")
        relay.between(0, 1, delay_s=rtt_ms / 2e3, bytes_per_s=mbit_per_s * 1e6 / 8)
        relay.move_here(0)
        with contextlib.redirect_stdout(sys.stderr), Watched(folder, "0", relay, options.width, replicas=1) as sites:
            sites.fill()
            carried = {way: kept.once(name, partial(sites.watch, way, options.steps)) for way, name in names.items()}
    with rc_context(SETTINGS):
        draw(carried, options.steps, mbit_per_s, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
