"""What a row of the table of all benchmarks is: the benchmarks that it runs, and the figures that are read of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from benchmarks.full.results import Value

Values = dict[str, list[Value]]


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a row; without `aim` it is shown beside the others only."""

    key: str
    text: str
    against: str
    aim: float | None = None
    at_most: bool = False  # the aim is an upper bound
    unit: str = "x"  # of both; "x": a ratio
    digits: int = 2

    def met(self, value: Value) -> bool | None:
        """Whether the aim is met; None: there is none."""
        if self.aim is None:
            return None
        return value is not None and (value <= self.aim if self.at_most else value >= self.aim)

    def middle(self, values: Sequence[Value]) -> Value:
        """The median; what never came counts as the worst, and half of those make the median one of them."""
        if sum(value is None for value in values) * 2 >= len(values):
            return None
        worst = inf if self.at_most else -inf
        return median(worst if value is None else value for value in values)

    def shown(self, value: Value, *, unit: bool = True) -> str:
        if value is None:
            return "never"
        sign = "+" if self.unit == "%" else ""
        number = f"{value:{sign},.{self.digits}f}"
        return f"{number} {self.unit}" if unit and self.unit != "x" else number


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark, and what is added to it for the short form and for the long one."""

    command: str  # module and flags
    quick: str = ""
    full: str = ""

    def words(self, *, quick: bool) -> str:
        return f"{self.command} {self.quick if quick else self.full}".strip()


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    about: str
    runs: Sequence[Run]
    measures: Sequence[Measure]
    read: Callable[[Sequence[Any]], Values]  # of what each run printed
    network: bool = False  # in network namespaces: needs root
