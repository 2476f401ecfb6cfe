"""Situations as text: what is done, line by line, and under each line what comes of it.

    === a stage server that is gone fails the job and is named
    # what the bug was, if the test is of one
    > job
    > PeerGone(c, "session broke")
    to a, b, d: Release(job=job, reason=...)

A player takes the lines that begin with > and gives the lines under them. SWARM_RECORD_GOLDEN=1 writes those anew; the
change is read before it is committed. The titles of a file are claims (tests/claims.txt).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from scheduler.brain.replay import spell
from swarm.errors import SwarmError

Play: TypeAlias = Callable[[str], Iterable[str]]
_RECORDS = bool(os.environ.get("SWARM_RECORD_GOLDEN"))


@dataclass(frozen=True)
class Situation:
    """One part of a file."""

    path: Path
    title: str
    text: str

    def __str__(self) -> str:
        return self.title

    def run(self, play: Play) -> list[str]:
        """Play it; its lines, with what comes of them."""
        return [line for asked in self.text.splitlines() for line in _played(asked, play)]

    def check(self, play: Play) -> None:
        """Play it, and compare what comes of it with what is written."""
        found = self.run(play)
        if _RECORDS:
            parts = {situation.title: situation.text for situation in situations(self.path)} | {
                self.title: "\n".join(found)
            }
            self.path.write_text("\n\n".join(f"=== {title}\n{text}" for title, text in parts.items()) + "\n")
        else:
            assert found == self.text.splitlines(), f"{self.path.name} says otherwise of: {self.title}"


def situations(path: Path) -> list[Situation]:
    """The situations of a file, in their order."""
    parts = re.split(r"^=== (.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    return [Situation(path, title, text.strip("\n")) for title, text in zip(parts[::2], parts[1::2], strict=True)]


def beside(test: str) -> list[Situation]:
    """The situations in the text beside a test file."""
    return situations(Path(test).with_suffix(".txt"))


def _played(line: str, play: Play) -> list[str]:
    if line.startswith("> "):
        return [line, *play(line[2:])]
    return [line] if line.startswith("#") else []


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression of literals, names and calls; a name of one small letter or two is itself."""

    def of(node: Any) -> Any:
        match node:
            case ast.Name(id=name):
                return name if name not in names and name.islower() else names[name]
            case ast.Call(func=ast.Name(id=name), args=args, keywords=pairs):
                return names[name](*map(of, args), **{pair.arg: of(pair.value) for pair in pairs})
            case ast.Attribute(value=whole, attr=name):
                return getattr(of(whole), name)
            case ast.Call(func=ast.Attribute() as method, args=args, keywords=pairs):
                return of(method)(*map(of, args), **{pair.arg: of(pair.value) for pair in pairs})
            case ast.Tuple(elts=parts):
                return tuple(map(of, parts))
            case ast.Dict(keys=keys, values=values):
                return dict(zip(map(of, keys), map(of, values), strict=True))
        return ast.literal_eval(node)

    return of(ast.parse(text.strip(), mode="eval").body)


class _Names(dict[str, Any]):
    """Names that are given, and the public methods and fields of a thing as they are when they are looked up."""

    def __init__(self, thing: object, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._thing = thing

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or hasattr(self._thing, str(name))

    def __missing__(self, name: str) -> Any:
        return getattr(self._thing, name)


class Calls:
    """Plays one thing: a line is an expression of its methods and fields, and its value stands below, or NAME = one."""

    def __init__(self, thing: object, **given: Any) -> None:
        self.names = _Names(thing, given)

    def play(self, line: str) -> Iterable[str]:
        name, is_kept, asked = line.rpartition(" = ")
        try:
            value = value_of(asked, self.names)
        except SwarmError as error:
            return [f"{type(error).__name__}: {error}"]
        if is_kept and "." in name:
            setattr(value_of(name.rpartition(".")[0], self.names), name.rpartition(".")[2], value)
        elif is_kept:
            self.names[name] = value
        return [] if value is None or is_kept else [value if isinstance(value, str) else spell(value)]
