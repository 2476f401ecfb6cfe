"""The states of a job and the ways between them.

    queued ─▶ placing ─▶ loading ─▶ running ─▶ succeeded | failed | cancelled | paused
      ▲          ▲          ▲          │ ╲
      │          │          └ stalled ◀┘  ╲▶ pausing, cancelling ─▶ what was asked, or what came first
      └ resume ─ paused | failed | cancelled

A stalled job lost a stage, or stood still: it goes back to a checkpoint and loads again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from swarm.types import JobState

_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.PAUSED, JobState.STALLED})
_STOPS = frozenset({JobState.PAUSING, JobState.CANCELLING})
_WAITING_ENDS = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.PAUSED})

# A job may also enter the state that it is in, with another reason, unless it has ended.
TRANSITIONS: Mapping[JobState, Set[JobState]] = {
    JobState.QUEUED: {JobState.PLACING, JobState.LOADING} | _WAITING_ENDS,
    JobState.PLACING: {JobState.LOADING} | _WAITING_ENDS,
    # A restarted scheduler places a job anew that had not run yet. One that is loaded may have no step left to train.
    JobState.LOADING: {JobState.PLACING, JobState.RUNNING} | _STOPS | _ENDS,
    JobState.RUNNING: _STOPS | _ENDS,
    JobState.PAUSING: {JobState.RUNNING, JobState.CANCELLING} | _ENDS,  # a pause that cannot be saved is given up
    JobState.CANCELLING: _ENDS,  # training may end before it hears of the order
    JobState.STALLED: {JobState.LOADING, JobState.SUCCEEDED} | _WAITING_ENDS,
    JobState.PAUSED: {JobState.QUEUED, JobState.CANCELLED},
    JobState.FAILED: {JobState.QUEUED},
    JobState.CANCELLED: {JobState.QUEUED},
    JobState.SUCCEEDED: frozenset(),
}


def may_enter(before: JobState, after: JobState) -> bool:
    """Whether a job in one state may enter the other."""
    return after in TRANSITIONS[before] or (after is before and not before.is_final)
