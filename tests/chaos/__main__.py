"""`python -m tests.chaos`: runs the scenarios, prints a table, and ends with 1 if one failed or showed nothing.

Every trial has a seed, and the line that repeats it is printed when it fails.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from swarm.pki.profiles import ENVIRONMENT
from tests.chaos.relay import why_not
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.trial import Broken, Void, entries

COMPARED = "microbatches compared: "
WARNINGS = 20  # of a failed trial's scheduler that are shown


def main() -> int:
    # As Ctrl-C, so that the processes of a trial end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="names; all if none is given")
    parser.add_argument("--short", action="store_true", help="the three-minute selection, and little of each")
    parser.add_argument("--seed", default="0", help="of the moments, victims and points")
    parser.add_argument("--keep", type=Path, help="keep logs and data of failed trials in this folder")
    parser.add_argument("--no-network", action="store_true", help="leave out what needs network namespaces (root)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="show the table and run nothing")
    options = parser.parse_args()
    unknown = set(options.scenarios) - {scenario.name for scenario in SCENARIOS}
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}")
    if options.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:<16} {scenario.claim}")
        return 0
    wanted = [scenario for scenario in SCENARIOS if scenario.name in options.scenarios] or [
        scenario
        for scenario in SCENARIOS
        if (scenario.short or not options.short) and not (scenario.network and options.no_network)
    ]
    started_s = time.monotonic()
    if ENVIRONMENT not in os.environ:  # else this is a part of such a run, in a network of its own
        os.environ[ENVIRONMENT] = tempfile.mkdtemp(prefix="swarm-chaos-profiles-")
        atexit.register(shutil.rmtree, os.environ[ENVIRONMENT], ignore_errors=True)
    failed, microbatches = 0, 0
    for scenario in wanted:
        if scenario.network and not options.here:
            done = _run_on_network(scenario, options.seed, not options.short, options.keep)
        else:
            done = _run(scenario, options.seed, not options.short, options.keep)
        failed += done is None
        microbatches += done or 0
    if options.here:
        print(f"{COMPARED}{microbatches}")
        return 1 if failed else 0
    for scenario in SCENARIOS:
        if scenario.network and options.no_network:
            print(f"{scenario.name:<16} NOT RUN: left out by --no-network")
    print(f"{microbatches} microbatches compared bitwise in {time.monotonic() - started_s:.0f} s")
    print(f"{len(wanted) - failed} passed, {failed} failed")
    return 1 if failed or not wanted else 0


def _run_on_network(scenario: Scenario, seed: str, long: bool, keep: Path | None) -> int | None:
    """The same in a process of its own: it moves into a network namespace, from which there is no way back."""
    reason = why_not()
    if reason:
        print(f"{scenario.name:<16}           FAILED: cannot run here: {reason}; leave it out with --no-network")
        return None
    flags = ["--seed", seed, "--here", *([] if long else ["--short"]), *(["--keep", str(keep)] if keep else [])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", scenario.name, *flags], stdout=subprocess.PIPE, text=True
    )
    shown, _, compared = done.stdout.rpartition(COMPARED)
    print(shown, end="", flush=True)
    return int(compared) if done.returncode == 0 else None


def _run(scenario: Scenario, seed: str, long: bool, keep: Path | None) -> int | None:
    """Microbatches that were compared; None if the trial failed."""
    folder = Path(tempfile.mkdtemp(prefix=f"swarm-chaos-{scenario.name}-"))
    started_s = time.monotonic()
    verdict, figures, trial = "passed", "", None
    try:
        trial = scenario.run(folder, f"{scenario.name}:{seed}", long)
        figures = json.dumps(trial.figures)
    except Void as reason:
        verdict = f"VOID, which is no pass: {reason}"
    except Broken as reason:
        verdict = f"FAILED: {reason}"
    except Exception:
        verdict = f"FAILED: {traceback.format_exc()}"
    print(f"{scenario.name:<16} {time.monotonic() - started_s:6.1f} s  {verdict}  {figures}", flush=True)
    if trial is None:
        again = f"python -m tests.chaos {scenario.name} --seed {seed}" + ("" if long else " --short")
        print(f"               again: {again}", flush=True)
        for line in _warnings(folder / "scheduler.log"):
            print(f"               {line}", flush=True)
        if keep is not None:
            shutil.copytree(folder, keep / scenario.name, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    shutil.rmtree(folder, ignore_errors=True)
    return None if trial is None else trial.microbatches


def _warnings(log: Path) -> list[str]:
    """The last that a scheduler was not content with, and what became of its jobs, oldest first."""
    found = entries(log) if log.exists() else ()
    told = [entry for entry in found if entry["level"] in ("warning", "error") or entry["event"].startswith("job is")]
    return [f"{entry['ts']} {entry['level']} {entry['event']}"[:300] for entry in told[-WARNINGS:]]


if __name__ == "__main__":
    sys.exit(main())
