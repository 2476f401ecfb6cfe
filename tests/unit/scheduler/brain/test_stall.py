"""What becomes of a job that lost a stage: every case by hand. The cases stand in the text beside this file."""

from __future__ import annotations

import pytest

from scheduler.brain import stall
from scheduler.brain.stall import Stalls
from swarm.types import JobId, JobState
from tests.support.situations import Calls, Situation, beside

LOST = "stage server c (stage 1) is gone: killed; the stage has no other replica"


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_a_stalled_job_goes_on_as_the_text_says(situation: Situation) -> None:
    known = {"JOB": JobId("demo-1"), "LOST": LOST, "show": lambda value: value, **JobState.__members__}
    situation.check(Calls(stall, **known).play)


def test_only_standing_still_three_times_in_a_row_is_too_often() -> None:
    stalls = Stalls(10)
    for stood_still in (False, False, True, True, False, True, True):
        stalls = stalls.after(9, 5, stood_still=stood_still)
        assert not stalls.are_too_many
    assert stalls.after(9, 5, stood_still=True).are_too_many
    assert not stalls.after(11, 5, stood_still=True).are_too_many
