"""How large the house is: `python -m tools.size`, or `make size`. Exit status 1 if it grew beyond [tool.size].

Whoever makes something smaller lowers the ceiling in pyproject.toml to what is left.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ("swarm", "scheduler", "stage_server", "client")
_SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def files(*tops: str) -> list[Path]:
    """The Python files of these folders, without what is generated."""
    return [
        path for top in tops for path in sorted((ROOT / top).rglob("*.py")) if ROOT / "swarm/wire" not in path.parents
    ]


def code_lines(text: str) -> int:
    """Lines with code: no blank lines, comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in _SPACE for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


def doubled(paths: Iterable[Path]) -> list[str]:
    """The names of classes that are defined twice, a leading underscore left out."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    count = Counter(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, times in count.items() if times > 1)


def figures() -> Iterator[tuple[str, int]]:
    """Prints a line for each package; the figures that have a ceiling."""
    sums = Counter[str]()
    for top in SOURCE:
        texts = [path.read_text(encoding="utf-8") for path in files(top)]
        lines, code = sum(text.count("\n") for text in texts), sum(map(code_lines, texts))
        print(f"{top:14}{len(texts):5} files {lines:7,} lines {code:7,} of code")
        sums += Counter(source_lines=lines, source_code_lines=code)
    yield from sums.items()
    yield "test_lines", sum(path.read_text(encoding="utf-8").count("\n") for path in files("tests"))
    yield "architecture_bytes", (ROOT / "ARCHITECTURE.md").stat().st_size


def main() -> int:
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["size"]
    grown = False
    for name, figure in figures():
        grown |= figure > ceilings[name]
        print(f"{name:20} {figure:8,} of at most {ceilings[name]:,}{'  GROWN' if figure > ceilings[name] else ''}")
    print("classes of one name:", *doubled(files(*SOURCE)))
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
