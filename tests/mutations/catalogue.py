"""The mutants: patches that each switch one safety mechanism of the product off, so that its tests can be tested.

A file `NAME.patch` begins with three lines for people and for the runner, then come its hunks. A hunk names the file
and the function, class or constant that its lines stand in, by its dotted name, and then its lines as a diff does. It
has no line numbers, and as little context as makes its place unique:

    Switches off: what keeps whom from what
    Breaks: I1, I7                                   invariants of ARCHITECTURE.md
    Caught by: tests/unit/stage_server/brain/test_cell.py ...           what ought to turn red, fastest first
    @@ stage_server/brain/cell.py Cell.seal
    -        the line as it is
    +        the line of the mutant

A name that its file does not define any more is looked for in all of the source, so that code may move.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PRODUCT = ("client/", "scheduler/", "stage_server/", "swarm/")

_HEAD = ("Switches off", "Breaks", "Caught by")
_INVARIANT = re.compile(r"I([1-9]|1[0-2])")


class BadPatch(ValueError):
    """A patch whose header is not as it should be, or whose place in the source cannot be found."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines of one definition, and what stands in their place; without a name they stand outside of definitions."""

    file: str
    name: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One patch."""

    name: str
    path: Path
    mechanism: str
    invariants: tuple[str, ...]
    tests: tuple[str, ...]  # paths, or test ids, in the order in which they are run
    hunks: tuple[Hunk, ...]


def read(path: Path) -> Mutant:
    """The mutant in a file; BadPatch."""
    head, *parts = re.split(r"(?m)^@@ ", path.read_text(encoding="utf-8"))
    lines = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    if tuple(lines) != _HEAD or not all(value.strip() for value in lines.values()):
        raise BadPatch(f"{path.name} does not begin with the lines {', '.join(_HEAD)}")
    mechanism, breaks, tests = (lines[key].strip() for key in _HEAD)
    invariants = tuple(breaks.split(", "))
    if not all(_INVARIANT.fullmatch(invariant) for invariant in invariants):
        raise BadPatch(f"{path.name}: {breaks!r} names no invariants I1 to I12")
    mutant = Mutant(path.stem, path, mechanism, invariants, tuple(tests.split()), tuple(map(_hunk, parts)))
    if not parts or not all(hunk.file.startswith(PRODUCT) and hunk.old for hunk in mutant.hunks):
        raise BadPatch(f"{path.name} changes something else than lines of {', '.join(PRODUCT)}")
    for test in mutant.tests:
        if not _is_there(*test.split("::", 1)):
            raise BadPatch(f"{path.name}: there is no {test}")
    return mutant


def _is_there(file: str, name: str = "") -> bool:
    """Whether there is such a file, and in it the test, whose name may go on with its parameters."""
    path = ROOT / file
    return path.exists() and (not name or f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8"))


def _hunk(part: str) -> Hunk:
    place, *lines = part.removesuffix("\n").split("\n")
    file, _, name = place.strip().partition(" ")
    old, new = (tuple(line[1:] for line in lines if line[:1] != other) for other in "+-")
    return Hunk(file, name, old, new)


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


def sources(tree: Path) -> dict[str, str]:
    """The text of each file of the product in a tree."""
    paths = sorted(path for top in PRODUCT for path in (tree / top).glob("**/*.py"))
    return {path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def apply(mutant: Mutant, tree: Path) -> str:
    """Apply a patch to a tree; what speaks against it, empty if nothing."""
    try:
        changed = patched(mutant, sources(tree))
    except BadPatch as error:
        return str(error)
    for path, text in ((tree / file, text) for file, text in changed.items()):
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
    return ""


def misfits(mutants: Sequence[Mutant], tree: Path) -> list[str]:
    """Why patches do not apply: NAME: reason. Nothing is changed."""
    texts, found = sources(tree), []
    for mutant in mutants:
        try:
            patched(mutant, texts)
        except BadPatch as error:
            found.append(f"{mutant.name}: {error}")
    return found


def patched(mutant: Mutant, texts: Mapping[str, str]) -> dict[str, str]:
    """The files that a mutant changes, as they are then; BadPatch."""
    places = sorted(((*_place(hunk, texts), hunk) for hunk in mutant.hunks), key=lambda place: place[:2], reverse=True)
    changed: dict[str, list[str]] = {}
    for file, line, hunk in places:  # from the last to the first: the lines above keep their numbers
        changed.setdefault(file, texts[file].split("\n"))[line : line + len(hunk.old)] = hunk.new
    return {file: "\n".join(lines) for file, lines in changed.items()}


def _place(hunk: Hunk, texts: Mapping[str, str]) -> tuple[str, int]:
    """The file and the line where a hunk's old lines begin; BadPatch."""
    is_home = hunk.file in texts and hunk.name in _definitions(texts[hunk.file])
    found = [(file, line) for file in ([hunk.file] if is_home else texts) for line in _lines(hunk, texts[file])]
    if len(found) != 1:
        where = f"{hunk.name or 'the file'} of {hunk.file}" if is_home else f"{hunk.name or 'a file'} of any file"
        raise BadPatch(f"its lines stand {len(found)} times in {where}: {hunk.old[0].strip()!r} ...")
    return found[0]


def _lines(hunk: Hunk, text: str) -> Iterator[int]:
    if "\n".join(hunk.old) in text:  # else it need not be parsed
        lines = text.split("\n")
        for first, end in _definitions(text).get(hunk.name, ()):
            for line in range(first, end - len(hunk.old) + 1):
                if tuple(lines[line : line + len(hunk.old)]) == hunk.old:
                    yield line


@cache
def _definitions(text: str) -> dict[str, list[tuple[int, int]]]:
    """The lines, from and to, of each function, class and constant of a file by its dotted name; "" is the file."""
    found = {"": [(0, text.count("\n") + 1)]}
    ahead: list[tuple[str, ast.stmt]] = [("", node) for node in ast.parse(text).body]
    for prefix, node in ahead:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                first = node.lineno
            case _:
                continue
        found.setdefault(prefix + name, []).append((first - 1, node.end_lineno or first))
        if isinstance(node, ast.ClassDef):
            ahead += [(f"{prefix}{name}.", child) for child in node.body]
    return found
