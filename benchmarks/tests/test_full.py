"""The table of all benchmarks is made of its JSON alone; a row reads what its benchmarks print; aims are bounds."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.full.__main__ import DOCS, Printed, has_uncommitted_changes, measured
from benchmarks.full.measures import Measure, Row, Run
from benchmarks.full.page import MARKS, between_marks, text_of, write_page
from benchmarks.full.plots import AIMS, SPEEDS, shows, write_plots
from benchmarks.full.results import Circumstances, Found, read, write
from benchmarks.full.rows import BUBBLES, CHOSEN, LENGTHS, PAPERS, ROWS
from benchmarks.models.bubbles import Shape
from benchmarks.models.time_to_loss import SPLIT

ROOT = Path(__file__).parents[2]
HERE = Circumstances("2026-01-02 03:04", 2, "a processor", 0.5)
LEAST, MOST = Measure("least", "speed", "1F1B", 1.5), Measure("most", "time", "gloo", 1.5, at_most=True)
TIMED = {"tokens_per_s": 100.0}
WAYS = (
    "local",
    "swarm",
    "overlap",
    "int8",
    "gpipe",
    "1f1b",
    "interleaved",
    "zbv",
    "loopback",
    "hivemind",
    "whole",
    "wholelap",
)
ROUND = {"rounds": [{"ways": dict.fromkeys(WAYS, TIMED)}] * 2}
NAMES = ("synchronous AdamW", "synchronous, lookahead", SPLIT, "a quarter late", "half late (auto)")
GOALS = {goal: {name: [2.0, None] for name in NAMES} for goal in ("75%", "100%")}
MODELLED = {"times": dict.fromkeys(("2", "4", "8"), GOALS), "losses": {name: [2.0, 2.0] for name in NAMES}}
SIZE = {f"gRPC, {count} in flight": [{"gigabytes_per_s": count / 10}] * 2 for count in (1, 4, 8)}
HOPS = [{"level": level, "peers": n, "hops_per_s": 9e4 / n} for level in ("brain", "sessions") for n in (64, 1000)]
CHURN = [[{"kept": 1.0}, {"kept": share}] for share in (0.9, 0.8)]

# What the benchmarks of each row print, cut down to what is read.
PRINTED: dict[str, list[Any]] = {
    "L1": [None, MODELLED, {"seeds": [{"seconds": [[1.0, 2.0], [None, 2.0]]}]}],
    "L2": [None, MODELLED],
    "P1": [ROUND] * 2,
    "P1M": [ROUND],
    "P1M4": [ROUND],
    "P2": [{"kept": [0.9, 1.0]}] * 6,
    "P3": [ROUND] * 3,
    "P3S": [ROUND] * 3,
    "P3M": [ROUND] * 5,
    "P4": [{size: SIZE | {"TCP sendall": [{"gigabytes_per_s": 1.6}] * 2} for size in ("64 KiB", "1 MiB", "4 MiB")}],
    "P5": [{"seconds": {"ours": [3.0], "gloo": [2.0]}}] * 3,
    "P6": [HOPS],
    "P7": [*CHURN, {"kept": [0.9, 0.95]}, {"kept": [0.8]}, {"joins": [0.99]}] * 2,
    "P8": [ROUND] * 2,
    "M": [{"runs": [[{"training_ratio": 1.4}, {"training_ratio": 1.7}], [{"training_ratio": 1.5}]]}] * 2,
    "S": [{"rounds": [{"step": 0.02, "processors": 0.04}]}] * 2,
    "G": [
        *([{"comes_out": True}, {"comes_out": True}],) * 4,
        [{"comes_out": True}, {"comes_out": False}],
        [{"about": way, "found": 0.9} for way in ("flow", "least_completion", "uniform")] * 4,
    ],
    "C": [{"codecs": {"none": [[2.0, 4.0]], "bfloat16": [[1.0, 4.0]], "int8": [[0.5, 4.4]]}}],
}


def results() -> dict[str, Found]:
    found = {row.name: Found(row.name, True, ["a --b"], 60.0, HERE, row.read(PRINTED[row.name])) for row in ROWS}
    return found | {"P4": Found("P4", True, ["a --b"], 1.0, HERE, fault="it failed")}


def test_the_table_and_plots_are_what_the_results_give() -> None:
    kept = read(DOCS / "benchmarks.json")
    told = "run: python -m benchmarks.full --page-only"
    assert between_marks(DOCS / "benchmarks.md") == text_of(kept), told
    assert [name for name in (AIMS, SPEEDS) if not shows(DOCS / name, kept)] == [], told


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_reads_each_of_its_measures(row: Row) -> None:
    keys = [measure.key for measure in row.measures]
    values = row.read(PRINTED[row.name])
    assert sorted(values) == sorted(keys)
    assert all(values.values())
    assert len(PRINTED[row.name]) == len(row.runs)


def test_what_is_read_are_the_ratios_that_the_measure_names() -> None:
    read_of = {row.name: row.read(PRINTED[row.name]) for row in ROWS}
    assert read_of["L1"]["link/75%"] == [2.0]
    assert read_of["L1"]["link/100%"] == [None], "a loss that the swarm never reaches is no speed"
    assert read_of["P4"] == {"64 KiB": [0.8, 0.8], "1 MiB": [0.5, 0.5]}
    assert read_of["P5"]["unequal"] == [1.5]
    assert read_of["P6"]["sessions/growth"] == pytest.approx([1000 / 64])
    found = {"kills": [0.9, 0.8], "slow": [0.9, 0.95], "slow/64": [0.8], "join": [0.99]}
    assert read_of["P7"] == {f"{length}/{key}": shares for length in LENGTHS for key, shares in found.items()}
    assert read_of["M"] == {"parameters": [1.7, 1.5], "graphs": [1.7, 1.5]}, "the worse of the stages"
    assert read_of["S"]["safety/processors"] == [4.0]
    assert read_of["G"] == {name: [1.0] for name in PAPERS} | {"square_cube": [0.5]} | {
        f"flow/{many}/{deaths}": [0.9] for many in (128, 256) for deaths in (0.0, 0.2)
    }
    assert read_of["C"]["int8/time"] == [0.25]
    assert read_of["C"]["int8/loss"] == pytest.approx([10.0])


def source(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text()


@pytest.mark.parametrize("quick", [True, False])
def test_every_command_is_a_benchmark_that_takes_its_flags(quick: bool) -> None:
    for words in {run.words(quick=quick) for row in ROWS for run in row.runs}:
        module, *flags = shlex.split(words)
        text = source(module)
        text += "".join(map(source, re.findall(r"(?m)^from (benchmarks\.[\w.]+) import", text)))
        assert [flag for flag in flags if flag.startswith("--") and f'"{flag}"' not in text] == [], words


def test_the_modelled_pipelines_have_the_bubbles_that_the_aims_are_for() -> None:
    assert {stages: round(Shape(int(stages)).bubble, 2) for stages in CHOSEN} == BUBBLES


def test_an_aim_is_a_bound_on_one_side_and_what_never_came_misses_it() -> None:
    assert [LEAST.met(value) for value in (1.5, 1.49, None)] == [True, False, False]
    assert [MOST.met(value) for value in (1.5, 1.51, None)] == [True, False, False]
    assert Measure("none", "speed", "1F1B").met(1.0) is None
    assert [LEAST.shown(value) for value in (1.234, None)] == ["1.23", "never"]
    assert Measure("loss", "loss", "", 1.0, at_most=True, unit="%").shown(1.0) == "+1.00 %"


@pytest.mark.parametrize(("measure", "worse"), [(LEAST, 1.0), (MOST, 3.0)], ids=["at least", "at most"])
def test_what_never_came_is_the_worst_of_the_values_and_half_of_them_make_the_median_never(
    measure: Measure, worse: float
) -> None:
    assert measure.middle([1.0, 3.0, None]) == worse
    assert measure.middle([1.0, 2.0, 3.0, None]) == (1.5 if measure is LEAST else 2.5)
    assert measure.middle([3.0, None]) is None


def test_results_come_back_as_they_were_and_only_the_marked_part_of_a_page_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "benchmarks.json", results())
    assert read(tmp_path / "benchmarks.json") == results()
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write_page(page, results())
    text = page.read_text()
    assert text.startswith(f"before\n{MARKS[0]}\n")
    assert text.endswith(f"\n{MARKS[1]}\nafter\n")
    assert between_marks(page) == text_of(results())
    assert "not measured: it failed" in text
    assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="put both lines"):
        write_page(page, results())


def test_plots_name_the_results_that_they_show(tmp_path: Path) -> None:
    write_plots(tmp_path, results())
    for name in (AIMS, SPEEDS):
        assert shows(tmp_path / name, results())
        assert not shows(tmp_path / name, results() | {"P5": Found("P5", True, [], 1.0, HERE, {"equal": [9.0]})})
    assert "tokens/s" in (tmp_path / SPEEDS).read_text()


def test_a_plot_without_bars_is_neither_there_nor_on_the_page(tmp_path: Path) -> None:
    write_plots(tmp_path, results())
    only = {name: found for name, found in results().items() if name == "P5"}  # has aims, but no tokens per second
    assert not shows(tmp_path / SPEEDS, only), "the one of before is left"
    write_plots(tmp_path, only)
    assert [path.name for path in tmp_path.iterdir()] == [AIMS]
    assert shows(tmp_path / AIMS, only)
    assert shows(tmp_path / SPEEDS, only)
    assert f"({AIMS})" in text_of(only)
    assert f"({SPEEDS})" not in text_of(only)
    assert f"({SPEEDS})" in text_of(results())


def test_the_table_has_every_aim_and_says_what_is_not_measured_yet() -> None:
    aims = sum(measure.aim is not None for row in ROWS for measure in row.measures)
    measures = sum(len(row.measures) for row in ROWS)
    nothing = text_of({})
    assert f"Of {aims} aims, 0 measured, 0 met." in nothing
    assert nothing.count("| not measured yet |") == measures
    some = text_of({"P5": Found("P5", True, [], 1.0, HERE, {"equal": [1.5], "unequal": [1.5]})})
    assert f"Of {aims} aims, 2 measured, 1 met." in some
    assert some.count("| not measured yet |") == measures - 2


def test_results_that_name_a_commit_are_read_without_it(tmp_path: Path) -> None:
    write(tmp_path / "benchmarks.json", results())
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    for result in kept:
        del result["circumstances"]["uncommitted"]
        result["circumstances"]["commit"] = "0123abc"
    (tmp_path / "benchmarks.json").write_text(json.dumps(kept))
    assert read(tmp_path / "benchmarks.json") == results()


def test_changes_of_the_source_are_told_and_those_of_documents_are_not(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True)

    assert has_uncommitted_changes(tmp_path) is None
    git("init", "-q")
    (tmp_path / "docs").mkdir()
    source, document = tmp_path / "source.py", tmp_path / "docs" / "benchmarks.json"
    for path in (source, document):
        path.write_text("before")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    document.write_text("after")
    assert has_uncommitted_changes(tmp_path) is False
    source.write_text("after")
    assert has_uncommitted_changes(tmp_path) is True
    changed = replace(HERE, uncommitted=True)
    assert "with uncommitted changes" in text_of({"P5": Found("P5", True, ["a"], 1.0, changed)})
    assert "with uncommitted changes" not in text_of({"P5": Found("P5", True, ["a"], 1.0, HERE)})


def row_of(*commands: str, reads: Callable[[Sequence[Any]], Any] = lambda printed: {"all": list(printed)}) -> Row:
    return Row("X", "a trial", [Run(command) for command in commands], (), reads)


OPTIONS = Namespace(quick=True, remark="")


def test_a_benchmark_that_fails_is_the_fault_of_its_row(tmp_path: Path) -> None:
    found = measured(row_of("json.tool --no-such-flag"), OPTIONS, tmp_path, {})
    assert found.fault == "`json.tool` ended with 2"
    assert not found.values
    assert measured(row_of("this json"), OPTIONS, tmp_path, {}).fault.startswith("`this` printed no JSON: ")


def test_a_command_that_has_run_already_is_not_run_again_also_if_it_failed(tmp_path: Path) -> None:
    command = "no.such.module --output json"
    assert measured(row_of(command), OPTIONS, tmp_path, {command: Printed(1.0)}).values == {"all": [1.0]}
    printed: dict[str, Printed] = {}
    fault = measured(row_of(command), OPTIONS, tmp_path, printed).fault
    assert fault == "`no.such.module` ended with 1"
    assert printed == {command: Printed(fault=fault)}
    found = measured(row_of(command), OPTIONS, tmp_path, {command: Printed(fault="it failed before")})
    assert (found.fault, found.values) == ("it failed before", {})


@pytest.mark.parametrize(
    ("reads", "fault"),
    [
        (lambda printed: printed[0]["losses"], "KeyError: 'losses'"),
        (lambda printed: 1.0 / printed[0]["seconds"], "ZeroDivisionError: "),
        (lambda printed: dict(zip(printed, (), strict=True)), "ValueError: "),
        (lambda printed: sum(printed[0]), "TypeError: "),
        (lambda printed: printed[0]["seconds"].items(), "AttributeError: "),
    ],
    ids=["key", "zero", "value", "type", "attribute"],
)
def test_output_that_a_row_cannot_read_is_its_fault(
    tmp_path: Path, reads: Callable[[Sequence[Any]], Any], fault: str
) -> None:
    found = measured(row_of("a b", reads=reads), OPTIONS, tmp_path, {"a b": Printed({"seconds": 0.0})})
    assert found.fault.startswith(f"what was printed cannot be read: {fault}")
    assert not found.values


def test_ctrl_c_ends_the_benchmark_that_runs_and_keeps_what_was_measured(tmp_path: Path) -> None:
    """The folder is a copy of nothing but the page: the real one stays as it is."""
    (tmp_path / "benchmarks.md").write_text(f"{MARKS[0]}\n{MARKS[1]}\n")
    write(tmp_path / "benchmarks.json", results())
    command = [sys.executable, "-m", "benchmarks.full", "--rows", "P6", "--docs", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
        try:
            deadline_s = time.monotonic() + 120.0
            while not (below := psutil.Process(child.pid).children(recursive=True)):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            child.send_signal(signal.SIGINT)
            assert child.wait(60.0) == 130
        finally:
            child.kill()
    _, left = psutil.wait_procs(below, timeout=30.0)  # what had only just begun ends with its parent, by itself
    assert left == []
    assert read(tmp_path / "benchmarks.json") == results()
    assert json.loads((tmp_path / "benchmarks.json").read_text())
