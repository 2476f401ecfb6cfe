"""A round is given up when it stands still, not when a slow line needs long for it."""

from __future__ import annotations

import asyncio

import pytest

from stage_server.replica.averaging.deadline import STRETCH_MAX, Deadline
from tests.support.sim import loop as sim


async def waited_s(deadline: Deadline, moves_s: list[float]) -> float:
    """How long a wait under the deadline takes if the round moves at these times."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    deadline.begin()
    for at_s in moves_s:
        loop.call_at(began_s + at_s, deadline.moved)
    with pytest.raises(TimeoutError):
        async with deadline.limit():
            await asyncio.Event().wait()
    return loop.time() - began_s


@pytest.mark.parametrize(
    ("moves_s", "expected_s"),
    [
        ([], 60.0),
        ([50.0], 110.0),
        ([50.0, 100.0], 160.0),
        ([61.0], 60.0),
        ([float(at) for at in range(0, 900, 9)], 600.0),
    ],
)
def test_what_makes_progress_has_its_seconds_again_but_not_for_ever(moves_s: list[float], expected_s: float) -> None:
    """8 MiB take more than a minute over 1 Mbit/s, and a round had a minute: it failed for ever."""
    assert STRETCH_MAX == 10
    assert sim.run(waited_s(Deadline(60.0), moves_s), seed=0) == pytest.approx(expected_s, abs=0.5)


def test_progress_before_the_step_is_full_starts_no_clock() -> None:
    async def main() -> None:
        deadline = Deadline(1.0)
        deadline.moved()
        async with deadline.limit():
            await asyncio.sleep(5.0)

    sim.run(main(), seed=0)
