"""Persons: the jobs that a caller may change, and how much one person may take.

Every viewer sees every job. A submitter changes and pulls own jobs, an admin every job.

Not chosen: projects that do not see each other's jobs, because teams that need such a wall run a scheduler each.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import NotOwner, QuotaReached
from swarm.limits import (
    CHANGES_OF_ONE_AT_ONCE,
    CHANGES_OF_ONE_PER_S,
    JOBS_OPEN_OF_ONE_MAX,
    MEMBERS_MAX,
    SUBMITS_OF_ONE_AT_ONCE,
    SUBMITS_OF_ONE_PER_S,
    UPLOADED_BYTES_MIN,
    UPLOADED_OF_ONE_MAX,
    Buckets,
)
from swarm.pki.names import Role
from swarm.text import counted, size, spoken_duration


@dataclass(frozen=True, slots=True)
class Person:
    """The person that makes a call."""

    role: Role
    name: str

    @property
    def owner(self) -> str:
        """The submitter's name in a job; empty over plaintext."""
        return f"{self.role}/{self.name}" if self.name else ""


ANYBODY = Person(Role.ADMIN, "")  # over plaintext

_FREE_FILES = "remove ended jobs with their files: swarm rm JOB; a file that no job names goes after a day"

# Methods that name a job and only look at it; every other method is for the job's owner. "Verify" is Checkpoints when
# it reads every byte, "Start" is Submit when it names a job to start from, whose weights the new job then has.
LOOKS = frozenset({"Get", "Watch", "Logs", "Explain", "Checkpoints", "History", "Trace"})


def check_owner(person: Person, method: str, job: str, owner: str) -> None:
    """NotOwner if the method is for the job's owner, and the caller is neither the owner nor an admin."""
    if method in LOOKS or person.role is Role.ADMIN or owner == person.owner:
        return
    raise NotOwner(
        f"{method} is for the person who submitted job {job}: {owner or 'unknown'}", hint="ask its owner or an admin"
    )


def check_share(owner: str, own_jobs: int, other_jobs: int, most: int) -> None:
    """QuotaReached if a person has JOBS_OPEN_OF_ONE_MAX jobs, or half of what others leave free of `most`.

    Over plaintext callers have no names and share them.
    """
    if owner and own_jobs >= JOBS_OPEN_OF_ONE_MAX:
        raise QuotaReached(
            f"you have {counted(own_jobs, 'open job')}, as many as one person may have",
            hint="wait until one has ended, or cancel one: swarm ls",
        )
    if owner and 2 * own_jobs >= most - other_jobs:
        raise QuotaReached(
            f"you have {counted(own_jobs, 'open job')}, half of the {most - other_jobs} that others leave free",
            hint="wait until one has ended, or cancel one: swarm ls",
        )


def check_room(
    owner: str, room_bytes: int, promised_bytes: int, wanted_bytes: int, held_bytes: int = 0, files: int = 0
) -> None:
    """QuotaReached if a person would have UPLOADED_OF_ONE_MAX files, or more than half of the disk's room.

    `room_bytes`: what no other person has or was promised; a slow upload holds its promise for long. `held_bytes` and
    `files`: the person's files, with uploads under way. Over plaintext callers have no names and share the room.
    """
    if owner and files >= UPLOADED_OF_ONE_MAX:
        raise QuotaReached(
            f"you have {counted(files, 'uploaded file')}, as many as one person may have", hint=_FREE_FILES
        )
    taken_bytes = held_bytes + promised_bytes + max(wanted_bytes, UPLOADED_BYTES_MIN)
    if owner and taken_bytes > room_bytes // 2:
        raise QuotaReached(
            f"a file of {size(wanted_bytes)} does not fit: your files take {size(held_bytes)}, you are sending "
            f"{size(promised_bytes)}, and together they may take half of the {size(room_bytes)} that others leave",
            hint=_FREE_FILES,
        )


class Submits:
    """Counts how often one person submits a job: each leaves rows, a folder and series behind, even if it is cancelled.

    A submit that is refused for its content counts too, since the scheduler looked at it. A restart forgets all counts.
    Over plaintext persons are not known, and nothing is counted.
    """

    def __init__(self) -> None:
        self._buckets = Buckets(SUBMITS_OF_ONE_PER_S, SUBMITS_OF_ONE_AT_ONCE, MEMBERS_MAX)

    def check(self, owner: str, now_s: float) -> None:
        """QuotaReached, with the time until the next one, if the person may submit nothing now."""
        if (wait_s := self._buckets.wait_s(owner, now_s)) > 0:
            raise QuotaReached(
                f"you have submitted {SUBMITS_OF_ONE_AT_ONCE} jobs in a short time, and may submit "
                f"{SUBMITS_OF_ONE_PER_S * 3600:.0f} an hour from there on",
                hint=f"the next one may come in {spoken_duration(wait_s)}",
            )

    def take(self, owner: str, now_s: float) -> None:
        """Count a submit; QuotaReached as in `check`."""
        if owner:
            self.check(owner, now_s)
            self._buckets.take(owner, now_s)


class Changes:
    """Counts how often one person cancels, pauses and resumes jobs: each writes a row with the whole spec of the job,
    and a job that is paused and resumed in turn has no other end. Over plaintext nothing is counted.
    """

    def __init__(self) -> None:
        self._buckets = Buckets(CHANGES_OF_ONE_PER_S, CHANGES_OF_ONE_AT_ONCE, MEMBERS_MAX)

    def take(self, owner: str, now_s: float) -> None:
        """Count a change; QuotaReached, with the time until the next one, if the person may change nothing now."""
        if owner and not self._buckets.take(owner, now_s):
            raise QuotaReached(
                f"you have cancelled, paused or resumed jobs {CHANGES_OF_ONE_AT_ONCE} times in a short time, "
                f"and may do it {CHANGES_OF_ONE_PER_S * 60:.0f} times a minute from there on",
                hint=f"the next one may come in {spoken_duration(max(0.1, self._buckets.wait_s(owner, now_s)))}",
            )
