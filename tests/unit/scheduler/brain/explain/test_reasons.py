"""What is said of a job at work follows what is at work, not what was once decided."""

from __future__ import annotations

import pytest

from scheduler.brain.explain.reasons import AWAITS_DATABASE, LOADED, RESUMED, Team, machines_lost, reason_at_work


@pytest.mark.parametrize(
    ("team", "text"),
    [
        (Team(1), "trains with 1 stage server"),
        (Team(4), "trains with 4 stage servers"),
        (Team(4, 1), "trains with 4 stage servers, 1 of them is not heard"),
        (Team(4, 2, 1, 3), "trains with 4 stage servers, 2 of them are not heard, 1 of them leaves, 3 more join"),
    ],
)
def test_a_job_is_said_to_train_with_those_that_it_has(team: Team, text: str) -> None:
    for stored in (LOADED, RESUMED):
        assert reason_at_work(stored, team, awaits_database=False, unsaved="") == text


def test_a_checkpoint_that_could_not_be_written_is_said_until_one_is() -> None:
    told = reason_at_work(LOADED, Team(2), awaits_database=False, unsaved="the checkpoint at step 20: no space")
    assert told == "trains with 2 stage servers; the checkpoint at step 20: no space"


def test_what_was_decided_on_the_way_stands_and_the_database_comes_first() -> None:
    stored = "cannot pause, goes on: the checkpoint at step 20 could not be written"
    assert reason_at_work(stored, Team(2), awaits_database=False, unsaved="x") == stored
    assert reason_at_work(stored, Team(2), awaits_database=True, unsaved="x") == AWAITS_DATABASE


@pytest.mark.parametrize(
    ("lost", "back", "are_enough", "told"),
    [
        (0, 0, True, ""),
        (1, 0, False, "one machine was lost; no step lost"),
        (1, 1, True, "one machine was lost and is back; no step lost"),
        (1, 0, True, "one machine was lost and replaced; no step lost"),
        (2, 2, True, "2 machines were lost and are back; no step lost"),
        (2, 1, False, "2 machines were lost; no step lost"),
    ],
)
def test_a_job_says_which_machines_it_lost_and_that_no_step_went_with_them(
    lost: int, back: int, are_enough: bool, told: str
) -> None:
    """After a kill the headline stayed "trains with 4 stage servers", and nobody saw that something had happened."""
    assert machines_lost(lost, back, are_enough=are_enough) == told
