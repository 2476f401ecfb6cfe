"""What a job's decisions depend on, fixed for one timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.brain.checkpoint.schedule import NEVER, SavingRules
from scheduler.brain.replicas.rebalancing import RebalanceSettings
from scheduler.brain.routing.deadlines import DeadlineSettings
from swarm.messages import StateFile
from swarm.types import JobId, OnStall, Routing, UnitName

DEADLINES = DeadlineSettings()
NO_REBALANCING = RebalanceSettings(rebalance=False)


@dataclass(frozen=True, slots=True)
class BrainSettings:
    """What a job's decisions depend on; `split` is decoder layers per stage, `units` the stages that share a unit."""

    job: JobId
    epoch: int
    timeline: int
    steps: int
    microbatches: int
    split: tuple[int, ...]
    spec_json: str
    staleness: int
    max_in_flight: int | None  # None = auto
    units: Mapping[UnitName, tuple[int, ...]]
    grad_clip_norm: float  # 0 = off
    averaging_timeout_s: float
    fail_on_nonfinite: bool
    learning_rate: Callable[[int], float] = field(repr=False)
    tokens_of: Callable[[int], int] = field(repr=False)
    routing: Routing = "least_completion"
    eval_every_steps: int = 0  # 0 = never
    evaluation_microbatches: int = 0
    evaluation_tokens: int = 0
    pause_on_nonfinite: bool = False  # commit the step as skip, then pause
    first_step: int = 0  # the version that is loaded, from `files`
    files: tuple[StateFile, ...] = field(default=(), repr=False)
    saving: SavingRules = NEVER
    recover: bool = False  # route around lost replicas; else the job fails when one is gone
    work: tuple[float, ...] = ()  # of a microbatch at each stage, in any unit; all alike if not known
    state_bytes: tuple[int, ...] = ()  # that a peer fetches when it joins a stage
    on_stall: OnStall = "wait"  # with `recover`, when a stage has no replica left
    rebalance: RebalanceSettings = NO_REBALANCING
    deadlines: DeadlineSettings = DEADLINES
