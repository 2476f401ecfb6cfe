"""Projects: the jobs that a person may see and change, and the quotas of a project.

an admin                         sees and changes every job
a member of a job's project      sees it; may change it as its submitter only
anybody else                     is told that there is no such job
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from swarm.errors import NotAllowed, NotOwner, QuotaReached, UsageError
from swarm.pki.names import Role
from swarm.text import counted, listed, size
from swarm.types import DEFAULT_PROJECT


@dataclass(frozen=True, slots=True)
class Person:
    """The person that makes a call."""

    role: Role
    name: str
    project: str

    @property
    def owner(self) -> str:
        """The submitter's name in a job; empty over plaintext."""
        return f"{self.role}/{self.name}" if self.name else ""


ANYBODY = Person(Role.ADMIN, "", DEFAULT_PROJECT)  # over plaintext


class JobScope(StrEnum):
    """The jobs that a method may be about."""

    PROJECT = "jobs of the caller's project"
    OWN = "jobs that the caller submitted"


# The methods that name a job. "Verify" is Checkpoints when it reads every byte.
REACH: Mapping[str, JobScope] = {
    **dict.fromkeys(("Get", "Watch", "Logs", "Explain", "Checkpoints", "History", "Trace"), JobScope.PROJECT),
    **dict.fromkeys(("Cancel", "Pause", "Resume", "Pull", "Verify", "Remove"), JobScope.OWN),
}


class JobAccess(StrEnum):
    """The verdict on a call that names a job."""

    ALLOWED = "allowed"
    UNKNOWN = "there is no such job"
    NOT_OWNER = "the job is somebody else's"


def sees(person: Person, project: str) -> bool:
    """Whether jobs of the project exist for the person."""
    return person.role is Role.ADMIN or person.project == project


def judge(person: Person, method: str, project: str, owner: str) -> JobAccess:
    """The verdict on a call about a job of this project and owner, by a person whose role allows the method."""
    reach = REACH.get(method)
    if reach is None or not sees(person, project):
        return JobAccess.UNKNOWN
    if reach is JobScope.OWN and person.role is not Role.ADMIN and owner != person.owner:
        return JobAccess.NOT_OWNER
    return JobAccess.ALLOWED


def not_owner(method: str, job: str, owner: str) -> NotOwner:
    """The error for a job of the caller's project that somebody else submitted."""
    return NotOwner(
        f"{method} is for whoever submitted job {job}: {owner or 'nobody who is known'}",
        hint="ask its owner or an admin",
    )


QUOTA_COUNT_MAX, QUOTA_BYTES_MAX = 1 << 30, 1 << 60


# Quotas --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a project may have; 0: as much as the scheduler takes."""

    jobs: int = 0  # that have not ended
    upload_bytes: int = 0  # of token shards and model files that the scheduler holds
    peers: int = 0  # stage servers that serve its jobs at a time


def check_quota(quota: Quota) -> None:
    """UsageError for numbers that no database keeps."""
    if max(quota.jobs, quota.peers) > QUOTA_COUNT_MAX or quota.upload_bytes > QUOTA_BYTES_MAX:
        raise UsageError(
            f"a quota of {quota.jobs} jobs, {quota.upload_bytes} bytes and {quota.peers} stage servers is too large",
            hint=f"at most {QUOTA_COUNT_MAX} jobs or stage servers and {size(QUOTA_BYTES_MAX)}; 0 is no quota",
        )


def check_jobs(project: str, quota: Quota, open_jobs: int) -> None:
    """QuotaReached if the project may not open another job beside these."""
    if quota.jobs and open_jobs >= quota.jobs:
        raise QuotaReached(
            f"project {project} has {counted(open_jobs, 'open job')}; its quota of jobs is {quota.jobs}",
            hint="wait until one has ended, or cancel one: swarm ls; "
            f"an admin can give more: swarm project set {project} --quota-jobs N",
        )


def check_share(owner: str, own_jobs: int, other_jobs: int, most: int) -> None:
    """QuotaReached if a person has half of the jobs that others leave free of the `most` that can be open.

    Over plaintext nobody is known, and all share them.
    """
    if owner and 2 * own_jobs >= most - other_jobs:
        raise QuotaReached(
            f"you have {counted(own_jobs, 'open job')}, half of the {most - other_jobs} that others leave free",
            hint="wait until one has ended, or cancel one: swarm ls",
        )


def check_bytes(project: str, quota: Quota, held_bytes: int, promised_bytes: int, wanted_bytes: int) -> None:
    """QuotaReached if a file does not fit beside the project's files and its running uploads."""
    if quota.upload_bytes and held_bytes + promised_bytes + wanted_bytes > quota.upload_bytes:
        raise QuotaReached(
            f"a file of {size(wanted_bytes)} does not fit: project {project} holds {size(held_bytes)} of uploads and "
            f"is sending {size(promised_bytes)}; its quota of bytes is {size(quota.upload_bytes)}",
            hint="files that no job names go after a day; "
            f"an admin can give more: swarm project set {project} --quota-bytes SIZE",
        )


def check_room(project: str, quota: Quota, room_bytes: int, promised_bytes: int, wanted_bytes: int) -> None:
    """QuotaReached if a project without a quota of bytes would be promised more than half of the disk's room.

    `room_bytes` are those that no other project was promised. A slow upload holds what it was promised for long.
    """
    if not quota.upload_bytes and promised_bytes + wanted_bytes > room_bytes // 2:
        raise QuotaReached(
            f"a file of {size(wanted_bytes)} does not fit: project {project} is sending {size(promised_bytes)}, and "
            f"without a quota of bytes it may send half of the {size(room_bytes)} that uploads may take, at a time",
            hint=f"free disk space in the scheduler's --data-dir; an admin can allow it: swarm project set {project} "
            "--quota-bytes SIZE",
        )


def check_removable(project: str, jobs: int, people: int, tokens: int) -> None:
    """NotAllowed for the default project, and for one that still has jobs, members or tokens."""
    if project == DEFAULT_PROJECT:
        raise NotAllowed(f"project {DEFAULT_PROJECT} is that of whoever names none, and stays")
    held = [counted(number, noun) for number, noun in ((jobs, "job"), (people, "member"), (tokens, "token")) if number]
    if held:
        raise NotAllowed(
            f"project {project} still has {listed(held)}",
            hint="remove its jobs: swarm ls --all, swarm rm JOB; its members: swarm identity ls, swarm identity revoke "
            "NAME; its tokens: swarm token ls, swarm token revoke ID",
        )
