"""What chance had a say in between islands: which of them took part in an exchange, and which began anew behind it.

The job file alone says when islands exchange. If one was lost, the weights depend on where; with this log one process
repeats the bits (`swarm train-local --outer-log`). It has a line for each exchange that was not like the others:

    {"after_step": 100, "islands": [0], "begins": {}}           island 1 was lost: its last 50 steps do not count
    {"after_step": 150, "islands": [0], "begins": {"1": 0}}     island 1 begins as a copy of island 0

Where shares follow speed (swarm/job/shares.py), a line says those behind it, unless they are equal: "shares": [6, 2].
Those of ten steps with 8 microbatches sum to 80: "shares": [61, 19].
With several fragments a line names the one that was exchanged, if it is not the first.

Pure values; standard library only. Decision: docs/decisions/090.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.errors import InvalidConfig
from swarm.job.shares import divides

OUTER_LOG = "outer-log.jsonl"


@dataclass(frozen=True, slots=True)
class OuterRecord:
    """An exchange of a fragment: the islands whose steps since the last one count, and the islands that begin anew as
    copies."""

    after_step: int
    islands: tuple[int, ...]
    begins: Mapping[int, int] = field(default_factory=dict)
    fragment: int = 0
    shares: tuple[int, ...] = ()  # of each island in the steps behind it; equal ones if left out


def written(log: Iterable[OuterRecord]) -> bytes:
    """The log as a file."""
    lines = [
        {
            "after_step": record.after_step,
            **({"fragment": record.fragment} if record.fragment else {}),
            "islands": list(record.islands),
            "begins": {str(k): v for k, v in record.begins.items()},
            **({"shares": list(record.shares)} if record.shares else {}),
        }
        for record in log
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def read(content: bytes) -> tuple[OuterRecord, ...]:
    """The log in a file; InvalidConfig names the line that is wrong."""
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            values = json.loads(line)
            begins = {int(island): int(origin) for island, origin in values["begins"].items()}
            islands, fragment = tuple(map(int, values["islands"])), int(values.get("fragment", 0))
            shares = tuple(map(int, values.get("shares", ())))
            record = OuterRecord(int(values["after_step"]), islands, begins, fragment, shares)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise InvalidConfig(f"line {number} of the outer log cannot be read", hint=_HINT) from None
        records.append(record)
    return tuple(records)


class TookPart:
    """Which islands took part in which exchange; exchanges that the log does not name had all of them."""

    def __init__(
        self, log: Iterable[OuterRecord], islands: int, exchanges: Iterable[tuple[int, int]], microbatches: int = 0
    ) -> None:
        """`exchanges`, in order: after which inner step, and of which fragment; `microbatches`: of a step, if shares
        follow speed. InvalidConfig if no job can have had this log."""
        self._records = {(record.after_step, record.fragment): record for record in log}
        self._exchanges = list(exchanges)
        self._all = tuple(range(islands))
        present, found = set(self._all), set()
        for at in self._exchanges:
            one = self._record(*at)
            found.add(at)
            took_part, began = set(one.islands), set(one.begins)
            is_possible = bool(took_part) and took_part <= present
            if not is_possible or not set(one.begins.values()) <= took_part or not began <= {*self._all} - took_part:
                raise self._unfit(at[0])
            present = took_part | began
            if one.shares and not _divides(one.shares, present, islands, microbatches):
                raise self._unfit(at[0])
        if others := sorted(self._records.keys() - found):
            raise self._unfit(others[0][0])

    def shares(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """From which inner step on which shares hold, in order; without any they are equal."""
        for after_step, fragment in self._exchanges:
            yield after_step, self._record(after_step, fragment).shares

    def islands(self, step: int) -> tuple[int, ...]:
        """Those whose inner step `step` (from 0) counts."""
        return self._record(*next(at for at in self._exchanges if at[0] > step)).islands

    def proposers(self, step: int, fragment: int) -> tuple[int, ...]:
        """Those that take part in the merge of a fragment behind inner step `step`."""
        return self._record(step + 1, fragment).islands

    def begins(self, step: int) -> Mapping[int, int]:
        """The islands that begin behind inner step `step`, and of which others they are copies."""
        behind = [self._record(*at).begins for at in self._exchanges if at[0] == step + 1]
        return {island: origin for begins in behind for island, origin in begins.items()}

    def _record(self, after_step: int, fragment: int) -> OuterRecord:
        return self._records.get((after_step, fragment)) or OuterRecord(after_step, self._all)

    def _unfit(self, after_step: int) -> InvalidConfig:
        told = f"no job with {len(self._all)} islands can have exchanged like that after step {after_step}"
        return InvalidConfig(f"the outer log does not fit: {told}", hint=_HINT)


def _divides(shares: Sequence[int], present: Collection[int], islands: int, microbatches: int) -> bool:
    """Whether the islands at work, and no others, share the microbatches of steps."""
    having = {island for island, share in enumerate(shares) if share}
    return len(shares) == islands and having == set(present) and microbatches > 0 and divides(shares, microbatches)


_HINT = (
    f"take the file {OUTER_LOG} from the folder that swarm pull has made, and the job file of that job; if that job "
    "went on from a checkpoint, begin there too: --resume-from"
)
