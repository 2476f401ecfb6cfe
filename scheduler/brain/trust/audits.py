"""The audits that a job file asks for."""

from __future__ import annotations

from random import Random

from scheduler.brain.checkpoint.collection import CheckpointCollector
from scheduler.brain.checkpoint.schedule import CheckpointSchedule
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.trust.checkpoint_audit import CheckpointAudit
from scheduler.brain.trust.hop_audit import HopAudit
from scheduler.brain.trust.inquiry import ReplicaAudit
from scheduler.brain.trust.mean_audit import MeanAudit
from scheduler.brain.trust.strikes import Strikes
from scheduler.brain.trust.sum_audit import SumAudit


def audits_of(
    state: BrainState, saving: CheckpointSchedule, collector: CheckpointCollector, rng: Random
) -> tuple[ReplicaAudit, ...]:
    settings, strikes, audits = state.settings, Strikes(state), list[ReplicaAudit]()
    if settings.hashes_hops:
        audits.append(hops := HopAudit(state, strikes, rng))
    if settings.second_owner > 0.0 or settings.recount > 0.0:
        audits.append(means := MeanAudit(state, strikes, rng))
    if settings.recount > 0.0:
        audits.append(SumAudit(state, hops, means, strikes, rng))
    if settings.second_hash:
        audits.append(CheckpointAudit(state, saving, collector, strikes))
    return tuple(audits)
