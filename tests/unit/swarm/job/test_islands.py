"""swarm.job.islands: what [islands] and [outer] mean, and what they may not say."""

from __future__ import annotations

import math
import re
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import InvalidConfig
from swarm.job.course import PLAIN, TIMELINES_MAX, OuterCourse
from swarm.job.islands import (
    check_for_swarm,
    check_speeds,
    course_of,
    courses,
    island_of,
    island_spec,
    island_timeline,
    job_timeline,
    most_islands,
    outer_plan,
)
from swarm.job.outer import OuterUpdate
from swarm.job.overlap import UNMEASURED, FleetSpeed
from swarm.job.partition import shape_text
from swarm.job.resolve import Basis, choose, resolve
from swarm.job.spec import JobSpec, TrustSection, parse_job, spec_from_json

TRUSTED = {key: True if value is False else 1 for key, value in TrustSection().model_dump().items()}  # everything on


def spec_of(mode: str = "diloco", count: int = 2, **sections: dict[str, Any]) -> JobSpec:
    return resolve(job_of(mode, count, **sections), Basis(257))


def job_of(mode: str, count: int = 2, **sections: dict[str, Any]) -> JobSpec:
    config = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 7, "num_attention_heads": 2}
    config |= sections.pop("config", {})
    values: dict[str, Any] = {
        "name": "t",
        "model": {"config": config},
        "data": {"source": "x"},
        "training": {"steps": 400, "global_batch_sequences": 64} | sections.pop("training", {}),
        "islands": {"count": count, "shares": "equal"},
        "averaging": {"mode": mode},
    }
    return parse_job(values | sections)


JOINED = ("diloco", "streaming")  # modes that propose everything
ISLANDS = {count: spec_of(count=count, training={"global_batch_sequences": 60}) for count in range(1, 6)}


def test_every_mode_has_a_rhythm_and_a_code_unless_the_job_says_otherwise() -> None:
    many = {"steps": 10_000}
    plan = outer_plan(spec_of(training=many))
    assert (*astuple(plan.rhythm), plan.mixing) == (10_000, 50, 1, 0, 0.0)
    assert spec_of().outer.compression == "bfloat16"
    plan = outer_plan(spec_of("streaming", outer={"every_steps": 30}, training=many))
    assert (*astuple(plan.rhythm)[1:], plan.mixing) == (30, 3, 1, 0.5)
    assert spec_of("streaming").outer.compression == "fp4"
    plan = outer_plan(spec_of("gaia", training=many))
    assert (*astuple(plan.rhythm)[1:], plan.mixing, plan.threshold) == (2, 1, 1, 0.0, 0.01)
    assert (plan.update, spec_of("gaia").outer.compression) == (OuterUpdate(1.0, 0.0), "none")
    assert outer_plan(spec_of("gaia", outer={"threshold": 0.0, "every_steps": 1})).threshold == 0.0


@pytest.mark.parametrize(("layers", "fragments"), [(1, 1), (3, 1), (4, 2), (12, 4)])
def test_a_fragment_has_three_layers_unless_the_job_says_otherwise(layers: int, fragments: int) -> None:
    assert spec_of("streaming", config={"num_hidden_layers": layers}).outer.fragments == fragments


PAIRS = [
    ("diloco", OuterUpdate(1.0, 0.5), OuterUpdate(0.7, 0.9)),
    ("streaming", OuterUpdate(0.7, 0.5), OuterUpdate(0.4, 0.9)),
]


@pytest.mark.parametrize("steps", [400, 10_000])
@pytest.mark.parametrize(("mode", "measured", "published"), PAIRS)
def test_jobs_have_less_outer_momentum_than_the_papers_however_long_they_are(
    mode: str, measured: OuterUpdate, published: OuterUpdate, steps: int
) -> None:
    """Jobs of 100 exchanges and more had the papers' until runs of 100 to 500 were measured."""

    def update(**outer: float) -> OuterUpdate:
        return outer_plan(spec_of(mode, outer=outer, training={"steps": steps})).update

    assert update() == measured
    assert update(momentum=0.9) == published, "who gives one of the two has the other of the paper"
    assert update(learning_rate=published.learning_rate) == published


def test_people_are_told_how_islands_exchange() -> None:
    told = "2 islands, diloco: every 40 steps, outer learning rate 1, momentum 0.5"
    assert f"; {told}; steps do not overlap" in shape_text(spec_of(outer={"every_steps": 40}))
    told = (
        "2 islands, streaming: 3 parts of the model in turn, each every 4 steps, outer learning rate 0.7, momentum 0.5"
    )
    assert told in shape_text(spec_of("streaming", outer={"every_steps": 4}))
    assert "gaia: every 2 steps what has moved by 1 %, outer learning rate 1, momentum 0" in shape_text(spec_of("gaia"))
    assert "island" not in shape_text(spec_of("allreduce", 1))


def test_a_resolved_job_with_islands_is_resolved_for_good() -> None:
    spec = spec_of("streaming")
    assert resolve(spec, Basis(257, stages=3)) == spec
    assert spec_from_json(spec.model_dump_json()) == spec


def test_an_island_trains_its_share_of_the_batch_and_one_island_all_of_it() -> None:
    share = island_spec(spec_of(count=4))
    assert share.training.global_batch_sequences == 16
    assert share.training.microbatches * share.training.microbatch_sequences == 16
    assert island_spec(share) == share
    assert [course.island for course in courses(spec_of(count=4))] == [0, 1, 2, 3]
    plain = spec_of("allreduce", 1)
    assert island_spec(plain) == plain
    assert [course.at(7).portion for course in courses(plain)] == [7]


def test_steps_of_islands_do_not_overlap_unless_the_job_asks_for_it() -> None:
    assert spec_of("allreduce", 1).overlap > 0
    assert spec_of().overlap == 0
    assert spec_of(pipeline={"overlap": 2}).overlap == 2
    with pytest.raises(InvalidConfig, match="more than the 8 microbatches of a step"):
        spec_of(count=4, training={"microbatch_sequences": 2}, pipeline={"overlap": 9})


@pytest.mark.parametrize(
    ("mode", "count", "sections", "told"),
    [
        ("allreduce", 2, {}, "islands.count = 2 needs averaging.mode"),
        ("allreduce", 1, {"outer": {"momentum": 0.5}}, "does nothing with averaging.mode"),
        ("diloco", 3, {}, "islands.count = 3 does not divide training.global_batch_sequences = 64"),
        ("diloco", 4, {"training": {"microbatch_sequences": 32}}, "into shares of whole microbatches of 32"),
        ("diloco", 2, {"outer": {"overlap_steps": 50}}, "50 is too long for 1 fragment in 50 steps"),
        ("streaming", 2, {"outer": {"fragments": 8}}, "outer.fragments = 8 is more than the model's 7"),
        (
            "streaming",
            2,
            {"outer": {"every_steps": 6, "overlap_steps": 2, "fragments": 3}},
            "2 is too long for 3 fragments in 6 steps",
        ),
        ("diloco", 2, {"outer": {"every_steps": 1}, "training": {"steps": 10**6}}, "200000 exchanges at most"),
        ("allreduce", 1, {"islands": {"count": 1, "shares": "speed"}}, "needs averaging.mode"),
        *((mode, 2, {"outer": {"threshold": 0.01}}, "outer.threshold = 0.01 does nothing") for mode in JOINED),
        *(("gaia", 2, {"outer": {"threshold": wrong}}, "outer.threshold") for wrong in (-0.1, 1.1, True, "much")),
        *(("diloco", 2, {"outer": {"patience": bad}}, "outer.patience") for bad in (-0.1, 1.1, math.nan, True, "long")),
        ("gaia", 2, {"outer": {"compression": "fp4"}}, 'outer.compression = "fp4" packs two numbers into a byte'),
        ("gaia", 2, {"outer": {"mixing": 0.5}}, "outer.mixing = 0.5 does nothing"),
        ("gaia", 1, {}, "is for several islands"),
        ("gaia", 2, {"islands": {}, "training": {"global_batch_sequences": 63}}, "is for several islands"),
        ("gossip", 2, {}, "averaging.mode = 'gossip': should be 'allreduce', 'diloco', 'streaming' or 'gaia'"),
    ],
)
def test_what_contradicts_itself_or_does_nothing_is_refused(
    mode: str, count: int, sections: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(told)) as refused:
        spec_of(mode, count, **sections)
    assert refused.value.hint


def test_a_job_that_is_older_than_the_threshold_goes_on() -> None:
    values = spec_of().model_dump()
    del values["outer"]["threshold"]
    del values["outer"]["patience"]
    assert outer_plan(parse_job(values)) == outer_plan(spec_of())


@pytest.mark.parametrize(
    ("mode", "sections", "patience"),
    [
        ("diloco", {"islands": {"count": 2}}, 0.05),
        ("diloco", {"islands": {"count": 2}, "outer": {"every_steps": 10}}, 0.15),
        ("gaia", {"islands": {"count": 2, "shares": "speed"}}, 0.75),
        ("gaia", {"islands": {"count": 2}, "outer": {"every_steps": 1, "overlap_steps": 0}}, 1.0),
        ("diloco", {"islands": {"count": 2}, "training": {"reproducible": True}}, "none"),
        ("diloco", {}, "none"),
        ("streaming", {"outer": {"patience": "none"}}, "none"),
        ("streaming", {"outer": {"patience": 0.0}, "training": {"reproducible": True}}, 0.0),
    ],
)
def test_exchanges_have_patience_where_chance_has_a_say_anyway(
    mode: str, sections: dict[str, Any], patience: float | str
) -> None:
    """A step and a half at least."""
    assert spec_of(mode, 2, **sections).outer.patience == patience


SAME_BITS = {"reproducible": True}
HERE, FAST, SLOW = (FleetSpeed(1e9, 1e6, 0.1, between) for between in (0.0, 1e9, 1.0))


@pytest.mark.parametrize(
    ("mode", "speed", "sections", "overlap", "mixing"),
    [
        ("diloco", UNMEASURED, {}, 0, 0.0),
        ("diloco", HERE, {}, 0, 0.0),  # no link between sites was measured
        ("diloco", FAST, {}, 1, 0.5),
        ("diloco", SLOW, {}, 5, 0.5),
        ("diloco", SLOW, {"outer": {"every_steps": 200}}, 20, 0.5),
        ("diloco", SLOW, {"outer": {"every_steps": 9}}, 0, 0.0),
        ("diloco", SLOW, {"outer": {"mixing": 0.25}}, 5, 0.25),
        ("diloco", SLOW, {"islands": {"count": 1}}, 0, 0.0),
        ("diloco", SLOW, {"training": SAME_BITS}, 0, 0.0),
        ("diloco", SLOW, {"checkpoint": {"resume_from": "a-1:50"}}, 0, 0.0),
        ("diloco", UNMEASURED, {"outer": {"overlap_steps": 7}}, 7, 0.5),
        ("streaming", UNMEASURED, {}, 1, 0.5),
        ("streaming", SLOW, {"training": SAME_BITS}, 1, 0.5),
        ("streaming", SLOW, {}, 10, 0.5),
        ("streaming", SLOW, {"outer": {"fragments": 7, "every_steps": 60}}, 6, 0.5),
        ("streaming", SLOW, {"outer": {"fragments": 7, "every_steps": 20}}, 2, 0.5),
        ("streaming", SLOW, {"outer": {"fragments": 7, "every_steps": 14}}, 1, 0.5),
        ("streaming", UNMEASURED, {"outer": {"fragments": 6, "every_steps": 6}}, 0, 0.5),
        ("streaming", UNMEASURED, {"outer": {"fragments": 6, "every_steps": 7}}, 1, 0.5),
        ("gaia", UNMEASURED, {"outer": {"fragments": 2}}, 0, 0.0),
        ("gaia", UNMEASURED, {"outer": {"fragments": 2, "every_steps": 3}}, 1, 0.0),
        ("gaia", UNMEASURED, {"islands": {}}, 1, 0.0),
        ("gaia", SLOW, {}, 1, 0.0),  # it bounds how far islands are apart
        ("gaia", FAST, {"outer": {"every_steps": 20, "overlap_steps": 4}}, 4, 0.0),
    ],
)
def test_islands_train_on_for_the_steps_that_an_exchange_takes_as_far_as_that_was_measured(
    mode: str, speed: FleetSpeed, sections: dict[str, Any], overlap: int, mixing: float
) -> None:
    plain = {"pipeline": {"compression": "none"}}
    draft, basis = job_of(mode, **plain | sections), Basis(257, speed=speed)
    spec, told = choose(draft, basis)
    assert (spec.outer.overlap_steps, spec.outer.mixing) == (overlap, mixing)
    is_chosen = speed in (FAST, SLOW) and overlap > 0 and "training" not in sections and mode != "gaia"
    assert (f"outer.overlap_steps = {overlap}, since an exchange takes" in told) is is_chosen
    assert choose(spec, Basis(257)) == (spec, ""), "it is stored"


@pytest.mark.parametrize(
    ("mode", "count", "training", "shares"),
    [
        ("diloco", 2, {}, "speed"),
        ("streaming", 2, {}, "speed"),
        ("streaming", 2, SAME_BITS, "equal"),
        ("diloco", 1, {}, "equal"),
        ("allreduce", 1, {}, "equal"),
    ],
)
def test_shares_follow_speed_unless_the_job_asks_for_the_same_bits(
    mode: str, count: int, training: dict[str, Any], shares: str
) -> None:
    plain = {"pipeline": {"compression": "none"}, "training": training}
    assert spec_of(mode, islands={"count": count}, **plain).islands.shares == shares
    if mode != "allreduce":
        assert spec_of(mode, islands={"count": count, "shares": "speed"}, **plain).islands.shares == "speed"


@pytest.mark.parametrize(("every", "overlap", "fragments"), [(6, 2, 2), (3, "auto", 2), (1, "auto", 3), (30, 29, 1)])
def test_automatic_fragments_are_as_many_as_can_be_exchanged_one_after_the_other(
    every: int, overlap: object, fragments: int
) -> None:
    plan = outer_plan(spec_of("streaming", 2, outer={"every_steps": every, "overlap_steps": overlap}))
    assert plan.rhythm.fragments == fragments
    assert plan.rhythm.overlap_steps * fragments < plan.rhythm.every_steps


@pytest.mark.parametrize(("round_s", "still_s"), [(300, 300), (600, 300), (60, 20)])
def test_a_swarm_refuses_islands_that_are_given_up_before_a_round_is_over(round_s: float, still_s: float) -> None:
    """Who does not reach whom is known once a round is over. None was, and so the job stalled, three times."""
    sections = {"averaging": {"mode": "diloco", "timeout_s": round_s}, "limits": {"no_progress_s": still_s}}
    with pytest.raises(InvalidConfig, match=rf"timeout_s = {round_s} .* limits\.no_progress_s = {still_s}:") as refused:
        check_for_swarm(spec_of(**sections))
    assert "lower averaging.timeout_s or raise limits.no_progress_s" in refused.value.hint
    check_for_swarm(spec_of(**sections | {"limits": {"no_progress_s": round_s + 1}}))
    check_for_swarm(spec_of("allreduce", 1, **sections | {"averaging": {"timeout_s": round_s}}))


def test_limits_that_a_job_has_already_are_not_refused_when_it_goes_on_with_something_else_changed() -> None:
    """`resume --set` was refused for a job that was older than the rule, whatever was set; a plain resume was not."""

    def of(still_s: int, overlap: int = 0) -> JobSpec:
        sections = {"averaging": {"mode": "diloco", "timeout_s": 300}, "limits": {"no_progress_s": still_s}}
        return spec_of(pipeline={"overlap": overlap}, **sections)

    check_for_swarm(of(60, overlap=2), stored=of(60))
    with pytest.raises(InvalidConfig, match=r"limits\.no_progress_s = 90:"):
        check_for_swarm(of(90), stored=of(60))


@pytest.mark.parametrize(
    ("shares", "speeds", "repeats", "told"),
    [
        ("equal", 2, False, "--speeds does nothing with equal shares"),
        ("speed", 2, True, "--speeds does nothing beside an outer log"),
        ("speed", 3, False, "3 numbers, and the job 2 islands"),
    ],
)
def test_what_one_process_cannot_do_is_refused(shares: str, speeds: int, repeats: bool, told: str) -> None:
    spec = spec_of(islands={"count": 2, "shares": shares})
    with pytest.raises(InvalidConfig, match=told):
        check_speeds(spec, speeds, repeats=repeats)
    check_speeds(spec, 0, repeats=repeats)


@pytest.mark.parametrize(("key", "value"), TRUSTED.items())
def test_what_a_swarm_cannot_do_with_islands_yet_is_refused_with_what_can_be_done(key: str, value: object) -> None:
    sections = {
        "limits": {"min_replicas": 3},
        "training": {"reproducible": True},
        "pipeline": {"compression": "none"},
        "trust": {key: value},
    }
    with pytest.raises(InvalidConfig, match=rf"trust\.{key} does not work in a swarm") as refused:
        check_for_swarm(spec_of(**sections | {"averaging": {"mode": "diloco"}}))
    assert "remove it" in refused.value.hint
    check_for_swarm(spec_of("allreduce", 1, **sections | {"averaging": {"mode": "allreduce"}}))


@given(st.integers(0, 9), st.integers(1, 5), st.data())
def test_each_island_has_a_timeline_of_its_own_and_those_of_different_pasts_differ(
    timeline: int, count: int, data: st.DataObject
) -> None:
    spec = ISLANDS[count]
    island = data.draw(st.integers(0, count - 1))
    life = data.draw(st.integers(0, 99)) if count > 1 else 0
    own = island_timeline(spec, timeline, island, life)
    assert (island_of(spec, own), job_timeline(spec, own)) == (island, timeline)
    first = island_timeline(spec, timeline, island)
    assert first == timeline if count == 1 else first >= timeline
    assert own == first if not life else own >= TIMELINES_MAX * count


def test_the_course_of_an_island_follows_from_its_timeline_and_a_plain_job_has_the_plain_one() -> None:
    assert course_of(spec_of("allreduce", 1), 3) is PLAIN
    spec = spec_of(count=4)
    found = [course_of(spec, timeline) for timeline in range(8, 12)]
    assert found == [OuterCourse(inner) for inner in courses(spec)]


@pytest.mark.parametrize("outer", [{"fragments": 2}, {"overlap_steps": 1}, {"mixing": 0.5}])
def test_weights_that_are_never_the_outer_weights_are_evaluated_as_they_are(outer: dict[str, Any]) -> None:
    of = {name: course_of(spec_of(**sections), 0) for name, sections in (("plain", {}), ("apart", {"outer": outer}))}
    assert {name: getattr(course, "streams", None) for name, course in of.items()} == {"plain": False, "apart": True}


def test_islands_that_are_left_open_are_as_many_as_divide_the_batch() -> None:
    spec = spec_of("diloco", 1, training={"global_batch_sequences": 12, "microbatch_sequences": 2})
    assert [most_islands(spec, able) for able in (0, 1, 2, 3, 5, 6, 8)] == [1, 1, 2, 3, 3, 6, 6]
