"""Who is here, suspect, draining, gone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.fleet.membership import NO_STAGE, Endings, Measured, Membership, Peer, Transition, fleet_speed
from swarm.errors import NotAllowed, NotFound, StaleMessage
from swarm.job.overlap import UNMEASURED, FleetSpeed
from swarm.types import NO_JOB, JobId, PeerId, PeerState
from swarm.wire.messages import Hello, LinkSpeed

A, JOB = PeerId("a"), JobId("job")
IDLE, LOADING, SERVING, SUSPECT, GONE = (
    PeerState.IDLE,
    PeerState.LOADING,
    PeerState.SERVING,
    PeerState.SUSPECT,
    PeerState.GONE,
)


def hello(peer: str = "a", incarnation: int = 1, job: JobId = NO_JOB) -> Hello:
    return Hello(PeerId(peer), incarnation, 1, "0.1", "addr", "http", "cpu", 1, 1 << 30, -1, job, 0, 0)


def pool() -> Membership:
    return Membership(suspect_after_s=3.0, grace_s=10.0, forget_after_s=100.0)


def moves(transitions: list[Transition]) -> list[tuple[PeerState | None, PeerState]]:
    return [(one.before, one.after) for one in transitions]


def serving(members: Membership) -> None:
    members.hello(hello(), 0.0)
    members.assign(A, JOB, 1, 0.0)
    members.serving(A, 0.0)


@pytest.fixture
def members() -> Membership:
    return pool()


def test_a_peer_joins_loads_serves_and_is_idle_again(members: Membership) -> None:
    assert moves(members.hello(hello(), 0.0)) == [(None, IDLE)]
    assert [peer.hello.peer for peer in members.idle_peers()] == ["a"]
    assert moves(members.assign(A, JOB, 1, 1.0)) == [(IDLE, LOADING)]
    assert members.idle_peers() == []
    assert moves(members.serving(A, 2.0)) == [(LOADING, SERVING)]
    known = members.get(A)
    assert known is not None
    assert (known.job, known.stage, known.since_s) == (JOB, 1, 2.0)
    assert moves(members.release(A, 3.0, "job is over")) == [(SERVING, IDLE)]
    assert (known.job, known.stage, known.reason) == (NO_JOB, NO_STAGE, "job is over")


def test_silence_makes_suspect_and_grace_makes_gone_with_job_and_stage_named(members: Membership) -> None:
    serving(members)
    assert members.tick(2.9) == []
    (suspect,) = members.tick(3.0)
    assert (suspect.before, suspect.after, suspect.reason) == (SERVING, SUSPECT, "silent for 3.0 s")
    assert not suspect.session_lost
    assert members.tick(12.9) == []
    (gone,) = members.tick(13.0)
    assert (gone.before, gone.after, gone.job, gone.stage) == (SUSPECT, GONE, JOB, 1)
    assert gone.reason == "silent for 3.0 s; not heard for 13.0 s (grace_s = 10)"
    assert members.heard(A, 13.5) == [], "gone is gone until it dials again"


def test_while_the_scheduler_itself_stood_still_nobody_was_silent(members: Membership) -> None:
    """Stopped (SIGSTOP) for longer than the grace just after sessions broke, it took all its peers for gone."""
    serving(members)
    members.disconnected(A, 1, 1.0)
    members.stood_still(20.0, 21.1)
    assert members.tick(21.1) == []
    assert members.tick(30.9) == []
    assert moves(members.tick(31.0)) == [(SUSPECT, GONE)], "its own grace is not longer for that"
    members.hello(hello("b"), 31.0)
    members.stood_still(5.0, 32.0)
    assert members.tick(34.9) == []
    assert moves(members.tick(35.0)) == [(IDLE, SUSPECT)], "nobody is heard in the future"


def test_a_suspect_that_is_heard_is_back_where_it_was(members: Membership) -> None:
    serving(members)
    (suspect,) = members.disconnected(A, 1, 1.0, "connection reset")
    assert (suspect.before, suspect.after, suspect.session_lost) == (SERVING, SUSPECT, True)
    assert moves(members.hello(hello(job=JOB), 2.0)) == [(SUSPECT, SERVING)]
    known = members.get(A)
    assert known is not None
    assert (known.job, known.stage) == (JOB, 1)


def test_a_peer_that_dials_again_without_its_job_is_lost_to_the_job_and_idle(members: Membership) -> None:
    serving(members)
    members.disconnected(A, 1, 1.0, "connection reset")
    gone, idle = members.hello(hello(), 2.0)
    assert (gone.before, gone.after, gone.job, gone.stage) == (SUSPECT, GONE, JOB, 1)
    assert "lost its session" in gone.reason
    assert (idle.before, idle.after) == (GONE, IDLE)
    assert [peer.hello.peer for peer in members.idle_peers()] == ["a"]
    members.validate()


@pytest.mark.parametrize("away_s", [0.5, 20.0])
@pytest.mark.parametrize("given", [False, True])
def test_a_process_that_left_in_order_and_dials_again_is_idle(members: Membership, away_s: float, given: bool) -> None:
    """It would hand its work over for ever, although it has none."""
    members.hello(hello(), 0.0)
    if given:
        members.assign(A, JOB, 1, 0.0)
    members.leaving(A, 1.0, "its device is at work")
    members.disconnected(A, 1, 1.0)
    if given:
        members.release(A, 1.1)
    members.tick(1.0 + away_s)
    *gone, idle = members.hello(hello(), 1.0 + away_s)
    assert moves(gone) == ([(SUSPECT, GONE)] if away_s < 10.0 else [])
    assert idle.after is IDLE
    assert [peer.hello.peer for peer in members.idle_peers()] == ["a"]
    assert [peer.hello.peer for peer in members.lasting_peers()] == ["a"]
    members.validate()


def test_an_older_incarnation_is_refused_and_changes_nothing(members: Membership) -> None:
    members.hello(hello(incarnation=5), 0.0)
    with pytest.raises(StaleMessage, match="incarnation 4, incarnation 5 is known"):
        members.hello(hello(incarnation=4), 1.0)
    assert members.disconnected(A, 4, 1.0) == []
    assert members.get(A) is not None
    assert members.get(A).state is IDLE  # type: ignore[union-attr]  # asserted above


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("job", [NO_JOB, JOB])
def test_a_newer_incarnation_replaces_the_older_which_is_gone_at_once(loaded: bool, job: JobId) -> None:
    """Whatever it says that it holds: the process that held it has ended."""
    members = pool()
    members.hello(hello(), 0.0)
    members.assign(A, JOB, 1, 0.0)
    if loaded:
        members.serving(A, 0.0)
    gone, joined = members.hello(hello(incarnation=2, job=job), 1.0)
    assert (gone.incarnation, gone.after, gone.stage) == (1, GONE, 1)
    assert gone.before is (SERVING if loaded else LOADING)
    assert (joined.incarnation, joined.after) == (2, IDLE)
    assert len(members.idle_peers()) == 1


def test_a_peer_that_was_gone_comes_back_with_nothing(members: Membership) -> None:
    serving(members)
    members.disconnected(A, 1, 0.0)
    members.tick(10.0)
    (back,) = members.hello(hello(), 11.0)
    assert (back.before, back.after) == (GONE, IDLE)
    assert members.get(A).job == NO_JOB  # type: ignore[union-attr]  # it just joined


def test_a_gone_peer_is_forgotten_in_the_end(members: Membership) -> None:
    members.hello(hello(), 0.0)
    members.disconnected(A, 1, 0.0)
    members.tick(10.0)
    members.tick(109.0)
    assert members.get(A) is not None
    members.tick(110.0)
    assert members.get(A) is None


def test_a_job_that_ends_while_its_peer_is_suspect_leaves_it_idle(members: Membership) -> None:
    serving(members)
    members.disconnected(A, 1, 0.0)
    assert members.release(A, 1.0) == []
    assert moves(members.heard(A, 2.0)) == [(SUSPECT, IDLE)]
    members.validate()


def test_loading_can_end_while_the_peer_is_suspect(members: Membership) -> None:
    members.hello(hello(), 0.0)
    members.assign(A, JOB, 0, 0.0)
    members.disconnected(A, 1, 0.0)
    assert members.serving(A, 1.0) == []
    assert moves(members.heard(A, 1.0)) == [(SUSPECT, SERVING)]


def test_only_an_idle_peer_can_be_given_a_stage(members: Membership) -> None:
    serving(members)
    with pytest.raises(NotAllowed, match="a is serving"):
        members.assign(A, JOB, 0, 1.0)
    with pytest.raises(NotAllowed, match="unknown"):
        members.assign(PeerId("x"), JOB, 0, 1.0)


def test_a_leaving_peer_drains_and_gets_nothing_new(members: Membership) -> None:
    members.hello(hello(), 0.0)
    assert moves(members.leaving(A, 1.0, "SIGTERM")) == [(IDLE, PeerState.DRAINING)]
    assert members.idle_peers() == []


def test_a_drained_peer_stays_once_it_has_handed_its_work_over(members: Membership) -> None:
    serving(members)
    assert members.stay(A, 1.0) == [], "it never was to leave"
    members.leaving(A, 1.0, "drained by its user")
    with pytest.raises(NotAllowed, match="still hands its work over"):
        members.stay(A, 2.0)
    members.release(A, 3.0)
    members.disconnected(A, 1, 4.0)
    with pytest.raises(NotAllowed, match="suspect"):
        members.stay(A, 4.5)
    members.heard(A, 5.0)
    assert moves(members.stay(A, 6.0)) == [(PeerState.DRAINING, IDLE)]
    assert [known.hello.peer for known in members.idle_peers()] == [A]
    assert [known.hello.peer for known in members.lasting_peers()] == [A]
    members.assign(A, JOB, 0, 7.0)


def test_a_quarantined_peer_that_was_drained_stays_quarantined(members: Membership) -> None:
    members.hello(hello(), 0.0)
    members.leaving(A, 1.0, "drained by its user")
    members.quarantine(A, 2.0, "wrong numbers")
    assert moves(members.stay(A, 3.0)) == [(PeerState.DRAINING, PeerState.QUARANTINED)]
    assert members.idle_peers() == []


def test_a_peer_that_ends_after_it_has_left_its_job_is_no_crash() -> None:
    members = pool()
    members.hello(hello(), 0.0)
    members.leaving(A, 1.0, "its process was told to end")
    [lost] = members.disconnected(A, 1, 2.0)
    assert lost.reason == "it ended in order: its process was told to end"
    members = pool()
    serving(members)
    members.leaving(A, 1.0, "its process was told to end")
    [lost] = members.disconnected(A, 1, 2.0)
    assert lost.reason == "session broke"  # it had not handed its stage over yet


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
        for one in transitions:
            assert one.before is shown, "transitions are a chain without gaps"
            assert one.before is not one.after
            shown = one.after
        present = members.get(A)
        if present is None:
            shown = None
        else:
            assert present.state is shown
            assert present.reason


def test_a_peer_is_found_by_its_id_or_a_beginning_that_fits_one(members: Membership) -> None:
    for name in ("ab", "abc", "abd", "x"):
        members.hello(hello(name), 0.0)
    assert members.find("ab").hello.peer == "ab"
    assert members.find("x").hello.peer == "x"
    for reference in ("", "y"):
        with pytest.raises(NotFound, match="there is no stage server"):
            members.find(reference)
    with pytest.raises(NotFound, match="nothing has a name of 4000000 characters"):
        members.find("a" * 4_000_000)  # it cost the event loop 20 ms, most of it for the answer
    with pytest.raises(NotFound, match="abc, abd"):
        members.find("a")
    for name in ("ab", "abc"):
        members.disconnected(PeerId(name), 1, 0.0)
    members.tick(10.0)
    for name in ("abd", "x"):
        members.heard(PeerId(name), 10.0)
    assert members.find("a").hello.peer == "abd", "those that are gone come last"
    assert members.find("abc").state is GONE


def test_a_suspect_that_is_drained_says_why_once_it_is_heard(members: Membership) -> None:
    serving(members)
    members.disconnected(A, 1, 1.0)
    assert members.leaving(A, 1.0, "drained by its user") == []
    (back,) = members.heard(A, 2.0)
    assert (back.after, back.reason) == (PeerState.DRAINING, "drained by its user")
    assert members.leaving(A, 2.0, "again") == []


def test_a_quarantined_peer_is_given_nothing_wherever_it_comes_from_until_it_is_freed(members: Membership) -> None:
    serving(members)
    assert members.quarantine(A, 1.0, "wrong numbers") == [], "its job lets go of it first"
    assert moves(members.release(A, 2.0)) == [(SERVING, PeerState.QUARANTINED)]
    known = members.get(A)
    assert known is not None
    assert known.reason == "wrong numbers"
    assert members.idle_peers() == []
    with pytest.raises(NotAllowed):
        members.assign(A, JOB, 1, 3.0)
    assert moves(members.hello(hello(incarnation=2), 4.0)) == [
        (PeerState.QUARANTINED, GONE),
        (GONE, PeerState.QUARANTINED),
    ]
    assert moves(members.disconnected(A, 2, 5.0)) == [(PeerState.QUARANTINED, SUSPECT)]
    assert moves(members.heard(A, 6.0)) == [(SUSPECT, PeerState.QUARANTINED)]
    assert moves(members.free(A, 7.0)) == [(PeerState.QUARANTINED, IDLE)]
    assert moves(members.quarantine(A, 8.0, "again")) == [(IDLE, PeerState.QUARANTINED)]
    members.disconnected(A, 2, 9.0)
    assert members.free(A, 10.0) == []
    assert moves(members.heard(A, 11.0)) == [(SUSPECT, IDLE)]
    members.validate()


def test_who_leaves_is_gone_or_is_quarantined_in_whatever_state_does_not_last(members: Membership) -> None:
    serving(members)
    for name in ("gone", "leaves", "silent", "suspect"):
        members.hello(hello(name), 0.0)
    members.revoked(PeerId("gone"), 1.0, "no member")
    members.leaving(PeerId("leaves"), 1.0)
    members.disconnected(PeerId("silent"), 1, 1.0)
    assert [known.hello.peer for known in members.lasting_peers()] == [A, "silent", "suspect"]
    members.quarantine(PeerId("suspect"), 2.0, "wrong numbers")
    members.disconnected(PeerId("suspect"), 1, 2.0)
    members.quarantine(A, 2.0, "wrong numbers")
    assert [known.hello.peer for known in members.lasting_peers()] == ["silent"]
    members.free(PeerId("suspect"), 3.0)
    assert [known.hello.peer for known in members.lasting_peers()] == ["silent", "suspect"]


def test_a_name_is_quarantined_before_it_dials(members: Membership) -> None:
    assert members.quarantine(A, 1.0, "wrong numbers") == []
    assert moves(members.hello(hello(), 2.0)) == [(None, PeerState.QUARANTINED)]
    assert members.free(PeerId("b"), 3.0) == []


def test_links_are_those_to_known_peers_and_go_with_the_job(members: Membership) -> None:
    serving(members)
    members.hello(hello("b"), 0.0)
    told = (LinkSpeed(PeerId("b"), 1e6, 0.01), LinkSpeed(PeerId("stranger"), 1e6, 0.01))
    members.measured(A, told)
    members.measured(PeerId("b"), told)  # it serves nothing
    assert [known.links for known in members.peers()] == [told[:1], ()]
    members.release(A, 3.0)
    assert [known.links for known in members.peers()] == [(), ()]


def test_what_was_measured_of_a_peer_is_kept_for_the_next_job_of_its_process(members: Membership) -> None:
    serving(members)
    members.measured(A, (LinkSpeed(A, 1e6, 0.01),), 1e9)
    members.release(A, 3.0)
    known = members.get(A)
    assert known is not None
    assert known.measured == Measured((LinkSpeed(A, 1e6, 0.01),), 1e9)
    members.hello(hello(incarnation=2), 4.0)
    known = members.get(A)
    assert known is not None
    assert known.measured == Measured()


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
    assert fleet_speed(peers) == FleetSpeed(2e9, 2e6, 0.2)


def test_links_to_stage_servers_that_are_busy_or_gone_do_not_count() -> None:
    assert fleet_speed([measured("a", 1e9, ("b", 1e6, 0.2))]) is UNMEASURED


def test_nothing_is_known_without_links_or_without_computing() -> None:
    assert fleet_speed([]) is UNMEASURED
    assert fleet_speed([measured("a", 1e9), measured("b", 1e9)]) is UNMEASURED
    assert fleet_speed([measured("a", 0.0, ("b", 1e6, 0.2)), measured("b", 0.0)]) is UNMEASURED


def test_speeds_that_no_machine_has_do_not_count() -> None:
    for odd in (math.nan, math.inf, -1.0, 0.0):
        assert fleet_speed([measured("a", odd, ("b", 1e6, 0.2)), measured("b", 1e9)]) == FleetSpeed(1e9, 1e6, 0.2)
        assert fleet_speed([measured("a", 1e9, ("b", odd, 0.2)), measured("b", 1e9)]) is UNMEASURED
        assert fleet_speed([measured("a", 1e9, ("b", 1e6, odd)), measured("b", 1e9)]) is UNMEASURED
