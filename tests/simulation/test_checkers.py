"""Each checker objects to the history that it is there for, and to none that is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from swarm.types import Hop, Microbatch
from swarm.wire.messages import Average, Committed, Route, Void
from tests.simulation.engine import checkers
from tests.simulation.engine.checkers import CHECKERS, Checker
from tests.simulation.engine.counting import NUMBERS
from tests.simulation.engine.history import (
    Applied,
    Backwarded,
    Commanded,
    Ended,
    EpochTaken,
    Fetched,
    Forwarded,
    Gauge,
    Held,
    History,
    Kept,
    Logged,
    Record,
    Reported,
    RowStored,
    Started,
)
from tests.simulation.engine.player import Result, facts_of, play
from tests.simulation.engine.scenario import Links, Scenario, Workload

SOUND = Scenario(
    "sound",
    workload=Workload(stages=(2,), replicas=(2,), late=(1.0,), tied=(True,), microbatches=(4,), steps=4),
    links=Links(duplicate=0.5, copies_max=3),
)


@pytest.fixture(scope="module")
def sound() -> Result:
    """A run in which nothing is wrong."""
    result = play(SOUND, 1)
    assert not result.failures, result.explain()
    return result


def test_no_checker_objects_to_a_sound_run(sound: Result) -> None:
    assert sound.microbatches == 16
    assert sound.counts["duplicated"] > 0
    for kind in (
        Applied,
        Backwarded,
        Commanded,
        EpochTaken,
        Forwarded,
        Gauge,
        Held,
        Kept,
        Reported,
        RowStored,
        Started,
    ):
        assert any(sound.history.of(kind)), f"no {kind.__name__} was recorded: checkers would have nothing to judge"
    assert [list(checker(sound.history, facts_of(sound.shape))) for checker in CHECKERS] == [[] for _ in CHECKERS]


Doctor = Callable[[list[Record]], list[Record]]


def changed(kind: type, change: Callable[[object], object], which: int = -1) -> Doctor:
    """Change one record of a kind; `change` gives None where it cannot."""

    def doctor(records: list[Record]) -> list[Record]:
        able = [
            (at, new)
            for at, record in enumerate(records)
            if isinstance(record.what, kind) and (new := change(record.what)) is not None
        ]
        at, new = able[which]
        return [*records[:at], replace(records[at], what=new), *records[at + 1 :]]

    return doctor


def every(kind: type, change: Callable[[object], object]) -> Doctor:
    """Change all records of a kind."""
    return lambda records: [
        replace(record, what=change(record.what)) if isinstance(record.what, kind) else record for record in records
    ]


def without(wrong: Callable[[Record], bool]) -> Doctor:
    """Leave records out."""
    return lambda records: [record for record in records if not wrong(record)]


def again(kind: type, change: Callable[[object], object]) -> Doctor:
    """Repeat the last record of a kind, changed, right after it."""

    def doctor(records: list[Record]) -> list[Record]:
        at = max(at for at, record in enumerate(records) if isinstance(record.what, kind) and change(record.what))
        return [*records[: at + 1], replace(records[at], what=change(records[at].what)), *records[at + 1 :]]

    return doctor


def more(*whats: object, process: str = "scheduler", incarnation: int = 1) -> Doctor:
    """Add records at the end."""
    return lambda records: [*records, *(Record(records[-1].at_s, process, incarnation, what) for what in whats)]


def mean(edit: Callable[[np.ndarray], None], unit: str = "stage-1") -> Callable[[object], object]:
    """An Applied whose averaged gradient of a unit was edited."""

    def change(applied: object) -> object:
        assert isinstance(applied, Applied)
        if unit not in applied.means:
            return None
        values = np.frombuffer(applied.means[unit], "<f4").copy()
        edit(values)
        return replace(applied, means={**applied.means, unit: values.tobytes()})

    return change


def assign(index: slice | int, factor: float) -> Callable[[np.ndarray], None]:
    def edit(values: np.ndarray) -> None:
        values[index] *= factor

    return edit


def in_event(kind: type, **changes: object) -> Callable[[object], object]:
    def change(what: object) -> object:
        assert isinstance(what, Reported)
        return Reported(replace(what.event, **changes)) if isinstance(what.event, kind) else None

    return change


def in_command(kind: type, **changes: object) -> Callable[[object], object]:
    def change(what: object) -> object:
        assert isinstance(what, Commanded)
        return replace(what, command=replace(what.command, **changes)) if isinstance(what.command, kind) else None

    return change


def in_row(**changes: object) -> Callable[[object], object]:
    def change(what: object) -> object:
        assert isinstance(what, RowStored)
        return replace(what, row=replace(what.row, **changes))

    return change


def old_row(records: list[Record]) -> list[Record]:
    """A newer scheduler takes over; the older one writes all the same."""
    at = max(at for at, record in enumerate(records) if isinstance(record.what, RowStored))
    return [*records[:at], Record(records[at].at_s, "scheduler", 2, EpochTaken(99)), *records[at:]]


def old_commit(records: list[Record]) -> list[Record]:
    """Every command is of an epoch older than one that all peers have heard of."""
    first = next(record for record in records if isinstance(record.what, Commanded))
    heard = [
        Record(0.0, f"peer-{number}", 1, Commanded(99, first.what.command))  # type: ignore[attr-defined]
        for number in range(4)
    ]
    return [*heard, *records]


def late_word(records: list[Record]) -> list[Record]:
    """A new incarnation starts; then an event of the one before is taken."""
    word = next(record for record in records if isinstance(record.what, Reported) and record.process == "peer-0")
    return [*records, Record(records[-1].at_s, "peer-0", 2, Started()), word]


CASES: list[tuple[str, Checker, Doctor]] = [
    ("a doubled gradient", checkers.exactly_once, changed(Applied, mean(assign(NUMBERS + 2, 2.0)))),
    ("a lost gradient", checkers.exactly_once, changed(Applied, mean(assign(NUMBERS + 1, 0.0)))),
    ("a gradient of another step", checkers.exactly_once, changed(Applied, mean(assign(-1, 2.0)))),
    ("a doubled use of a tied weight", checkers.exactly_once, changed(Applied, mean(assign(0, 1.5), "tied"))),
    (
        "a stage that never applies a step",
        checkers.exactly_once,
        without(lambda record: isinstance(record.what, Applied) and (record.what.stage, record.what.step) == (1, 1)),
    ),
    ("another divisor in a gradient", checkers.one_divisor, changed(Applied, mean(assign(slice(None), 1.001)))),
    ("another divisor in a round", checkers.one_divisor, changed(Commanded, in_command(Average, tokens=1))),
    ("another divisor in a row", checkers.one_divisor, changed(RowStored, in_row(tokens=1))),
    ("a replica that differs", checkers.parity, changed(Applied, lambda one: replace(one, digest="odd"))),
    ("a replica that lies", checkers.parity, changed(Reported, in_event(Committed, digest="odd"))),
    ("replicas that agree on other bytes", checkers.equality, every(Applied, lambda one: replace(one, digest="odd"))),
    (
        "another sample",
        checkers.data_cursor,
        changed(Forwarded, lambda one: replace(one, source="[7]") if one.stage == 0 else None),
    ),
    (
        "a sample that is never computed",
        checkers.data_cursor,
        without(lambda record: isinstance(record.what, Forwarded) and record.what.microbatch.index == 3),
    ),
    (
        "a checkpoint that does not verify",
        checkers.checkpoints,
        changed(Kept, lambda one: replace(one, fault="a file is too short")),
    ),
    (
        "a checkpoint of other weights",
        checkers.checkpoints,
        changed(Kept, lambda one: replace(one, weights_sha256="0")),
    ),
    ("no last checkpoint", checkers.checkpoints, without(lambda record: isinstance(record.what, Kept))),
    ("a joiner with other bytes", checkers.equality, more(Fetched(0, 2, "odd"), process="peer-9")),
    ("a replay with other bytes", checkers.replays, again(Forwarded, lambda one: replace(one, output="odd"))),
    ("a row of an older scheduler", checkers.fencing, old_row),
    ("an epoch that falls", checkers.fencing, more(EpochTaken(1))),
    ("a commit of an older scheduler", checkers.fencing, old_commit),
    ("bytes that no round gave", checkers.fencing, changed(Applied, mean(assign(0, 2.0)))),
    (
        "a round that is not the row's",
        checkers.fencing,
        every(RowStored, lambda one: replace(one, row=replace(one.row, rounds=dict.fromkeys(one.row.rounds, 0)))),
    ),
    ("a word of a process that was replaced", checkers.fencing, late_word),
    ("something that grows", checkers.bounds, more(Gauge("cells", 11, 10))),
    ("a gradient added twice", checkers.added_once, again(Backwarded, lambda one: one)),
    (
        "a row left out",
        checkers.steps_in_order,
        without(lambda record: isinstance(record.what, RowStored) and record.what.row.step == 1),
    ),
    (
        "a row written twice",
        checkers.steps_in_order,
        lambda records: [*records, next(r for r in records if isinstance(r.what, RowStored))],
    ),
    (
        "a timeline that begins beyond what was committed",
        checkers.steps_in_order,
        again(RowStored, lambda one: replace(one, row=replace(one.row, timeline=1, step=one.row.step + 2))),
    ),
    (
        "a version left out",
        checkers.steps_in_order,
        changed(Applied, lambda one: replace(one, version=one.version + 1)),
    ),
    (
        "an output dropped too early",
        checkers.held_until_commit,
        more(Held(4, frozenset([(99, 0, "forward")])), Held(4, frozenset()), process="peer-0"),
    ),
    ("a process that ends by itself", checkers.no_surprise, more(Ended("KeyError()", unexpected=True))),
    ("a traceback", checkers.no_surprise, more(Logged("call failed"))),
]


@pytest.mark.parametrize(("checker", "doctor"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_checker_objects_to(sound: Result, checker: Checker, doctor: Doctor) -> None:
    doctored = History()
    doctored.records = doctor(sound.history.records)
    facts = facts_of(sound.shape)
    assert doctored.records != sound.history.records
    assert list(checker(doctored, facts))
    assert list(checker(sound.history, facts)) == []


@pytest.mark.parametrize(("voided", "objects"), [(99, False), (98, True)])
def test_a_void_takes_what_was_at_work_when_it_came_and_no_other_step(
    sound: Result, voided: int, objects: bool
) -> None:
    hops = (Hop("peer-0", 1, 1, ""), Hop("peer-1", 1, 1, ""))
    history = History()
    history.records = more(
        Commanded(1, Route(Microbatch(0, 99, 0), 99, hops)),
        Commanded(1, Void(0, voided, 1)),
        Held(4, frozenset([(99, 0, "backward")])),  # that backward ran when the Void came, and goes first
        Held(4, frozenset()),
        process="peer-0",
    )(sound.history.records)
    assert bool(list(checkers.held_until_commit(history, facts_of(sound.shape)))) is objects


def test_every_checker_has_a_case() -> None:
    assert {checker for _, checker, _ in CASES} == set(CHECKERS)


def test_a_job_that_makes_no_progress_is_reported_with_what_it_waits_for() -> None:
    result = play(replace(SOUND, safety_s=0.0, calm_s=0.3), 1)
    assert any(failure.startswith("I11") for failure in result.failures)
    assert "peer-0.1 is up" in result.explain()
    assert "--scenario 'sound' --seed 1" in result.explain()
