"""A newcomer adds a routing policy, an optimizer, an event, a command, a call: CONTRIBUTING.md names all that it takes.

Each .txt file beside this is such a change. It names its row of the table "Where to add things", and the tests that its
author would run; then come its hunks, as in tests/mutations, but each begins with the path alone, and its lines stand
once in that file. A hunk without old lines is a new file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutations.catalogue import ROOT, copy_tree
from tests.support.effort import ALL

FOLDER = Path(__file__).parent
MADE = {"make protos": ("protos/generate.py", "."), "make references": ("-m", "tests.support.references")}


@dataclass(frozen=True, slots=True)
class Change:
    """One file of this folder."""

    rows: tuple[str, ...]
    tests: tuple[str, ...]
    hunks: tuple[tuple[str, str, str], ...]  # path, old lines, new lines

    def make(self, tree: Path) -> None:
        for name, old, new in self.hunks:
            path = tree / name
            text = path.read_text() if old else ""
            assert text.count(old) == 1 or not old, f"{name} has {text.count(old)} times: {old!r}"
            assert old or not path.exists(), f"{name} is not new"
            path.write_text(text.replace(old, new) if old else new)


def read(path: Path) -> Change:
    head, *hunks = re.split(r"(?m)^@@ ", path.read_text())
    lines = dict(line.split(": ", 1) for line in head.splitlines())
    return Change(tuple(lines["Rows"].split("; ")), tuple(lines["Tests"].split()), tuple(map(_hunk, hunks)))


def _hunk(text: str) -> tuple[str, str, str]:
    name, *lines = text.removesuffix("\n").split("\n")
    old, new = ("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")
    return name, old, new


CHANGES = {path.stem: read(path) for path in sorted(FOLDER.glob("*.txt"))}


def named(change: Change) -> tuple[str, ...]:
    """The paths and the commands that CONTRIBUTING.md gives for the rows of a change; a folder ends with a slash."""
    table = dict(re.findall(r"(?m)^\| (.*?) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text()))
    return tuple(word for row in change.rows for word in re.findall(r"`([^`]+)`", table[row]))


def run(tree: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_touches_only_what_contributing_names(change: Change) -> None:
    for name, _, _ in change.hunks:
        assert any(name == path or (path.endswith("/") and name.startswith(path)) for path in named(change)), name


def test_all_changes_fit_the_tree_as_it_is(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    for change in CHANGES.values():
        change.make(tmp_path)


if ALL:

    @pytest.mark.timeout(1800)
    def test_with_what_contributing_names_all_five_changes_pass_mypy_and_their_tests(tmp_path: Path) -> None:
        copy_tree(tmp_path)
        changes = list(CHANGES.values())
        for change in changes:
            change.make(tmp_path)
        for command in [command for command in MADE if any(command in named(change) for change in changes)]:
            run(tmp_path, sys.executable, *MADE[command])
        run(tmp_path, sys.executable, "-m", "mypy")
        tests = dict.fromkeys(test for change in changes for test in change.tests)
        run(tmp_path, sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", "-p", "no:cacheprovider", *tests)
