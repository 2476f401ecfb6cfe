"""Which stage servers may dial this one: compares the caller's pass with the place that is served here.

                          0     1     2     3      stages; embedding and head of stages 0 and 3 may be tied
    Exchange   from 1 to  ✓     ✓     ✓            neighbours, replicas of one stage
               from 3 to  tied        ✓     ✓
    Pull       from 1 to        ✓                  a joiner asks replicas of the stage that it was given

The timeline says the island (swarm/job/islands.py). From another island they come to replicas of their own stage, and
exchange with the stage that shares a tied weight with it. Another life of an island is another past: it is not let in.

Whether a tensor counts is decided later, by its route or its round. Decision: docs/decisions/052.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import NoPass, Revoked, StaleMessage
from swarm.job.course import job_timeline_of
from swarm.types import JobId
from swarm.wire.messages import Pass

GRACE_S = 60.0  # that a stream goes on after its pass has ended; one that begins has none


@dataclass(frozen=True, slots=True)
class PassSlot:
    """The place that a stage server serves."""

    job: JobId
    timeline: int
    stage: int
    stages: int
    is_tied: bool  # the first and the last stage average a unit together
    islands: int = 1  # each has a timeline of its own


@dataclass(frozen=True, slots=True)
class KnownPass:
    """Facts beside the pass: about its holder, and the time."""

    cluster: str  # ours
    now_unix_s: float  # by the scheduler's clock
    name: str | None  # in the certificate of the caller; None: plaintext
    cut_unix_s: float | None = None  # when the holder was revoked


def check(shown: Pass, at: PassSlot | None, known: KnownPass, *, pulls: bool) -> None:
    """NoPass or Revoked if the holder may not dial this place; StaleMessage if it may, but another place is served
    here.

    The last happens to honest callers: the stage server that they mean has moved on, or is not as far yet.
    """
    if shown.cluster != known.cluster:
        raise NoPass(f"the pass is of swarm {shown.cluster}")
    if known.name is not None and known.name != shown.peer:
        raise NoPass(f"{known.name} showed the pass of {shown.peer}")
    if known.now_unix_s >= shown.expires_unix_s:
        raise NoPass(f"the pass of {shown.peer} ended {known.now_unix_s - shown.expires_unix_s:.0f} s ago")
    if known.cut_unix_s is not None and shown.issued_unix_s <= known.cut_unix_s:
        raise Revoked(f"stage server {shown.peer} was revoked after the pass was issued")
    if at is None or shown.job != at.job or not _is_now(shown.timeline, at):
        raise StaleMessage(f"the pass of {shown.peer} is for job {shown.job}, timeline {shown.timeline}")
    is_near = shown.timeline == at.timeline
    if shown.stages != at.stages or not _are_related(shown.stage, at, pulls=pulls, is_near=is_near):
        raise NoPass(f"{shown.peer} has no pass for stage {at.stage} of job {at.job}: it serves stage {shown.stage}")


def _is_now(timeline: int, at: PassSlot) -> bool:
    """Whether it is the own timeline, or another island's; not another life of the own island."""
    if timeline == at.timeline:
        return True
    together = job_timeline_of(timeline, at.islands) == job_timeline_of(at.timeline, at.islands)
    return together and timeline % at.islands != at.timeline % at.islands


def _are_related(stage: int, at: PassSlot, *, pulls: bool, is_near: bool) -> bool:
    """`is_near`: both are of one island."""
    if pulls:
        return stage == at.stage
    return abs(stage - at.stage) <= is_near or (at.is_tied and {stage, at.stage} == {0, at.stages - 1})
