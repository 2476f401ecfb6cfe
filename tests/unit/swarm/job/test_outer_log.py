"""swarm.job.outer_log: which islands took part in which exchange."""

from __future__ import annotations

import pytest

from swarm.errors import InvalidConfig
from swarm.job.leases import Cut, Leases
from swarm.job.outer_log import OuterRecord, TookPart, line, read, written

EXCHANGES = [(2, 0), (4, 0), (6, 0), (8, 0)]
LOG = (OuterRecord(4, (0, 2)), OuterRecord(6, (0, 2), {1: 0}))


def test_a_log_reads_as_it_was_written() -> None:
    log = (*LOG, Cut({0: 3, 2: 5}, {0: ((7, 9), (12, 20)), 2: ()}), OuterRecord(8, (0,), late=(1, 2)))
    assert read(written(log)) == log
    assert read(b"") == ()
    assert line(OuterRecord(2, (0,), late=(1,))) == '{"after_step": 2, "islands": [0], "late": [1], "begins": {}}'
    assert line(OuterRecord(2, (0, 1))) == '{"after_step": 2, "islands": [0, 1], "begins": {}}'


@pytest.mark.parametrize(
    "line",
    [b"no json", b"[1]", b"{}", b'{"after_step": 4, "islands": 0, "begins": {}}',
     b'{"from_step": {"0": 4}, "leases": {"0": [[1, 1e999]]}}', b'{"from_step": {"0": 4}, "leases": {"0": [7]}}',
     b'{"from_step": [4], "leases": {}}', b'{"from_step": {"0": 4}}',
     b'{"after_step": 4, "islands": [0], "late": 1, "begins": {}}', b'{"after_step": 4, "late": [1], "begins": {}}',
     b'{"after_step": 4, "islands": [0], "begins": {"x": 0}}', b'{"after_step": null, "islands": [0], "begins": {}}'],
)  # fmt: skip
def test_a_line_that_is_none_is_named(line: bytes) -> None:
    with pytest.raises(InvalidConfig, match="line 2 of the outer log cannot be read"):
        read(written(LOG[:1]) + line + b"\n")


def test_steps_of_a_lost_island_count_up_to_its_last_exchange() -> None:
    took_part = TookPart(LOG, 3, EXCHANGES)
    assert [took_part.islands(step) for step in range(8)] == [(0, 1, 2)] * 2 + [(0, 2)] * 4 + [(0, 1, 2)] * 2
    assert {step: took_part.begins(step) for step in range(8) if took_part.begins(step)} == {5: {1: 0}}


@pytest.mark.parametrize(
    "log",
    [
        [OuterRecord(4, (0, 3))],  # there is no such island
        [OuterRecord(4, ())],
        [OuterRecord(5, (0, 1))],  # there is no exchange
        [OuterRecord(4, (0, 1))],  # and then island 2 is back, and nobody knows how
        [OuterRecord(4, (0, 1)), OuterRecord(6, (0, 1, 2)), OuterRecord(8, (0, 1))],
        [OuterRecord(8, (0, 1), {2: 2})],  # as a copy of itself
        [OuterRecord(8, (0, 1), {1: 0})],  # it took part
        [OuterRecord(8, (0,), {2: 1})],  # as a copy of one that did not
        [OuterRecord(8, (0, 1), {3: 1})],
        [OuterRecord(4, (0, 1), late=(3,))],
        [OuterRecord(4, (), late=(0, 1, 2))],
        [OuterRecord(2, (0, 1)), OuterRecord(4, (0, 1), late=(2,))],  # it was lost before
    ],
)
def test_a_log_that_no_job_can_have_is_refused(log: list[OuterRecord]) -> None:
    with pytest.raises(InvalidConfig, match="the outer log does not fit: no job with 3 islands"):
        TookPart(log, 3, EXCHANGES)


@pytest.mark.parametrize(
    "log",
    [
        [OuterRecord(4, (0, 1, 2), late=(1,))],  # it took part
        [OuterRecord(4, (0, 1), late=(2,)), OuterRecord(6, (0, 1), late=(2,))],
        [OuterRecord(4, (0,), {1: 0}, late=(2,))],  # as if all held the same there
        [OuterRecord(8, (0, 1), late=(2,))],  # it would never count
    ],
)
def test_an_island_is_late_once_running_and_not_where_all_must_hold_the_same(log: list[OuterRecord]) -> None:
    with pytest.raises(InvalidConfig, match="the outer log does not fit: no island can have been late like that"):
        TookPart(log, 3, EXCHANGES)


def test_a_late_island_is_at_work_and_may_be_late_again_behind_an_exchange_with_it_or_in_a_new_life() -> None:
    log = [OuterRecord(2, (0, 2), late=(1,)), OuterRecord(4, (0, 1), late=(2,)), OuterRecord(6, (0, 2), late=(1,))]
    took_part = TookPart(log, 3, EXCHANGES)
    assert [took_part.islands(step) for step in range(8)] == [(0, 1, 2)] * 8
    assert [(took_part.proposers(step, 0), took_part.late(step, 0)) for step in (3, 5, 7)] == [
        ((0, 1), (2,)),
        ((0, 2), (1,)),
        ((0, 1, 2), ()),
    ]
    anew = [OuterRecord(2, (0,), late=(1,)), OuterRecord(3, (0,), {1: 0}, 1), OuterRecord(4, (0,), late=(1,))]
    assert TookPart(anew, 2, [(2, 0), (3, 1), (4, 0), (6, 0), (6, 1)]).late(3, 0) == (1,)


def test_steps_of_an_island_that_was_late_and_then_lost_count_as_far_as_a_version_has_them() -> None:
    """With one fragment not at all. With two they may be in a version of the other one."""
    lost = [OuterRecord(4, (0,), late=(1,)), OuterRecord(6, (0,)), OuterRecord(8, (0,))]
    took_part = TookPart(lost, 2, EXCHANGES)
    assert [took_part.islands(step) for step in range(8)] == [(0, 1)] * 2 + [(0,)] * 6
    assert took_part.late(3, 0) == ()
    two = [OuterRecord(2, (0,), late=(1,)), OuterRecord(4, (0,)), OuterRecord(4, (0,), fragment=1)]
    took_part = TookPart(two, 2, [(2, 0), (3, 1), (4, 0), (4, 1)])
    assert [took_part.islands(step) for step in range(4)] == [(0, 1), (0, 1), (0, 1), (0,)]


def test_of_several_fragments_each_exchange_has_a_record_of_its_own() -> None:
    """Island 1 is lost between the two merges behind the last step, and island 2 before the second fragment's."""
    log = (OuterRecord(5, (0, 1), fragment=1), OuterRecord(8, (0, 1)), OuterRecord(8, (0,), fragment=1))
    assert read(written(log)) == log
    took_part = TookPart(log, 3, [(3, 0), (5, 1), (8, 0), (8, 1)])
    assert [took_part.islands(step) for step in (0, 2, 3, 7)] == [(0, 1, 2), (0, 1, 2), (0, 1), (0, 1)]
    assert [took_part.proposers(step, fragment) for step, fragment in ((2, 0), (4, 1), (7, 0), (7, 1))] == [
        (0, 1, 2),
        (0, 1),
        (0, 1),
        (0,),
    ]
    with pytest.raises(InvalidConfig, match="after step 8"):
        TookPart(log, 3, [(3, 0), (5, 1), (8, 0)])


def test_shares_of_an_earlier_version_are_named() -> None:
    with pytest.raises(InvalidConfig, match="line 1 of the outer log has shares of each step") as caught:
        read(b'{"after_step": 2, "islands": [0, 1], "begins": {}, "shares": [5, 3]}')
    assert caught.value.hint == "repeat the job with that version"


def test_leases_are_cut_as_the_log_says() -> None:
    leases, cut = Leases(3, 12, 8, 2), Cut({0: 3, 1: 2}, {0: ((28, 32), (32, 36)), 1: ((36, 40),)})
    TookPart([*LOG, cut], 3, EXCHANGES, leases)
    assert [leases.count(island, 3) for island in range(3)] == [8, 2, 4]


@pytest.mark.parametrize(
    ("cut", "has_leases"),
    [
        (Cut({0: 3}, {0: ((28, 32),)}), False),
        (Cut({0: 3, 3: 3}, {0: (), 3: ((28, 32),)}), True),  # there is no such island
        (Cut({0: 3}, {0: ((28, 33),)}), True),
        (Cut({0: 9}, {0: ()}), True),
    ],
)
def test_leases_that_no_job_can_have_are_refused(cut: Cut, has_leases: bool) -> None:
    why = "no such job with 3 islands can have had" if has_leases else "the islands of this job have equal shares, not"
    with pytest.raises(InvalidConfig, match=f"the outer log does not fit: {why}"):
        TookPart([cut], 3, EXCHANGES, Leases(3, 12, 8, 2) if has_leases else None)
