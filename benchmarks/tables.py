"""Tables: in a terminal, and between two marks of a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import stdev

from rich.console import Console
from rich.table import Table


def show(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int = 120) -> None:
    """Print a table."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between two marks of a Markdown file."""
    start, end = marks
    before, _, rest = page.read_text().partition(start)
    page.write_text(f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}")


def publish(text: str, page: Path | None, marks: tuple[str, str]) -> None:
    """Print a text, and write it between two marks of a page if there is one."""
    Console().print(text, highlight=False)
    if page is not None:
        write_between(page, marks, text)


def spread(found: Sequence[float]) -> str:
    """How far several figures lie apart; empty for one."""
    return f" ± {stdev(found):.3f}" if len(found) > 1 else ""
