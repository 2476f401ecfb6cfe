"""The mutants: patches that each switch one safety mechanism of the product off, so that its tests can be tested.

A file `NAME.patch` begins with three lines for people and for the runner, then a unified diff with little context:

    Switches off: what keeps whom from what
    Breaks: I1, I7                                   invariants of ARCHITECTURE.md
    Caught by: tests/unit/stage_server/brain/test_cell.py ...           what ought to turn red, fastest first
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PRODUCT = ("client/", "scheduler/", "stage_server/", "swarm/")

_HEAD = ("Switches off", "Breaks", "Caught by")
_INVARIANT = re.compile(r"I([1-9]|1[0-2])")


class BadPatch(ValueError):
    """A patch whose header or diff is not as it should be."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One patch."""

    name: str
    path: Path
    mechanism: str
    invariants: tuple[str, ...]
    tests: tuple[str, ...]  # paths, or test ids, in the order in which they are run
    diff: str

    @property
    def files(self) -> tuple[str, ...]:
        """What it changes."""
        return tuple(re.findall(r"^\+\+\+ b/(\S+)$", self.diff, re.MULTILINE))

    def originals(self) -> list[tuple[str, str]]:
        """(file, the lines as they are before) of each hunk."""
        found: list[tuple[str, list[str]]] = []
        file = ""
        for line in self.diff.splitlines():
            if line.startswith("+++ b/"):
                file = line.removeprefix("+++ b/")
            elif line.startswith("@@"):
                found.append((file, []))
            elif found and line[:1] in (" ", "-") and not line.startswith("--- "):
                found[-1][1].append(line[1:])
        return [(file, "\n".join(lines) + "\n") for file, lines in found]


def read(path: Path) -> Mutant:
    """The mutant in a file; BadPatch."""
    head, mark, diff = path.read_text(encoding="utf-8").partition("--- a/")
    lines = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    if tuple(lines) != _HEAD or not all(value.strip() for value in lines.values()):
        raise BadPatch(f"{path.name} does not begin with the lines {', '.join(_HEAD)}")
    mechanism, breaks, tests = (lines[key].strip() for key in _HEAD)
    invariants = tuple(breaks.split(", "))
    if not all(_INVARIANT.fullmatch(one) for one in invariants):
        raise BadPatch(f"{path.name}: {breaks!r} names no invariants I1 to I12")
    mutant = Mutant(path.stem, path, mechanism, invariants, tuple(tests.split()), mark + diff)
    if not mutant.files or not all(file.startswith(PRODUCT) for file in mutant.files):
        raise BadPatch(f"{path.name} changes something else than {', '.join(PRODUCT)}")
    for test in mutant.tests:
        if not (ROOT / test.partition("::")[0]).exists():
            raise BadPatch(f"{path.name}: there is no {test}")
    return mutant


def read_all() -> list[Mutant]:
    """All mutants in order of name; BadPatch."""
    return [read(path) for path in sorted(FOLDER.glob("*.patch"))]


def copy_tree(target: Path) -> None:
    """What git knows of the working tree, with what was changed and added; without history and environments."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, place = ROOT / name, target / name
        if source.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)


def apply(mutant: Mutant, tree: Path) -> str:
    """Apply a patch; what git says against it, empty if nothing."""
    return _git_apply([mutant], tree)


def misfits(mutants: Sequence[Mutant], tree: Path) -> list[str]:
    """What git says of patches that do not apply: NAME: reason. Nothing is changed."""
    found = []
    left = list(mutants)
    while left:
        # One call for many patches, as long as no two of them change the same file.
        group: dict[str, Mutant] = {}
        for mutant in left:
            if not group.keys() & set(mutant.files):
                group |= dict.fromkeys(mutant.files, mutant)
        members = list(dict.fromkeys(mutant.name for mutant in group.values()))
        tried = [mutant for mutant in left if mutant.name in members]
        left = [mutant for mutant in left if mutant.name not in members]
        if _git_apply(tried, tree, "--check"):
            each = {mutant.name: _git_apply([mutant], tree, "--check") for mutant in tried}
            found += [f"{name}: {fault}" for name, fault in each.items() if fault]
    return found


def _git_apply(mutants: Sequence[Mutant], tree: Path, *options: str) -> str:
    command = ["git", "apply", *options, *(str(mutant.path) for mutant in mutants)]
    # Beyond `tree` git must not look for a repository: it would take the paths for those of that one.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip() or f"git apply ended with {done.returncode}"
