"""Who is here, suspect, draining, gone. The situations stand in the text beside this file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.fleet.membership import (
    NO_FELLOWS,
    Endings,
    Fellows,
    Measured,
    Membership,
    Peer,
    Transition,
    filled,
    fleet_speed,
)
from scheduler.brain.replay import spell
from swarm.errors import StaleMessage, SwarmError
from swarm.job.overlap import UNMEASURED, FleetSpeed
from swarm.types import NO_JOB, JobId, PeerId, PeerState
from swarm.wire.messages import Calibrated, Hello, LinkSpeed
from tests.support.situations import Situation, beside, value_of

A, JOB = PeerId("a"), JobId("job")
IDLE = PeerState.IDLE


def hello(peer: str = "a", incarnation: int = 1, job: JobId = NO_JOB) -> Hello:
    return Hello(PeerId(peer), incarnation, 1, "0.1", "addr", "http", "cpu", 1, 1 << 30, -1, job, 0, 0)


def pool() -> Membership:
    return Membership(suspect_after_s=3.0, grace_s=10.0, forget_after_s=100.0)


class Watcher:
    """Plays a membership: methods with the time at which they are called, and questions, which have none.

    `hello` takes the fields of a Hello, and `served(a)` is a peer that has loaded stage 1 of a job.
    """

    def __init__(self) -> None:
        self.members = pool()

    def play(self, line: str) -> Iterator[str]:
        at_s, name, told = re.fullmatch(r"(?:([\d.]+) )?(\w+)\(?(.*?)\)?", line).groups()  # type: ignore[union-attr]

        def called(*args: Any, **facts: Any) -> Any:
            if name == "hello":
                args, facts = (hello(*args, **facts),), {}
            method = getattr(self, name, None) or getattr(self.members, name)
            takes_time = "now_s" in signature(method).parameters
            return method(*args, **facts, **({"now_s": float(at_s)} if takes_time else {}))

        try:
            found = value_of(f"called({told})", {"called": called, "LinkSpeed": LinkSpeed, "LONG": "a" * 4_000_000})
        except SwarmError as error:
            yield f"{type(error).__name__}: {error}"
        else:
            yield from map(
                self.spelled, found if isinstance(found, list) else [found] if name in ("get", "find") else []
            )
        self.members.validate()

    def served(self, peer: PeerId, now_s: float) -> None:
        self.members.hello(hello(peer), now_s)
        self.members.assign(peer, JOB, 1, now_s)
        self.members.serving(peer, now_s)

    def idle(self) -> list[Peer]:
        return self.members.idle_peers()

    def lasting(self) -> list[Peer]:
        return self.members.lasting_peers()

    @staticmethod
    def spelled(one: Transition | Peer | None) -> str:
        if isinstance(one, Transition):
            of_job = f" (stage {one.stage} of {one.job})" if one.job else ""
            lost = ", its session is lost" if one.session_lost else ""
            return f"{one.peer}#{one.incarnation} {one.before or 'unknown'} > {one.after}{of_job}: {one.reason}{lost}"
        if one is None:
            return "none"
        of_job = f" stage {one.stage} of {one.job}" if one.job else ""
        told = f"{one.hello.peer}#{one.hello.incarnation} {one.state}{of_job} since {one.since_s:g} s: {one.reason}"
        measured = "" if one.measured == Measured() else f", measured {spell(one.measured)}"
        return told + measured + (f", links {spell(one.links)}" if one.links else "")


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_members_come_and_go_as_the_text_says(situation: Situation) -> None:
    situation.check(Watcher().play)


ACTS = st.sampled_from(["hello", "newer", "older", "heard", "lost", "assign", "serving", "release", "leaving", "tick"])


@given(st.lists(st.tuples(ACTS, st.floats(0, 8))))
def test_whatever_happens_states_jobs_and_transitions_fit_together(acts: list[tuple[str, float]]) -> None:
    members, now_s, incarnation, shown = pool(), 0.0, 1, None
    for act, wait_s in acts:
        now_s += wait_s
        known = members.get(A)
        transitions: list[Transition] = []
        match act:
            case "hello":
                transitions = members.hello(hello(incarnation=incarnation), now_s)
            case "newer":
                incarnation += 1
                transitions = members.hello(hello(incarnation=incarnation), now_s)
            case "older" if known is not None:
                with pytest.raises(StaleMessage):
                    members.hello(hello(incarnation=known.hello.incarnation - 1), now_s)
            case "heard":
                transitions = members.heard(A, now_s)
            case "lost":
                transitions = members.disconnected(A, incarnation, now_s)
            case "assign" if known is not None and known.state is IDLE:
                transitions = members.assign(A, JOB, 0, now_s)
            case "serving":
                transitions = members.serving(A, now_s)
            case "release":
                transitions = members.release(A, now_s)
            case "leaving":
                transitions = members.leaving(A, now_s)
            case "tick":
                transitions = members.tick(now_s)
        members.validate()
        for transition in transitions:
            assert transition.before is shown, "transitions are a chain without gaps"
            assert transition.before is not transition.after
            shown = transition.after
        present = members.get(A)
        if present is None:
            shown = None
        else:
            assert present.state is shown
            assert present.reason


def island(*peers: str) -> tuple[Membership, Callable[[Peer], Fellows]]:
    """Peers of an island that may be late, for 60 s; whoever else serves the job has no fellows."""
    members, fellows = pool(), Fellows([PeerId(peer) for peer in peers], 60.0)
    for peer in peers:
        members.hello(hello(peer), 0.0)
        members.assign(PeerId(peer), JOB, 1, 0.0)
        members.serving(PeerId(peer), 0.0)
    return members, lambda known: fellows if known.hello.peer in fellows.peers else NO_FELLOWS


def gone(transitions: Iterable[Transition]) -> list[str]:
    return [one.peer for one in transitions if one.after is PeerState.GONE]


def test_an_island_that_is_silent_stays_suspect_until_the_job_makes_no_progress_for_it() -> None:
    members, fellows_of = island("a", "b")
    assert gone(members.tick(3.0, fellows_of)) == []
    assert gone(members.tick(59.9, fellows_of)) == []
    assert gone(members.tick(60.0, fellows_of)) == ["a", "b"]


def test_a_peer_whose_island_is_heard_is_gone_after_the_grace() -> None:
    members, fellows_of = island("a", "b")
    for now_s in range(1, 14):
        members.heard(PeerId("b"), float(now_s))
        assert gone(members.tick(float(now_s), fellows_of)) == (["a"] if now_s == 13 else [])


def test_whoever_of_a_silent_island_is_heard_last_has_the_grace_from_the_first() -> None:
    """Session after session is dialled when a link is back, and the second of them was gone between the two."""
    members, fellows_of = island("a", "b", "c")
    members.tick(3.0, fellows_of)
    members.heard(PeerId("a"), 40.0)
    assert gone(members.tick(40.5, fellows_of)) == []
    members.heard(PeerId("a"), 45.0)
    members.heard(PeerId("b"), 45.0)
    members.heard(PeerId("a"), 49.0)
    members.heard(PeerId("b"), 49.0)
    assert gone(members.tick(49.9, fellows_of)) == []
    assert gone(members.tick(50.0, fellows_of)) == ["c"]


def test_a_silent_peer_is_gone_in_the_end_though_one_of_its_island_dials_again_and_again() -> None:
    """Each new session of the other gave it the grace anew, for ever."""
    members, fellows_of = island("a", "b")
    for now_s in range(1, 61):
        members.disconnected(PeerId("b"), 1, float(now_s))
        members.hello(hello("b"), float(now_s))
        assert gone(members.tick(float(now_s), fellows_of)) == (["a"] if now_s == 60 else [])


def test_a_silent_island_is_not_waited_for_any_more_once_it_is_to_leave() -> None:
    """`swarm peers drain` of stage servers that were dead took effect after `limits.no_progress_s`."""
    members, fellows_of = island("a", "b")
    members.tick(3.0, fellows_of)
    members.leaving(PeerId("a"), 5.0)
    assert gone(members.tick(12.9, fellows_of)) == []
    assert gone(members.tick(13.0, fellows_of)) == ["a"]


def test_an_island_whose_process_has_ended_or_that_may_not_be_late_any_more_does_not_wait() -> None:
    members, fellows_of = island("a", "b")
    members.disconnected(A, 1, 1.0)
    assert gone(members.ended(A, 1, 1.5, "nobody listens")) == ["a"]
    members.tick(3.0, fellows_of)
    assert gone(members.tick(20.0, fellows_of)) == []
    assert gone(members.tick(20.0)) == ["b"]


HELLO = Hello(A, 1, 1, "0", "203.0.113.7:7951", "", "cpu", 1, 0, -1, JobId(""))


@dataclass(frozen=True)
class At:
    """A session from some port of a host."""

    connection: str = "ipv4:203.0.113.7:40312"
    incarnation: int = 1


class Watched:
    """One peer, and its session if it has one."""

    def __init__(self, hello: Hello = HELLO, session: At | None = At()) -> None:
        self.membership, self.endings, self.session = Membership(), Endings(), session
        self.membership.hello(hello, 0.0)
        assert self.look() == []

    def look(self) -> list[PeerId]:
        return [one.peer for one in self.endings.look(self.membership.peers(), lambda _: self.session)]

    def breaks(self) -> list[PeerId]:
        self.session = None
        self.membership.disconnected(A, 1, 1.0)
        return self.look()


def test_who_lost_its_session_is_dialled_once() -> None:
    watched = Watched()
    assert watched.breaks() == [A]
    assert watched.look() == []
    watched.session = At()
    watched.membership.heard(A, 2.0)
    assert watched.look() == []
    assert watched.breaks() == [A], "this is another session"


def test_membership_may_hear_of_it_later() -> None:
    watched = Watched()
    watched.session = None
    assert watched.look() == []
    watched.membership.disconnected(A, 1, 1.0)
    assert watched.look() == [A]


def test_who_is_silent_and_has_a_session_is_not_dialled() -> None:
    watched = Watched()
    watched.membership.tick(3.0)
    assert watched.look() == []


def test_who_never_had_a_session_is_not_dialled() -> None:
    assert Watched(session=None).breaks() == []


@pytest.mark.parametrize(
    ("hello", "session"),
    [
        (HELLO, At("ipv4:203.0.113.8:40312")),
        (HELLO, At("")),
        (replace(HELLO, address=""), At()),
        (replace(HELLO, forwarded=True), At()),
        (HELLO, At(incarnation=2)),
    ],
    ids=["another host", "not known whence", "behind relays", "a forwarded port", "another process"],
)
def test_an_address_that_is_not_of_the_process_shows_nothing(hello: Hello, session: At) -> None:
    """A tunnel that fails breaks the session and refuses at the announced port, and the process lives."""
    assert Watched(hello, session).breaks() == []


def test_an_address_that_was_never_reached_shows_nothing() -> None:
    watched = Watched()
    watched.membership.reached(A, 1, "the scheduler cannot dial it")
    assert watched.breaks() == []


def test_a_host_of_ipv6_is_known_by_its_address() -> None:
    assert Watched(replace(HELLO, address="[2001:db8::7]:7951"), At("ipv6:%5B2001:db8::7%5D:40312")).breaks() == [A]


def measured(name: str, multiply_adds_per_s: float, *links: tuple[str, float, float]) -> Peer:
    found = tuple(LinkSpeed(PeerId(to), rate, receipt_s) for to, rate, receipt_s in links)
    return Peer(hello(name), IDLE, "", 0.0, 0.0, measured=Measured(found, multiply_adds_per_s))


def test_the_medians_of_computing_and_links_count() -> None:
    far = measured("a", 1e9, ("b", 1e6, 0.2), ("c", 3e6, 0.1))
    peers = [far, measured("b", 5e9, ("a", 2e6, 0.3)), measured("c", 2e9), measured("new", 0.0)]
    assert fleet_speed(peers) == FleetSpeed(2e9, 2e6, 0.2, 2e6)


def test_between_sites_only_the_links_that_leave_one_count() -> None:
    a, b = measured("a", 1e9, ("b", 9e6, 0.1), ("c", 1e6, 0.1)), measured("b", 1e9, ("a", 9e6, 0.1))
    c = measured("c", 1e9)
    at = {"a": "x", "b": "x", "c": "y"}
    peers = [replace(one, hello=replace(one.hello, site=at[one.hello.peer])) for one in (a, b, c)]
    assert fleet_speed(peers) == FleetSpeed(1e9, 9e6, 0.1, 1e6)
    assert fleet_speed(peers[:2]) == FleetSpeed(1e9, 9e6, 0.1, 0.0)


def test_links_to_stage_servers_that_are_busy_or_gone_do_not_count() -> None:
    assert fleet_speed([measured("a", 1e9, ("b", 1e6, 0.2))]) is UNMEASURED


def test_nothing_is_known_without_links_or_without_computing() -> None:
    assert fleet_speed([]) is UNMEASURED
    assert fleet_speed([measured("a", 1e9), measured("b", 1e9)]) is UNMEASURED
    assert fleet_speed([measured("a", 0.0, ("b", 1e6, 0.2)), measured("b", 0.0)]) is UNMEASURED


CALIBRATED = Calibrated(1e9, 2e6, 3e6, 0.02)


def asked(*names: str) -> Membership:
    members = pool()
    for name in names:
        members.hello(hello(name), 0.0)
    assert members.calibrate(10.0) == names[0]
    return members


def test_idle_peers_are_asked_to_calibrate_one_after_the_other_once_they_are_here_for_10_s() -> None:
    members = pool()
    for name, at_s in (("b", 0.0), ("a", 1.0), ("c", 2.0)):
        members.hello(hello(name), at_s)
    assert [members.calibrate(now_s) for now_s in (9.9, 10.0, 11.0)] == [None, "b", None]
    assert members.find("b").reason == "calibrating"
    members.calibrated(PeerId("b"), CALIBRATED)
    assert members.find("b").measured == Measured((), 1e9, 2e6, 3e6, 0.02)
    assert members.find("b").reason == "calibrated"
    assert [members.calibrate(now_s) for now_s in (11.0, 12.0, 41.0, 42.0)] == ["a", None, "c", None]
    assert members.find("a").reason == "calibration: no answer for 30 s"


def test_a_peer_that_was_given_a_stage_is_calibrating_no_longer() -> None:
    members = asked("a", "b")
    members.assign(A, JOB, 0, 11.0)
    assert "calibrating" not in members.find("a").reason
    assert members.calibrate(11.0) == "b", "the line of the scheduler is free"
    members.calibrated(PeerId("b"), CALIBRATED)
    members.release(A, 20.0)
    assert [members.calibrate(now_s) for now_s in (29.9, 30.0)] == [None, "a"], "it gave way"
    members.calibrated(A, CALIBRATED)
    members.assign(A, JOB, 0, 31.0)
    members.release(A, 32.0)
    assert members.calibrate(99.0) is None, "each is asked until it has answered"


def test_what_a_peer_says_of_itself_counts_less_than_what_a_job_shows_and_is_asked_for() -> None:
    members = asked("a", "b")
    members.calibrated(PeerId("b"), CALIBRATED)
    assert members.find("b").measured == Measured(), "nobody asked it"
    assert members.calibrate(40.0) == "b", "a is late"
    members.assign(A, JOB, 0, 11.0)
    members.measured(A, (), 5e9)
    members.calibrated(A, CALIBRATED)
    for odd in (0.0, math.nan, math.inf, -1.0, 1e300):
        members.measured(A, (), odd)
    members.calibrated(A, Calibrated(7e9, 7e6, 7e6, 0.7))
    assert members.find("a").measured == Measured((), 5e9, 2e6, 3e6, 0.02)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_what_no_machine_can_measure_is_not_known(odd: float) -> None:
    members = asked("a")
    members.calibrated(A, Calibrated(odd, odd, odd, odd, fault="x" * 1000))
    assert members.find("a").measured == Measured()
    assert members.find("a").reason == f"calibrated: {'x' * 200}"


def test_of_those_that_were_no_neighbours_the_lines_count() -> None:
    lines = Measured((), 1e9, 2e6, 1e6, 0.02)
    assert fleet_speed([replace(measured("a", 1e9), measured=lines)]) == FleetSpeed(1e9, 1e6, 0.02)


def test_speeds_that_no_machine_has_do_not_count() -> None:
    for odd in (math.nan, math.inf, -1.0, 0.0):
        assert fleet_speed([measured("a", odd, ("b", 1e6, 0.2)), measured("b", 1e9)]) == FleetSpeed(1e9, 1e6, 0.2, 1e6)
        assert fleet_speed([measured("a", 1e9, ("b", odd, 0.2)), measured("b", 1e9)]) is UNMEASURED
        assert fleet_speed([measured("a", 1e9, ("b", 1e6, odd)), measured("b", 1e9)]) is UNMEASURED
        assert filled([odd, 3.0, 1.0, 2.0]) == [2.0, 3.0, 1.0, 2.0]
        assert filled([odd, odd], otherwise=7.0) == [7.0, 7.0]
