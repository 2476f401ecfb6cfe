"""Retention: a job may be removed once it has ended and no other job may begin from it any more.

    a  succeeded ──resume_from──▶ b  failed      b can be resumed from where it began, so a stays until b goes

A job is younger than the one it began at. So removal from the youngest on removes all that may go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from swarm.errors import NotAllowed, UsageError
from swarm.text import seconds
from swarm.types import JobId, JobState

KEPT_S_MIN = 3600.0  # as long as an ended job has metrics


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that the scheduler keeps."""

    id: JobId
    name: str
    state: JobState
    since_unix_s: float  # in this state
    created_unix_s: float
    begins_at: str = ""  # the job that it starts from: an id, the beginning of one, or a name
    start_where: str = ""  # the folder or URL of the checkpoint that its present timeline starts from
    checkpoint_dir: str = ""  # where it keeps its own, in a folder of its id; empty: in the data folder
    owner: str = ""  # who submitted it; empty over plaintext
    has_weights: bool = False  # it saved some, as far as is known

    @property
    def may_begin_elsewhere(self) -> bool:
        """Whether it has to do with another job's checkpoints, now or when it is resumed."""
        return self.state is not JobState.SUCCEEDED and bool(self.begins_at or self.start_where)

    def may_begin_at(self, other: HeldJob) -> bool:
        """Whether it may need a checkpoint of the other job. In doubt it does."""
        if not self.may_begin_elsewhere or self.id == other.id or self.created_unix_s < other.created_unix_s:
            return False
        if other.id in self.start_where.split("/"):
            return True
        named = self.begins_at == other.name or other.id.startswith(self.begins_at)
        return bool(self.begins_at) and named

    def lies_in(self, other: HeldJob) -> bool:
        """Whether its checkpoints lie in the folder that is removed with the other job."""
        folder = f"{other.checkpoint_dir}/{other.id}/"
        return bool(other.checkpoint_dir) and self.id != other.id and f"{self.checkpoint_dir}/".startswith(folder)


def kept_for_s(text: str) -> float:
    """The seconds of --keep-jobs; 0, for ever, if it is not given. UsageError."""
    found = seconds(text) if text else 0.0
    if found is None or (text and found < KEPT_S_MIN):
        raise UsageError(f'--keep-jobs is a time of at least 1h, not "{text[:40]}"', hint="--keep-jobs 30d")
    return found


def check_removable(job: HeldJob, among: Sequence[HeldJob]) -> None:
    """NotAllowed if the job has not ended, if one of these jobs may begin at it, or if one lies in its folder."""
    if not job.state.is_final:
        raise NotAllowed(
            f"job {job.id} {job.state.phrase}; only a job that has ended can be removed",
            hint=f"end it first: swarm cancel {job.id}",
        )
    inside = next((other for other in among if other.lies_in(job)), None)
    if inside is not None:
        raise NotAllowed(
            f"job {inside.id} keeps its checkpoints in the folder of job {job.id}", hint=f"swarm rm {inside.id} first"
        )
    user = next((other for other in among if other.may_begin_at(job)), None)
    if user is None:
        return
    told = "can be resumed" if user.state.is_final else user.state.phrase
    first = f"swarm rm {user.id}" if user.state.is_final else f"swarm cancel {user.id}, then swarm rm {user.id}"
    raise NotAllowed(f"job {user.id} began at job {job.id} and {told}", hint=f"remove that one first: {first}")


def expired(jobs: Sequence[HeldJob], keep_s: float, now_unix_s: float) -> list[JobId]:
    """The jobs that ended `keep_s` ago or earlier and may be removed, in order of removal."""
    beginners = [job for job in jobs if job.may_begin_elsewhere]
    found: list[JobId] = []
    for job in sorted(jobs, key=lambda held: held.created_unix_s, reverse=True):
        is_old = job.state.is_final and now_unix_s - job.since_unix_s >= keep_s
        if is_old and not any(other.may_begin_at(job) for other in beginners):
            found.append(job.id)
            beginners = [other for other in beginners if other.id != job.id]
    return found


def surplus(jobs: Sequence[HeldJob], most: int) -> list[JobId]:
    """The removable ended jobs without weights that an owner has beyond the `most` that ended last.

    Over plaintext jobs have no owners, and all stay.
    """
    light: dict[str, list[HeldJob]] = {}
    for job in sorted(jobs, key=lambda held: held.since_unix_s):
        if job.owner and job.state.is_final and not job.has_weights:
            light.setdefault(job.owner, []).append(job)
    found: list[JobId] = []
    for ended in light.values():
        if (over := len(ended) - most) > 0:
            free = (job.id for job in ended if not any(other.may_begin_at(job) or other.lies_in(job) for other in jobs))
            found += islice(free, over)
    return found
