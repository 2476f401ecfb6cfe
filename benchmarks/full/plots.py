"""The results as pictures: each figure as a share of its aim, and tokens per second as multiples of 1F1B's.

What was measured says which there are: a picture without a bar is not drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.full.measures import Measure
from benchmarks.full.results import Found, Value
from benchmarks.full.rows import ROWS

AIMS, SPEEDS = "benchmarks.svg", "benchmarks-speed.svg"
MET, MISSED, PLAIN = "#2a7f4f", "#b5432e", "#4a6fa5"
SETTINGS = {"svg.hashsalt": "swarm", "svg.fonttype": "none", "font.size": 9}
SHARES = (0.1, 10.0)  # shown; what lies outside is drawn at the edge
Bar = tuple[str, Measure, Sequence[Value]]


def write_plots(folder: Path, results: Mapping[str, Found]) -> None:
    """Write those that have bars, and remove the others; each names the results that it shows (`shows`)."""
    for name, (bars, draw) in PLOTS.items():
        if not (found := bars(results)):
            (folder / name).unlink(missing_ok=True)
            continue
        with rc_context(SETTINGS):
            draw(found).savefig(folder / name, metadata={"Date": None, "Description": mark(results)})
        lines = (folder / name).read_text().splitlines()
        (folder / name).write_text("\n".join(line.rstrip() for line in lines) + "\n")


def mark(results: Mapping[str, Found]) -> str:
    """Names the values and aims of which the plots are made."""
    values = {name: asdict(found)["values"] for name, found in sorted(results.items())}
    aims = [(row.name, measure.key, measure.text, measure.aim) for row in ROWS for measure in row.measures]
    return hashlib.sha256(json.dumps([values, aims]).encode()).hexdigest()


def shows(plot: Path, results: Mapping[str, Found]) -> bool:
    """Whether the plot was made of these results, or is not there because they have no bar for it."""
    if not has_bars(plot.name, results):
        return not plot.exists()
    return plot.exists() and mark(results) in plot.read_text()


def has_bars(name: str, results: Mapping[str, Found]) -> bool:
    bars, _ = PLOTS[name]
    return bool(bars(results))


def _aim_bars(results: Mapping[str, Found]) -> Sequence[Bar]:
    return [
        (f"{row.name}  {measure.text}, against {measure.against}" if measure.against else f"{row.name}  {measure.text}",
         measure, values)
        for row in ROWS
        for measure in row.measures
        if measure.aim and row.name in results and (values := results[row.name].values.get(measure.key))
    ]  # fmt: skip


def _aims(bars: Sequence[Bar]) -> Figure:
    """A bar for each figure with an aim; to the right of the line is better than the aim."""
    axes = _axes(len(bars))
    for place, (_, measure, values) in enumerate(reversed(bars)):
        shares = [_share(value, measure) for value in values]
        found = measure.middle(values)
        center, color = _share(found, measure), MET if measure.met(found) else MISSED
        axes.plot([min(shares), max(shares)], [place, place], color=color, linewidth=2, solid_capstyle="butt")
        axes.plot(center, place, "o", color=color, markersize=5)
        axes.annotate(measure.shown(found), (SHARES[1], place), textcoords="offset points", xytext=(4, -3))
    axes.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)])
    axes.set_xscale("log")
    axes.set_xlim(*SHARES)
    axes.set_xticks([0.1, 0.5, 1.0, 2.0, 10.0], ["0.1", "0.5", "aim", "2 x", "10 x"])
    axes.minorticks_off()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("share of the aim; right of the line: met")
    return _finished(axes)


def _speed_bars(results: Mapping[str, Found]) -> Sequence[Bar]:
    return [
        (measure.text + (" (half late or less)" if row.name[:2] == "P3" and "int8" not in measure.text else ""),
         measure, values)
        for row in ROWS
        if row.name in ("P1", "P1M", "P3", "P3S", "P3M") and row.name in results
        for measure in row.measures
        if measure.against == "1F1B" and (values := results[row.name].values.get(measure.key))
    ]  # fmt: skip


def _speeds(bars: Sequence[Bar]) -> Figure:
    """Tokens per second as multiples of 1F1B's in the same round."""
    axes = _axes(len(bars))
    for place, (_, measure, values) in enumerate(reversed(bars)):
        known = [value or 0.0 for value in values]
        center = measure.middle(values) or 0.0
        axes.barh(place, center, color=PLAIN, height=0.6)
        axes.plot([min(known), max(known)], [place, place], color="black", linewidth=1)
        axes.annotate(f"{center:.2f}", (max(known), place), textcoords="offset points", xytext=(4, -3))
    axes.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("tokens/s, 1F1B through the same links = 1; median with least and most")
    return _finished(axes)


def _share(value: Value, measure: Measure) -> float:
    """How much better than the aim: 2 is twice as good. An aim of at most a few per cent is one of what is lost."""
    assert measure.aim is not None
    if value is None:
        return SHARES[0]
    value, aim = (1.0 + value / 100.0, 1.0 + measure.aim / 100.0) if measure.unit == "%" else (value, measure.aim)
    share = aim / max(value, 1e-9) if measure.at_most else value / aim
    return min(max(share, SHARES[0]), SHARES[1])


def _axes(bars: int) -> Axes:
    figure = Figure(figsize=(10, 1.0 + 0.27 * bars), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _finished(axes: Axes) -> Figure:
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.7, max(0.7, len(axes.get_yticks()) - 0.3))
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


PLOTS = {AIMS: (_aim_bars, _aims), SPEEDS: (_speed_bars, _speeds)}
