"""Scenarios: what is trained, what goes wrong meanwhile, and how the job must end. Nothing but data.

A field that is a tuple of choices is drawn by the seed, so one scenario covers many shapes. Times are virtual seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

Seconds: TypeAlias = tuple[float, float]  # drawn uniformly between the two


@dataclass(frozen=True, slots=True)
class Workload:
    """A job and its peers."""

    stages: tuple[int, ...] = (1, 2, 3)
    replicas: tuple[int, ...] = (1, 2, 3)
    spares: int = 0  # peers that are idle when the job starts
    late: tuple[float, ...] = (0.0, 0.5, 1.0)  # share of a step's microbatches
    tied: tuple[bool, ...] = (False, True)
    microbatches: tuple[int, ...] = (3, 6)
    steps: int = 6
    routing: tuple[str, ...] = ("least_completion", "iwrr", "uniform")
    optimizer: tuple[str, ...] = ("adamw", "sgd")
    compute_s: Seconds = (0.001, 0.03)
    real: bool = False  # a Llama instead of the counting model
    checkpoint_every: int = 500  # steps
    sites: int = 0  # at which the peers are, in turn; 0: they say none

    def drawn(self, rng: Random) -> Shape:
        """One shape."""
        stages, replicas, late = rng.choice(self.stages), rng.choice(self.replicas), rng.choice(self.late)
        tied, microbatches = rng.choice(self.tied), rng.choice(self.microbatches)
        return Shape(
            stages=stages,
            replicas=replicas,
            spares=self.spares,
            overlap=round(late * microbatches),
            tied=tied,
            microbatches=microbatches,
            steps=self.steps,
            routing=rng.choice(self.routing),
            optimizer=rng.choice(self.optimizer),
            compute_s=self.compute_s,
            real=self.real,
            checkpoint_every=self.checkpoint_every,
            sites=self.sites,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload with every choice made."""

    stages: int
    replicas: int
    spares: int
    overlap: int
    tied: bool
    microbatches: int
    steps: int
    routing: str
    optimizer: str
    compute_s: Seconds
    real: bool
    checkpoint_every: int
    sites: int


@dataclass(frozen=True, slots=True)
class Links:
    """What the network does to everything until the calm phase."""

    loss: float = 0.0
    duplicate: float = 0.2
    copies_max: int = 2
    late_s_max: float = 0.0  # how much later than the first copy another one may arrive
    delay_s: Seconds = (0.0005, 0.02)
    encode: bool = False  # through the real encoding, which costs CPU


@dataclass(frozen=True, slots=True)
class Crash:
    """kill -9 of a stage server, and its start as a new incarnation, or under a new id.

    A restarted server joins the job at work. `stage`: share of the kills that take all replicas of a stage at once.
    """

    every_s: Seconds = (1.0, 4.0)
    down_s: Seconds = (0.05, 2.0)
    new_id: float = 0.0  # share of restarts under a new id
    stage: float = 0.0
    at_most: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Spawn:
    """A new stage server starts while the job is at work."""

    every_s: Seconds = (0.5, 3.0)
    at_most: int = 4


@dataclass(frozen=True, slots=True)
class Leave:
    """SIGTERM: a stage server hands its work over, for `patience_s` at most, and ends; it starts again later."""

    every_s: Seconds = (1.0, 4.0)
    patience_s: float = 10.0
    down_s: Seconds = (0.05, 2.0)


@dataclass(frozen=True, slots=True)
class CrashScheduler:
    """kill -9 of the scheduler, and its start on the same database."""

    every_s: Seconds = (1.0, 5.0)
    down_s: Seconds = (0.05, 2.0)
    at_most: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP and SIGCONT of a stage server, or of the scheduler."""

    every_s: Seconds = (1.0, 4.0)
    for_s: Seconds = (0.1, 1.5)
    scheduler: float = 0.2  # share of pauses that hit the scheduler


@dataclass(frozen=True, slots=True)
class Slow:
    """A stage server computes `factor` times slower for a while."""

    every_s: Seconds = (0.5, 2.0)
    for_s: Seconds = (1.0, 5.0)
    factor: float = 10.0


@dataclass(frozen=True, slots=True)
class Partition:
    """Links stop. Shapes: "peer" (from all), "scheduler" (a peer from it), "pair", "half"; one way or both."""

    shapes: tuple[str, ...] = ("peer", "scheduler", "pair", "half")
    every_s: Seconds = (1.0, 3.0)
    for_s: Seconds = (0.1, 1.5)
    one_way: float = 0.5


@dataclass(frozen=True, slots=True)
class Clog:
    """Swizzle-clog: some processes lose their links one after the other, and get them back in another order."""

    every_s: Seconds = (2.0, 5.0)
    between_s: Seconds = (0.0, 0.3)


@dataclass(frozen=True, slots=True)
class CutSession:
    """A session with the scheduler breaks; both ends live on."""

    every_s: Seconds = (1.0, 4.0)


@dataclass(frozen=True, slots=True)
class DatabaseOutage:
    """Writes are refused, are slow, or are done although an error is raised."""

    refused: float = 0.2
    unknown: float = 0.2
    seconds: Seconds = (0.0, 0.05)


@dataclass(frozen=True, slots=True)
class Disk:
    """An operation on the scheduler's disk fails while it writes a checkpoint: full, or broken; writes may be torn.

    The last checkpoint is spared: its loss may rightly end the job.
    """

    fails: float = 0.05


@dataclass(frozen=True, slots=True)
class Failpoint:
    """A process dies exactly at an edge, with some probability each time it passes the edge."""

    edge: str
    chance: float = 0.05
    down_s: Seconds = (0.05, 2.0)
    at_most: int = 3


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody cancels the job."""

    after_s: Seconds = (0.0, 4.0)


Fault: TypeAlias = (
    Crash
    | Spawn
    | Leave
    | CrashScheduler
    | Pause
    | Slow
    | Partition
    | Clog
    | CutSession
    | DatabaseOutage
    | Disk
    | Failpoint
    | Cancel
)

EDGES = {
    "compute/send": 0.04,
    "send/ack": 0.04,
    "reduce/Averaged": 0.15,
    "Averaged/row": 0.25,
    "row/Commit": 0.3,
    "Commit/apply": 0.2,
}
"""Where a process may die, with a chance that lets each be hit about as often: some are passed more often."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the catalogue. `expect`: the states in which the job may end."""

    name: str
    workload: Workload = Workload()
    links: Links = Links()
    faults: tuple[Fault, ...] = ()
    safety_s: float = 20.0
    calm_s: float = 120.0
    expect: tuple[str, ...] = ("succeeded",)
    weight: int = 1  # how often it is played, relative to the others
    must_happen: tuple[str, ...] = ()  # fault kinds that a hundred runs must show, or they prove nothing


TWO_UP = Workload(stages=(1, 2, 3), replicas=(2, 3), steps=8, compute_s=(0.02, 0.3))
"""At least two replicas per stage, one may be lost; slow enough that faults meet the job at work."""

SCENARIOS: dict[str, Scenario] = {
    one.name: one
    for one in (
        Scenario("calm", links=Links(duplicate=0.0)),
        Scenario(
            "disorder",
            links=Links(duplicate=0.5, copies_max=5, late_s_max=3.0, delay_s=(0.0005, 0.3)),
            must_happen=("duplicated", "reordered"),
        ),
        Scenario(
            "llama",
            workload=Workload(stages=(2, 3), replicas=(2,), microbatches=(3,), steps=3, real=True),
            links=Links(loss=0.1, duplicate=0.5, copies_max=3, encode=True),
            faults=(Slow(),),
        ),
        Scenario("loss", links=Links(loss=0.3, duplicate=0.25), must_happen=("lost",)),
        Scenario("slow", workload=Workload(replicas=(2, 3)), faults=(Slow(),), must_happen=("slow",)),
        Scenario("clog", faults=(Clog(),), must_happen=("clog",)),
        Scenario("database", faults=(DatabaseOutage(),), must_happen=("database refused", "database unknown")),
        Scenario(
            "cancel",
            faults=(Cancel(),),
            links=Links(loss=0.1),
            expect=("cancelled", "succeeded"),
            must_happen=("cancel",),
        ),
        Scenario(
            "wire",
            workload=Workload(steps=4, microbatches=(3,)),
            links=Links(loss=0.05, duplicate=0.25, encode=True),
        ),
        Scenario("hiccups", faults=(Pause(),), must_happen=("pause",)),
        Scenario("jams", faults=(Partition(),), must_happen=("partition",)),
        Scenario(
            "everything short",
            workload=Workload(replicas=(2, 3)),
            links=Links(loss=0.1, duplicate=0.3, copies_max=4, late_s_max=2.0, delay_s=(0.0005, 0.1)),
            faults=(Slow(), Pause(), Partition(), Clog(), DatabaseOutage(refused=0.05, unknown=0.05)),
        ),
        Scenario("broken sessions", workload=TWO_UP, faults=(CutSession(),), must_happen=("session cut",)),
        Scenario("crashes", workload=TWO_UP, faults=(Crash(new_id=0.3),), must_happen=("crash",)),
        Scenario("joins", workload=replace(TWO_UP, replicas=(1, 2)), faults=(Spawn(), Crash()), must_happen=("spawn",)),
        Scenario("leaves", workload=TWO_UP, faults=(Leave(), Spawn(at_most=2)), must_happen=("leave", "left")),
        Scenario(
            "lost stages",
            workload=replace(TWO_UP, checkpoint_every=2),
            faults=(Crash(stage=0.5),),
            must_happen=("stage lost",),
        ),
        Scenario(
            "disk",
            workload=replace(TWO_UP, checkpoint_every=1),
            faults=(Disk(), CrashScheduler(every_s=(2.0, 8.0))),
            must_happen=("disk",),
        ),
        Scenario(
            "sites",
            workload=replace(TWO_UP, stages=(1, 2), replicas=(4, 5), sites=2),
            faults=(Crash(), Spawn(), Pause(), Partition(shapes=("pair", "half"))),
            safety_s=60.0,
            must_happen=("crash", "spawn", "partition"),
        ),
        Scenario("scheduler crashes", workload=TWO_UP, faults=(CrashScheduler(),), must_happen=("scheduler crash",)),
        Scenario("long pauses", workload=TWO_UP, faults=(Pause(for_s=(0.5, 9.0)),), safety_s=60.0),
        Scenario("partitions", workload=TWO_UP, faults=(Partition(for_s=(0.5, 9.0)),), safety_s=60.0),
        Scenario("long clog", workload=TWO_UP, faults=(Clog(between_s=(0.0, 2.0)),), safety_s=60.0),
        Scenario(
            "failpoints",
            workload=replace(TWO_UP, replicas=(4, 5), compute_s=(0.01, 0.1)),  # more to lose
            faults=tuple(Failpoint(edge, chance) for edge, chance in EDGES.items()),
            safety_s=60.0,
            weight=5,
        ),
        Scenario(
            "everything",
            workload=replace(TWO_UP, checkpoint_every=2),
            links=Links(loss=0.1, duplicate=0.3, copies_max=4, late_s_max=20.0, delay_s=(0.0005, 0.1)),
            faults=(
                Crash(every_s=(4.0, 12.0), new_id=0.2),
                Spawn(every_s=(5.0, 20.0)),
                Leave(every_s=(5.0, 15.0)),
                Disk(fails=0.01),
                CrashScheduler(every_s=(8.0, 20.0)),
                Pause(every_s=(4.0, 12.0), for_s=(0.1, 8.0)),
                Slow(),
                Partition(every_s=(3.0, 9.0), for_s=(0.1, 6.0)),
                Clog(every_s=(5.0, 15.0), between_s=(0.0, 1.0)),
                CutSession(every_s=(3.0, 9.0)),
                DatabaseOutage(refused=0.05, unknown=0.05),
                *(Failpoint(edge, chance / 2, at_most=1) for edge, chance in EDGES.items()),
            ),
            safety_s=60.0,
            calm_s=240.0,
        ),
    )
}


def named(name: str) -> Scenario:
    """The scenario of this name."""
    return SCENARIOS[name]


def shortened(scenario: Scenario, steps: int) -> Scenario:
    """The scenario with fewer steps."""
    return replace(scenario, workload=replace(scenario.workload, steps=steps))
