"""The queue of waiting jobs: a job's place in it, and the jobs that hold the stage servers that it could use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, nan

from scheduler.brain.explain.facts import Fact
from swarm.text import counted, spoken_duration
from swarm.types import JobId

SHOWN = 8  # holders by name


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has stage servers; of one that is not the reader's, only that is known."""

    job: JobId
    stage_servers: int
    step: int = 0
    steps: int = 0  # 0 = not known
    left_s: float = nan  # until its last step, if it goes on as it does; nan = not known


@dataclass(frozen=True, slots=True)
class JobQueue:
    """All jobs that wait for stage servers, the next one first, and the jobs that have some, those with most first."""

    waiting: tuple[JobId, ...]
    holders: tuple[Holder, ...]
    priorities: Mapping[JobId, int] = field(default_factory=dict)  # of those that wait

    def text(self, job: JobId) -> str:
        """In a few words; empty if the job waits alone and no job has stage servers."""
        facts = [self._place(job)] if len(self.waiting) > 1 else []
        if self.holders:
            taken = counted(sum(one.stage_servers for one in self.holders), "stage server")
            first, more = self.holders[0].job, len(self.holders) - 1
            facts.append(f"{first} and {more} more have {taken}" if more else f"{first} has {taken}")
        return "; ".join(facts)

    def facts(self, job: JobId) -> list[Fact]:
        """In full."""
        before = self.waiting[: self.waiting.index(job)]
        named = f": {', '.join(map(self._named, before[-SHOWN:]))} before it" if before else ""
        numbers = {"place": len(before) + 1.0, "waiting": float(len(self.waiting))}
        facts = [Fact("queue", f"{self._place(job)}{named}", numbers)]
        for one in self.holders[:SHOWN]:
            text = f"{one.job} has {counted(one.stage_servers, 'stage server')}"
            text += f", step {one.step} of {one.steps}" if one.steps else ""
            numbers = {"stage_servers": float(one.stage_servers)}
            if isfinite(one.left_s):
                text += f", about {spoken_duration(one.left_s)} left at this speed"
                numbers["left_s"] = one.left_s
            facts.append(Fact("in use", text, numbers))
        if (more := len(self.holders) - SHOWN) > 0:
            facts.append(Fact("in use", f"by {counted(more, 'job')} more"))
        return facts

    def _named(self, job: JobId) -> str:
        priority = self.priorities.get(job, 0)
        return f"{job} (priority {priority})" if priority else job

    def _place(self, job: JobId) -> str:
        number = self.waiting.index(job) + 1
        place = f"number {number} of {len(self.waiting)} that wait"
        # Said only where it matters: where those that wait differ in it.
        differ = len(set(self.priorities.values())) > 1
        return f"{place}, priority {self.priorities[job]}" if differ else place
