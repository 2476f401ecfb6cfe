"""All benchmarks that have an aim, and the table of docs/benchmarks.md that is made of what they found.

    python -m benchmarks.full [--rows P1,P3] [--quick] [--remark TEXT]
    python -m benchmarks.full --page-only

A row replaces what was found for it before in docs/benchmarks.json; then the table and the plots are made of that file.
Rows with network namespaces need root, and say so where they cannot run. `--quick` is the short form: each row within
minutes, on two cores. Figures are ratios within one run, whose ways take turns.

Ctrl-C ends the benchmark that runs, which takes its processes and networks with it; rows that are done are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.full.measures import Row
from benchmarks.full.page import write_page
from benchmarks.full.plots import write_plots
from benchmarks.full.results import Circumstances, Found, read, write
from benchmarks.full.rows import ROWS
from swarm.process.children import dying_with_parent
from tests.chaos.relay import why_not

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
END_S_MAX = 30.0
UNREADABLE = (LookupError, ArithmeticError, AttributeError, TypeError, ValueError)  # output that no row expects


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command printed as JSON, None if it prints none; or why it failed."""

    output: Any = None
    fault: str = ""


def main() -> int:
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell ignores it for what runs in the background
        signal.signal(number, signal.default_int_handler)
    results = read(options.json)
    rows = () if options.page_only else [row for row in ROWS if row.name in options.rows]
    faults = 0
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        printed: dict[str, Printed] = {}
        for row in rows:
            _tell(f"{row.name}: {row.about}")
            try:
                results[row.name] = measured(row, options, Path(folder), printed)
            except KeyboardInterrupt:
                return 130
            if results[row.name].fault:
                faults += 1
                _tell(f"{row.name}: {results[row.name].fault}")
            write(options.json, results)
            _show(options.docs, results)
    if not rows:
        _show(options.docs, results)
    return 1 if faults else 0


def _show(docs: Path, results: dict[str, Found]) -> None:
    write_page(docs / "benchmarks.md", results)
    write_plots(docs, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full", description=(__doc__ or "").partition("\n")[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", type=lambda text: text.split(","), default=names, help=f"some of {','.join(names)}")
    parser.add_argument("--quick", action="store_true", help="the short form of each")
    parser.add_argument("--remark", default="", help="what else should be known of the circumstances")
    parser.add_argument("--page-only", action="store_true", help="measure nothing: make table and plots anew")
    parser.add_argument("--json", type=Path, help="where the results are kept; docs/benchmarks.json by default")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of benchmarks.md, for the table and plots")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in names]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(names)}")
    options.json = options.json or options.docs / "benchmarks.json"
    return options


def measured(row: Row, options: argparse.Namespace, folder: Path, printed: dict[str, Printed]) -> Found:
    """Run a row; a benchmark that fails is its fault, and so is one that prints what the row cannot read.

    `printed` has what came of commands that have run already: none runs twice, also if it failed.
    """
    commands = [run.words(quick=options.quick) for run in row.runs]
    shown = [command.replace("{folder}/", "") for command in commands]
    found = Found(row.name, options.quick, shown, 0.0, _circumstances(options.remark))
    if row.network and (lack := why_not()):
        return replace(found, fault=lack)
    began_s = time.monotonic()
    for command in commands:
        if command not in printed:
            _tell(f"  {command}")
            printed[command] = _run(command, folder)
        if fault := printed[command].fault:
            return replace(found, seconds=time.monotonic() - began_s, fault=fault)
    found = replace(found, seconds=time.monotonic() - began_s)
    try:
        return replace(found, values=row.read([printed[command].output for command in commands]))
    except UNREADABLE as error:
        return replace(found, fault=f"what was printed cannot be read: {type(error).__name__}: {error}")


def _run(command: str, folder: Path) -> Printed:
    module, *flags = shlex.split(command.replace("{folder}", str(folder)))
    wants_json = "json" in flags
    child = subprocess.Popen(
        dying_with_parent([sys.executable, "-m", module, *flags]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if wants_json else sys.stderr,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # Ctrl-C is passed on below, once
    )
    try:
        out, _ = child.communicate()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    if child.returncode != 0:
        return Printed(fault=f"`{module}` ended with {child.returncode}")
    if not wants_json:
        return Printed()
    try:
        return Printed(json.loads(out))
    except ValueError as error:
        return Printed(fault=f"`{module}` printed no JSON: {error}")


def _circumstances(remark: str) -> Circumstances:
    """No commit is named: history may be written anew before others see it."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    return Circumstances(date, cores, _processor(), load, remark, has_uncommitted_changes(ROOT))


def has_uncommitted_changes(folder: Path) -> bool | None:
    """Of tracked files, but for documents, to which each row is written; None without git."""
    words = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"]
    try:
        told = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return bool(told.stdout.strip()) if told.returncode == 0 else None


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return ()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
