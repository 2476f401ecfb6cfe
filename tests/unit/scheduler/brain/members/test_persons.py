"""The jobs that a person may change, and how much one person may take."""

from __future__ import annotations

from contextlib import suppress

import pytest

from scheduler.brain.members.access import RULES
from scheduler.brain.members.persons import (
    ANYBODY,
    LOOKS,
    Changes,
    Person,
    Submits,
    check_owner,
    check_room,
    check_share,
)
from swarm.errors import NotOwner, QuotaReached
from swarm.pki.names import Role
from tests.support.situations import Calls, Situation, beside

ANN, BOB = Person(Role.SUBMITTER, "ann"), Person(Role.SUBMITTER, "bob")
VERA, ROOT = Person(Role.VIEWER, "vera"), Person(Role.ADMIN, "root")
CHANGES = ("Cancel", "Pause", "Resume", "Pull", "Verify", "Remove", "Start")


@pytest.mark.parametrize("method", sorted(LOOKS))
def test_everybody_looks_at_every_job(method: str) -> None:
    for person in (ANN, BOB, VERA, ROOT, ANYBODY):
        check_owner(person, method, "demo-1", "submitter/ann")


@pytest.mark.parametrize("method", [*CHANGES, "a method that is made later"])
def test_a_job_is_changed_by_its_owner_and_by_admins(method: str) -> None:
    for person in (ANN, ROOT, ANYBODY):
        check_owner(person, method, "demo-1", "submitter/ann")
    for person in (BOB, VERA, Person(Role.VIEWER, "ann")):
        with pytest.raises(NotOwner, match=f"{method} is for the person who submitted job demo-1: submitter/ann"):
            check_owner(person, method, "demo-1", "submitter/ann")
    with pytest.raises(NotOwner, match="demo-1: unknown"):  # submitted over plaintext
        check_owner(BOB, method, "demo-1", "")


def test_no_method_that_changes_a_job_counts_as_a_look() -> None:
    """Each look is a call that also viewers make."""
    assert all(Role.VIEWER in RULES[f"/swarm.wire.Jobs/{method}"] for method in LOOKS)


def test_one_person_has_half_of_the_jobs_that_others_leave_free() -> None:
    check_share("submitter/ann", 49, 0, 100)
    check_share("", 999, 0, 1000)
    for own, others in ((50, 0), (25, 50), (1, 99)):
        with pytest.raises(QuotaReached, match=f"half of the {100 - others} that others leave free"):
            check_share("submitter/ann", own, others, 100)


def test_one_person_has_so_many_open_jobs() -> None:
    check_share("submitter/ann", 63, 0, 1000)
    check_share("", 64, 0, 1000)
    with pytest.raises(QuotaReached, match="you have 64 open jobs, as many as one person may have"):
        check_share("submitter/ann", 64, 0, 1000)


def test_one_person_is_promised_half_of_the_room_on_the_disk() -> None:
    mib = 1 << 20
    check_room("submitter/ann", 10 * mib, 2 * mib, 3 * mib)
    check_room("", 10 * mib, 2 * mib, 8 * mib)
    with pytest.raises(QuotaReached, match=r"you are sending 2.0 MiB, and together they may take half of the 10.0 MiB"):
        check_room("submitter/ann", 10 * mib, 2 * mib, 3 * mib + 1)


def taken(counted: Submits | Changes, owner: str, begin_s: float, end_s: float, each: int) -> int:
    """How many of `each` that a person asks for every second are granted."""
    granted = 0
    for second in range(int(end_s - begin_s) + 1):
        for _ in range(each):
            with suppress(QuotaReached):
                counted.take(owner, begin_s + second)
                granted += 1
    return granted


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_calls_are_counted_as_the_text_says(situation: Situation) -> None:
    people = {"ann": "submitter/ann", "bob": "submitter/bob"}
    situation.check(Calls(None, Submits=Submits, Changes=Changes, taken=taken, **people).play)
