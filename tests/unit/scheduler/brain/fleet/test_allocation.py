"""Which job gets which idle peer: every rule by hand. The situations stand in the text beside this file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from scheduler.brain.fleet.allocation import (
    LOOKS_S_MAX,
    PATIENCE_S,
    UNFIT_MAX,
    ActiveJob,
    Fewer,
    PendingJob,
    Reservation,
    Reservations,
    StartTurn,
    UnfitPeers,
    allocate,
    cut_here,
    waits_on,
)
from swarm.job.memory_split import ModelCosts
from swarm.job.placement import Candidate
from swarm.limits import STAGES_MAX
from swarm.types import Decision, JobId, Memory, PeerId
from tests.support.memories import memories
from tests.support.situations import Situation, beside, value_of

A, B, C = JobId("a-1"), JobId("b-1"), JobId("c-1")
_PEER = re.compile(r"([\w-]+)(?:@(\w+))?(?:=(\d+))?(?::(\d+))?(!?)")


def peers(*names: str, memory_bytes: int = 100) -> list[Candidate]:
    """Peers by name: x, x@site, x=pinned stage, x:memory, and x! where the scheduler cannot dial it."""
    parts = [_PEER.fullmatch(name).groups() for name in names]  # type: ignore[union-attr]
    return [
        Candidate(PeerId(name), int(pin or -1), 1.0, Memory(int(memory or memory_bytes)), site or "", bool(unreached))
        for name, site, pin, memory, unreached in parts
    ]


def busy(count: int) -> list[Candidate]:
    return peers(*(f"busy{number}" for number in range(count)))


def waiting(job: JobId = B, stages: int = 2, *, need: int = 10, fewest: int = 0, **facts: Any) -> PendingJob:
    """A job that waits; with islands it may begin with `fewest` of them."""
    needs = memories(*facts.pop("needs", ()) or (need,) * stages)
    made = replace(PendingJob(job, needs, 1, 1.0, unfit=frozenset(facts.pop("unfit", ()))), **facts)
    each = len(needs) // made.islands
    counts = range(made.islands - 1, fewest - 1, -1) if fewest else ()
    return replace(made, fewer=tuple(replace(made, needs=needs[: each * n], islands=n, is_part=True) for n in counts))


def running(job: JobId = A, *replicas: int, at_start: int = 0, refuses: str = "", **facts: Any) -> ActiveJob:
    """A job at work whose brain sends whoever comes to the first of the stages that are named."""
    replicas = replicas or (1, 1)

    def where(peer: Candidate, stages: Collection[int], coming: Mapping[PeerId, int]) -> Decision[int]:
        if refuses or not stages:
            return Decision(None, refuses or "no stage fits its memory")
        return Decision(min(stages), f"it helps, with {len(coming)} more")

    needs, min_replicas = memories(10) * len(replicas), facts.pop("min_replicas", 1)
    return replace(ActiveJob(job, needs, min_replicas, replicas, at_start or sum(replicas), where), **facts)


class Allocator:
    """Plays an allocation: peers that are idle, busy or move, jobs that wait or run, then `allocate` or a turn."""

    def __init__(self) -> None:
        self.idle: list[Candidate] = []
        self.away: list[Candidate] = []
        self.moving: dict[PeerId, Reservation] = {}
        self.jobs: tuple[list[PendingJob], list[ActiveJob]] = ([], [])

    def play(self, line: str) -> Iterator[str]:
        words, _, facts = line.partition(",")
        verb, *told = words.split()
        match verb:
            case "idle":
                self.idle = peers(*told)
            case "busy":
                self.away = busy(int(told[0])) if told[0].isdecimal() else peers(*told)
            case "moves":
                self.moving = {PeerId(told[0]): Reservation(JobId(f"{told[1]}-1"), int(told[2]), 9.0)}
            case "jobs":
                self.jobs = ([], [])
            case "waiting":
                self.jobs[0].append(self.made(waiting, told, facts))
            case "running":
                self.jobs[1].append(self.made(running, told, facts))
            case "allocate":
                handed = allocate(self.idle, self.present, *self.jobs, self.moving)
                yield from (f"{join.peer} to stage {join.stage} of {join.job}: {join.reason}" for join in handed.joins)
                yield from (
                    f"{peer} unused: {job}: {why}" for peer, of in handed.unused.items() for job, why in of.items()
                )
            case "turn":
                self.turn = StartTurn(self.idle, self.moving, self.present)
            case "only":
                self.turn.only(peers(*told))
            case "descend":
                list(self.turn.descend([self.made(waiting, told, facts)] if told else []))
            case "offer":
                yield self.decided(self.turn.offer(self.made(waiting, told, facts)))
            case "fewer":
                count, decision = self.turn.offer_fewer(self.made(waiting, told, facts))
                yield f"with {count} islands: {self.decided(decision)}" if count else "with none"
            case "least":
                yield " ".join(sorted(self.made(waiting, told, facts).least(self.idle)))

    @property
    def present(self) -> list[Candidate]:
        return [*self.idle, *self.away]

    @staticmethod
    def made(of: Any, told: list[str], facts: str) -> Any:
        job, *counts = told
        return value_of(f"made({facts})", {"made": lambda **facts: of(JobId(f"{job}-1"), *map(int, counts), **facts)})

    @staticmethod
    def decided(decision: Decision[dict[PeerId, int]]) -> str:
        plan = decision.plan
        return f"no: {decision.reason}" if plan is None else ", ".join(f"{peer} at {plan[peer]}" for peer in plan)


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_peers_are_given_away_as_the_text_says(situation: Situation) -> None:
    situation.check(Allocator().play)


def test_a_large_job_under_churn_does_not_starve_one_that_waits() -> None:
    """Whatever comes one by one would go to the large job, which has always just lost one."""
    collected: list[Candidate] = []
    waited_s, decision = 0.0, None
    for number in range(100):
        idle = [*collected, *peers(f"new-{number:02}")]
        job = waiting(stages=3, waited_s=waited_s)
        decision = StartTurn(idle, {}, []).offer(job)
        if decision.plan is not None:
            break
        handed = allocate(idle, idle + busy(8), [job], [running(A, 4, 4, at_start=100)], {})
        collected = [peer for peer in idle if peer.peer not in {join.peer for join in handed.joins}]
        waited_s += 60.0
    assert decision is not None
    assert decision.plan is not None
    assert waited_s == pytest.approx(PATIENCE_S + 2 * 60.0)


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
                left = [peer for peer in left if peer.peer not in decision.plan]
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
        free = [peer for peer in free if peer.peer not in kept]
    return free


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
    assert Fewer(2, None, 320.0).told(20.0) == "goes on with 2 stages in 300 s if no more come"


def model(layer_bytes: int, layers: int = 4) -> ModelCosts:
    return ModelCosts(layers, 1, 1, lambda of, stage, stages, replicas: Memory(layer_bytes * of))


def stages_here(job: PendingJob, costs: ModelCosts, here: list[Candidate], most: int = 999) -> int:
    """The number of stages of `most` layers; each has a peer, and the job is not as it was."""
    split, decision = cut_here(job, costs, here, lambda split: max(split) <= most)
    assert set((decision.plan or {}).values()) == set(range(len(split)))
    assert len(split) != len(job.needs)
    return len(split)


def test_what_is_here_is_offered_only_if_it_can_hold_the_job() -> None:
    """A job waited for a second stage server, while the one that was idle could hold all of it."""
    assert stages_here(waiting(B, 2), model(25), peers("a")) == 1
    assert stages_here(waiting(B, 2), model(26), peers("a")) == 0, "one layer too many"
    assert stages_here(waiting(B, 4), model(50), peers("a", "b", "c")) == 3, "the most first"
    assert stages_here(waiting(B, 4), model(50), peers("a", "b")) == 2
    assert stages_here(waiting(B, 2), model(1), []) == 0
    assert stages_here(waiting(B, 1), model(1), peers("a")) == 0, "there are no fewer stages"
    assert stages_here(replace(waiting(B, 2), min_replicas=2), model(25), peers("a")) == 0
    assert stages_here(replace(waiting(B, 2), unfit=frozenset({PeerId("a")})), model(25), peers("a")) == 0
    pinned = [replace(peer, pinned_stage=1) for peer in peers("a")]
    assert stages_here(waiting(B, 2), model(25), pinned) == 0
    assert stages_here(waiting(B, 2), model(25), [replace(peer, unreached=True) for peer in peers("x")]) == 1, (
        "alone it needs no links"
    )


def test_stages_are_more_where_those_that_are_here_are_smaller_than_those_that_left() -> None:
    assert stages_here(waiting(B, 1), model(50), peers("a", "b", "c")) == 2, "as few as hold it"
    assert stages_here(waiting(B, 1), model(101), peers("a", "b", "c")) == 0
    assert stages_here(waiting(B, 2), model(25), peers("a", "b", "c"), most=2) == 3, "one stage would be too long"
    many = peers(*(str(number) for number in range(STAGES_MAX + 1)))
    assert stages_here(waiting(B, STAGES_MAX - 1), model(50, 1024), many) == STAGES_MAX
    assert stages_here(replace(waiting(B, STAGES_MAX), peers_max=1), model(50, 1025), many) == 0


def test_with_another_cut_a_job_takes_as_many_replicas_of_a_stage_as_before() -> None:
    job = replace(waiting(B, 4), peers_max=8)
    assert job.with_cut(model(1), (2, 2), 8).peers_max == 4
    assert len(job.with_cut(model(1), (2, 2), 8).plan(peers(*"abcdefgh")).plan or {}) == 4
