"""The claim: whoever says otherwise than most is expelled, and nobody is where nobody can say who is right."""

from __future__ import annotations

import math

import pytest

from scheduler.brain.commit.digests import Expel, average_of, outvoted, vote
from scheduler.brain.outputs import Fail
from swarm.errors import ReplicaDiverged
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Averaged, ParameterNorm


def said(text: str) -> dict[PeerId, str]:
    """'a=x b=y' as a mapping."""
    return {PeerId(peer): one for peer, one in (pair.split("=") for pair in text.split())}


@pytest.mark.parametrize("text", ["", "a=x", "a=x b=x c=x"])
def test_those_that_agree_go_on(text: str) -> None:
    assert outvoted(said(text)) == ()
    assert vote(said(text), "the bytes", [["a", "b", "c"]], recover=True) == []  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "odd"),
    [("a=x b=y c=x", "b"), ("a=x b=y c=x d=x e=z", "b e"), ("a=x b=y", "a b"), ("c=x b=y a=z d=x", "a b c d")],
)
def test_a_strict_majority_outvotes_the_others(text: str, odd: str) -> None:
    assert outvoted(said(text)) == tuple(odd.split())


def remedies(text: str, stages: str, *, recover: bool = True) -> list[Expel | Fail]:
    by_stage = [[PeerId(peer) for peer in stage] for stage in stages.split()]
    return vote(said(text), "the bytes of stage 0 after step 3", by_stage, recover=recover)


def test_the_odd_one_is_expelled_and_told_what_each_of_them_said() -> None:
    (remedy,) = remedies("a=x b=y c=x", "abc d")
    text = "replicas differ in the bytes of stage 0 after step 3: b (a holds x, b holds y, c holds x)"
    assert remedy == Expel(PeerId("b"), text)


@pytest.mark.parametrize(
    ("text", "stages", "recover"),
    [
        ("a=x b=y", "ab", True),
        ("a=x b=y c=x", "abc", False),
        ("a=x b=y c=x", "ac b", True),
        ("a=x b=y c=z", "abc", True),
    ],
)
def test_the_job_stops_where_nobody_can_be_done_without(text: str, stages: str, *, recover: bool) -> None:
    (remedy,) = remedies(text, stages, recover=recover)
    assert isinstance(remedy, Fail)
    assert remedy.code == ReplicaDiverged.code


def averaged(*norms: tuple[str, float], digest: str = "x") -> Averaged:
    made = tuple(ParameterNorm(name, value) for name, value in norms)
    return Averaged(0, 0, UnitName("u"), Round(1, 1), digest, made, 0.1)


def test_members_must_report_the_same_bytes_and_the_same_norm_of_each_parameter() -> None:
    same = average_of(averaged(("v", 1.0), ("w", math.nan)))
    assert same == average_of(averaged(("w", math.nan), ("v", 1.0)))
    others = [
        averaged(("v", 1.0), ("w", 2.0)),
        averaged(("v", 1.0)),
        averaged(("v", math.nextafter(1.0, 2.0)), ("w", math.nan)),
        averaged(("v", 1.0), ("x", math.nan)),
        averaged(("v", 1.0), ("w", math.nan), digest="y"),
    ]
    assert same not in [average_of(other) for other in others]
