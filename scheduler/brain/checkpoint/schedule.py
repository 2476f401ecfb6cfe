"""The life of a checkpoint: when it is due, which replica hands over each stage, and when it is complete or given up.

    due ──▶ COLLECTING ──all stages handed over, the commit agreed──▶ WRITING ──▶ kept
                │ a saver lost or failed, or the storage refused         │ refused
                └──────────────────────▶ given up ◀──────────────────────┘

There is one checkpoint at a time, and the job's steps never wait for it. All replicas of a stage hold the same bytes,
so one is enough: the one with the least to do. It must be asked right after the commit that made the version, before it
moves on. If nothing follows that commit (the last step, a pause), another replica may be asked instead.

A job that is to stop (pause, cancel) feeds no new step, and stops once the open steps are committed and saved. One with
islands first trains up to the next version that can be saved, as only behind an outer step all hold the same. After the
last step the replicas keep their state until it is saved, however often the storage refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from scheduler.brain.inputs import OthersSave, SaveAnew
from scheduler.brain.outputs import BeginCheckpoint, Exchanged, PublishCheckpoint, Stopped
from scheduler.brain.settings import SavingRules
from swarm.job.course import PLAIN, Course
from swarm.types import Decision, PeerId
from swarm.wire.messages import ParameterHash, Saved

# A timeline saves this soon for the first time if it saves by time: until then a lost stage costs all of its steps.
FIRST_S_MAX = 180.0
# A checkpoint that takes longer than this is given up when the next one is due.
SAVING_S_MAX = 3600.0
# Pauses before the final state is saved once more, doubled from the first to the longest.
AGAIN_S_MIN, AGAIN_S_MAX = 1.0, 60.0
FAILURES_MAX = 16  # counted; the pause no longer grows
# Storage gets room again, or a person sees to it. Stage servers that contradict themselves or hang do not recover.
UNHEALING_MAX = 6


Move: TypeAlias = BeginCheckpoint | PublishCheckpoint | Stopped


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint under way: replicas that still have to hand over a stage, and the parts that came."""

    version: int
    since_s: float
    savers: dict[PeerId, int]
    again: int = 0  # how often its version was begun before; parts of those tries went with their files
    parameters: dict[int, tuple[ParameterHash, ...]] = field(default_factory=dict)
    claims: dict[int, tuple[PeerId, Saved]] = field(default_factory=dict)  # of savers, while others are asked
    rests_on_one: bool = False  # a stage was accepted although nobody else has hashed it
    is_writing: bool = False


class CheckpointSchedule:
    """The checkpoints of one job; `newest` is the newest version that is kept (or was started from)."""

    def __init__(self, rules: SavingRules, stages: int, first_step: int, steps: int, course: Course = PLAIN) -> None:
        self.rules = rules
        self._course = course
        self.newest = first_step
        self.open: OpenCheckpoint | None = None
        self._begun = (-1, 0)  # the newest version that was begun, and how often before
        self.others: int | None = None  # the version that other islands write, while this one has no part in it
        self.stop: Stopped | None = None  # how the job is to end, if before its last step
        self.stop_at = 0  # the version to train up to first
        self._stages = stages
        self._steps = steps
        self._last_s = rules.since_s  # when the last one was due, or when training began
        self._pause_s = rules.every_s if rules.has_begun else min(rules.every_s, FIRST_S_MAX)
        self._failures = 0  # of the final state, one after the other
        self._unhealing = 0  # how many of them were not the storage's fault
        self.again_s = -math.inf  # when to save it once more
        self.at_once = rules.at_once  # save the next version, as the one before was not accepted
        self._apart = -1  # the newest version that islands do not reach at one moment

    def due(self, version: int, now_s: float) -> Decision[int]:
        """Whether to save `version`, which was just committed; a reason without a plan belongs in the log."""
        rules = self.rules
        if version == self._apart or version != self._course.level_from(version):
            return Decision(None, "")  # islands differ, and so must not their clocks: all hear of a level one at once
        if self._last_s is None:
            self._last_s = now_s
        if version == self._steps or (self.stop is not None and version >= self.stop_at):
            return Decision(None, "")  # saved when nothing runs any more
        by_steps = self._course.is_saved(version, rules.every_steps)
        by_time = self._by_time(now_s)
        if not by_steps and not by_time and not self.at_once:
            return Decision(None, "")
        pause_s, self._pause_s = self._pause_s, rules.every_s
        if self.open is not None and now_s - self.open.since_s < SAVING_S_MAX:
            self._last_s = now_s
            told, held = map(self._course.inner_steps, (version, self.open.version))
            return Decision(None, f"no checkpoint at step {told}: the one at step {held} is still being written")
        self._last_s = now_s
        if self.others is not None:
            told = self._course.inner_steps(version)
            return Decision(None, f"no checkpoint at step {told}: other islands still write an earlier one")
        return Decision(version, f"every {rules.every_steps} steps" if by_steps else f"after {pause_s:g} s")

    def wants(self, version: int, now_s: float, *, clock: bool) -> bool:
        """Whether a level version would be saved if it were committed now, or, with `clock`, the clock begins there."""
        ends = version == self._steps or (self.stop is not None and version >= self.stop_at)
        by_steps = self._course.is_saved(version, self.rules.every_steps)
        return ends or by_steps or self.at_once or ((clock or self._last_s is not None) and self._by_time(now_s))

    def _by_time(self, now_s: float) -> bool:
        """Whether one is due by the clock, which begins with the first level version."""
        return self.rules.every_s > 0 and (self._last_s is None or now_s - self._last_s >= self._pause_s)

    def merges(self, exchanged: Exchanged) -> None:
        """Islands exchange: what is behind that is saved only if they hold it at one moment."""
        if not exchanged.whole:
            self._apart = exchanged.step + 1
            self.at_once |= self._course.is_saved(self._apart, self.rules.every_steps)

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is open, or this island waits for the others' checkpoint."""
        return self.open is not None or self.others is not None

    @property
    def of_copy(self) -> SavingRules:
        """The rules of an island that begins as a copy: its checkpoints are due when this island's are."""
        has_begun = self._pause_s == self.rules.every_s
        return replace(self.rules, since_s=self._last_s, has_begun=has_begun, at_once=self.at_once)

    def begin(self, version: int, savers: Sequence[PeerId], now_s: float) -> None:
        """Collect `version`; `savers` has one peer per stage."""
        assert self.open is None
        assert len(savers) == self._stages
        self.at_once = False
        self._begun = version, self._begun[1] + 1 if version == self._begun[0] else 0
        self.open = OpenCheckpoint(version, now_s, {peer: stage for stage, peer in enumerate(savers)}, self._begun[1])

    def claimed(self, peer: PeerId, event: Saved) -> bool:
        """A saver claims to have handed over its stage, still to be confirmed; False if it was not awaited."""
        if (held := self._awaits(peer, event)) is None:
            return False
        held.claims[event.stage] = peer, event
        return True

    def saved(self, peer: PeerId, event: Saved) -> bool:
        """A stage was handed over; False if it was not awaited."""
        if (held := self._awaits(peer, event)) is None:
            return False
        del held.savers[peer]
        held.parameters[event.stage] = event.parameters
        return True

    def awaits(self, peer: PeerId, event: Saved) -> bool:
        """Whether the peer was asked for this part, and says so for the first time."""
        held = self._awaits(peer, event)
        return held is not None and event.stage not in held.claims

    def _awaits(self, peer: PeerId, event: Saved) -> OpenCheckpoint | None:
        """The checkpoint under way, if the peer was asked for this part of it and still owes it."""
        held = self.open
        if held is None or held.version != event.version or held.savers.get(peer) != event.stage:
            return None
        return held

    def replace(self, stage: int, lost: PeerId, saver: PeerId) -> None:
        """Another replica hands the stage over."""
        assert self.open is not None
        self.open.claims.pop(stage, None)
        self.open.savers.pop(lost, None)
        self.open.savers[saver] = stage

    def stage_of(self, peer: PeerId) -> int | None:
        """The stage that the peer still has to hand over."""
        return self.open.savers.get(peer) if self.open is not None else None

    def next(self, agreed: int, now_s: float, *, idle: bool) -> Move | None:
        """The next move, if any; `agreed` counts the commits that all replicas agree on, `idle` means nothing runs."""
        held = self.open
        if held is not None:
            if held.is_writing or len(held.parameters) < self._stages or agreed < held.version:
                return None
            held.is_writing = True
            return PublishCheckpoint(held.version, held.parameters)
        if not idle or ((self.stop is None or agreed < self.stop_at) and agreed < self._steps):
            return None
        if self.others is not None:
            return None
        if agreed > self.newest:
            return BeginCheckpoint(agreed) if self.stop is not None or now_s >= self.again_s else None
        return self.stop if agreed < self._steps else None

    def may_begin(self, step: int) -> bool:
        """Whether the job begins this step; it may be about to stop."""
        return self.stop is None or step < self.stop_at

    def kept(self, version: int) -> bool:
        """The checkpoint is complete; False if it was given up before."""
        if self.open is None or self.open.version != version:
            return False
        self.newest, self.open = version, None
        return True

    def others_did(self, version: int) -> bool:
        """The checkpoint of the other islands is written, or given up; False if this one did not wait for it."""
        if self.others != version:
            return False
        self.others = None
        return True

    def hear(self, told: OthersSave | SaveAnew) -> None:
        """What becomes of the checkpoint of all islands."""
        if isinstance(told, OthersSave):
            self.others = told.version
            return
        self.others_did(told.version)
        if self.open is not None and self.open.version == told.version:
            self.open = None

    def give_up(self) -> int:
        """Forget the checkpoint under way; gives its version."""
        assert self.open is not None
        version, self.open = self.open.version, None
        return version

    def rest(self, now_s: float, reason: str) -> float | None:
        """Seconds until the final state is saved once more; None if causes that do not pass made it fail too often."""
        self._unhealing += reason in ("peer", "internal", "timeout")
        if self._unhealing == UNHEALING_MAX:
            return None
        pause_s = min(AGAIN_S_MIN * 2.0**self._failures, AGAIN_S_MAX)
        self._failures = min(self._failures + 1, FAILURES_MAX)
        self.again_s = now_s + pause_s
        return pause_s
