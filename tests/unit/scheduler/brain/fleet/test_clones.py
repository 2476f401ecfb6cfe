"""Two processes under one identity are told from one that is restarted, moved, or not heard for a while."""

from __future__ import annotations

import pytest

from scheduler.brain.fleet.clones import CLONE_S, GAP_S_MAX, RIVALS_MAX, Rivals

A_MINUTE = 60.0


def dials(*, count: int, every_s: float, incarnations: int = 1, machines: int = 1) -> list[tuple[int, str, float]]:
    """Refused dials of processes that take turns."""
    return [(one % incarnations, f"10.0.0.{one % machines}", 1000.0 + every_s * one) for one in range(count)]


@pytest.mark.parametrize(
    ("seen", "cloned"),
    [
        (dials(count=11, every_s=A_MINUTE), True),
        (dials(count=601, every_s=1.0), True),
        (dials(count=10, every_s=A_MINUTE), False),
        (dials(count=600, every_s=1.0), False),
        # The scheduler, or the machine that it runs on, slept.
        (dials(count=2, every_s=CLONE_S), False),
        (dials(count=50, every_s=GAP_S_MAX + 1.0), False),
        # Started again and again, or through two addresses in turn while it is.
        (dials(count=5000, every_s=1.0, incarnations=5000), False),
        (dials(count=5000, every_s=1.0, incarnations=5000, machines=2), False),
        # One process that is not let in goes on through two addresses.
        (dials(count=602, every_s=1.0, machines=2), True),
    ],
)
def test_only_who_goes_on_dialling_beside_a_session_that_is_heard_is_another_process(
    seen: list[tuple[int, str, float]], cloned: bool
) -> None:
    rivals = Rivals()
    assert [rivals.dialled(*one) for one in seen][-1] is cloned


def test_what_is_remembered_is_bounded() -> None:
    rivals = Rivals()
    for one in dials(count=1000, every_s=1.0, incarnations=1000):
        rivals.dialled(*one)
    assert len(rivals._seen) == RIVALS_MAX
    later_s = 2000.0 + GAP_S_MAX  # they are gone, and make room
    assert [rivals.dialled(7777, "10.0.0.9", later_s + one * A_MINUTE) for one in range(11)][-1]


def test_a_session_that_began_anew_has_no_rivals() -> None:
    rivals = Rivals()
    for one in dials(count=10, every_s=A_MINUTE):
        assert not rivals.dialled(*one)
    assert not Rivals().dialled(0, "10.0.0.0", 1000.0 + CLONE_S)
