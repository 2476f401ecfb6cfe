"""Counting islands under harm: each portion counts once, whatever becomes of islands; and each checker can object."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from scheduler.brain.outputs import Exchanged
from swarm.job.leases import Cut
from tests.simulation.engine.islands import (
    CHECKERS,
    Asked,
    Checker,
    Composed,
    Computed,
    Ended,
    HandedOver,
    Harmed,
    History,
    Kept,
    Merged,
    Proposed,
    Rows,
    Shape,
    Summed,
    World,
    anchor_gap,
    begun_world,
    checkpoints_level,
    course_of,
    exchange_first,
    exchanges,
    faults,
    islands_together,
    late_once,
    leases_of,
    leases_tile,
    microbatches_once,
    outer_weights_equal,
    play,
    portions_once,
    quorum,
    rows_in_order,
    spans_tile,
    stops_in_time,
    succeeds,
)
from tests.simulation.engine.shapes import PLAYS, by_speed, cases, histories, played
from tests.support.effort import seeds


@pytest.mark.parametrize(("shape", "seed"), cases())
def test_each_portion_counts_once_whatever_becomes_of_islands(shape: Shape, seed: int) -> None:
    assert faults(played(shape, seed), shape) == []


@pytest.mark.parametrize("seed", seeds(30, 2, 14))
def test_islands_begin_each_checkpoint_together_however_their_clocks_and_steps_lie(seed: int) -> None:
    """Each island counted from its own first commit, so one could begin a checkpoint that the others did not."""
    shape = Shape(steps=12, lease=3, islands=3, every_s=Random(seed).uniform(0.1, 4.0))
    assert faults(play(shape, seed), shape) == []


def test_a_pause_waits_for_what_a_late_island_owes_where_fragments_stream() -> None:
    """The exchange behind the late one merges another fragment, and all islands are in it; it is too early."""
    shape = Shape(islands=3, steps=30, lease=6, fragments=2, overlap=2, patience=0.05, stops=1)
    world = World(shape, 0)
    world.play_until(lambda one: len(one.made) >= 2)
    world.harm(Harmed(frozenset(peer for peer in world.replicas if peer.startswith("i2")), world.now_s + 60.0))
    world.play_until(lambda one: bool(one.made[-1].late))
    late = world.made[-1].step
    world.stop()
    world.finish()
    assert faults(world.history, shape) == []
    assert [made.step for made in exchanges(world.history).values() if made.step > late and made.whole] == [late + 8]


# Otherwise the first claim would be about nothing --------------------------------------------------------------------


def counts(history: History, name: str) -> list[int]:
    """How many islands took part in each exchange."""
    return [len(made.islands) for _, made in sorted(exchanges(history).items())]


def begun_anew(history: History) -> int:
    return sum(len(record.forks) for record in history if isinstance(record, Rows))


def epochs(history: History) -> set[int]:
    return {record.round.epoch for record in history if isinstance(record, Composed)}


def cuts(history: History) -> list[Cut]:
    return [item.cut for item in history if isinstance(item, Rows) and item.cut is not None]


def test_replicas_die_exchanges_are_repeated_and_schedulers_restarted() -> None:
    plays = histories("all-of-these")
    assert max(max(epochs(history)) for history in plays) > 2
    repeated = [len({record.round for record in history if isinstance(record, Proposed)}) for history in plays]
    assert max(repeated) > 9, "three outer steps have three units each"
    merged = [len([record for record in history if isinstance(record, Merged)]) for history in plays]
    assert min(merged) < 3 * 18, "replicas died"


def test_islands_are_lost_and_begin_anew() -> None:
    assert min(min(counts(history, "lost-lonely")) for history in histories("lost-lonely")) == 1, "of three"
    assert max(map(begun_anew, histories("lost-wide"))) > 1
    assert any(counts(history, "lost-wide")[-1] == 2 for history in histories("lost-wide")), "and end well"
    for name in ("lost-hard", "lost-streaming"):
        assert any(map(begun_anew, histories(name)))
    assert max(max(epochs(history)) for history in histories("lost-hard")) > 2, "schedulers were restarted"
    kept = [record.steps for history in histories("lost-hard") for record in history if isinstance(record, Kept)]
    assert any(0 < steps < 16 for steps in kept)
    for name in ("absent-short", "absent-shorter", "absent-by-speed"):
        shape = PLAYS[name].shape
        for history in histories(name):
            assert counts(history, name)[0] <= shape.islands - shape.absent
            assert begun_anew(history)


def test_islands_are_cut_off_and_freeze() -> None:
    splits = [history for name in PLAYS if "split" in name for history in histories(name)]
    harms = [record for history in splits for record in history if isinstance(record, Harmed)]
    assert {(harm.out, harm.into) for harm in harms} == {(True, False), (False, True), (True, True)}
    assert len({harm.until_s == math.inf for harm in harms}) == 2
    for name in ("split", "frozen", "split-streaming", "frozen-streaming"):
        assert any(min(counts(history, name)) < 3 for history in histories(name))


@pytest.mark.parametrize("name", ["guests-plain", "guests-hard", "guests-streaming"])
def test_lost_sites_come_back_where_stage_servers_start_there(name: str) -> None:
    """With so many losses not before the end in each play."""
    calm = replace(PLAYS[name].shape, losses=4, deaths=0, restarts=0)
    plays = [counts(played(calm, seed), name) for seed in seeds(8, 0, 1)]
    back = [sum(later > earlier for earlier, later in pairwise(play)) for play in plays]
    assert 2 * sum(back) >= len(plays)
    alone = replace(calm, replicas=1, arrivals=0)
    assert not any(begun_anew(played(alone, seed)) for seed in seeds(4, 0))


def test_islands_are_late_and_come_back() -> None:
    """Whatever made them late; the next exchange has them."""
    for name in [name for name in PLAYS if name.startswith("late-")]:
        made = [[*exchanges(history).values()] for history in histories(name)]
        late = [timeline for play in made for exchange in play for timeline in exchange.late]
        assert late or name in ("late-slow-saving", "late-and-lost", "late-losing"), name


def test_leases_are_cut_anew_amid_a_period_and_a_lost_island_has_none() -> None:
    found = [cut for history in histories("divided-losing") for cut in cuts(history) if cut.leases]
    lease = PLAYS["divided-losing"].shape.lease
    assert any(step % lease for cut in found for step in cut.from_step.values())
    assert any(() in cut.leases.values() for cut in found)


def test_a_slow_island_trains_less_of_each_step_where_leases_follow_speed() -> None:
    shape = replace(by_speed(PLAYS["slow"].shape), deaths=0, failures=0, restarts=0)
    plays = [leases_of(shape, cuts(play(shape, seed))) for seed in seeds(8, 0, 1, 2)]
    assert 2 * sum(play.trained(0, shape.steps) > play.trained(1, shape.steps) for play in plays) > len(plays)


# Doctored histories --------------------------------------------------------------------------------------------------

Doctor = Callable[[History], History]


def without(kind: type[object], number: int) -> Doctor:
    def doctored(history: History) -> History:
        found = [record for record in history if isinstance(record, kind)]
        return [record for record in history if record is not found[number]]

    return doctored


def changed(kind: type[object], number: int, change: Callable[[object], object]) -> Doctor:
    def doctored(history: History) -> History:
        found = [record for record in history if isinstance(record, kind)]
        return [change(record) if record is found[number] else record for record in history]

    return doctored


def twice(merged: object) -> object:
    assert isinstance(merged, Merged)
    return replace(merged, theta=((merged.theta[0][0], 2), *merged.theta[1:]))


def lacking(merged: object) -> object:
    assert isinstance(merged, Merged)
    return replace(merged, theta=merged.theta[1:])


def fewer(proposed: object) -> object:
    assert isinstance(proposed, Proposed)
    return replace(proposed, portions=proposed.portions[1:])


def one_less(history: History) -> History:
    """A microbatch is in no sum of those who averaged its stage."""
    found = next(record for record in history if isinstance(record, Summed) and record.indexes)
    less = replace(found, indexes=frozenset(sorted(found.indexes)[1:]))
    return [less if record is found else record for record in history]


def one_at_two(history: History) -> History:
    """Two replicas of a stage have the same microbatch in what they averaged."""
    for at, one in enumerate(history):
        for other in history[at + 1 :] if isinstance(one, Summed) and one.indexes else ():
            if isinstance(other, Summed) and (other.round, other.stage) == (one.round, one.stage):
                twice = replace(other, indexes=other.indexes | one.indexes)
                return [twice if each is other else each for each in history]
    raise AssertionError("no two of one stage")


def early(handed: object) -> object:
    assert isinstance(handed, HandedOver)
    return replace(handed, pending=(7,))


def merge_first(history: History) -> History:
    merged = next(record for record in history if isinstance(record, Merged))
    return [merged, *(record for record in history if record is not merged)]


def ended_badly(history: History) -> History:
    return [*history[:-1], Ended("stalled", "nobody knows")]


def without_forks(history: History) -> History:
    return [replace(record, forks=()) if isinstance(record, Rows) else record for record in history]


def late_forks(history: History) -> History:
    """The island trained before it was durable that it begins."""
    found = [fork for record in history if isinstance(record, Rows) for fork in record.forks]
    return [*without_forks(history)[:-1], Rows((), tuple(found)), history[-1]]


def lost_island_counts(history: History) -> History:
    """What the lost island had trained is in the outer weights after all."""
    return [
        replace(record, theta=tuple(sorted((*record.theta, (2, 1)))))
        if isinstance(record, Merged) and record.step
        else record
        for record in history
    ]


def lost_island_merges(history: History) -> History:
    """A replica of the first life of the lost island took over outer weights behind its end."""
    first = next(record for record in history if isinstance(record, Merged))
    return [*history[:-1], replace(first, timeline=1), history[-1]]


def lost_island_has_a_part(history: History) -> History:
    """A checkpoint has a part of an island that did not take part."""
    parts = [record for record in history if isinstance(record, HandedOver)]
    kept = next(record for record in history if isinstance(record, Kept))
    at = history.index(kept)
    return [*history[:at], replace(parts[0], number=2, timeline=2), *history[at:]]


def parts_exchanged(history: History) -> History:
    """Each part of a checkpoint has the number of the other."""
    return [
        replace(record, number=1 - record.number) if isinstance(record, HandedOver) else record for record in history
    ]


def a_microbatch_is_missing(history: History) -> History:
    at = next(n for n, one in enumerate(history) if isinstance(one, Computed))
    gone = history[at]
    return [record for record in history if record != gone]


def one_too_many(history: History) -> History:
    at = next(n for n, one in enumerate(history) if isinstance(one, Computed))
    first = history[at]
    assert isinstance(first, Computed)
    return [*history[:at], replace(first, index=99), *history[at:]]


def leases_forgotten(history: History) -> History:
    return [replace(item, cut=None) if isinstance(item, Rows) else item for item in history]


def leases_late(history: History) -> History:
    """Leases were used before they were durable."""
    at = next(n for n, one in enumerate(history) if isinstance(one, Rows) and one.cut is not None)
    later = next(n for n in range(at, len(history)) if isinstance(history[n], Computed)) + 1
    return [*history[:at], *history[at + 1 : later], history[at], *history[later:]]


def leases_too_large(history: History) -> History:
    """An island trains a microbatch more than there is."""
    at, one = next((n, one) for n, one in enumerate(history) if isinstance(one, Rows) and one.cut and one.cut.leases)
    assert isinstance(one, Rows)
    assert one.cut is not None
    (*others, (first, end)) = one.cut.leases[0]
    cut = replace(one.cut, leases={**one.cut.leases, 0: (*others, (first, end + 1))})
    return [*history[:at], replace(one, cut=cut), *history[at + 1 :]]


def change_exchange(number: int, change: Callable[[Exchanged], Exchanged]) -> Doctor:
    """Another exchange became durable."""

    def doctored(history: History) -> History:
        rows = [item for item in history if isinstance(item, Rows) and item.exchange is not None]
        at = rows[number]
        assert at.exchange is not None
        other = replace(at, exchange=change(at.exchange))
        return [other if item is at else item for item in history]

    return doctored


def late_twice(history: History) -> History:
    """The island that was late is late in the next exchange too."""
    made = [item.exchange for item in history if isinstance(item, Rows) and item.exchange is not None]
    number = next(n for n, one in enumerate(made) if one.late)
    late = made[number].late
    return change_exchange(number + 1, lambda one: replace(one, late=late))(history)


def late_in_the_end(history: History) -> History:
    return change_exchange(-1, lambda one: replace(one, islands=one.islands[:1], late=one.islands[1:]))(history)


def late_where_it_is_saved(history: History) -> History:
    made = next(item.exchange for item in history if isinstance(item, Rows) and item.exchange and item.exchange.late)
    return [*history, Kept(course_of(PLAYS["late-slow"].shape, 0).inner_steps(made.step))]


def behind_one_that_has_not_merged(history: History) -> History:
    """The next exchange is durable before replicas of a late island have made the outer step of the one before."""
    made = next(item.exchange for item in history if isinstance(item, Rows) and item.exchange and item.exchange.late)
    return moved_back(history, made.late[0], made.step)


def one_does_not_merge(history: History) -> History:
    """The second exchange is durable before a stage of an island has made the outer step of the first one."""
    first = next(item.exchange for item in history if isinstance(item, Rows) and item.exchange is not None)
    return moved_back(history, first.islands[-1], first.step, stages=(1,))


def moved_back(history: History, timeline: int, step: int, stages: Sequence[int] = (0, 1)) -> History:
    """The outer step is made by these replicas when all is over."""
    late = [
        item
        for item in history
        if isinstance(item, Merged) and (item.timeline, item.step) == (timeline, step) and item.stage in stages
    ]
    return [*(item for item in history if item not in late), *late]


def one_has_no_row(history: History) -> History:
    """An island trains on behind the first exchange without its outer step."""
    first = next(item.exchange for item in history if isinstance(item, Rows) and item.exchange is not None)
    late = (first.islands[-1], first.step)
    return [
        replace(item, rows=tuple(row for row in item.rows if (row.timeline, row.step) != late))
        if isinstance(item, Rows)
        else item
        for item in history
    ]


def composed_otherwise(history: History) -> History:
    """An envoy made another mean."""
    return changed(Composed, 0, lambda one: replace(one, mean="another"))(history)  # type: ignore[type-var]


LOSING = Shape(replicas=3, steps=9)
STOPPING = Shape(islands=3, steps=18, lease=6, fragments=2, overlap=2)


def played_as(name: str) -> tuple[History, Shape]:
    """A history to be doctored, and its shape.

    "lost": island 1 lost a stage behind its first step. "lost-between": the middle island was lost behind the exchange
    with which the job is saved, before it handed over its part, so the last island has the second part.
    """
    if name == "lost-between":
        world = begun_world(STOPPING)
        world.stop()
        world.play_until(lambda one: bool(one.made) and one.made[-1].whole)
        assert (world.brain.present, world.collecting) == ((0, 1, 2), None)
        world.lose(1, 0)
        world.finish()
        return world.history, replace(STOPPING, losses=1, stops=1)
    if name != "lost":
        return played(PLAYS[name].shape, PLAYS[name].kept if name in LATE else 0), PLAYS[name].shape
    world = World(LOSING, 0)
    world.play_until(lambda one: bool(one.database[1]))
    world.lose(1, 0)
    world.finish()
    return world.history, replace(LOSING, losses=1)


WHOLE, LOST, DIVIDED, LATE = ("calm", "streaming"), ("lost",), ("divided-quiet",), ("late-slow",)
BETWEEN = ("lost-between",)
DOCTORED: list[tuple[tuple[str, ...], Checker, Doctor]] = [
    (WHOLE, rows_in_order, without(Rows, 0)),
    (WHOLE, microbatches_once, one_less),
    (WHOLE, microbatches_once, one_at_two),
    (WHOLE, spans_tile, without(Proposed, 0)),
    (WHOLE, spans_tile, changed(Proposed, 1, fewer)),
    (WHOLE, portions_once, changed(Merged, 0, twice)),
    (WHOLE, portions_once, changed(Merged, -1, lacking)),
    (WHOLE, outer_weights_equal, changed(Merged, 0, lacking)),
    (WHOLE, exchange_first, merge_first),
    (WHOLE, exchange_first, lambda history: [record for record in history if not isinstance(record, Composed)]),
    (WHOLE, exchange_first, change_exchange(0, lambda one: replace(one, islands=one.islands[:1]))),
    (WHOLE, anchor_gap, one_does_not_merge),
    (WHOLE, quorum, composed_otherwise),
    (WHOLE, quorum, change_exchange(0, lambda one: replace(one, islands=()))),
    (LATE, anchor_gap, behind_one_that_has_not_merged),
    (LATE, late_once, late_twice),
    (LATE, late_once, late_in_the_end),
    (LATE, late_once, late_where_it_is_saved),
    (LATE, spans_tile, change_exchange(0, lambda one: replace(one, late=one.islands[:1]))),
    (WHOLE, islands_together, one_has_no_row),
    (WHOLE, checkpoints_level, without(HandedOver, 0)),
    (WHOLE, checkpoints_level, changed(HandedOver, 0, early)),
    (WHOLE, stops_in_time, lambda history: [Asked(), *history]),
    (WHOLE, succeeds, ended_badly),
    (LOST, rows_in_order, without_forks),
    (LOST, islands_together, without_forks),
    (LOST, islands_together, late_forks),
    (LOST, portions_once, lost_island_counts),
    (LOST, exchange_first, lost_island_merges),
    (LOST, checkpoints_level, lost_island_has_a_part),
    (BETWEEN, checkpoints_level, parts_exchanged),
    (BETWEEN, checkpoints_level, without(HandedOver, -1)),
    (DIVIDED, leases_tile, a_microbatch_is_missing),
    (DIVIDED, leases_tile, one_too_many),
    (DIVIDED, leases_tile, leases_forgotten),
    (DIVIDED, leases_tile, leases_late),
    (DIVIDED, leases_tile, leases_too_large),
]


@pytest.mark.parametrize(("names", "checker", "doctor"), DOCTORED)
def test_a_checker_objects_to_a_doctored_history(names: tuple[str, ...], checker: Checker, doctor: Doctor) -> None:
    for history, shape in map(played_as, names):
        assert list(checker(history, shape)) == []
        assert list(checker(doctor(history), shape)) != []


def test_every_checker_was_shown_to_object() -> None:
    assert {checker for _, checker, _ in DOCTORED} == set(CHECKERS)
