"""Which ready computation runs next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stage_server.brain.cell import Compute, Gradients
from stage_server.brain.work_queue import WorkQueue
from swarm.types import Direction, Microbatch

F, B = Direction.FORWARD, Direction.BACKWARD


def order(
    step: int,
    index: int,
    direction: Direction = F,
    ticket: int = 0,
    *,
    late: bool = False,
    part: Gradients = Gradients.ALL,
) -> Compute:
    ticket = ticket or 1 + 100 * step + 2 * index + (direction is B)
    return Compute(Microbatch(0, step, index), direction, step - late, False, ticket, part)


def weights(step: int, index: int, *, late: bool = False) -> Compute:
    return order(step, index, B, late=late, part=Gradients.WEIGHTS)


def drain(intake: WorkQueue) -> list[Compute]:
    return [work for work in iter(intake.take, None) if work is not None]


def test_backward_comes_before_forward_then_older_step_then_lower_index() -> None:
    intake = WorkQueue()
    wanted = [order(0, 5, B), order(1, 0, B), order(0, 1), order(0, 3), order(1, 2)]
    for work in reversed(wanted):
        assert intake.put(work)
    assert (len(intake), intake.waiting(F), intake.waiting(B)) == (5, 3, 2)
    assert drain(intake) == wanted
    assert intake.take() is None


def test_late_microbatches_fill_the_gaps_that_the_others_leave() -> None:
    """A step ends when the microbatches that were fed last have come back, so they come first."""
    intake = WorkQueue(late_behind=True)
    wanted = [
        order(1, 7, B),
        order(1, 6),
        order(1, 0, B, late=True),
        order(2, 1, B, late=True),
        order(1, 2, late=True),
        order(2, 0, late=True),
    ]
    for work in reversed(wanted):
        assert intake.put(work)
    assert drain(intake) == wanted


def test_weights_come_behind_their_step_and_before_the_late_ones_of_the_next() -> None:
    """The commit waits for them, and for nothing of the next step."""
    last = [order(1, 4, B), order(2, 1, B, late=True), order(1, 5), weights(1, 0), order(2, 0, late=True)]
    before = [
        *(order(1, 4, B), order(1, 5), weights(1, 0)),
        *(order(2, 1, B, late=True), weights(1, 3, late=True), order(2, 0, late=True), weights(2, 2, late=True)),
    ]
    for wanted, behind in ((last, False), (before, True)):
        intake = WorkQueue(late_behind=behind)
        for work in reversed(wanted):
            assert intake.put(work)
        assert drain(intake) == wanted


def test_weights_wait_for_a_bounded_number_of_later_orders() -> None:
    intake = WorkQueue(patience=3)
    for index in range(9):
        intake.put(order(0, index))
    for index in (10, 11, 12):
        intake.put(weights(0, index))
    intake.discard(Microbatch(0, 0, 11))
    taken = [work.microbatch.index for work in drain(intake)]
    assert taken == [0, 1, 2, 10, 12, 3, 4, 5, 6, 7, 8]


def test_a_newer_order_of_a_microbatch_replaces_the_older() -> None:
    intake = WorkQueue()
    intake.put(order(0, 0, ticket=1))
    intake.put(order(0, 0, ticket=2))
    assert [work.ticket for work in drain(intake)] == [2]


def test_a_discarded_order_is_never_taken() -> None:
    intake = WorkQueue()
    intake.put(order(0, 0))
    intake.put(order(0, 1))
    assert intake.discard(Microbatch(0, 0, 0))
    assert not intake.discard(Microbatch(0, 0, 0))
    assert [work.microbatch.index for work in drain(intake)] == [1]


def test_a_full_queue_refuses_but_still_replaces() -> None:
    intake = WorkQueue(limit=1)
    assert intake.put(order(0, 0, ticket=1))
    assert not intake.put(order(0, 1))
    assert intake.put(order(0, 0, B, ticket=7))
    assert [work.ticket for work in drain(intake)] == [7]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(Direction), st.booleans()), max_size=300)
)
def test_it_holds_what_a_plain_dictionary_would(acts: list[tuple[int, int, Direction, bool]]) -> None:
    intake, plain = WorkQueue(), dict[Microbatch, Compute]()
    for ticket, (step, index, direction, put) in enumerate(acts, start=1):
        work = order(step, index, direction, ticket)
        if put:
            intake.put(work)
            plain[work.microbatch] = work
        else:
            assert intake.discard(work.microbatch) == (plain.pop(work.microbatch, None) is not None)
    assert len(intake) == len(plain)
    key = {F: 1, B: 0}
    expected = sorted(plain.values(), key=lambda w: (key[w.direction], w.microbatch.step, w.microbatch.index))
    assert drain(intake) == expected
