"""scheduler.brain.islands.waits: what each island does, and how long it waited for what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.brain.islands.waits import WAITS, Waits, states
from scheduler.brain.state.mode import Mode
from swarm.job.course import IslandCourse, OuterCourse

COURSES = tuple(OuterCourse(IslandCourse(4, 2, 2, island)) for island in range(2))  # steps 2 and 5 are outer ones


def island(agreed: int, *, begun: int | None = None, mode: Mode = Mode.RUNNING, is_held: bool = False) -> Any:
    """One that has this version; `is_held`: an evaluation needs its weights."""
    begun = agreed if begun is None else begun
    has_come = COURSES[0].is_outer(agreed) and begun == agreed and mode is Mode.RUNNING and not is_held
    return SimpleNamespace(mode=mode, agreed=agreed, begun=begun, outer_step=agreed if has_come else None)


def roster(*islands: Any) -> Any:
    """None in the place of an island: it is lost."""
    at_work = {number: one for number, one in enumerate(islands) if one is not None}
    steps = {one.outer_step for one in at_work.values()}
    return SimpleNamespace(
        islands=islands,
        courses=COURSES,
        lost={number: "" for number, one in enumerate(islands) if one is None},
        at_work=lambda: at_work,
        outer_step=steps.pop() if len(steps) == 1 else None,
    )


@pytest.mark.parametrize(
    ("one", "other", "state"),
    [
        (island(1, begun=2), island(1), "training"),
        (island(2), island(1), "waiting"),
        (island(2), island(2), "exchanging"),
        (island(2, begun=3), island(2, begun=3), "exchanging"),
        (island(2, is_held=True), island(2), "evaluating"),
        (island(3), island(2, begun=3), "training"),
        (island(0, mode=Mode.LOADING), island(2), "loading"),
        (island(2, mode=Mode.GATHERING), island(2), "loading"),
        (island(6, mode=Mode.SAVING), island(6), "saving"),
        (island(2), None, "exchanging"),
        (None, island(2), "lost"),
    ],
)
def test_an_island_is_in_the_state_that_its_steps_and_those_of_the_others_say(one: Any, other: Any, state: str) -> None:
    assert states(roster(one, other))[0].value == state


def test_what_an_island_waits_for_is_counted_apart_also_while_it_lasts() -> None:
    at: Any = SimpleNamespace(now=roster(island(1), island(1)))
    waits = Waits(at)

    def note(now_s: float, *islands: Any) -> None:
        at.__dict__.update(vars(roster(*islands)))
        waits.note(now_s)

    note(100.0, island(1), island(1))
    note(110.0, island(2), island(1))  # the first waits for the second
    note(113.0, island(2), island(1))
    note(115.0, island(2), island(2))  # they exchange
    note(119.0, island(3), island(2, begun=3))  # the second has yet to merge
    assert [[waits.of(n, 120.0)[reason] for reason in WAITS] for n in (0, 1)] == [[5.0, 4.0], [0.0, 5.0]]
    note(121.0, island(3), None)
    note(200.0, island(3), None)
    assert [[waits.of(n, 300.0)[reason] for reason in WAITS] for n in (0, 1)] == [[5.0, 4.0], [0.0, 6.0]]
