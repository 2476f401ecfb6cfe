"""Which job gets which idle peer: every rule by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from scheduler.brain.fleet.allocation import (
    LOOKS_S_MAX,
    PATIENCE_S,
    UNFIT_MAX,
    ActiveJob,
    Allocation,
    Fewer,
    PendingJob,
    Reservation,
    Reservations,
    StartTurn,
    UnfitPeers,
    allocate,
    stages_here,
    waits_on,
)
from swarm.job.memory_split import ModelCosts
from swarm.job.placement import Candidate
from swarm.types import Decision, JobId, Memory, PeerId
from tests.support.memories import memories

A, B, C = JobId("a-1"), JobId("b-1"), JobId("c-1")


def peers(*names: str, memory_bytes: int = 100) -> list[Candidate]:
    return [Candidate(PeerId(name), offer=Memory(memory_bytes)) for name in names]


def waiting(
    job: JobId = B, stages: int = 2, *, need: int = 10, waited_s: float = 1.0, looks: bool = False
) -> PendingJob:
    return PendingJob(job, memories(need) * stages, 1, waited_s, looks)


def running(job: JobId = A, *replicas: int, at_start: int = 0, min_replicas: int = 1, refuses: str = "") -> ActiveJob:
    """A job at work whose brain sends whoever comes to the first of the stages that are named."""
    replicas = replicas or (1, 1)

    def where(peer: Candidate, stages: Collection[int], coming: Mapping[PeerId, int]) -> Decision[int]:
        if refuses or not stages:
            return Decision(None, refuses or "no stage fits its memory")
        return Decision(min(stages), f"it helps, with {len(coming)} more")

    return ActiveJob(job, memories(10) * len(replicas), min_replicas, replicas, at_start or sum(replicas), where)


def given(handed: Allocation) -> dict[str, tuple[str, int]]:
    return {join.peer: (join.job, join.stage) for join in handed.joins}


def start_with(
    job: PendingJob,
    before: Iterable[PendingJob],
    idle: Sequence[Candidate],
    reserved: Mapping[PeerId, Reservation],
    present: Sequence[Candidate] = (),
    *,
    higher: Iterable[PendingJob] = (),
) -> Decision[dict[PeerId, int]]:
    """What a job is given after those of higher priority, and those `before` it of its own; none of these starts."""
    turn = StartTurn(idle, reserved, present)
    list(turn.descend(higher))
    for one in before:
        turn.offer(one)
    return turn.offer(job)


def busy(count: int) -> list[Candidate]:
    return peers(*(f"busy-{number}" for number in range(count)))


# Jobs at work --------------------------------------------------------------------------------------------------------


def test_idle_peers_join_the_oldest_job_that_takes_them() -> None:
    idle = peers("x", "y", "z")
    handed = allocate(idle, idle, [], [running(A), running(C)], {})
    assert given(handed) == {"x": (A, 0), "y": (A, 0), "z": (A, 0)}
    assert [join.reason for join in handed.joins] == [f"it helps, with {count} more" for count in range(3)]
    assert handed.unused == {}
    handed = allocate(idle[:1], idle, [], [running(A, refuses="barred"), running(C)], {})
    assert given(handed) == {"x": (C, 0)}
    handed = allocate(idle[:1], idle, [], [running(A, refuses="barred"), running(C, refuses="saves")], {})
    assert handed.unused == {"x": {A: "barred", C: "saves"}}


def test_a_job_that_needs_a_peer_comes_before_an_older_one_that_would_like_one() -> None:
    idle = peers("x")
    assert given(allocate(idle, idle, [], [running(A), running(C, 1, 0)], {})) == {"x": (C, 1)}
    assert given(allocate(idle, idle, [], [running(A), running(C, 1, 1, at_start=4)], {})) == {"x": (C, 0)}
    assert given(allocate(idle, idle, [], [running(A, 1, 1, at_start=4), running(C, 2, 0)], {})) == {"x": (C, 1)}
    assert given(allocate(idle, idle, [], [running(A, 1, 1, at_start=4), running(C, 2, 1, min_replicas=2)], {})) == {
        "x": (C, 1)
    }


def test_the_stage_whose_last_replica_leaves_is_the_one_that_is_filled() -> None:
    """The brain counts who leaves until it leaves, and would send a peer to where it makes the job fastest."""
    idle = peers("x", "y")
    assert given(allocate(idle, idle, [], [running(A, 3, 0)], {})) == {"x": (A, 1), "y": (A, 0)}


def test_a_peer_gets_only_what_it_can_hold() -> None:
    idle = peers("small", memory_bytes=5)
    handed = allocate(idle, idle, [], [running(A, 1, 0)], {})
    assert handed.joins == ()
    assert handed.unused == {"small": {A: "no stage fits its memory"}}


# While jobs wait -----------------------------------------------------------------------------------------------------


def test_while_a_job_waits_those_at_work_get_what_they_need_and_what_they_lost_but_no_more() -> None:
    idle = peers("x")
    present = idle + busy(4)
    waits = [waiting(stages=2)]
    assert given(allocate(idle, present, waits, [running(A, 2, 0)], {})) == {"x": (A, 1)}
    assert given(allocate(idle, present, waits, [running(A, 2, 1, at_start=4)], {})) == {"x": (A, 0)}
    handed = allocate(idle, present, waits, [running(A, 2, 2)], {})
    assert handed.joins == ()
    assert handed.unused == {"x": {A: f"it is kept for {B}, which waits for peers"}}


def test_a_job_that_all_peers_together_could_not_serve_keeps_nothing() -> None:
    idle = peers("x")
    for waits in (waiting(stages=6), waiting(stages=1, need=1000)):
        assert given(allocate(idle, idle + busy(4), [waits], [running(A, 2, 2)], {})) == {"x": (A, 0)}


def test_a_job_that_has_waited_long_keeps_what_is_not_needed() -> None:
    idle = peers("x")
    present = idle + busy(4)
    lost = running(A, 2, 1, at_start=4)
    for waited_s, expected in ((PATIENCE_S - 1.0, {"x": (A, 0)}), (PATIENCE_S, {})):
        assert given(allocate(idle, present, [waiting(waited_s=waited_s)], [lost], {})) == expected
    needs = running(A, 2, 0, at_start=4)
    assert given(allocate(idle, present, [waiting(waited_s=PATIENCE_S)], [needs], {})) == {"x": (A, 1)}


def test_no_more_is_kept_than_the_least_with_which_a_job_would_start() -> None:
    """Stage 1 needs a bigger peer than those here; stage 0 needs one of them."""
    idle = peers("x", "y", "z")
    waits = [PendingJob(B, memories(10, 1000), 1, 1.0)]
    big = Candidate(PeerId("big"), offer=Memory(2000))
    handed = allocate(idle, [*idle, big], waits, [running(A)], {})
    assert set(given(handed)) == {"y", "z"}
    assert set(handed.unused) == {"x"}


def test_a_peer_that_is_of_no_use_to_the_waiting_job_is_not_kept() -> None:
    pinned = [Candidate(PeerId("x"), pinned_stage=5)]
    handed = allocate(pinned, pinned + busy(4), [waiting()], [running(A, *[1] * 6)], {})
    assert set(given(handed)) == {"x"}


def test_a_large_job_under_churn_does_not_starve_one_that_waits() -> None:
    """Whatever comes one by one would go to the large job, which has always just lost one."""
    collected: list[Candidate] = []
    waited_s, decision = 0.0, None
    for number in range(100):
        idle = [*collected, *peers(f"new-{number:02}")]
        job = waiting(stages=3, waited_s=waited_s)
        decision = start_with(job, [], idle, {})
        if decision.plan is not None:
            break
        handed = allocate(idle, idle + busy(8), [job], [running(A, 4, 4, at_start=100)], {})
        collected = [one for one in idle if one.peer not in given(handed)]
        waited_s += 60.0
    assert decision is not None
    assert decision.plan is not None
    assert waited_s == pytest.approx(PATIENCE_S + 2 * 60.0)


# Starting ------------------------------------------------------------------------------------------------------------


def test_a_job_starts_with_all_that_is_idle_but_what_moves() -> None:
    idle = peers("x", "y", "z")
    assert start_with(waiting(), [], idle, {}).plan == {"x": 0, "y": 1, "z": 0}
    moves = {PeerId("x"): Reservation(A, 1, 9.0)}
    assert start_with(waiting(), [], idle, moves).plan == {"y": 0, "z": 1}
    assert start_with(waiting(stages=3), [], idle, moves).reason == "stage 2 needs 1 replica more (2 idle, 3 needed)"


def test_a_stalled_job_that_looks_for_its_checkpoint_keeps_what_it_will_start_with() -> None:
    idle = peers("x", "y", "z")
    looks = waiting(B, looks=True)
    assert start_with(waiting(C, 1), [looks], idle, {}).plan == {"z": 0}
    assert start_with(waiting(C, 2), [looks], idle, {}).plan is None
    handed = allocate(idle[:2], idle, [looks], [running(A, 1, 0)], {})
    assert handed.joins == (), "not even for a stage that needs one: it starts in a moment"
    for other in (waiting(B), waiting(B, 4, looks=True), waiting(B, looks=True, waited_s=LOOKS_S_MAX)):
        assert start_with(waiting(C, 1), [other], idle, {}).plan == {"x": 0, "y": 0, "z": 0}


# Moves ---------------------------------------------------------------------------------------------------------------


def test_a_replica_that_moves_goes_to_its_job_whoever_waits_or_is_older() -> None:
    idle = peers("x", "y")
    moves = {PeerId("x"): Reservation(C, 1, 9.0)}
    older, its_own = running(A, 1, 0), running(C, 3, 1, at_start=5)
    handed = allocate(idle, idle, [waiting(looks=True)], [older, its_own], moves)
    assert given(handed)["x"][0] == C
    handed = allocate(idle, idle, [], [older, running(C, refuses="saves")], moves)
    assert given(handed) == {"y": (A, 1)}
    assert handed.unused["x"] == {A: f"it moves to another stage of {C}", C: "saves"}


def test_a_replica_that_moves_is_not_missed() -> None:
    idle = peers("x")
    moves = {PeerId("mover"): Reservation(A, 1, 9.0)}
    handed = allocate(idle, idle + busy(4), [waiting()], [running(A, 2, 1, at_start=4)], moves)
    assert handed.joins == ()


def test_a_reservation_ends_with_the_arrival_the_peer_the_job_or_the_time() -> None:
    held = Reservations()
    x, y, z, v = (PeerId(name) for name in "xyzv")
    for peer, job in ((x, A), (y, A), (z, B)):
        held.reserve(peer, job, 1, 0.0)
    held.reserve(v, B, 0, 30.0)
    assert held.now(59.9)[x] == Reservation(A, 1, 60.0)
    held.end(x)
    held.end(x)
    assert set(held.now(59.9)) == {y, z, v}
    held.end_of(A)
    assert set(held.now(59.9)) == {z, v}
    assert set(held.now(60.0)) == {v}


def test_an_expelled_peer_is_kept_away_until_it_is_started_anew() -> None:
    unfit = UnfitPeers()
    unfit.add(PeerId("a"), 3, "needs 9 GiB")
    assert unfit.why(PeerId("a"), 3) == "the job expelled it (needs 9 GiB); start it anew"
    assert unfit.why(PeerId("a"), 4) == ""
    assert unfit.why(PeerId("b"), 3) == ""
    for incarnation, kept_away in ((3, {"a"}), (4, set()), (None, set())):
        assert unfit.among({PeerId("a"): incarnation, PeerId("b"): 3}.get) == kept_away


def test_the_memory_is_bounded() -> None:
    unfit = UnfitPeers()
    for incarnation in range(UNFIT_MAX + 1):
        unfit.add(PeerId("a"), incarnation, "")
    assert not unfit.why(PeerId("a"), 0)
    assert unfit.why(PeerId("a"), 1)
    assert unfit.why(PeerId("a"), UNFIT_MAX)


# Priorities and bounds -----------------------------------------------------------------------------------------------


def test_a_waiting_job_keeps_what_it_would_start_with_from_those_of_lower_priority() -> None:
    """Peers come one by one, and a small job took each before a large one of higher priority could start."""
    idle, present = peers("x", "y"), [*peers("x", "y"), *busy(2)]
    large = waiting(C, 3)
    decision = start_with(waiting(B, 2), [], idle, {}, present, higher=[large])
    assert decision.plan is None
    assert decision.reason.endswith(f"(0 idle, 2 needed); others are kept for {C}")
    more = [*idle, *peers("z", "v")]
    assert start_with(waiting(B, 1), [], more, {}, [*more, *busy(2)], higher=[large]).plan == {"z": 0}
    assert start_with(waiting(B, 2), [large], idle, {}, present).plan == {"x": 0, "y": 1}, "as high as it"


def test_nothing_is_kept_from_lower_priorities_for_a_job_that_nobody_here_could_serve() -> None:
    idle, present = peers("x", "y"), [*peers("x", "y"), *busy(2)]
    expelled = replace(waiting(C, 4), unfit=frozenset({PeerId("x")}))
    for other in (waiting(C, 5), expelled):
        assert start_with(waiting(B, 2), [], idle, {}, present, higher=[other]).plan == {"x": 0, "y": 1}
    assert start_with(waiting(B, 2), [], idle, {}, present, higher=[waiting(C, 4)]).plan is None


@drawn(st.data())
def test_a_turn_decides_as_if_every_job_looked_at_all_before_it(data: st.DataObject) -> None:
    """What is free is carried along; here each job asks each before it anew what that keeps."""
    small, large = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    idle = [*peers(*(f"s{at}" for at in range(small)), memory_bytes=10), *peers(*(f"x{at}" for at in range(large)))]
    present = [*idle, *busy(data.draw(st.integers(0, 3)))]
    jobs = st.builds(
        PendingJob,
        st.sampled_from([A, B, C]),
        st.lists(st.sampled_from([5, 50]), min_size=1, max_size=4).map(lambda needs: memories(*needs)),
        st.integers(1, 2),
        st.sampled_from([1.0, LOOKS_S_MAX]),
        st.booleans(),
        st.sampled_from([None, 4]),
        st.sampled_from([frozenset[PeerId](), frozenset({PeerId("x0")})]),
    )
    levels = data.draw(st.lists(st.lists(jobs, max_size=3), max_size=3))
    turn, left = StartTurn(idle, {}, present), idle
    above: list[PendingJob] = []  # of higher priority, that did not start
    for level in levels:
        beside: list[PendingJob] = []
        for job in level:
            decision = turn.offer(job)
            free = _less_what_is_kept(left, above, beside, present)
            expected = {} if job.looks else job.plan(free).plan
            assert (decision.plan or {}) == (expected or {})
            if decision.plan:
                left = [one for one in left if one.peer not in decision.plan]
                turn.only(left)
            else:
                beside.append(job)
        list(turn.descend(beside))
        above += beside


def _less_what_is_kept(
    free: list[Candidate], above: list[PendingJob], beside: list[PendingJob], present: list[Candidate]
) -> list[Candidate]:
    for number, other in enumerate((*above, *beside)):
        kept: Collection[PeerId] = ()
        if other.looks and other.waited_s < LOOKS_S_MAX and other.plan(free).plan is not None:
            kept = other.least(free)
        if not kept and number < len(above) and other.plan(present).plan is not None:
            kept = other.least(free)
        free = [one for one in free if one.peer not in kept]
    return free


def test_peers_that_are_no_longer_idle_are_given_to_nobody() -> None:
    idle = peers("x", "y", "z")
    turn = StartTurn(idle, {}, idle)
    turn.only(peers("y", "z", "new"))
    assert turn.offer(waiting(B, 2)).plan == {"y": 0, "z": 1}
    turn.only(peers("z"))
    list(turn.descend([]))
    assert turn.offer(waiting(B, 1)).plan == {"z": 0}


def test_a_job_starts_with_no_more_peers_than_it_takes() -> None:
    idle = peers("w", "x", "y", "z")
    assert start_with(replace(waiting(), peers_max=2), [], idle, {}).plan == {"w": 0, "x": 1}
    assert set(start_with(replace(waiting(), peers_max=3), [], idle, {}).plan or {}) == {"w", "x", "y"}


def test_a_running_job_that_has_as_many_as_it_takes_leaves_the_others_to_the_next() -> None:
    idle = peers("x", "y", "z")
    full, one_more = replace(running(A), room=0), replace(running(A), room=1)
    handed = allocate(idle, idle, [], [full], {})
    assert handed.joins == ()
    assert set(handed.unused) == {"x", "y", "z"}
    assert handed.unused["x"] == {A: "it has as many stage servers as its limits.max_replicas allows"}
    assert given(allocate(idle, idle, [], [one_more, running(C)], {})) == {"x": (A, 0), "y": (C, 0), "z": (C, 0)}
    empty = replace(running(A, 0, 2), room=0)
    assert given(allocate(idle[:1], idle, [], [empty], {})) == {"x": (A, 0)}, "a stage that nobody serves comes first"
    moves = {PeerId("x"): Reservation(A, 1, 9.0)}
    assert given(allocate(idle[:1], idle, [], [full], moves)) == {"x": (A, 0)}, "it has its place already"


def test_the_stage_servers_of_a_site_are_placed_in_one_island() -> None:
    job = PendingJob(B, memories(10) * 4, 1, 1.0, islands=2)
    sited = [replace(one, site=site) for one, site in zip(peers(*"abcde"), ("x", "y", "x", "y", "x"), strict=True)]
    plan = job.plan(sited).plan
    assert plan is not None
    assert {peer: place // 2 for peer, place in plan.items()} == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}
    assert job.least(sited) < {"a", "b", "c", "d", "e"}
    few = replace(job, peers_max=4).plan(sited).plan
    assert few is not None
    assert {"b", "d"} < few.keys()
    pinned = [replace(one, pinned_stage=1) if one.peer == "b" else one for one in sited]
    assert (job.plan(pinned).plan or {})["b"] == 3, "its stage, at its site"
    assert job.plan(sited[:3]).plan is None
    assert replace(job, unfit=frozenset({PeerId("b")})).plan(sited).plan is None


# Fewer islands -------------------------------------------------------------------------------------------------------


def islands(most: int, fewest: int, *, looks: bool = False, waited_s: float = 1.0) -> PendingJob:
    """A job whose islands have two stages each, and that may begin with `fewest` of them."""
    whole = PendingJob(B, memories(10) * 2 * most, 1, waited_s, looks, islands=most)
    fewer = (
        replace(whole, needs=memories(10) * 2 * n, islands=n, is_part=True) for n in range(most - 1, fewest - 1, -1)
    )
    return replace(whole, fewer=tuple(fewer))


def test_a_job_could_start_with_as_many_islands_as_idle_peers_can_serve_but_not_with_too_few() -> None:
    for many, expected in ((1, 0), (2, 1), (3, 1), (4, 2), (5, 2)):
        idle = peers(*"abcde"[:many])
        turn = StartTurn(idle, {}, idle)
        assert turn.offer(islands(3, 1)).plan is None, "that is for the caller to decide"
        could, decision = turn.offer_fewer(islands(3, 1))
        assert could == expected
        assert set(decision.plan or {}) == {one.peer for one in idle if could}
        assert set((decision.plan or {}).values()) == set(range(2 * could)), "the first of them"
    assert StartTurn(peers(*"ab"), {}, []).offer_fewer(islands(3, 2))[0] == 0
    assert StartTurn(peers(*"ab"), {}, []).offer_fewer(islands(2, 2))[0] == 0


def test_an_island_that_begins_alone_is_of_one_site() -> None:
    sites = zip(peers(*"abcd"), ("x", "y", "y", "z"), strict=True)
    idle = [replace(one, site=site) for one, site in sites]
    could, decision = StartTurn(idle, {}, idle).offer_fewer(islands(2, 1))
    assert (could, set(decision.plan or {})) == (1, {"b", "c"})
    apart = [one for one in idle if one.peer != "c"]
    assert StartTurn(apart, {}, apart).offer_fewer(islands(2, 1))[0] == 0, "no site can serve one"
    assert waiting(B, 3).plan(apart).plan is not None, "where a job asks for one island, sites do not matter"


def test_a_job_keeps_what_it_could_go_on_with_from_those_that_would_only_be_faster() -> None:
    idle = peers("x", "y")
    assert given(allocate(idle, idle, [islands(2, 1)], [running()], {})) == {}
    assert len(given(allocate(idle, idle, [islands(2, 2)], [running()], {}))) == 2, "it waits for others, maybe forever"
    others = [*idle, *busy(2)]
    assert given(allocate(idle, others, [islands(2, 1)], [running()], {})) == {}, "all, as they might become idle"
    lower = start_with(waiting(C, 2), [], idle, {}, idle, higher=[islands(2, 1)])
    assert lower.plan is None
    assert lower.reason.endswith(f"others are kept for {B}")


def test_a_job_that_looks_for_its_checkpoint_keeps_only_what_it_can_start_with_at_once() -> None:
    idle = peers("x", "y")
    looks = islands(2, 1, looks=True)
    assert start_with(waiting(C, 2), [looks], idle, {}, idle).plan is not None
    assert start_with(waiting(C, 2), [replace(looks, needs=memories(10) * 2, islands=1)], idle, {}, idle).plan is None


# Whom the scheduler cannot dial --------------------------------------------------------------------------------------


def hidden(*names: str, site: str = "") -> list[Candidate]:
    return [replace(one, unreached=True, site=site) for one in peers(*names)]


def starts(job: PendingJob, idle: Sequence[Candidate]) -> set[str] | None:
    plan = start_with(job, [], idle, {}, idle).plan
    return None if plan is None else set(plan)


def test_who_cannot_be_dialled_gets_no_stage_beside_others() -> None:
    """A job was placed on a stage server that was shown as not reached: 22 s without a step, then another one left."""
    idle = [*peers("a"), *hidden("x")]
    decision = start_with(waiting(stages=2), [], idle, {}, idle)
    assert decision.plan is None
    assert decision.reason == (
        "stage 1 needs 1 replica more (1 idle, 2 needed); x gets no stage beside others, "
        "as the scheduler cannot dial it: swarm explain x"
    )
    assert starts(waiting(stages=2), [*peers("a", "b"), *hidden("x")]) == {"a", "b"}
    assert starts(waiting(stages=2), hidden("x", "y")) is None, "they may be behind two routers"
    assert starts(waiting(stages=2), [replace(one, unreached=False) for one in hidden("x", "y")]) == {"x", "y"}


def test_one_that_cannot_be_dialled_serves_a_job_of_one_stage_alone() -> None:
    assert starts(waiting(stages=1), hidden("x", "y")) == {"x"}
    assert starts(waiting(stages=1), [*peers("a"), *hidden("x")]) == {"a"}, "if no other can"
    two = replace(waiting(stages=1), min_replicas=2)
    assert starts(two, hidden("x", "y")) is None


def test_those_of_one_site_serve_together_wherever_the_scheduler_stands() -> None:
    assert starts(waiting(stages=2), [*hidden("x", "y", site="home"), *hidden("z", site="lab")]) == {"x", "y"}
    assert starts(waiting(stages=2), [*hidden("x", site="home"), *hidden("z", site="lab")]) is None
    home = [*hidden("x", site="home"), *(replace(one, site="home") for one in peers("a"))]
    assert starts(waiting(stages=2), home) == {"a", "x"}
    assert starts(waiting(stages=2), [*peers("a", "b"), *hidden("x", "y", site="home")]) == {"a", "b"}


def test_who_cannot_be_dialled_joins_no_job_at_work_and_none_joins_the_one_that_it_serves() -> None:
    job = running(A, 1, 1, at_start=4, min_replicas=2)
    handed = allocate(hidden("x"), [], [], [job], {})
    assert handed.joins == ()
    assert "the scheduler cannot dial it" in handed.unused[PeerId("x")][A]
    assert given(allocate(hidden("x", site="home"), [], [], [replace(job, site="home")], {})) == {"x": (A, 0)}
    alone = replace(running(A, 1, at_start=2), apart=True)
    handed = allocate(peers("a"), [], [], [alone], {})
    assert handed.joins == ()
    assert "the stage server that serves it" in handed.unused[PeerId("a")][A]


def test_only_as_many_are_kept_for_a_waiting_job_as_may_serve_it() -> None:
    job = waiting(stages=2)
    assert job.least([*peers("a", "b"), *hidden("x")]) == {"a", "b"}
    assert job.least([*peers("a"), *hidden("x", "y")]) == {"a"}
    assert job.least(hidden("x", "y", site="home")) == {"x", "y"}


def test_the_wait_begins_when_some_could_begin_and_goes_on_when_more_could() -> None:
    first = waits_on(None, 1, 3, 300.0, 20.0)
    assert first == Fewer(1, 3, 320.0)
    assert waits_on(first, 2, 3, 300.0, 200.0) == Fewer(2, 3, 320.0)
    assert waits_on(first, 1, 3, 300.0, 400.0) == first


def test_a_job_for_which_too_few_are_there_waits_anew() -> None:
    assert waits_on(None, 0, 2, 300.0, 20.0) is None
    assert waits_on(Fewer(1, 2, 320.0), 0, 2, 300.0, 100.0) is None


def test_people_are_told_how_long_it_still_waits() -> None:
    assert Fewer(1, 2, 320.0).told(79.5) == "goes on with 1 of 2 islands in 241 s if no more can begin"
    assert Fewer(2, 3, 320.0).told(321.0) == "goes on with 2 of 3 islands in 0 s if no more can begin"


def recut_peers(*names: str) -> list[Candidate]:
    return [Candidate(PeerId(name), offer=Memory(100)) for name in names]


def recut_waiting(stages: int) -> PendingJob:
    return PendingJob(JobId("b-1"), memories(10) * stages, 1, 1.0)


def model(layer_bytes: int, layers: int = 4) -> ModelCosts:
    return ModelCosts(layers, 1, 1, lambda of, stage, stages, replicas: Memory(layer_bytes * of))


def test_what_is_here_is_offered_only_if_it_can_hold_the_job() -> None:
    """A job waited for a second stage server, while the one that was idle could hold all of it."""
    assert stages_here(recut_waiting(2), model(25), recut_peers("a")) == 1
    assert stages_here(recut_waiting(2), model(26), recut_peers("a")) is None, "one layer too many"
    assert stages_here(recut_waiting(4), model(50), recut_peers("a", "b", "c")) == 3, "the most first"
    assert stages_here(recut_waiting(4), model(50), recut_peers("a", "b")) == 2
    assert stages_here(recut_waiting(2), model(1), []) is None
    assert stages_here(recut_waiting(1), model(1), recut_peers("a")) is None, "there are no fewer stages"
    assert stages_here(replace(recut_waiting(2), min_replicas=2), model(25), recut_peers("a")) is None
    assert stages_here(replace(recut_waiting(2), unfit=frozenset({PeerId("a")})), model(25), recut_peers("a")) is None
    pinned = [replace(one, pinned_stage=1) for one in recut_peers("a")]
    assert stages_here(recut_waiting(2), model(25), pinned) is None
    assert stages_here(recut_waiting(2), model(25), [replace(one, unreached=True) for one in recut_peers("x")]) == 1, (
        "alone it needs no links"
    )
