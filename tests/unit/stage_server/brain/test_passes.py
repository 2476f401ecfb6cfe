"""Who may dial whom, as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stage_server.brain.passes import KnownPass, PassSlot, check
from swarm.errors import NoPass, Revoked, StaleMessage, SwarmError
from swarm.job.course import TIMELINES_MAX
from swarm.types import JobId, PeerId
from swarm.wire.messages import Pass

NOW = 1000.0
SHOWN = Pass("ours", JobId("job"), 2, PeerId("p"), 7, 1, 4, NOW - 100, NOW + 500)
AT = PassSlot(JobId("job"), 2, 2, 4, is_tied=False)
KNOWN = KnownPass("ours", NOW, "p")


def refusal(shown: Pass = SHOWN, at: PassSlot | None = AT, known: KnownPass = KNOWN, *, pulls: bool = False) -> Any:
    try:
        check(shown, at, known, pulls=pulls)
    except SwarmError as error:
        return type(error)
    return None


def test_a_pass_for_the_next_stage_lets_in() -> None:
    assert refusal() is None
    assert refusal(known=replace(KNOWN, name=None)) is None, "plaintext: the signature alone"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"cluster": "theirs"}, NoPass),
        ({"peer": PeerId("q")}, NoPass),
        ({"expires_unix_s": NOW}, NoPass),
        ({"expires_unix_s": NOW + 0.1}, None),
        ({"job": JobId("another")}, StaleMessage),
        ({"timeline": 1}, StaleMessage),
        ({"timeline": 3}, StaleMessage),
        ({"stages": 5}, NoPass),
    ],
)
def test_a_pass_of_others_or_of_another_time_lets_nobody_in(changed: dict[str, Any], expected: Any) -> None:
    assert refusal(replace(SHOWN, **changed)) is expected


def test_whoever_serves_nothing_lets_nobody_in() -> None:
    assert refusal(at=None) is StaleMessage


def test_the_passes_of_those_who_were_revoked_end_and_newer_ones_are_good() -> None:
    assert refusal(known=replace(KNOWN, cut_unix_s=SHOWN.issued_unix_s)) is Revoked
    assert refusal(known=replace(KNOWN, cut_unix_s=NOW)) is Revoked
    assert refusal(known=replace(KNOWN, cut_unix_s=SHOWN.issued_unix_s - 0.1)) is None  # it joined again


@pytest.mark.parametrize("is_tied", [False, True])
def test_neighbours_and_replicas_send_tied_ends_too_and_replicas_alone_pull(is_tied: bool) -> None:
    for mine in range(4):
        for theirs in range(4):
            shown, at = replace(SHOWN, stage=theirs), replace(AT, stage=mine, is_tied=is_tied)
            ends = is_tied and {mine, theirs} == {0, 3}
            assert refusal(shown, at) is (None if abs(mine - theirs) <= 1 or ends else NoPass), (mine, theirs)
            assert refusal(shown, at, pulls=True) is (None if mine == theirs else NoPass), (mine, theirs)


@pytest.mark.parametrize("is_tied", [False, True])
def test_from_another_island_of_the_job_only_their_own_stage_is_reached_and_that_with_their_tied_weight(
    is_tied: bool,
) -> None:
    """Timelines 6, 7 and 8 are the islands of the job's timeline 2; 5 and 9 are of others."""
    for mine in range(4):
        for theirs in range(4):
            at = replace(AT, stage=mine, is_tied=is_tied, timeline=7, islands=3)
            for timeline in (6, 8):
                shown = replace(SHOWN, stage=theirs, timeline=timeline)
                ends = is_tied and {mine, theirs} == {0, 3}
                assert refusal(shown, at) is (None if mine == theirs or ends else NoPass), (mine, theirs)
                assert refusal(shown, at, pulls=True) is (None if mine == theirs else NoPass), (mine, theirs)
            near = replace(SHOWN, stage=theirs, timeline=7)
            assert refusal(near, at) is (
                None if abs(mine - theirs) <= 1 or (is_tied and mine - theirs in (3, -3)) else NoPass
            )
            for timeline in (5, 9):
                assert refusal(replace(SHOWN, stage=theirs, timeline=timeline), at) is StaleMessage


def test_each_life_of_another_island_is_another_island_and_another_life_of_ones_own_is_nobody() -> None:
    """Whoever goes over to an island that begins anew is let in; whoever was cut off has the pass of an ended life."""
    life = TIMELINES_MAX * 3
    for mine in (7, 7 + life):
        at = replace(AT, timeline=mine, islands=3)
        for timeline in (6, 6 + life, 8 + 2 * life):
            assert refusal(replace(SHOWN, stage=at.stage, timeline=timeline), at) is None
        for timeline in {7, 7 + life, 7 + 2 * life} - {mine} | {9 + life}:
            assert refusal(replace(SHOWN, stage=at.stage, timeline=timeline), at) is StaleMessage
