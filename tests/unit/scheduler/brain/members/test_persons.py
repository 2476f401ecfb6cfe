"""The jobs that a person may change, and how much one person may take."""

from __future__ import annotations

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


def test_one_person_submits_a_hundred_jobs_and_then_one_a_minute() -> None:
    """A job that was cancelled at once was free for its submitter, and cost the scheduler memory for ever."""
    submits = Submits()
    for _ in range(100):
        submits.check("submitter/ann", 7.0)
        submits.take("submitter/ann", 7.0)
    with pytest.raises(QuotaReached, match="100 jobs in a short time, and may submit 60 an hour") as caught:
        submits.take("submitter/ann", 37.0)
    assert caught.value.hint == "the next one may come in 30.0 s"
    with pytest.raises(QuotaReached):
        submits.check("submitter/ann", 66.0)
    submits.take("admin/bob", 66.0)
    submits.take("submitter/ann", 67.5)
    with pytest.raises(QuotaReached):
        submits.take("submitter/ann", 68.0)
    allowed = 0
    for second in range(68, 68 + 10 * 3600):
        try:
            submits.take("submitter/ann", float(second))
        except QuotaReached:
            continue
        allowed += 1
    assert allowed in (599, 600)


def test_a_person_has_so_many_at_once_again_after_a_pause() -> None:
    submits = Submits()
    for now_s in (0.0, 100 * 60.0 + 1):
        for _ in range(100):
            submits.take("submitter/ann", now_s)
        with pytest.raises(QuotaReached):
            submits.take("submitter/ann", now_s)


def test_over_plaintext_nobody_is_known_and_nothing_is_counted() -> None:
    submits = Submits()
    for _ in range(1000):
        submits.take("", 0.0)
    submits.check("", 0.0)


def test_one_person_changes_jobs_two_hundred_times_and_then_once_a_second() -> None:
    """A job that was paused and resumed in turn wrote rows of its whole spec as fast as the disk took them."""
    changes = Changes()
    for _ in range(200):
        changes.take("submitter/ann", 7.0)
    with pytest.raises(QuotaReached, match="200 times in a short time, and may do it 60 times a minute") as caught:
        changes.take("submitter/ann", 7.5)
    assert caught.value.hint == "the next one may come in 0.5 s"
    changes.take("submitter/bob", 7.5)
    changes.take("submitter/ann", 8.0)
    for _ in range(1000):
        changes.take("", 8.0)  # over plaintext nobody is known
