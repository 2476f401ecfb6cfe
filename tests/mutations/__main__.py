"""Do the tests notice when a safety mechanism is missing? `python -m tests.mutations [NAME ...]`, or `make mutants`.

Each patch of this folder is applied to a copy of the tree, and the tests that it names must turn red there; if they
stay green, all unit, property and simulation tests get a chance. Before that every patch must apply, and the copy
without a patch must be green. A mutant counts as caught only if a test that was collected ran and failed by an
assertion, a checker or a limit: a broken import, fixture or name is a broken patch. Exit status: 0 all caught, 1 not,
2 misuse.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hypothesis
import pytest

from tests.mutations.catalogue import ROOT, BadPatch, Mutant, apply, copy_tree, misfits, read_all

WIDE = ("tests/unit", "tests/property", "tests/simulation")
OWN_TEST = "tests/mutations/test_catalogue.py"  # notices every mutant, by the patch that does not apply twice
UNPATCHED = "unpatched"  # the copy of the working tree that all others are made from
HANGS_S = 200  # of one test: then it is caught by the limit on its time
# Not faults that a mechanism's absence leads to, but patches that no longer fit the code around them.
_BROKEN = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "UnboundLocalError")
# Loaded once: whoever tries a mutant is a fork of this process, which itself never loads the product. Not transformers:
# stage_server/lean_imports.py must come before it.
_WARM = ("torch", "safetensors.torch", "sqlalchemy", "alembic.command", "grpc.aio", "pydantic")
_PRODUCT = ("scheduler", "stage_server", "swarm", "client", "tests")


@dataclass(slots=True, eq=False)  # pytest keeps its plugins in sets
class Outcome:
    """What the tests said of one tree; also the pytest plugin that hears them say it."""

    failed: str = ""  # the first test that ran and failed
    broken: str = ""  # why nothing counts
    ran: int = 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken = f"{report.nodeid} cannot be collected: {_last(report.longreprtext)}"

    def pytest_runtest_logstart(self) -> None:
        faulthandler.dump_traceback_later(2 * HANGS_S, exit=True)  # a test that not even its limit ends

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if not report.failed or self.failed:
            return
        self.failed = report.nodeid
        found = re.search(rf"^[E |+]*\s({'|'.join(_BROKEN)}): (.*)$", report.longreprtext, re.MULTILINE)
        if found is not None:
            self.broken = f"{report.nodeid}: {found[1]}: {found[2]}"
        elif report.when != "call":
            self.broken = f"{report.nodeid}: its {report.when} failed: {_last(report.longreprtext)}"


@dataclass(slots=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome = field(default_factory=lambda: Outcome(broken="ended without a word"))
    wide: bool = False  # only the whole suite noticed
    seconds: float = 0.0

    @property
    def is_caught(self) -> bool:
        return bool(self.outcome.failed) and not self.outcome.broken

    def row(self) -> tuple[str, str, str, str]:
        """mutant, invariants, caught by, seconds."""
        by = self.outcome.failed if self.is_caught else f"NOT CAUGHT {self.outcome.broken}".strip()
        by += " (not by the tests that it names)" if self.wide and self.is_caught else ""
        return self.mutant.name, " ".join(self.mutant.invariants), by, f"{self.seconds:.0f}"


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run tests in a tree until the first failure, in the order given, in a process of their own."""
    result = tree / "outcome.json"
    result.unlink(missing_ok=True)
    os.waitpid(_fork(lambda: result.write_text(json.dumps(asdict(_pytest(tree, tests))))), 0)
    return Outcome(**json.loads(result.read_text())) if result.exists() else Outcome(broken="the tests were ended")


def _pytest(tree: Path, tests: Sequence[str]) -> Outcome:
    assert not any(name.partition(".")[0] in ("scheduler", "stage_server", "swarm") for name in sys.modules)
    for name in [name for name in sys.modules if name.partition(".")[0] in _PRODUCT]:
        del sys.modules[name]  # ours: the tree has its own
    output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)  # for the processes that tests start
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, tree))]
    # Chance and a slow machine must decide nothing here.
    calm = hypothesis.settings(deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.settings.register_profile("mutants", calm)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += ["--hypothesis-profile=mutants", f"--timeout={HANGS_S}", f"--ignore={OWN_TEST}"]
    outcome = Outcome()
    status = pytest.main([*options, *tests], plugins=[outcome])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not outcome.broken:
        outcome.broken = f"pytest ended with {status!r}: {_last((tree / 'output.txt').read_text())}"
    return outcome


def _fork(work: Callable[[], object]) -> int:
    """Do `work` in a fork of this process; its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def judge(mutant: Mutant, folder: Path, wider: Sequence[str]) -> Verdict:
    """Try one mutant; `wider` gets a chance where the tests that it names stay green."""
    started_s = time.monotonic()
    tree = folder / mutant.name
    shutil.copytree(folder / UNPATCHED, tree)  # with what was compiled
    wide = False
    fault = apply(mutant, tree)
    if fault:
        outcome = Outcome(broken=f"does not apply: {fault}")
    else:
        outcome = run_tests(tree, mutant.tests)
        if wider and not outcome.failed and not outcome.broken:
            wide, outcome = True, run_tests(tree, wider)
            if outcome.failed:
                outcome.broken = _red_anyway(outcome.failed, folder, mutant.name)
    shutil.rmtree(tree)
    verdict = Verdict(mutant, outcome, wide, time.monotonic() - started_s)
    name, _, by, seconds = verdict.row()
    print(f"{name:28} {seconds:>5} s  {by}", flush=True)
    return verdict


def _red_anyway(test: str, folder: Path, name: str) -> str:
    tree = folder / f"{name}-{UNPATCHED}"
    shutil.copytree(folder / UNPATCHED, tree)
    outcome = run_tests(tree, [test])
    shutil.rmtree(tree)
    return f"{test} is red without any patch too" if outcome.failed or outcome.broken else ""


def judge_all(mutants: Sequence[Mutant], folder: Path, wider: Sequence[str], jobs: int) -> list[Verdict]:
    """Try all of them, `jobs` at a time, each in a process of its own."""
    verdicts = {mutant.name: Verdict(mutant) for mutant in mutants}
    under_way: dict[int, Mutant] = {}

    def tell(mutant: Mutant) -> None:
        verdict = judge(mutant, folder, wider)
        facts = {"outcome": asdict(verdict.outcome), "wide": verdict.wide, "seconds": verdict.seconds}
        (folder / f"{mutant.name}.json").write_text(json.dumps(facts))

    def wait() -> None:
        pid, _ = os.wait()
        mutant = under_way.pop(pid)
        told = folder / f"{mutant.name}.json"
        if told.exists():
            facts = json.loads(told.read_text())
            verdicts[mutant.name] = Verdict(
                mutant, Outcome(**facts["outcome"]), wide=facts["wide"], seconds=facts["seconds"]
            )

    for mutant in mutants:
        if len(under_way) == jobs:
            wait()
        under_way[_fork(lambda mutant=mutant: tell(mutant))] = mutant  # type: ignore[misc]
    while under_way:
        wait()
    return list(verdicts.values())


def baseline(mutants: Sequence[Mutant], folder: Path) -> str:
    """Why trying mutants would show nothing: a patch does not apply, a test is red anyway; empty if all is well."""
    tree = folder / UNPATCHED
    copy_tree(tree)
    if faults := misfits(mutants, tree):
        return "\n".join(["these patches do not apply:", *faults])
    outcome = run_tests(tree, list(_once(test for mutant in mutants for test in mutant.tests)))
    if outcome.failed or outcome.broken:
        return f"the tests are red without any patch: {outcome.failed} {outcome.broken}"
    print(f"{outcome.ran} tests are green without a patch", flush=True)
    return ""


def _once(tests: Iterable[str]) -> Iterator[str]:
    """Files and single tests of other files."""
    known = sorted(set(tests))
    whole = {test for test in known if "::" not in test}
    return (test for test in known if test in whole or test.partition("::")[0] not in whole)


def table(verdicts: Sequence[Verdict]) -> str:
    """All verdicts, for people."""
    rows = [("mutant", "breaks", "caught by", "s"), *(verdict.row() for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join((row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2]), row[3])) for row in rows
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try (default: all)")
    parser.add_argument("--list", action="store_true", help="say what the mutants are")
    parser.add_argument("--named-only", action="store_true", help="run no other tests than those that a mutant names")
    parser.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="mutants tried at one time")
    options = parser.parse_args(arguments)
    try:
        mutants = read_all()
    except BadPatch as error:
        print(error)
        return 2
    known = {mutant.name for mutant in mutants}
    if unknown := sorted(set(options.names) - known):
        print(f"there is no mutant {', '.join(unknown)}; see: python -m tests.mutations --list")
        return 2
    mutants = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:28} {' '.join(mutant.invariants):7} {mutant.mechanism}")
        return 0
    started_s = time.monotonic()
    for name in _WARM:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name).resolve()
        if fault := baseline(mutants, folder):
            print(fault)
            return 1
        verdicts = judge_all(mutants, folder, () if options.named_only else WIDE, options.jobs)
    print(f"\n{table(verdicts)}\n")
    survivors = [verdict.mutant.name for verdict in verdicts if not verdict.is_caught]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants caught in {time.monotonic() - started_s:.0f} s")
    if survivors:
        print(f"NOT caught: {', '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
