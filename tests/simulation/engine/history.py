"""What happened in a simulation, as seen at the ports: an append-only list that only checkers read.

Nothing here comes from the ledger, the cells or any other part that is judged. It records commands and events as they
passed the network, frames as receivers answered them, rows as the database took them, and calls of the stage.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from scheduler.brain.outputs import CommitRow
from swarm.types import Microbatch
from swarm.wire.messages import Command, Event, TensorHeader

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Started:
    """A process began."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process ended: "killed: ...", or the exception that it died of."""

    cause: str
    unexpected: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """Something was done to the system."""

    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EpochTaken:
    """A scheduler start took its number in the database."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command reached a stage server's side of its session."""

    epoch: int
    command: Command


@dataclass(frozen=True, slots=True)
class Reported:
    """An event of a stage server reached the scheduler's side of its session."""

    event: Event


@dataclass(frozen=True, slots=True)
class Delivered:
    """A receiver answered a tensor: "" accepted it, else the code of the refusal."""

    header: TensorHeader
    refusal: str


@dataclass(frozen=True, slots=True)
class RowStored:
    """The database has the row of a step; `told` is whether the scheduler was told so."""

    job: str
    epoch: int
    row: CommitRow
    told: bool


@dataclass(frozen=True, slots=True)
class Built:
    """A replica built its stage, which holds `version`."""

    stage: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """A joiner has put its stage's state together from the parts that others gave."""

    stage: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A replica computed a forward; `source` names its input (the sample on stage 0, a hash elsewhere)."""

    stage: int
    microbatch: Microbatch
    version: int
    source: str
    output: str


@dataclass(frozen=True, slots=True)
class Backwarded:
    """A replica computed a backward; `added` is whether the gradient entered the step's sums."""

    stage: int
    microbatch: Microbatch
    added: bool
    source: str
    output: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """A replica computed the gradients that a backward had left; `added` as there."""

    stage: int
    microbatch: Microbatch
    added: bool


@dataclass(frozen=True, slots=True)
class SumsDropped:
    """A replica forgot what it had added for a step (also after the optimizer used it)."""

    stage: int
    step: int


@dataclass(frozen=True, slots=True)
class Applied:
    """A replica ran the optimizer: averaged gradients by unit as bytes of float32, and what it holds afterwards."""

    stage: int
    step: int
    means: dict[str, bytes] = field(repr=False)
    learning_rate: float
    scale: float
    skip: bool
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Held:
    """The outputs that a replica holds for its neighbours: (step, index, "forward" | "backward")."""

    version: int
    outputs: frozenset[tuple[int, int, str]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that existed when the job had ended; `fault` says what does not verify."""

    step: int
    weights_sha256: str
    fault: str


@dataclass(frozen=True, slots=True)
class Gauge:
    """How full something bounded is; only new maxima are written down."""

    name: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Logged:
    """An error in a log."""

    text: str


@dataclass(frozen=True, slots=True)
class JobIs:
    """The job's state changed."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Calm:
    """Faults end here: from now on the job must make progress."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line: when, by which process (name and incarnation; "" outside of all processes), what."""

    at_s: float
    process: str
    incarnation: int
    what: object

    def __str__(self) -> str:
        who = f"{self.process}.{self.incarnation}" if self.process else "world"
        return f"{self.at_s:10.4f} s {who}: {self.what}"


class History:
    """The lines, in the order in which they happened."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, process: str, incarnation: int, what: object) -> None:
        self.records.append(Record(asyncio.get_running_loop().time(), process, incarnation, what))

    def of(self, kind: type[T]) -> Iterator[tuple[Record, T]]:
        """All lines of a kind."""
        return ((record, record.what) for record in self.records if isinstance(record.what, kind))

    def faults(self) -> dict[str, int]:
        """How often each kind of fault was injected."""
        counts: dict[str, int] = {}
        for _, fault in self.of(Fault):
            counts[fault.kind] = counts.get(fault.kind, 0) + 1
        return counts

    def sha256(self) -> str:
        """The hash of the history: two runs of a seed must agree."""
        digest = hashlib.sha256()
        for record in self.records:
            digest.update(_stable(record).encode())
        return digest.hexdigest()


def _stable(record: Record) -> str:
    """The line in a form that equal runs share: sets have no order."""
    what = record.what
    if isinstance(what, Held):
        return f"{record.at_s!r} {record.process} {record.incarnation} {what.version} {sorted(what.outputs)}"
    return f"{record.at_s!r} {record.process} {record.incarnation} {what!r}"
