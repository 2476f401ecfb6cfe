"""The part of docs/benchmarks.md that is made of the results: each figure beside its aim, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from benchmarks.full.measures import Measure, Row
from benchmarks.full.plots import AIMS, SPEEDS, has_bars
from benchmarks.full.results import Circumstances, Found, Value
from benchmarks.full.rows import ROWS

MARKS = ("<!-- all -->", "<!-- all end -->")
COMMAND = "python -m "
WIDTH = 120
HOW = (
    "How each was measured; in brackets above, the number of turns. The load is that of the machine just before: how "
    "many processes were runnable on average, 0 on an idle one."
)


def text_of(results: Mapping[str, Found]) -> str:
    """All between the marks."""
    figures = [cells for row in ROWS for cells in _figures(row, results.get(row.name))]
    commands = [cells for row in ROWS if row.name in results for cells in _commands(results[row.name])]
    parts = [
        "<!-- Made from docs/benchmarks.json: python -m benchmarks.full --page-only. Do not edit. -->",
        _summary(results),
        *_plot(AIMS, "Each figure as a share of its aim", results),
        _table(("row", "measure", "against", "median", "least to most", "aim", "met"), figures),
        *_plot(SPEEDS, "Tokens per second as multiples of Schedule1F1B's", results),
        fill(HOW, WIDTH),
        _table(("row", "command", "form", "date", "cores", "load", "took"), commands),
    ]
    remarks = dict.fromkeys(found.circumstances.remark for found in results.values() if found.circumstances.remark)
    return "\n\n".join([*parts, *(fill(remark, WIDTH) for remark in remarks)])


def write_page(page: Path, results: Mapping[str, Found]) -> None:
    """Replace what stands between the marks; ValueError if the page has none."""
    start, end = MARKS
    before, mark, rest = page.read_text().partition(start)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise ValueError(f"{page} has no {start} ... {end}: put both lines where the table is to be")
    page.write_text(f"{before}{start}\n{text_of(results)}\n{end}{after}")


def between_marks(page: Path) -> str:
    """What the page has now."""
    start, end = MARKS
    return page.read_text().partition(f"{start}\n")[2].partition(f"\n{end}")[0]


def _plot(name: str, title: str, results: Mapping[str, Found]) -> Sequence[str]:
    return [f"![{title}]({name})"] if has_bars(name, results) else []


def _summary(results: Mapping[str, Found]) -> str:
    aimed = [(row, measure) for row in ROWS for measure in row.measures if measure.aim is not None]
    verdicts = [
        measure.met(measure.middle(values))
        for row, measure in aimed
        if row.name in results and (values := results[row.name].values.get(measure.key))
    ]
    return f"Of {len(aimed)} aims, {len(verdicts)} measured, {sum(verdict is True for verdict in verdicts)} met."


def _figures(row: Row, found: Found | None) -> Iterator[Sequence[str]]:
    if found and found.fault:
        yield row.name, row.about, "", f"not measured: {found.fault}", "", "", ""
    for measure in row.measures:
        values = found.values.get(measure.key) if found else None
        yield row.name, measure.text, measure.against, *_figure(measure, values or ())


def _figure(measure: Measure, values: Sequence[Value]) -> Sequence[str]:
    if not values:
        return "not measured yet", "", _aim(measure), ""
    found = measure.middle(values)
    verdict = {True: "yes", False: "**no**", None: ""}[measure.met(found)]
    return measure.shown(found), _range(values, measure), _aim(measure), verdict


def _range(values: Sequence[Value], measure: Measure) -> str:
    if len(values) == 1:
        return "one run"
    known = [value for value in values if value is not None]
    ends = [measure.shown(end, unit=False) for end in ((min(known), max(known)) if known else ())]
    never = f"{len(values) - len(known)} never" if len(known) < len(values) else ""
    return ", ".join(part for part in (" to ".join(ends), never) if part) + f" ({len(values)})"


def _aim(measure: Measure) -> str:
    return "" if measure.aim is None else f"{'≤' if measure.at_most else '≥'} {measure.shown(measure.aim)}"


def _commands(found: Found) -> Iterator[Sequence[str]]:
    where = found.circumstances
    for number, command in enumerate(found.commands):
        told = _told(found, where) if number == 0 else ("",) * 5
        yield found.row if number == 0 else "", f"`{COMMAND}{command}`", *told


def _told(found: Found, where: Circumstances) -> Sequence[str]:
    form = "quick" if found.quick else "full"
    date = f"{where.date}, with uncommitted changes" if where.uncommitted else where.date
    return form, date, str(where.cores), f"{where.load_before:.1f}", f"{found.seconds:.0f} s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
