"""Chooses the replicas that hand over a checkpoint, and handles their failures; schedule.py says when one is due.

A replica is asked for a version right after the order to make it, because later it has moved on. If a checkpoint fails,
the job goes on without it. Only the one after the last step is tried again until it is kept, because nothing else has
those weights.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from scheduler.brain.checkpoint.schedule import SAVING_S_MAX, CheckpointSchedule
from scheduler.brain.outputs import BeginCheckpoint, DropCheckpoint, EnterState, Fail, Stopped
from scheduler.brain.state.brain_state import BrainState
from swarm.errors import CheckpointFailed
from swarm.text import listed
from swarm.types import JobState, PeerId
from swarm.wire.messages import Saved, SaveStage

End: TypeAlias = Fail | Stopped


class CheckpointCollector:
    """Collects the checkpoints of one job from its replicas; methods give how the job ends, if it does."""

    def __init__(self, state: BrainState, saving: CheckpointSchedule) -> None:
        self._state = state
        self._saving = saving
        self._owed: Counter[PeerId] = Counter()  # how often each replica failed to hand over its part
        self._late: set[int] = set()  # stages that were not handed over in time, since a checkpoint was kept

    def committed(self, version: int, *, skipped: bool, now_s: float) -> None:
        """The replicas just got the order to make `version`: ask for its checkpoint if one is due."""
        if skipped and self._state.settings.pause_on_nonfinite and self._saving.stop is None:
            reason = f'the gradient of step {version - 1} was not finite (limits.on_nonfinite = "pause")'
            self._saving.stop = Stopped(JobState.PAUSED, reason)
            self._state.outbox.put(EnterState(JobState.PAUSING, reason))
        decision = self._saving.due(version, now_s)
        if decision.plan is not None:
            if self._saving.open is not None:
                end = self.give_up("timeout", f"it took more than {SAVING_S_MAX:g} s", now_s)
                assert end is None, "a newer one follows"
            self.begin(version, now_s)
        elif decision.reason:
            self._state.outbox.note("warning", decision.reason)

    def begin(self, version: int, now_s: float) -> None:
        """Ask one replica of each stage, the one with the least to do, for its state."""
        self._state.outbox.put(BeginCheckpoint(version))
        savers = [min(peers, key=self._reluctance) for peers in self._state.pool.by_stage]
        self._saving.begin(version, savers, now_s)
        for saver in savers:
            self._ask(saver, version)

    def saved(self, peer: PeerId, event: Saved, now_s: float) -> End | None:
        """A replica handed over its stage, or could not."""
        settings, again = self._state.settings, None if self._saving.open is None else self._saving.open.again
        current = (event.job, event.timeline, event.again) == (settings.job, settings.timeline, again)
        is_claim = self._state.settings.second_hash and not event.fault
        saved = self._saving.claimed if is_claim else self._saving.saved
        if not current or not saved(peer, event):
            self._state.ledger.duplicates += 1
        elif event.fault:
            fault = f"{self._state.pool.name(peer)} could not hand over its state: {event.fault}"
            return self.give_up("peer", fault, now_s)
        return None

    def saver_gone(self, peer: PeerId, stage: int, now_s: float) -> End | None:
        """A replica is lost or has forgotten the request: ask another of its stage, if that still has the version."""
        held = self._saving.open
        if held is None or self._saving.stage_of(peer) is None:
            return None
        if held.version != self._state.progress.committed:
            fault = f"stage server {peer} was lost before it had handed over stage {stage}"
            return self.give_up("peer", fault, now_s)
        # The others still hold that version.
        saver = min(self._state.pool.by_stage[stage], key=self._reluctance)
        self._saving.replace(stage, peer, saver)
        self._ask(saver, held.version)
        return None

    def start_over(self, now_s: float) -> End | None:
        """Replicas were expelled for holding wrong bytes: give the checkpoint up, as some may be in it."""
        if self._saving.open is None:
            return None
        if self._state.settings.second_hash and not self._saving.open.rests_on_one:
            return None  # what was handed over is what others hold too
        return self.give_up("peer", "a replica that held other bytes than most may have handed over a part", now_s)

    def refuse(self, saver: PeerId, stage: int, fault: str, now_s: float) -> End | None:
        """Refuse the files that the replica handed over: another one is asked, if it still has the version."""
        held = self._saving.open
        assert held is not None
        self._owed[saver] += 1
        if held.version != self._state.progress.committed:
            return self.give_up("peer", fault, now_s)
        told = (
            f"stage {stage} of the checkpoint at {self._at(held.version)} is not accepted: {fault}; it is saved again"
        )
        self._state.outbox.note("error", told)
        another = min(self._state.pool.by_stage[stage], key=self._reluctance)
        self._saving.replace(stage, saver, another)
        self._ask(another, held.version)
        return None

    def eager(self, stage: int) -> list[PeerId]:
        """The replicas of a stage that can be asked for its state, those with the least to do first."""
        pool = self._state.pool
        return sorted((peer for peer in pool.by_stage[stage] if not pool[peer].is_suspect), key=self._reluctance)

    def failed(self, version: int, reason: str, fault: str, now_s: float) -> End | None:
        """The storage refused a version; as `give_up`."""
        self._saving.others_did(version)
        if self._saving.open is None or self._saving.open.version != version:
            return None
        self._saving.at_once = self._state.settings.second_hash and reason == "peer"
        return self.give_up(reason, fault, now_s)

    def kept(self, version: int) -> bool:
        """The checkpoint is complete; False if it was given up before."""
        is_complete = self._saving.kept(version)
        if is_complete:
            self._late.clear()
        return is_complete

    def owing(self, *, again: bool = False) -> list[PeerId]:
        """The replicas that still have to hand over a part; `again`: a part that was not handed over in time before."""
        savers = {} if self._saving.open is None else self._saving.open.savers
        return [saver for saver, stage in savers.items() if not again or stage in self._late]

    def stuck(self, for_s: float, now_s: float) -> End | None:
        """No part of the checkpoint that the job waits for has come for `for_s`.

        It is given up if replicas still owe parts; they are asked again only if their stage has no other. If the
        storage hangs, the job goes on waiting, because only the replicas have those weights, unless it is being
        cancelled.
        """
        held, stop = self._saving.open, self._saving.stop
        assert held is not None
        told = f"nothing came for {for_s:g} s: {self.waiting_for()}"
        if held.savers or (stop is not None and stop.state is JobState.CANCELLED):
            return self.give_up("timeout", told, now_s)
        self._state.outbox.note("error", f"{told}; waits on: look at the storage of checkpoints")
        return None

    def give_up(self, reason: str, fault: str, now_s: float) -> End | None:
        """Give up the checkpoint under way: the job goes on without it, or ends if it was to end with it."""
        if reason == "timeout":
            owing = self.owing()
            self._owed.update(owing)
            self._late.update(stage for stage in map(self._saving.stage_of, owing) if stage is not None)
        version, kept = self._saving.give_up(), self._saving.newest
        self._state.outbox.put(DropCheckpoint(version, reason, fault))
        newest = f"the newest checkpoint is that of {self._at(kept)}" if kept else "there is no earlier checkpoint"
        stop, at = self._saving.stop, self._at(version)
        newer = [
            self._saving.stop_at,
            self._state.progress.committed,
            *(step + 1 for step in self._state.progress.runs),
        ]
        if version < max(newer):
            stop = None  # it was an earlier one: the version with which the job stops is newer, and not saved yet
        if stop is not None and stop.state is JobState.CANCELLED:
            text = f"{stop.reason}; the checkpoint at {at} could not be written: {fault}; {newest}"
            return Stopped(stop.state, text)
        if stop is not None:
            self._saving.stop = None
            text = f"cannot pause, goes on: the checkpoint at {at} could not be written: {fault}"
            self._state.outbox.note("error", text)
            self._state.outbox.put(EnterState(JobState.RUNNING, text))
        elif version == self._state.settings.steps:
            pause_s = self._saving.rest(now_s, reason)
            if pause_s is None:
                again = f"swarm resume {self._state.settings.job}" if kept else "submit the job again"
                message = f"the final weights ({at}) could not be saved: {fault}; {newest}"
                return Fail(CheckpointFailed.code, message, f"see what is wrong with that stage server, then: {again}")
            text = (
                f"the final weights ({at}) could not be saved: {fault}; tries again in {pause_s:g} s, the "
                f"stage servers keep them until then: see to it that checkpoints can be written; {newest}"
            )
            self._state.outbox.note("error", text)
            self._state.outbox.put(EnterState(JobState.RUNNING, text))
        else:
            text = f"the checkpoint at {at} could not be written: {fault}; {newest}"
            self._state.outbox.note("error", text)
        return None

    def waiting_for(self) -> str:
        held = self._saving.open
        if held is None:
            return "waits for nothing"
        if missing := [saver for saver, stage in held.savers.items() if stage not in held.claims]:
            return f"waits for {listed(missing)} to hand over the weights"
        if held.savers:
            return f"waits until others have hashed what {listed(held.savers)} handed over"
        return f"waits until the checkpoint at {self._at(held.version)} is written"

    def _at(self, version: int) -> str:
        """The version, for a person."""
        return f"step {self._state.course.inner_steps(version)}"

    def _reluctance(self, peer: PeerId) -> tuple[bool, bool, int, int, PeerId]:
        """Sorts the replicas of a stage: the first one is asked for the stage's state."""
        leaves, is_suspect = peer in self._state.pool.leaves, self._state.pool[peer].is_suspect
        return self._owed[peer] > 0, leaves or is_suspect, self._owed[peer], self._state.ledger.outstanding(peer), peer

    def _ask(self, saver: PeerId, version: int) -> None:
        assert self._saving.open is not None
        settings, again = self._state.settings, self._saving.open.again
        save = SaveStage(settings.job, settings.timeline, version, settings.saving.optimizer, again=again)
        self._state.outbox.send(saver, save)
