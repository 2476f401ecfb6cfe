"""Whose address shows whether its process has ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scheduler.brain.fleet.endings import Endings
from scheduler.brain.fleet.membership import Membership
from swarm.types import JobId, PeerId
from swarm.wire.messages import Hello

A = PeerId("a")
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
