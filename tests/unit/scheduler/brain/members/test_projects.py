"""Whose jobs a person sees and changes, written down a second time; and how much a project may have."""

from __future__ import annotations

import pytest

from scheduler.brain.members.access import check_role
from scheduler.brain.members.projects import (
    ANYBODY,
    REACH,
    JobAccess,
    Person,
    Quota,
    check_bytes,
    check_jobs,
    check_share,
    judge,
    not_owner,
    sees,
)
from swarm.errors import QuotaReached, RoleForbids
from swarm.pki.names import PEOPLE, Principal, Role
from swarm.wire import jobs_pb2

CLUSTER = "abcdefghijklmno2"
# A job of the caller's own, of a colleague in his project, of another project, and of a namesake in another project.
TABLE = """
                 viewer                submitter             admin
    Get          . yes  yes  -  -      . yes  yes  -  -      . yes yes yes yes
    Watch        . yes  yes  -  -      . yes  yes  -  -      . yes yes yes yes
    Logs         . yes  yes  -  -      . yes  yes  -  -      . yes yes yes yes
    Explain      . yes  yes  -  -      . yes  yes  -  -      . yes yes yes yes
    Checkpoints  . yes  yes  -  -      . yes  yes  -  -      . yes yes yes yes
    History      . yes  yes  -  -      . yes  yes  -  -      . yes yes yes yes
    Trace        . yes  yes  -  -      . yes  yes  -  -      . yes yes yes yes
    Verify       . yes  his  -  -      . yes  his  -  -      . yes yes yes yes
    Cancel       . role role role role . yes  his  -  -      . yes yes yes yes
    Pause        . role role role role . yes  his  -  -      . yes yes yes yes
    Resume       . role role role role . yes  his  -  -      . yes yes yes yes
    Pull         . role role role role . yes  his  -  -      . yes yes yes yes
    Remove       . role role role role . yes  his  -  -      . yes yes yes yes
"""
WORDS = {"yes": JobAccess.ALLOWED, "his": JobAccess.NOT_OWNER, "-": JobAccess.UNKNOWN}
CALLS = {"Verify": "Checkpoints"}  # what is called, where it has another name


def jobs_seen_by(person: Person) -> list[tuple[str, str]]:
    """(project, owner) in the order of the table."""
    return [
        (person.project, person.owner),
        (person.project, f"{person.role}/colleague"),
        ("other", "submitter/somebody"),
        ("other", person.owner),
    ]


def cases() -> list[tuple[str, Role, list[str]]]:
    rows = [[part.split() for part in line.split(".")] for line in TABLE.strip().splitlines()[1:]]
    return [
        (name, role, words)
        for (name,), *by_role in rows
        for role, words in zip((Role.VIEWER, Role.SUBMITTER, Role.ADMIN), by_role, strict=True)
    ]


@pytest.mark.parametrize(("method", "role", "words"), cases())
def test_each_person_may_do_with_each_job_what_the_table_says(method: str, role: Role, words: list[str]) -> None:
    person = Person(role, "ann", "mine")
    for (project, owner), word in zip(jobs_seen_by(person), words, strict=True):
        if word == "role":
            with pytest.raises(RoleForbids):
                check_role(Principal(CLUSTER, role, "ann"), f"/swarm.wire.Jobs/{method}", CLUSTER)
        else:
            check_role(Principal(CLUSTER, role, "ann"), f"/swarm.wire.Jobs/{CALLS.get(method, method)}", CLUSTER)
            assert judge(person, method, project, owner) is WORDS[word], (project, owner)


def test_every_method_that_names_a_job_has_a_reach() -> None:
    """Those of the protos: a new one that nobody thought of sees no job at all."""
    service = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"]
    naming = {one.name for one in service.methods if {"job", "about"} & set(one.input_type.fields_by_name)}
    assert set(REACH) == naming | {"Verify"}
    assert {name for name, _, _ in cases()} == set(REACH)
    for role in PEOPLE:
        assert judge(Person(role, "ann", "mine"), "Delete", "mine", "submitter/ann") is JobAccess.UNKNOWN


def test_a_name_owns_nothing_under_another_role_or_over_plaintext() -> None:
    assert judge(Person(Role.SUBMITTER, "ann", "mine"), "Cancel", "mine", "admin/ann") is JobAccess.NOT_OWNER
    assert judge(Person(Role.SUBMITTER, "ann", "mine"), "Cancel", "mine", "") is JobAccess.NOT_OWNER
    assert (ANYBODY.owner, ANYBODY.project) == ("", "default")
    assert judge(ANYBODY, "Cancel", "mine", "submitter/ann") is JobAccess.ALLOWED
    assert not sees(Person(Role.STAGE_SERVER, "gpu-1", ""), "default")


def test_whoever_is_no_owner_learns_whom_to_ask() -> None:
    assert "submitter/ann" in not_owner("Cancel", "demo-1", "submitter/ann").message
    assert "nobody who is known" in not_owner("Cancel", "demo-1", "").message


def test_a_quota_of_jobs_counts_the_open_ones() -> None:
    check_jobs("red", Quota(), 10_000)
    check_jobs("red", Quota(jobs=2), 1)
    with pytest.raises(QuotaReached, match="project red has 2 open jobs; its quota of jobs is 2") as caught:
        check_jobs("red", Quota(jobs=2), 2)
    assert "swarm project set red --quota-jobs" in caught.value.hint
    assert (caught.value.code, caught.value.exit_code) == ("E1001", 10)


def test_a_person_has_at_most_half_of_the_jobs_that_others_leave_free() -> None:
    """One submitter without a quota could open all jobs that the scheduler holds."""
    for own, others in ((499, 0), (249, 500), (0, 998), (0, 999)):
        check_share("submitter/ann", own, others, 1000)
    for own, others in ((500, 0), (250, 500), (1, 998), (0, 1000)):
        with pytest.raises(QuotaReached, match=f"half of the {1000 - others} that others leave free"):
            check_share("submitter/ann", own, others, 1000)
        check_share("", own, others, 1000)


def test_a_quota_of_bytes_counts_what_is_held_promised_and_wanted() -> None:
    check_bytes("red", Quota(), 1 << 60, 1 << 60, 1 << 60)
    check_bytes("red", Quota(upload_bytes=100), 50, 30, 20)
    with pytest.raises(QuotaReached, match="holds 50 B of uploads and is sending 30 B; its quota of bytes is 100 B"):
        check_bytes("red", Quota(upload_bytes=100), 50, 30, 21)
