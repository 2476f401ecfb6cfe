"""swarm.job.course: what each step trains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.job.course import PLAIN, InnerStep, IslandCourse, OuterCourse
from swarm.job.outer import Rhythm
from swarm.job.schedule import evaluation_due


def test_on_the_plain_course_a_step_is_its_own_portion_and_place_in_the_schedule() -> None:
    assert [PLAIN.at(step) for step in (0, 1, 999)] == [InnerStep(0, 0), InnerStep(1, 1), InnerStep(999, 999)]


def test_islands_lease_portions_in_turn_and_the_last_lease_is_what_is_left() -> None:
    portions = [[IslandCourse(5, 2, 2, island).at(step).portion for step in range(5)] for island in range(2)]
    assert portions == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
    assert [IslandCourse(5, 2, 2, 1).at(step).rate_step for step in range(5)] == [0, 1, 2, 3, 4]


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 5))
def test_every_portion_of_a_job_is_trained_once_by_one_island(steps: int, lease: int, islands: int) -> None:
    courses = [IslandCourse(steps, lease, islands, island) for island in range(islands)]
    trained = [course.at(step).portion for course in courses for step in range(steps)]
    assert sorted(trained) == list(range(steps * islands))


@given(st.integers(1, 60), st.integers(1, 70))
def test_one_island_alone_is_on_the_plain_course(steps: int, lease: int) -> None:
    assert all(IslandCourse(steps, lease, 1, 0).at(step) == PLAIN.at(step) for step in range(steps))


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 3))
def test_outer_steps_lie_behind_the_inner_steps_that_the_plan_names(steps: int, lease: int, islands: int) -> None:
    """The twin makes an outer step wherever the plan merges; a swarm follows the course."""
    rhythm = Rhythm(steps, lease, 1, 0)
    course = OuterCourse(IslandCourse(steps, lease, islands, islands - 1))
    expected: list[int | None] = []
    for inner in range(steps):
        expected += [inner, *([None] if rhythm.merges(inner) else [])]
    assert course.steps == len(expected)
    assert [None if course.is_outer(step) else course.inner_steps(step) for step in range(course.steps)] == expected
    for step, inner in enumerate(expected):
        if inner is not None:
            assert course.at(step) == course.inner.at(inner)
    assert course.inner_steps(course.steps) == steps


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_late_microbatches_use_the_weights_of_the_inner_step_before_and_never_reach_across_a_merge(
    steps: int, lease: int, fragments: int, overlap: int, sync_steps: int
) -> None:
    course = OuterCourse(IslandCourse(steps, lease, 2, 0), fragments=min(fragments, lease))
    trained = 0
    for step in range(course.steps):
        used = [course.version_of(step, index, overlap=overlap, sync_steps=sync_steps) for index in range(4)]
        behind_merge = step > 0 and course.is_outer(step - 1)
        if course.is_outer(step) or behind_merge or trained < max(1, sync_steps):
            assert used == [step] * 4
        else:
            assert used == [step - 1] * overlap + [step] * (4 - overlap)
        trained += not course.is_outer(step)


def test_on_the_plain_course_the_first_microbatches_of_a_step_are_late() -> None:
    assert [PLAIN.version_of(5, index, overlap=2, sync_steps=5) for index in range(3)] == [4, 4, 5]
    assert [PLAIN.version_of(4, index, overlap=2, sync_steps=5) for index in range(3)] == [4, 4, 4]


@given(st.integers(1, 60), st.integers(1, 70))
def test_spans_of_outer_steps_tile_the_inner_steps(steps: int, lease: int) -> None:
    course = OuterCourse(IslandCourse(steps, lease, 2, 0))
    outer = [step for step in range(course.steps) if course.is_outer(step)]
    assert [inner for step in outer for inner in course.span(step)] == list(range(steps))
    assert outer[-1] == course.steps - 1


@given(st.integers(1, 60), st.integers(1, 70), st.data())
def test_versions_that_can_be_saved_lie_behind_outer_steps_and_say_how_many_inner_ones_were_made(
    steps: int, lease: int, data: st.DataObject
) -> None:
    course = OuterCourse(IslandCourse(steps, lease, 2, 1))
    level = [0, *(step + 1 for step in range(course.steps) if course.is_outer(step))]
    assert [course.version_after(course.inner_steps(version)) for version in level] == level
    version = data.draw(st.integers(0, course.steps))
    assert course.level_from(version) == min(other for other in level if other >= version)
    inner = data.draw(st.integers(0, steps))
    at = course.version_after(inner)
    assert (course.level_from(at) == at and course.inner_steps(at) == inner) == (inner % lease == 0 or inner == steps)
    assert (PLAIN.version_after(inner), PLAIN.level_from(inner)) == (inner, inner)


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 10))
def test_what_is_due_is_saved_once_behind_the_next_outer_step(steps: int, lease: int, every: int) -> None:
    course = OuterCourse(IslandCourse(steps, lease, 2, 1))
    found = [version for version in range(course.steps + 1) if course.is_saved(version, every)]
    due = [inner for inner in range(1, steps + 1) if every and inner % every == 0]
    assert found == sorted({course.version_after(min(-(-inner // lease) * lease, steps)) for inner in due})
    assert [inner for inner in range(1, steps + 1) if PLAIN.is_saved(inner, every)] == due


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 10))
def test_what_is_due_is_evaluated_once_behind_the_next_outer_step(steps: int, lease: int, every: int) -> None:
    course = OuterCourse(IslandCourse(steps, lease, 2, 1))
    found = [version for version in range(course.steps + 1) if course.is_evaluated(version, every, course.steps)]
    expected, waits = [], False
    for step in range(course.steps):
        waits = waits or (not course.is_outer(step) and evaluation_due(course.inner_steps(step) + 1, every, steps))
        if waits and course.is_outer(step):
            expected.append(step + 1)
            waits = False
    assert found == expected


# Fragments -----------------------------------------------------------------------------------------------------------


@st.composite
def rhythms(draw: st.DrawFn) -> Rhythm:
    every, fragments = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    overlap = draw(st.integers(0, max(0, (every - 1) // fragments)))
    return Rhythm(draw(st.integers(1, 60)), every, fragments, overlap)


def streaming(of: Rhythm) -> OuterCourse:
    return OuterCourse(IslandCourse(of.steps, of.every_steps, 2, 1), of.fragments, of.overlap_steps, streams=True)


@given(rhythms())
def test_each_fragment_is_merged_where_the_rhythm_says_in_an_outer_step_of_its_own(of: Rhythm) -> None:
    course = streaming(of)
    expected: list[tuple[int, int | None]] = []
    for inner in range(of.steps):
        expected += [(inner, None), *((inner + 1, fragment) for fragment in of.merges(inner))]
    found = [
        (course.inner_steps(step), course.outer_at(step).fragment if course.is_outer(step) else None)
        for step in range(course.steps)
    ]
    assert found == expected
    for step, (inner, fragment) in enumerate(expected):
        if fragment is None:
            assert course.at(step) == course.inner.at(inner)
            assert course.version_after(inner) == step
    assert course.inner_steps(course.steps) == of.steps
    assert all(of.captures(inner) == of.merges(inner) == () for inner in range(of.steps) if inner not in of.events())


@given(rhythms())
def test_spans_of_each_fragment_tile_the_inner_steps_and_end_with_its_captures(of: Rhythm) -> None:
    course = streaming(of)
    for fragment in range(of.fragments):
        outer = [merge for merge in course.outer if merge.fragment == fragment]
        assert [inner for merge in outer for inner in course.span(merge.step)] == list(range(of.steps))
        assert [merge.captured for merge in outer] == [t + 1 for t in range(of.steps) if fragment in of.captures(t)]
    for merge in course.outer:
        assert course.inner_steps(merge.captured_version) == merge.captured
        assert not course.is_outer(merge.captured_version - 1), "captured before anything is merged there"
        assert merge.step - merge.captured_version <= course.steps_ahead
    between = [inner for merge in course.outer for inner in course.trained_before(merge.step)]
    assert between == list(range(of.steps))


@given(rhythms())
def test_what_is_held_is_captured_and_not_merged_and_nothing_is_at_a_level_version(of: Rhythm) -> None:
    course = streaming(of)
    level = []
    for version in range(course.steps + 1):
        waits = [merge for merge in course.outer if merge.captured_version <= version <= merge.step]
        held = [wait for wait in waits if wait.captured < wait.behind]
        assert course.held(version) == tuple(connection.fragment for connection in held)
        assert course.captured(version) == tuple(
            connection.fragment for connection in held if connection.captured_version == version
        )
        if not waits and (version == 0 or course.is_outer(version - 1)):
            level.append(version)
    for version in range(course.steps + 1):
        assert course.level_from(version) == min(other for other in level if other >= version)
        assert course.outer_before(version) == max(
            [0, *(merge.step + 1 for merge in course.outer if merge.step < version)]
        )
    assert [course.version_after(course.inner_steps(version)) for version in level] == level
    assert level[-1] == course.steps


@given(rhythms(), st.integers(0, 10))
def test_where_fragments_are_merged_in_turn_weights_are_evaluated_as_they_are(of: Rhythm, every: int) -> None:
    course = streaming(of)
    found = [version for version in range(course.steps + 1) if course.is_evaluated(version, every, course.steps)]
    due = [inner for inner in range(1, of.steps + 1) if evaluation_due(inner, every, of.steps)]
    assert found == [course.version_after(inner) for inner in due]
    saved = [version for version in range(course.steps + 1) if course.is_saved(version, every)]
    level_at = {inner: course.level_from(course.version_after(inner)) for inner in range(1, of.steps + 1)}
    assert saved == sorted({level_at[inner] for inner in level_at if every and inner % every == 0})


@given(rhythms(), st.integers(0, 90))
def test_a_replica_proposes_from_the_capture_to_the_merge(of: Rhythm, version: int) -> None:
    course = streaming(of)
    steps = [step for step in range(course.steps) if course.proposes(version, step)]
    assert steps == [merge.step for merge in course.outer if merge.captured_version <= version <= merge.step]
    assert not PLAIN.proposes(version, version)
