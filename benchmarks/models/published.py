"""Published figures beside those that are found here, and whether they come out."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: as it was published, as it is found here, and the bounds between which it comes out."""

    about: str
    published: str
    found: float
    least: float
    most: float
    digits: int = 3

    @property
    def comes_out(self) -> bool:
        return self.least <= self.found <= self.most

    def row(self) -> str:
        """Of a table in Markdown."""
        verdict = "yes" if self.comes_out else "**no**"
        return f"| {self.about} | {self.published} | {_shown(self.found, self.digits)} | {verdict} |"


def exactly(about: str, published: float, found: float, digits: int = 3) -> Figure:
    """A figure that must be equal in as many digits as are printed."""
    half = 0.5 * 10.0**-digits * (1.0 + 1e-9)
    return Figure(about, _shown(published, digits), found, published - half, published + half, digits)


def near(about: str, published: float, found: float, share: float, digits: int = 3) -> Figure:
    """A figure that may differ by a share of the published one."""
    margin = abs(published) * share
    return Figure(about, _shown(published, digits), found, published - margin, published + margin, digits)


def _shown(value: float, digits: int) -> str:
    return f"{value:.1e}" if 0.0 < abs(value) < 10.0**-digits else f"{value:,.{digits}f}"


def parser(doc: str | None) -> ArgumentParser:
    """For a benchmark whose first line says what it is."""
    made = ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--output", choices=("table", "json"), default="table")
    return made


def tell(options: Namespace, figures: Sequence[Figure]) -> int:
    """Print the figures as the options ask; gives the exit status: 1 if one does not come out, 0 as JSON."""
    if options.output == "json":
        print(json.dumps([asdict(figure) | {"comes_out": figure.comes_out} for figure in figures]))
        return 0
    print(
        "\n".join(["| figure | published | here | comes out |", "|---|---|---|---|", *(each.row() for each in figures)])
    )
    return 0 if all(figure.comes_out for figure in figures) else 1


def main_of(doc: str | None, figures: Callable[[], Sequence[Figure]]) -> int:
    """The whole program of a benchmark without other options."""
    return tell(parser(doc).parse_args(), figures())
