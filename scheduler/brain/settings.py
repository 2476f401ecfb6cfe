"""The settings of a job's brain, fixed for one timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from swarm.types import JobId, OnStall, Routing, UnitName
from swarm.wire.messages import StateFile

# A peer that was released for another stage and has not arrived by then is no longer waited for.
ON_ITS_WAY_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class DeadlineSettings:
    """A hop is late after the median of recent hops and `k` times their spread, within the two bounds."""

    k: float = 6.0
    min_s: float = 1.0
    max_s: float = 120.0


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """`rebalance` is a key of [pipeline] in the job file, `min_replicas` one of [limits]; all else is constant."""

    rebalance: bool = True
    interval_s: float = 30.0  # between two looks
    min_gain: float = 0.15  # of throughput, net of what the move costs
    cooldown_s: float = 120.0  # that a stage server stays after it moved or joined
    min_replicas: int = 1
    horizon_s: float = 1800.0  # how long a gain is assumed to last
    windows: int = 3


@dataclass(frozen=True, slots=True)
class SavingRules:
    """How often; 0 = not by steps, not by time. `optimizer`: with all that an exact resume needs."""

    every_steps: int = 0
    every_s: float = 0.0
    optimizer: bool = False
    since_s: float | None = None  # when the newest was due, of an island that begins as a copy of another
    has_begun: bool = False  # of such an island: the first was due
    at_once: bool = False  # of such an island: the next version is to be saved


NEVER = SavingRules()  # but after the last step
DEADLINES = DeadlineSettings()
REBALANCING = RebalanceSettings()
NO_REBALANCING = replace(REBALANCING, rebalance=False)


@dataclass(frozen=True, slots=True)
class BrainSettings:
    """The settings of a job's brain; `split` is decoder layers per stage, `units` the stages that share a unit."""

    job: JobId
    epoch: int
    timeline: int
    steps: int
    microbatches: int
    split: tuple[int, ...]
    spec_json: str
    overlap: int  # the first microbatches of a step that use the version before its own
    max_in_flight: int | None  # None = auto
    units: Mapping[UnitName, tuple[int, ...]]
    grad_clip_norm: float  # 0 = off
    averaging_timeout_s: float
    fail_on_nonfinite: bool
    learning_rate: Callable[[int], float] = field(repr=False)  # of a rate step
    tokens_of: Callable[[int], int] = field(repr=False)  # of a portion
    sync_steps: int = 0  # the first steps that do without overlap
    routing: Routing = "least_completion"
    eval_every_steps: int = 0  # 0 = never
    evaluation_microbatches: int = 0
    evaluation_tokens: int = 0
    evaluates: bool = True  # of several islands one does
    pause_on_nonfinite: bool = False  # commit the step as skip, then pause
    nonfinite_steps_max: int = 10  # skipped steps in a row, after which the job fails
    skipped_in_a_row: int = 0  # up to the newest commit, when the brain begins
    first_step: int = 0  # the version that is loaded, from `files`
    files: tuple[StateFile, ...] = field(default=(), repr=False)
    saving: SavingRules = NEVER
    recover: bool = False  # route around lost replicas; else the job fails when one is gone
    work: tuple[float, ...] = ()  # of a microbatch at each stage, in any unit; all alike if not known
    state_bytes: tuple[int, ...] = ()  # that a peer fetches when it joins a stage
    steps_on_host: bool = False  # every stage's optimizer runs on the CPU
    compiles: bool = False  # model.compile: a peer that joins compiles its layers before it fetches the state
    on_stall: OnStall = "wait"  # with `recover`, when a stage has no replica left
    rebalance: RebalanceSettings = NO_REBALANCING
    deadlines: DeadlineSettings = DEADLINES
    spot_check: float = 0.0  # the share of hops that another replica computes again; 0 = replicas are believed
    recount: float = 0.0  # the share of steps of which another replica computes the sum of one once more
    clips: bool = False  # averaging cuts false parts
    second_owner: float = 0.0  # the share of rounds of which another member reduces a slice once more
    second_hash: bool = False  # other replicas say by hash what one of them hands over

    @property
    def hashes_hops(self) -> bool:
        """Whether replicas say by hash what they took and made."""
        return self.spot_check > 0.0 or self.recount > 0.0

    @property
    def staleness(self) -> int:
        """How many versions before the newest the replicas keep: 1 with overlap, else 0."""
        return min(1, self.overlap)
