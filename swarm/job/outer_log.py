"""What chance had a say in between islands: which of them took part in an exchange, were late, or began anew behind it,
and who trained what.

The job file alone says when islands exchange. If one was lost or late, the weights depend on where; with this log one
process repeats the bits (`swarm train-local --outer-log`). It has a line for each exchange that was not like the
others, and, where leases follow speed (swarm/job/leases.py), for each time that they were cut anew:

    {"after_step": 100, "islands": [0], "begins": {}}           island 1 was lost: its last 50 steps do not count
    {"after_step": 150, "islands": [0], "begins": {"1": 0}}     island 1 begins as a copy of island 0
    {"after_step": 250, "islands": [0], "late": [1], "begins": {}}
                                     made without island 1, whose last 50 steps count in the next exchange
    {"from_step": {"0": 163, "1": 158}, "leases": {"0": [[2496, 2710]], "1": [[2710, 2800]]}}
                                     from its step 163 on, up to the end of the period, island 0 trains these 214

With several fragments a line names the one that was exchanged, if it is not the first. An island is late once running
at most, and never where islands begin anew, nor behind the last step.

Pure values; standard library only. Decision: docs/decisions/090.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from swarm.errors import InvalidConfig
from swarm.job.leases import Cut, Leases
from swarm.text import counted

OUTER_LOG = "outer-log.jsonl"


@dataclass(frozen=True, slots=True)
class OuterRecord:
    """An exchange of a fragment: the islands whose steps since the last one count, the islands that begin anew as
    copies, and the late ones, whose steps count in the next."""

    after_step: int
    islands: tuple[int, ...]
    begins: Mapping[int, int] = field(default_factory=dict)
    fragment: int = 0
    late: tuple[int, ...] = ()


Entry: TypeAlias = OuterRecord | Cut


def written(log: Iterable[Entry]) -> bytes:
    """The log as a file."""
    return "".join(line(entry) + "\n" for entry in log).encode()


def line(entry: Entry) -> str:
    """A line of the log; its numbers of islands are texts, as JSON has it."""
    if isinstance(entry, Cut):
        return json.dumps({"from_step": entry.from_step, "leases": entry.leases})
    fragment = {"fragment": entry.fragment} if entry.fragment else {}
    late = {"late": entry.late} if entry.late else {}
    islands = {"islands": entry.islands} | late | {"begins": entry.begins}
    return json.dumps({"after_step": entry.after_step} | fragment | islands)


def entry_of(values: Any) -> Entry:
    """What a line says; ValueError, TypeError, KeyError, AttributeError or OverflowError if that is nothing."""
    if "from_step" in values:
        from_step = {int(island): int(step) for island, step in values["from_step"].items()}
        leases = {
            int(island): tuple((int(first), int(end)) for first, end in ranges)
            for island, ranges in values["leases"].items()
        }
        return Cut(from_step, leases)
    begins = {int(island): int(origin) for island, origin in values["begins"].items()}
    islands, late = (tuple(map(int, told)) for told in (values["islands"], values.get("late", ())))
    return OuterRecord(int(values["after_step"]), islands, begins, int(values.get("fragment", 0)), late)


def read(content: bytes) -> tuple[Entry, ...]:
    """The log in a file; InvalidConfig names the line that is wrong."""
    entries = list[Entry]()
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            values = json.loads(text)
            entries.append(entry_of(values))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise InvalidConfig(f"line {number} of the outer log cannot be read", hint=_HINT) from None
        if "shares" in values:
            told = f"line {number} of the outer log has shares of each step, which an earlier version of swarm cut"
            raise InvalidConfig(told, hint="repeat the job with that version")
    return tuple(entries)


class TookPart:
    """Which islands took part in which exchange; exchanges that the log does not name had all of them."""

    def __init__(
        self,
        log: Iterable[Entry],
        islands: int,
        exchanges: Iterable[tuple[int, int]],
        leases: Leases | None = None,
    ) -> None:
        """`exchanges`, in order: after which inner step, and of which fragment; `leases`: where they follow speed; they
        are cut as the log says. InvalidConfig if no job can have had this log."""
        entries = tuple(log)
        self._records = {
            (entry.after_step, entry.fragment): entry for entry in entries if isinstance(entry, OuterRecord)
        }
        self._exchanges = list(exchanges)
        self._all = tuple(range(islands))
        present, found, owed = set(self._all), set(), dict[int, set[int]]()
        for at in self._exchanges:
            one = self._record(*at)
            found.add(at)
            took_part, late, began = set(one.islands), set(one.late), set(one.begins)
            is_possible = bool(took_part) and took_part | late <= present
            if not is_possible or not set(one.begins.values()) <= took_part or not began <= {*self._all} - took_part:
                raise self._unfit(at[0])
            is_whole = bool(began) or at[0] == self._exchanges[-1][0]
            if late and (is_whole or late & (took_part | owed.get(at[1], set()))):
                raise unfit(f"no island can have been late like that in the exchange after step {at[0]}")
            present = took_part | late | began
            owed = {fragment: before - began for fragment, before in owed.items()} | {at[1]: late}
        if others := sorted(self._records.keys() - found):
            raise self._unfit(others[0][0])
        self._counting = dict[tuple[int, int], tuple[int, ...]]()
        behind = set[int]()  # who counts at the exchange behind
        for at in reversed(self._exchanges):
            one = self._record(*at)
            behind = {*one.islands, *behind.intersection(one.late)}
            self._counting[at] = tuple(sorted(behind))
        for cut in (entry for entry in entries if isinstance(entry, Cut)):
            if leases is None:
                raise unfit(f"the islands of this job have equal shares, not the leases {line(cut)}")
            if not leases.fits(cut):
                raise unfit(f"no such job with {counted(islands, 'island')} can have had the leases {line(cut)}")
            leases.cut(cut)

    def islands(self, step: int) -> tuple[int, ...]:
        """Those whose inner step `step` (from 0) counts: not of an island that was late, and lost then."""
        return self._counting[next(at for at in self._exchanges if at[0] > step)]

    def proposers(self, step: int, fragment: int) -> tuple[int, ...]:
        """Those that take part in the merge of a fragment behind inner step `step`."""
        return self._record(step + 1, fragment).islands

    def late(self, step: int, fragment: int) -> tuple[int, ...]:
        """Those that merge it too, and propose what they have made at the fragment's next capture."""
        at = step + 1, fragment
        return tuple(island for island in self._record(*at).late if island in self._counting[at])

    def begins(self, step: int) -> Mapping[int, int]:
        """The islands that begin behind inner step `step`, and of which others they are copies."""
        behind = [self._record(*at).begins for at in self._exchanges if at[0] == step + 1]
        return {island: origin for begins in behind for island, origin in begins.items()}

    def _record(self, after_step: int, fragment: int) -> OuterRecord:
        return self._records.get((after_step, fragment)) or OuterRecord(after_step, self._all)

    def _unfit(self, after_step: int) -> InvalidConfig:
        return unfit(f"no job with {len(self._all)} islands can have exchanged like that after step {after_step}")


def unfit(told: str) -> InvalidConfig:
    """The log is another job's."""
    return InvalidConfig(f"the outer log does not fit: {told}", hint=_HINT)


_HINT = (
    f"take the file {OUTER_LOG} from the folder that swarm pull has made, and the job file of that job; if that job "
    "went on from a checkpoint, begin there too: --resume-from"
)
