"""When a stage server is started again."""

from __future__ import annotations

from client.up.revival import ENDS_MAX, PAUSE_S_MAX, STARTS_AT_ONCE, STARTS_PER_S, STEADY_S, Revival


def served() -> Revival:
    revival = Revival()
    revival.served()
    return revival


def test_each_early_end_doubles_the_pause_up_to_a_minute() -> None:
    revival = served()
    pauses = [revival.ended("a", 5.0, 1000.0 * number) for number in range(9)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, PAUSE_S_MAX, PAUSE_S_MAX, PAUSE_S_MAX]


def test_who_has_lived_long_begins_anew() -> None:
    revival = served()
    assert [revival.ended("a", 5.0, 0.0), revival.ended("a", 5.0, 10.0)] == [1.0, 2.0]
    assert revival.ended("a", STEADY_S, 100.0) == 1.0
    assert revival.ended("a", 5.0, 110.0) == 2.0


def test_the_pauses_of_one_are_not_those_of_another() -> None:
    revival = served()
    assert [revival.ended(name, 5.0, 0.0) for name in "aab"] == [1.0, 2.0, 1.0]


def test_many_that_end_together_do_not_start_together() -> None:
    revival = served()
    pauses = [revival.ended(f"peer-{number}", STEADY_S, 50.0) for number in range(40)]
    assert pauses[:STARTS_AT_ONCE] == [1.0] * STARTS_AT_ONCE
    late = [pause for pause in pauses[STARTS_AT_ONCE:] if pause is not None]
    assert late == [1.0 + number / STARTS_PER_S for number in range(1, 25)]
    assert revival.ended("later", STEADY_S, 500.0) == 1.0


def test_nobody_is_given_up_once_a_server_has_served() -> None:
    revival = served()
    assert None not in [revival.ended("a", 0.0, float(number)) for number in range(10 * ENDS_MAX)]


def test_a_server_that_only_ends_while_none_has_ever_served_is_given_up() -> None:
    revival = Revival()
    assert [revival.ended("a", 0.0, 0.0) is None for _ in range(ENDS_MAX)] == [False] * (ENDS_MAX - 1) + [True]
    assert revival.ended("b", 0.0, 0.0) is not None
