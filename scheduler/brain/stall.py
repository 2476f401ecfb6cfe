"""Stalls: decides how a job goes on that lost all replicas of a stage, or committed no step for too long.

Everything since the newest checkpoint is then lost, for all stages.

    cannot  ────┬─ was told to pause or to cancel ──▶ paused | cancelled
                ├─ on_stall = "pause" ──▶ paused
                ├─ on_stall = "fail" ──▶ failed
                └─ on_stall = "wait" ──▶ STALLED ─┬─ newest checkpoint that verifies, or none was written ──▶ a new
                                                  │  timeline from there, or from the job's start; waits for peers,
                                                  │  placed as at a start ──▶ loading ──▶ running
                                                  ├─ it has all steps ──▶ succeeded
                                                  └─ none of those written verifies ──▶ paused

A job that stalls again before it has got further than ever waits before it loads again, longer each time (`pause_s`): a
stage that is too large for its stage server would otherwise fail over and over. A job that makes no progress may simply
be slow, and loading again does not make it faster, so it fails in the end.

All stages roll back together, on a new timeline; replicas of the old timeline are released. If checkpoints were written
and none verifies, a person decides whether to begin again at the start: the disk may only be away for a while, and
abandoned checkpoints are removed sooner or later.

Decision: docs/decisions/027.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from scheduler.brain.outputs import Fail, Stopped
from swarm.errors import NoProgress, OutOfMemory, PeerUnavailable
from swarm.text import counted
from swarm.types import JobId, JobState, OnStall, PeerId

LOST_HINT = "start a stage server in its place"
STUCK_HINT = "raise limits.no_progress_s if it is only slow; else look at the logs of what it waits for: swarm logs "
STUCK_MAX = 3  # in a row
FAILED_HINT = f"{LOST_HINT}, then submit the job again"
RETRY_S = 1.0  # the first pause; doubles with each failure in a row
RETRY_S_MAX = 60.0
_SEEKS = "; looks for the newest checkpoint that verifies"
_GOES_ON = "; goes on at step "
_COST = re.compile(r"; (from step \d+: )?(no|\d+) steps? (is|are) lost(: no checkpoint)?$")  # as `steps_lost` says it


class Recovery(StrEnum):
    """How a stalled job resumes."""

    FROM_CHECKPOINT = "from the checkpoint"
    ANEW = "anew"
    BY_HAND = "by hand"


def stopped_by_loss(lost: str, on_stall: OnStall, stop: Stopped | None) -> Stopped | None:
    """How a job that lost a stage stops; None if it fails. `stop` is an order that it was given before, if any."""
    if stop is not None:
        return Stopped(stop.state, f"{stop.reason}; {lost}", LOST_HINT)
    match on_stall:
        case "wait":
            return Stopped(JobState.STALLED, lost, LOST_HINT)
        case "pause":
            return Stopped(JobState.PAUSED, f'{lost} (limits.on_stall = "pause")', LOST_HINT)
        case "fail":
            return None


def as_asked(state: JobState) -> JobState | None:
    """How a job in this state ends that stalls before its brain has heard of the order; None if there is none."""
    return {JobState.PAUSING: JobState.PAUSED, JobState.CANCELLING: JobState.CANCELLED}.get(state)


def is_loss(end: Stopped | Fail) -> bool:
    """Whether a job, or an island, ends as it has lost a stage: its last replica is gone, or has no memory left."""
    if isinstance(end, Fail):
        return end.code in (PeerUnavailable.code, OutOfMemory.code)
    return bool(end.hint) and not end.error_code


def stuck(job: JobId, for_s: float, waiting: str, on_stall: OnStall, stop: Stopped | None) -> Stopped | Fail:
    """How a job that has committed no step for `for_s` ends; `waiting` is the reason why it waits."""
    told, hint = f"no step was committed for {for_s:g} s: {waiting}", STUCK_HINT + job
    stopped = stopped_by_loss(told, on_stall, stop)
    return replace(stopped, hint=hint, error_code=NoProgress.code) if stopped else Fail(NoProgress.code, told, hint)


@dataclass(frozen=True, slots=True)
class Stalls:
    """How often a job stalled in a row without getting further than ever before."""

    furthest: int = 0  # steps that were ever committed, including those that are lost
    count: int = 0
    standstills: int = 0  # how many of the last ones were standstills: nothing moved, though no stage was lost

    def after(self, committed: int, first_step: int, *, stood_still: bool) -> Stalls:
        """The job stalled once more, at `committed` steps of a timeline that began at `first_step`."""
        furthest = max(self.furthest, first_step)
        if committed > furthest:
            return Stalls(committed, 0, int(stood_still))
        return Stalls(furthest, self.count + 1, self.standstills + 1 if stood_still else 0)

    @property
    def are_too_many(self) -> bool:
        """Whether the job fails."""
        return self.standstills >= STUCK_MAX


def nobody_back(stages: Iterable[int], known: Mapping[PeerId, int]) -> str:
    """The loss, for a person, if no replica of some stages returned after a restart of the scheduler."""
    parts = []
    for stage in stages:
        names = ", ".join(sorted(peer for peer, at in known.items() if at == stage))
        parts.append(f"stage {stage} has no replica: " + (f"{names} did not come back" if names else "it had none"))
    return f"after the restart of the scheduler {'; '.join(parts)}"


def recovery_for(job: JobId, found_of: str | None, *, skipped: bool) -> Recovery:
    """How a stalled job goes on.

    `found_of`: the job that wrote the newest valid checkpoint, either this one or the one that it started from; None:
    there is no such checkpoint. `skipped`: newer ones do not verify.
    """
    if skipped and found_of != job:
        return Recovery.BY_HAND
    return Recovery.ANEW if found_of is None else Recovery.FROM_CHECKPOINT


def steps_lost(reached: int, step: int, *, saved: bool) -> str:
    """What a job loses that has committed `reached` steps and goes back to `step`, which is `saved`, or its start."""
    if reached <= step:
        return "no step is lost"
    lost = f"{counted(reached - step, 'step')} {'is' if reached - step == 1 else 'are'} lost"
    return f"from step {step}: {lost}" if saved else f"{lost}: no checkpoint"


def seeking(lost: str, trouble: str = "") -> str:
    """The reason of a stalled job while its checkpoints are read."""
    return f"{lost}{_SEEKS}" + (f": {trouble}" if trouble else "")


def going_on(lost: str, cost: str, step: int, start: str, skipped: str) -> str:
    """The reason of a stalled job that knows where it resumes; `cost` is what it loses, `start` its starting point."""
    return f"{lost}; {cost}{_GOES_ON}{step} {start}" + (f" ({skipped})" if skipped else "")


def pause_s(stalls: Stalls) -> float:
    """How long a job waits before it loads again."""
    return min(RETRY_S_MAX, RETRY_S * 2.0 ** min(stalls.count - 1, 10)) if stalls.count else 0.0


def pausing(gone_back: str, stalls: Stalls) -> str:
    """The reason of a stalled job that waits before it loads again, if it does."""
    if not stalls.count:
        return gone_back
    return f"{gone_back}; tries again in {pause_s(stalls):g} s, failure {stalls.count}"


def waiting(gone_back: str, peers: str) -> str:
    """The reason of a stalled job that waits for peers."""
    return f"{gone_back} once it has peers: {peers}"


def lost_in(reason: str) -> str:
    """The loss, taken from the reason of a stalled job; an earlier scheduler start may have written it."""
    ends = (reason.find(mark) for mark in (_SEEKS, _GOES_ON))
    return _COST.sub("", reason[: min((end for end in ends if end >= 0), default=len(reason))])


def stalled_hint(job: JobId, stalls: Stalls = Stalls(), stages: int | None = None) -> str:
    """Advice for people about a stalled job, which could go on with the present peers if it had `stages` stages."""
    if stalls.standstills:
        return f"it goes on by itself; {STUCK_HINT}{job}; or stop it: swarm cancel {job}"
    if stalls.count > 1:
        return (
            "it gets no further: see why its stage servers end (too little memory for the stage?) and start others, "
            f"and it goes on by itself; or stop it: swarm cancel {job}"
        )
    cut = f"or go on with what is here: swarm pause {job}, swarm resume {job} --set pipeline.stages={stages}; "
    return f"start stage servers, and it goes on by itself; {cut if stages else ''}or stop it: swarm cancel {job}"


def resume_hint(job: JobId, newest_step: int | None) -> str:
    """How to resume a job that paused because of a lost stage; `newest_step` is the step of its newest checkpoint."""
    if newest_step is None:
        return f"begin again at the start with: swarm resume {job} --from 0"
    return f"go on from step {newest_step} with: swarm resume {job}"


PAUSE_AGAIN_S = 60.0  # after a pause that could not be saved
STOOD_STILL_S = 1.0  # a check that comes later than this was itself delayed: the job did not stand still


class Over(StrEnum):
    """A limit that a job has exceeded."""

    RAN_OUT = "ran out"
    STILL = "still"


class Watchdog:
    """The watchdog: limits how long a job may run, and how long it may stand still.

        begin ──▶ running ──moved──▶ ...          nothing moved for too long ──▶ STILL, and again after the same time
                     └──its runtime is over──▶ RAN_OUT, once ──it could not be paused──▶ once more, later

    All times are by one clock, in seconds.

    The limits of one job; `runtime_s_max` 0 = it may run for as long as it takes.
    """

    def __init__(self, still_s_max: float, runtime_s_max: float) -> None:
        self.still_s_max = still_s_max
        self.runtime_s_max = runtime_s_max
        self._moved_s = self._runs_out_s = math.inf
        self._ran_out = False

    def begin(self, now_s: float) -> None:
        self._moved_s = now_s
        self._runs_out_s = now_s + self.runtime_s_max if self.runtime_s_max else math.inf

    def moved(self, now_s: float) -> None:
        """A step was committed, or something else made progress."""
        self._moved_s = now_s

    def goes_on(self, now_s: float) -> None:
        """The job could not be paused; if its runtime was over, the pause is tried again."""
        if self._ran_out:
            self._runs_out_s = now_s + min(self.runtime_s_max, PAUSE_AGAIN_S)

    def over(self, now_s: float, rests_until_s: float = -math.inf) -> Over | None:
        """The limit that has been exceeded, reported once each; None if none.

        Nothing can move before `rests_until_s`.
        """
        if now_s >= self._runs_out_s:
            self._runs_out_s, self._ran_out = math.inf, True
            return Over.RAN_OUT
        late_s = now_s - self._still_s(rests_until_s)
        if late_s >= 0.0:
            self._moved_s = now_s
        return Over.STILL if 0.0 <= late_s < STOOD_STILL_S else None

    def due_s(self, rests_until_s: float = -math.inf) -> float:
        """When to call `over` next."""
        return min(self._runs_out_s, self._still_s(rests_until_s))

    def _still_s(self, rests_until_s: float) -> float:
        return max(self._moved_s, rests_until_s) + self.still_s_max
