"""The brain of a job with islands and replicas that count instead of compute: every portion that one of them trains is
a number, so the outer weights are a bag of numbers that says what was counted, and how often. With P fragments a
portion q is P numbers, one for each: q * P, q * P + 1 ...

    pending  portions that a replica's island trained and did not merge
    held     those of them that it proposed and trains on meanwhile
    theta    portions that were merged: the outer weights

No torch, no network, no time: `play` picks whose turn it is, and harms, with its seed. The history that it gives is
what passed the door of the brain and what replicas did; checkers at the end of this file read nothing else.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from scheduler.brain import inputs, outputs
from scheduler.brain.inputs import EachIsland, Input, ReplicaRecord, Resumed, Start
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.islands.exchange import next_of_fragment
from scheduler.brain.islands.roster import still_at_work
from scheduler.brain.islands.rows import NEWEST
from scheduler.brain.outputs import CommitRow, Exchanged, Fork, Output
from scheduler.brain.settings import BrainSettings, SavingRules
from scheduler.brain.stall import Over, Watchdog
from swarm.job.course import IslandCourse, OuterCourse
from swarm.job.leases import Cut, Leases
from swarm.job.placement import Candidate
from swarm.types import PROTOCOL_VERSION, JobId, JobState, OnStall, PeerId, Round, UnitName
from swarm.wire.messages import (
    AbortRound,
    Accumulated,
    Admit,
    Average,
    Averaged,
    Command,
    Commit,
    Committed,
    Event,
    Exchange,
    Follow,
    Hello,
    Loaded,
    LoadStage,
    ParameterHash,
    ParameterNorm,
    Release,
    RoundFailed,
    Route,
    Saved,
    SaveStage,
    UnitSize,
    Void,
)

JOB, STAGES, MICROBATCHES = JobId("job"), 2, 2
TIMEOUT_S = 5.0  # averaging.timeout_s
UNITS = {UnitName("stage-0"): (0,), UnitName("stage-1"): (1,), UnitName("tied"): (0, 1)}


@dataclass(frozen=True, slots=True)
class Shape:
    """What is played, and how often out of a thousand turns which harm is done."""

    islands: int = 2
    replicas: int = 2
    steps: int = 5  # inner steps of an island
    lease: int = 2
    deaths: int = 0
    failures: int = 0  # of exchanges
    restarts: int = 0  # of the scheduler; half of them between a row and its Commit
    every: int = 0  # steps from one checkpoint to the next
    every_s: float = 0.0
    refusals: int = 0  # of a thousand checkpoints, and of parts of them
    least: int = 1  # islands.min
    losses: int = 0  # of islands: all replicas of one of its stages die at once
    stops: int = 0  # a person asks for a pause, once
    fragments: int = 1
    overlap: int = 0  # inner steps from a capture to its merge
    by_speed: bool = False  # leases follow speed
    late: int = 0  # microbatches of a step that use weights one step old
    arrivals: int = 0  # a stage server starts at a site that lacks one; each island is at a site of its own
    splits: int = 0  # one island and the others do not reach each other: one way or both, for a while or for good
    freezes: int = 0  # an island answers nothing, though it is heard, for a while or for good
    slow: int = 0  # of a hundred turns, those that the last island lets pass
    still_s: float = 0.0  # limits.no_progress_s; 0: nobody looks
    silence_s: float = 0.0  # how long a late island may be silent after a restart
    fetch: int = 12  # turns of a joiner until it has a state; it begins anew with each newer version
    patience: float = math.inf  # of exchanges, in shares of a period
    absent: int = 0  # the last islands, for which nobody was there when the timeline began

    @property
    def microbatches(self) -> int:
        """Those of a step of the job, of which an island has a share."""
        return MICROBATCHES * self.islands

    @property
    def may_lose(self) -> bool:
        """Whether islands may be lost."""
        return bool(self.losses or self.splits or self.freezes or self.absent)


# What happened -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """These rows became durable in one transaction, with an exchange and islands that begin behind it; or leases."""

    rows: tuple[CommitRow, ...]
    forks: tuple[Fork, ...] = ()
    cut: Cut | None = None
    exchange: Exchanged | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """A replica computed a microbatch of an inner step."""

    timeline: int
    stage: int
    step: int
    index: int


@dataclass(frozen=True, slots=True)
class Summed:
    """A replica averaged a unit of an inner step, with the gradients of these microbatches in its sum."""

    peer: PeerId
    timeline: int
    stage: int
    step: int
    unit: UnitName
    round: Round
    indexes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Trained:
    """A replica made an inner step, and counts its portion."""

    peer: PeerId
    timeline: int
    stage: int
    step: int
    portion: int


@dataclass(frozen=True, slots=True)
class Proposed:
    """An envoy told the others these portions."""

    peer: PeerId
    timeline: int
    unit: UnitName
    step: int
    round: Round
    portions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Composed:
    """An envoy made the mean of what all proposed."""

    peer: PeerId
    timeline: int
    unit: UnitName
    step: int
    round: Round
    mean: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    """A replica took over outer weights: what they count now."""

    peer: PeerId
    timeline: int
    stage: int
    step: int
    theta: tuple[tuple[int, int], ...]  # portion, times


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint was begun; parts that were handed over before belong to none, or to another."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A replica handed over its part of the checkpoint after so many steps of the job."""

    number: int  # of its island's part
    timeline: int
    stage: int
    steps: int
    pending: tuple[int, ...]
    theta: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint is complete."""

    steps: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A person asked for a pause, or a restarted scheduler found that one did."""


@dataclass(frozen=True, slots=True)
class GoesOn:
    """People were told that the job does not pause, or that its end is not saved yet."""


@dataclass(frozen=True, slots=True)
class Harmed:
    """These stage servers answer nothing, or (`out`, `into`) their tensors do not reach others, or others' them."""

    peers: frozenset[PeerId]
    until_s: float
    out: bool = False
    into: bool = False

    def cuts(self, sender: PeerId, receiver: PeerId) -> bool:
        leaves, enters = (one in self.peers for one in (sender, receiver))
        return (self.out and leaves and not enters) or (self.into and enters and not leaves)


@dataclass(frozen=True, slots=True)
class Ended:
    """How the job ended."""

    state: str
    reason: str


History: TypeAlias = list[object]


# Replicas ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replica:
    """A stage server that obeys."""

    record: ReplicaRecord
    island: int
    timeline: int
    course: OuterCourse
    start: str = "start"
    version: int = 0
    first: int = 0  # the version with which its island began
    is_free: bool = False
    pending: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    theta: Counter[int] = field(default_factory=Counter)
    means: dict[tuple[int, UnitName], tuple[Round, Counter[int]]] = field(default_factory=dict)
    log: dict[int, Counter[int]] = field(default_factory=dict)
    commands: deque[Command] = field(default_factory=deque)
    joins: int = 0  # the number of its join, if it came later
    follows: int = -1  # the version that it fetches
    fetched: int = 0  # turns for that
    reports: int = 0
    sums: dict[int, frozenset[int]] = field(default_factory=dict)  # the microbatches in the sum of each open step
    said: list[Committed] = field(default_factory=list)  # its newest commits, told again in a new session

    def hear(self, command: Command) -> None:
        if isinstance(command, Follow):  # the newest one counts
            self.commands = deque(command for command in self.commands if not isinstance(command, Follow))
        if isinstance(command, AbortRound):
            over = (command.unit, command.round)
            ahead = (
                command
                for command in self.commands
                if not isinstance(command, Exchange) or (command.unit, command.round) != over
            )
            self.commands = deque(ahead)
            return
        self.commands.append(command)

    @property
    def digest(self) -> str:
        return f"{self.version}.{self.pending}.{self.held}-{sorted(self.theta.items())}"

    def proposes(self, step: int) -> tuple[int, ...]:
        """What its island has to merge in an outer step."""
        fragment, held = self.course.outer_at(step).fragment, self.course.held(self.version)
        return tuple(n for n in (self.held if fragment in held else self.pending) if self.fragment_of(n) == fragment)

    def fragment_of(self, number: int) -> int:
        return number % self.course.fragments

    def is_ready(self, step: int) -> bool:
        """Whether it has captured what an outer step merges."""
        return self.course.proposes(self.version, step)


class World:
    """The brain, its replicas and its database."""

    def __init__(self, shape: Shape, seed: int, sites: Mapping[str, str] | None = None) -> None:
        """`sites`: where replicas are, by peer."""
        peers = [
            (island, stage, PeerId(f"i{island}-s{stage}-{number}"))
            for island in range(shape.islands - shape.absent)
            for stage in range(STAGES)
            for number in range(shape.replicas)
        ]
        own = {peer: f"site-{island}" for island, _, peer in peers} if shape.arrivals else {}
        where = sites or own
        self.shape, self.rng, self.history = shape, Random(seed), list[object]()
        self.epoch, self.now_s, self.over = 1, 0.0, False
        self.sites, self.started = Counter(where.values()), 0
        self.on_stall: OnStall = "wait"
        self.database: dict[int, list[CommitRow]] = {timeline: [] for timeline in range(shape.islands)}
        self.forks: dict[int, Fork] = {}  # the newest of each island
        self.cuts: list[Cut] = []  # durable
        self.made: tuple[Exchanged, ...] = ()
        self.courses = [course_of(shape, island) for island in range(shape.islands)]
        self.replicas = {
            peer: Replica(
                ReplicaRecord(peer, 1, f"at {peer}", stage, site=where.get(peer, "")),
                island,
                island,
                self.courses[island],
            )
            for island, stage, peer in peers
        }
        self.decided: list[Output] = []  # but for rows and what replicas are sent
        self.collecting: int | None = None  # as a sink: the checkpoint that takes files
        self.writing: int | None = None  # the one that is being written
        self.written = 0  # of a thousand turns: those in which it is done
        self.is_asked = False
        self.harms: list[Harmed] = []
        self.waits_in_vain: set[tuple[PeerId, PeerId]] = set()  # who notices only at the deadline that another is away
        self.heard_s: dict[tuple[PeerId, Round], float] = {}  # when envoys began with outer rounds
        self.watchdog = Watchdog(shape.still_s or math.inf, 0.0)
        self.watchdog.begin(self.now_s)
        self.brain = self._brain()
        of = [
            tuple(replica.record for replica in self.replicas.values() if replica.island == island)
            for island in range(shape.islands)
        ]
        self.tell(EachIsland(tuple(Start(records) if records else None for records in of)))

    def _brain(self) -> IslandsBrain:
        if self.shape.by_speed:
            leases = leases_of(self.shape, self.cuts)
            self.courses = [replace(one, inner=replace(one.inner, leases=leases)) for one in self.courses]
        settings = [
            BrainSettings(
                job=JOB,
                epoch=self.epoch,
                timeline=self._timeline(island),
                first_step=self._first(island),
                evaluates=island == 0,
                steps=course.steps,
                microbatches=self.shape.microbatches if self.shape.by_speed else MICROBATCHES,
                split=(1,) * STAGES,
                spec_json="{}",
                overlap=self.shape.late,
                max_in_flight=None,
                units=UNITS,
                grad_clip_norm=1.0,
                averaging_timeout_s=TIMEOUT_S,
                fail_on_nonfinite=False,
                learning_rate=lambda step: 0.1,
                tokens_of=lambda portion: 8 + portion,
                recover=True,
                on_stall=self.on_stall,
                saving=SavingRules(self.shape.every, self.shape.every_s, optimizer=True),
            )
            for island, course in enumerate(self.courses)
        ]
        rng = Random(self.rng.getrandbits(64))
        return IslandsBrain(settings, self.courses, rng, self.shape.least, self.shape.patience, self.shape.silence_s)

    def _timeline(self, island: int) -> int:
        return self.forks[island].timeline if island in self.forks else island

    def _first(self, island: int) -> int:
        return self.forks[island].version if island in self.forks else 0

    # As a driver ------------------------------------------------------------------------------------------------

    def tell(self, happened: Input) -> None:
        self.now_s += 0.01
        decided = deque(self.brain.step(happened, self.now_s))
        while decided:
            output = decided.popleft()
            match output:
                case outputs.Send(peer=peer, command=command):
                    is_ahead = isinstance(command, Average) and command.ahead  # it comes again
                    if peer in self.replicas and not is_ahead:
                        self.replicas[peer].hear(command)
                case outputs.WriteRows(rows, forks, shares, exchange, exchange_s):
                    assert (exchange_s is None) == (exchange is None)
                    for row in rows:
                        self.database.setdefault(row.timeline, []).append(row)
                    self.forks |= {fork.timeline % self.shape.islands: fork for fork in forks}
                    self.watchdog.moved(self.now_s)
                    self.cuts += shares
                    self.made += (exchange,) if exchange is not None else ()
                    self.history.append(Rows(rows, forks, *(shares or [None]), exchange))
                    if self._strikes(self.shape.restarts):
                        self.restart()
                        return  # whatever else was decided died with the scheduler
                    self.now_s += 0.01
                    decided.extendleft(reversed(self.brain.step(inputs.RowsDurable(rows, shares), self.now_s)))
                case outputs.IslandLost():
                    self.watchdog.moved(self.now_s)
                case _:
                    self._carry_out(output)
            self.brain.validate()

    @property
    def told(self) -> list[str]:
        """What people are told, among other decisions."""
        return [str(output) for output in self.decided]

    def _carry_out(self, output: Output) -> None:
        self.decided.append(output)
        match output:
            case outputs.BeginCheckpoint(version=version):
                assert self.collecting is None, "one at a time"
                self.collecting = version
                self.history.append(Saving())
            case outputs.DropCheckpoint(version=version):
                assert self.collecting in (version, None)
                self.collecting = self.writing = None
            case outputs.PublishCheckpoint(version=version):
                assert self.collecting == version
                self.writing, self.written = version, self.rng.choice([500, 50, 5])
            case outputs.EnterState(state=JobState.RUNNING):
                self.is_asked = False
                self.history.append(GoesOn())
            case outputs.Finish():
                self._end("succeeded", "")
            case outputs.Fail(message=message):
                self._end("failed", message)
            case outputs.Stopped(state=state, reason=reason):
                self._end(state.value, reason)

    def _end(self, state: str, reason: str) -> None:
        self.over = True
        self.history.append(Ended(state, reason))

    def restart(self, *, told: Sequence[Input] = ()) -> None:
        """A new scheduler finds the database and those who come back; what was on its way is lost.

        `told`: before anybody comes back.
        """
        self.epoch, self.collecting, self.writing = self.epoch + 1, None, None
        asked: list[Input] = [inputs.Stop(JobState.PAUSED, "asked")] if self.is_asked else []
        self.watchdog.begin(self.now_s)
        self.brain = self._brain()
        begins = []
        for island in range(self.shape.islands):
            rows = self.database.get(self._timeline(island), [])
            known = {
                replica.record.peer: replica.record.stage
                for replica in self.replicas.values()
                if replica.island == island
            }
            committed = rows[-1].step + 1 if rows else self._first(island)
            begins.append(Resumed(known, committed, tuple(rows[-2:]), (), 10.0))
        self.replicas = {peer: one for peer, one in self.replicas.items() if one.island >= 0}  # joiners begin anew
        for replica in self.replicas.values():
            replica.commands.clear()
            replica.sums.clear()
        lives = [self._timeline(island) for island in range(self.shape.islands)]
        at_work = still_at_work(self.courses, 0, begins, self.made, lives)
        self.history += [Asked()] if asked else []  # islands that are settled first may have gone on
        newest = self.made[-NEWEST - 2 * self.shape.fragments :]
        for happened in (EachIsland(at_work, exchanges=newest), *asked, *told):
            self.tell(happened)
        for _, one in sorted(self.replicas.items()):
            if not one.is_free:
                self._dial(one)

    def _dial(self, one: Replica) -> None:
        """A session of a replica begins."""
        peer = one.record.peer
        hello = Hello(peer, 1, PROTOCOL_VERSION, "", f"at {peer}", "", "cpu", 1, 0, -1, JOB, one.timeline,
                      one.version, (), one.record.stage, site=one.record.site)  # fmt: skip
        self.tell(inputs.Happened(peer, hello))
        for event in (self._loaded(one), *one.said):
            self.tell(inputs.Happened(peer, event))

    # Turns ------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One command is answered, or some harm is done, or time passes."""
        if self.shape.losses and self._strikes(self.shape.losses):
            self._lose_island()
        if self._strikes(self.shape.deaths):
            self._kill()
        elif self._strikes(self.shape.restarts):
            self.restart()
        if self.shape.stops and not self.over and self._strikes(self.shape.stops):
            self.stop()
        if self.writing is not None and not self.over and self._strikes(self.written):
            self.write()
        if self.shape.arrivals and not self.over and self._strikes(self.shape.arrivals):
            self._arrive()
        if (self.shape.splits or self.shape.freezes) and not self.over:
            self._harm()
        busy = sorted(peer for peer, one in self.replicas.items() if one.commands and not self._is_frozen(peer))
        if self.over:
            return
        if not busy or self._strikes(20):
            self.pass_time()
            return
        one = self.replicas[self.rng.choice(busy)]
        if self.shape.slow and one.island == self.shape.islands - 1 and self._strikes(10 * self.shape.slow):
            self.now_s += 0.1  # it computes
            return
        event = self._answer(one, one.commands.popleft())
        if event is not None:
            if self.brain.awaits(one.record.peer, event):
                self.watchdog.moved(self.now_s)
            self.tell(inputs.Happened(one.record.peer, event))

    def play_until(self, says: Callable[[World], bool], turns_max: int = 20_000) -> None:
        for _ in range(turns_max):
            if says(self):
                return
            self.turn()
        raise AssertionError(f"it does not come to that: {self.brain.waiting_for()}")

    def finish(self, turns_max: int = 20_000) -> None:
        """Play to the end."""
        self.play_until(lambda world: world.over, turns_max)

    def pass_time(self) -> None:
        """A second passes, and nothing else happens; as a driver, look whether nothing moved for too long."""
        self.now_s += 1.0
        is_still = self.watchdog.over(self.now_s, self.brain.saves_again_s) is Over.STILL
        self.tell(inputs.Stuck(self.shape.still_s) if is_still else inputs.Tick())

    def _harm(self) -> None:
        """An island is cut off from the others, or freezes, if all have begun, and no other one was harmed."""
        islands = self.brain.present
        held = {island: frozenset(p for p, one in self.replicas.items() if one.island == island) for island in islands}
        is_harmed = any(harm.until_s > self.now_s and harm.peers & self._serving() for harm in self.harms)
        if is_harmed or self.brain._divisions or len(islands) < 2 or not self._has_begun():
            return
        until_s = self.now_s + self.rng.choice([self.shape.still_s / 3, math.inf])
        if self._strikes(self.shape.splits):
            out, into = self.rng.choice([(True, False), (False, True), (True, True)])
            self.harm(Harmed(held[self.rng.choice(islands)], until_s, out, into))
        elif self._strikes(self.shape.freezes):
            self.harm(Harmed(held[self.rng.choice(islands)], until_s))

    def harm(self, harm: Harmed) -> None:
        self.harms.append(harm)
        self.history.append(harm)

    def _has_begun(self) -> bool:
        """Whether all islands have made a step that were there when the timeline began."""
        return all(self.database[island] for island in range(self.shape.islands - self.shape.absent))

    def _serving(self) -> set[PeerId]:
        return {peer for peer, one in self.replicas.items() if self.brain.island_of(peer) is not None}

    def _is_frozen(self, peer: PeerId) -> bool:
        return any(
            peer in harm.peers and not (harm.out or harm.into) for harm in self.harms if harm.until_s > self.now_s
        )

    def _reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        return not any(harm.cuts(sender, receiver) for harm in self.harms if harm.until_s > self.now_s)

    def stop(self) -> None:
        """A person asks for a pause, once all islands have begun; not while one is asked for."""
        if not self.is_asked and self._has_begun():
            self.is_asked = True
            self.history.append(Asked())
            self.tell(inputs.Stop(JobState.PAUSED, "asked"))

    def write(self) -> None:
        """The checkpoint that is being written is kept, or refused."""
        version, self.writing = self.writing, None
        assert version is not None
        if self._strikes(self.shape.refusals):
            self.tell(inputs.CheckpointNotKept(version, "disk_full", "full"))
            return
        self.collecting = None
        self.history.append(Kept(version))
        self.tell(inputs.CheckpointKept(version))

    def _strikes(self, of_a_thousand: int) -> bool:
        return self.rng.random() < of_a_thousand / 1000

    def _lose_island(self) -> None:
        """All replicas of a stage of an island die, once the job has begun, unless no other island could go on."""
        held = {(replica.island, replica.record.stage) for replica in self.replicas.values() if not replica.is_free}
        whole = [n for n in self.brain.present if all((n, stage) in held for stage in range(STAGES))]
        if self.over or len(whole) < 2 or not self._has_begun():
            return
        island, stage = self.rng.choice(whole), self.rng.randrange(STAGES)
        for peer, one in sorted(self.replicas.items()):
            if (one.island, one.record.stage, one.is_free) == (island, stage, False):
                self.kill(peer)

    def lose(self, island: int, *stages: int) -> None:
        """All replicas of an island die, or of these stages of it."""
        for peer, one in sorted(self.replicas.items()):
            if self.brain.island_of(peer) == island and one.record.stage in (stages or range(STAGES)):
                self.kill(peer)

    def _kill(self) -> None:
        """A replica dies, unless it is the last of its stage."""
        peers = [
            peer
            for peer, one in sorted(self.replicas.items())
            if sum((other.island, other.record.stage, other.is_free) == (one.island, one.record.stage, False)
                   for other in self.replicas.values()) > 1
        ]  # fmt: skip
        if peers:
            self.kill(self.rng.choice(peers))

    def kill(self, peer: PeerId) -> None:
        del self.replicas[peer]
        self.tell(inputs.PeerGone(peer, "killed"))

    def _arrive(self) -> None:
        """A stage server starts at a site that has lost one, and joins if the job takes it in."""
        held = Counter(replica.record.site for replica in self.replicas.values() if not replica.is_free)
        lacking = sorted(site for site, many in self.sites.items() if held[site] < many)
        if lacking:
            self.arrive(self.rng.choice(lacking))

    def arrive(self, site: str) -> PeerId | None:
        """A stage server starts at a site; its name, if the job takes it in."""
        self.started += 1
        peer = PeerId(f"new-{self.started}")
        stage = self.brain.where_to_join(Candidate(peer, site=site), range(STAGES), self.now_s).plan
        if stage is None:
            return None
        record = ReplicaRecord(peer, 1, f"at {peer}", stage, site=site)
        self.replicas[peer] = Replica(record, -1, -1, self.courses[0])  # of no island yet
        self.tell(inputs.Join(record))
        return peer

    def _fetch(self, one: Replica, follow: Follow) -> Event | None:
        """A turn of a joiner: it has its donor's state after some, if that has not gone on meanwhile."""
        one.fetched = one.fetched + 1 if one.follows == follow.version else 1
        one.follows = follow.version
        if follow.answered < one.reports:
            return None  # what it reported is judged still
        if one.fetched < self.shape.fetch:
            one.commands.append(follow)
            return None
        donor = next((donor for donor in self._donors(one, follow) if donor.version == follow.version), None)
        if donor is None:
            return None  # it hears of a newer version
        one.version, one.first, one.start = donor.version, donor.version, donor.digest
        one.pending, one.held, one.theta = donor.pending, donor.held, Counter(donor.theta)
        one.timeline, one.course, one.reports = donor.timeline, donor.course, one.reports + 1
        return self._loaded(one)

    def _donors(self, one: Replica, command: Follow | Commit) -> list[Replica]:
        """Those whom the replica may ask, and who answer."""
        peers = (hop.peer for hop in command.donors if hop.peer in self.replicas and not self._is_frozen(hop.peer))
        return [self.replicas[peer] for peer in peers if self._reaches(peer, one.record.peer)]

    def _answer(self, one: Replica, command: Command) -> Event | None:
        """What the replica says, if anything."""
        stage, peer = one.record.stage, one.record.peer
        match command:
            case LoadStage(held=held) if held:
                assert (held, one.held) == (one.version, ()), "nothing is under way between islands"
                assert one.course.streams or not one.pending, "it holds the outer weights alone"
                one.pending = ()
                one.timeline, one.island = command.timeline, command.timeline % self.shape.islands
                one.course, one.first, one.start, one.joins = self.courses[one.island], held, one.digest, 0
                one.said.clear()
                one.log.clear()
                return self._loaded(one)
            case LoadStage(join=join) if join:
                one.joins = join
            case Follow():
                return self._fetch(one, command)
            case Admit(timeline=timeline):
                one.island = timeline % self.shape.islands
            case LoadStage():
                return self._loaded(one)
            case Route(microbatch, version, hops) if hops[stage].peer == peer and microbatch.step >= one.version:
                used = range(version, microbatch.step)  # steps that are committed meanwhile
                assert len(used) <= 1, f"{microbatch} uses weights {version}"
                assert not any(map(self.courses[one.island].is_outer, used)), f"{microbatch} is late behind a merge"
                self.history.append(Computed(one.timeline, stage, microbatch.step, microbatch.index))
                one.sums[microbatch.step] = one.sums.get(microbatch.step, frozenset()) | {microbatch.index}
                return Accumulated(microbatch, stage, hops[stage].attempt, True, 1.0, 0.1, 0.2, 0.0)
            case Average(timeline=timeline, step=step, unit=unit, round=number) if step >= one.version:
                norms = (ParameterNorm(f"w of {unit}", 1.0),)
                self.history.append(Summed(peer, timeline, stage, step, unit, number, one.sums.get(step, frozenset())))
                return Averaged(timeline, step, unit, number, f"mean {step}", norms, 0.1)
            case Void(step=step):
                one.sums.pop(step, None)
            case Exchange():
                return self._exchange(one, command)
            case Commit(step=step) if step == one.version:
                return self._commit(one, command)
            case SaveStage():
                return self._save(one, command)
            case Release():
                one.commands.clear()
                one.is_free = True
        return None

    def _loaded(self, one: Replica) -> Loaded:
        units = tuple(UnitSize(unit, 64) for unit, stages in UNITS.items() if one.record.stage in stages)
        return Loaded(JOB, one.timeline, one.record.stage, one.first, one.start, units, "", one.joins)

    def _save(self, one: Replica, command: SaveStage) -> Saved:
        stage, theta, version = one.record.stage, tuple(sorted(one.theta.items())), command.version
        if one.version != version or self._strikes(self.shape.refusals // 4):
            return Saved(JOB, one.timeline, version, stage, (), "it holds another version", command.again)
        steps = one.course.inner_steps(version)
        number = self.brain.part_of(one.timeline)  # as the scheduler counts what it receives
        self.history.append(HandedOver(number, one.timeline, stage, steps, one.pending, theta))
        weights = f"{theta}" if one.course.streams else f"{theta} less {one.pending}"
        hashes = (ParameterHash(f"w{stage}", "float32", (1,), weights),)
        return Saved(JOB, one.timeline, version, stage, hashes, again=command.again)

    def _exchange(self, one: Replica, command: Exchange) -> Event | None:
        """Tell what is pending, and add up what all envoys have pending."""
        peer, step, unit, number = one.record.peer, command.step, command.unit, command.round
        of_round = (command.timeline, step, unit, number)
        if not one.is_ready(step):
            return None
        total, missed = Counter[int](), list[PeerId]()
        for envoy in command.envoys:
            other = self.replicas.get(envoy.peer)
            fails = other is None or not other.is_ready(step) or self._strikes(self.shape.failures)
            reaches = all(self._reaches(*way) for way in ((peer, envoy.peer), (envoy.peer, peer)))
            if other is None or (envoy.timeline != command.timeline and (fails or not reaches)):
                missed.append(envoy.peer)
            elif envoy.tokens:
                total.update(other.proposes(step))
        in_vain = any((peer, at) in self.waits_in_vain for at in missed)
        if in_vain and self.now_s < self.heard_s.setdefault((peer, number), self.now_s) + TIMEOUT_S:
            one.commands.append(command)
            return None
        for at in missed[:-1]:
            self.tell(inputs.Happened(peer, RoundFailed(*of_round, "no proposal came", at)))
        if missed:
            return RoundFailed(*of_round, "no proposal came", missed[-1])
        mine = next(envoy for envoy in command.envoys if envoy.peer == peer)
        if mine.tokens:
            self.history.append(Proposed(peer, one.timeline, unit, step, number, one.proposes(step)))
        one.means[step, unit] = (number, total)
        self.history.append(Composed(peer, one.timeline, unit, step, number, f"{sorted(total.items())}"))
        norms = (ParameterNorm(f"w of {unit}", 1.0),)
        return Averaged(command.timeline, step, unit, number, f"{sorted(total.items())}", norms, 0.1)

    def _commit(self, one: Replica, command: Commit) -> Event | None:
        peer, stage, step = one.record.peer, one.record.stage, command.step
        if one.course.is_outer(step):
            own = UnitName(f"stage-{stage}")
            number = next(made.round for made in command.rounds if made.unit == own)
            held, total = one.means.get((step, own), (None, Counter[int]()))
            if held != number:
                record = next((donor.log[step] for donor in self._donors(one, command) if step in donor.log), None)
                if record is None and command.rebases and not command.donors:
                    one.commands.clear()
                    one.sums.clear()
                    self.tell(inputs.PeerSuspect(peer, "session broke", session_lost=True))
                    self._dial(one)
                    return None
                if record is None:
                    one.commands.appendleft(command)  # asked again, as long as that takes
                    self.now_s += 0.1 if command.rebases else 0.0
                    return None
                total = record
            one.theta = one.theta + total
            proposed, one.log = one.proposes(step), {step: total}  # a donor keeps the newest alone
            one.held = tuple(n for n in one.held if n not in proposed)
            if not command.rebases:
                one.pending = tuple(n for n in one.pending if n not in proposed)
            self.history.append(Merged(peer, one.timeline, stage, step, tuple(sorted(one.theta.items()))))
        else:
            portion = one.course.at(step).portion
            one.pending = (*one.pending, *numbers(portion, one.course))
            self.history.append(Trained(peer, one.timeline, stage, step, portion))
            one.sums.pop(step, None)
        one.version = command.version
        captured = one.course.captured(one.version)
        one.held = (*one.held, *(n for n in one.pending if one.fragment_of(n) in captured))
        event = Committed(one.timeline, step, command.version, stage, one.digest)
        one.said = [*one.said[-1:], event]
        return event


def begun_world(shape: Shape, sites: Mapping[str, str] | None = None) -> World:
    """A world in which each island has made a step."""
    world = World(shape, 0, sites)
    world.play_until(lambda one: all(one.database[island] for island in range(shape.islands)))
    return world


def play(shape: Shape, seed: int, turns_max: int = 20_000) -> History:
    """Play a job to its end; the history, which ends with `Ended`."""
    world = World(shape, seed)
    world.finish(turns_max)
    return world.history


# Checkers ------------------------------------------------------------------------------------------------------------

Checker: TypeAlias = Callable[[History, Shape], Iterator[str]]


def course_of(shape: Shape, island: int) -> OuterCourse:
    streams = shape.fragments > 1 or shape.overlap > 0
    return OuterCourse(
        IslandCourse(shape.steps, shape.lease, shape.islands, island), shape.fragments, shape.overlap, streams
    )


def leases_of(shape: Shape, cuts: Iterable[Cut] = ()) -> Leases:
    """The leases of a job in which these became durable."""
    leases = Leases(shape.islands, shape.microbatches, shape.steps, shape.lease)
    leases.decided = leases.period(0).stop
    for cut in cuts:
        leases.cut(cut)
    return leases


def numbers(portion: int, course: OuterCourse) -> list[int]:
    """What stands for a portion: a number for each fragment."""
    return [portion * course.fragments + fragment for fragment in range(course.fragments)]


def begun(history: History, shape: Shape) -> dict[int, tuple[int, int]]:
    """Each timeline on which an island lived: the version with which it began, and the one of which it is a copy."""
    lives = dict.fromkeys(range(shape.islands), (0, -1))
    for one in history:
        lives |= {fork.timeline: (fork.version, fork.origin) for fork in one.forks} if isinstance(one, Rows) else {}
    return lives


def exchanges(history: History) -> dict[int, Exchanged]:
    """The exchanges, by outer step."""
    made = [one.exchange for one in history if isinstance(one, Rows) and one.exchange is not None]
    return {one.step: one for one in made}


def merged(history: History, shape: Shape, timeline: int, step: int) -> tuple[int, ...]:
    """What the island on a timeline has to merge in an outer step: all since the last capture, or since it began; since
    the one before, if it was late there."""
    course, lives = course_of(shape, timeline % shape.islands), begun(history, shape)
    fragment, first = course.outer_at(step).fragment, course.inner_steps(lives[timeline][0])
    before = [one for one in exchanges(history).values() if one.step < step and timeline in one.late]
    late = {one.step for one in before if next_of_fragment(course, one.step).step == step}
    span = [
        inner for inner in range(course.span(min(late, default=step)).start, course.span(step).stop) if inner >= first
    ]
    return tuple(numbers(course.inner.at(inner).portion, course)[fragment] for inner in span)


def counting(history: History, shape: Shape) -> list[int]:
    """The portions that outer weights are to count in the end: of the islands that took part in each outer step."""
    found = exchanges(history).items()
    return sorted(
        n for step, made in found for timeline in made.islands for n in merged(history, shape, timeline, step)
    )


def rows_in_order(history: History, shape: Shape) -> Iterator[str]:
    """E1, as far as rows show it: each island commits each of its steps once, in order; one that is not lost all."""
    steps: dict[int, list[int]] = {}
    for rows in (record for record in history if isinstance(record, Rows)):
        for row in rows.rows:
            steps.setdefault(row.timeline, []).append(row.step)
    lives, last = begun(history, shape), course_of(shape, 0).steps
    for timeline, made in steps.items():
        if timeline not in lives or made != list(range(lives[timeline][0], lives[timeline][0] + len(made))):
            yield f"E1 timeline {timeline} committed {made}"
    took_part = [timeline for timeline, made in steps.items() if made[-1:] == [last - 1]]
    if shape.stops:
        return
    if not took_part:
        yield "E1 no island made the last step"
    if not shape.may_lose and len(took_part) < shape.islands:
        yield f"E1 only {sorted(took_part)} made the last step, and nobody was lost"


def microbatches_once(history: History, shape: Shape) -> Iterator[str]:
    """E1: what each stage averaged for a step that was committed counts each microbatch of the island's lease once."""
    leases = leases_of(shape)
    summed: dict[tuple[int, int, UnitName, Round], list[tuple[int, int]]] = {}
    for one in history:
        if isinstance(one, Summed):
            of = summed.setdefault((one.timeline, one.step, one.unit, one.round), [])
            of += [(one.stage, index) for index in one.indexes]
        if isinstance(one, Rows) and one.cut is not None and leases.fits(one.cut):
            leases.cut(one.cut)
        for row in one.rows if isinstance(one, Rows) else ():
            course = course_of(shape, row.timeline % shape.islands)
            size = leases.count(row.timeline % shape.islands, course.inner_steps(row.step))
            for unit, made in () if course.is_outer(row.step) else row.rounds.items():
                found = sorted(summed.get((row.timeline, row.step, unit, made), []))
                if found != [(stage, index) for stage in UNITS[unit] for index in range(size)]:
                    yield f"E1 timeline {row.timeline} averaged (stage, microbatch) {found} of {unit} for {row.step}"


def spans_tile(history: History, shape: Shape) -> Iterator[str]:
    """E2: what an island proposed in rounds that were committed is what it trained since the capture before."""
    proposed: dict[tuple[int, int, UnitName], list[tuple[Round, tuple[int, ...]]]] = {}
    for one in history:
        if isinstance(one, Proposed):
            proposed.setdefault((one.timeline, one.step, one.unit), []).append((one.round, one.portions))
    for step, exchange in exchanges(history).items():
        for timeline in exchange.islands:
            trained = merged(history, shape, timeline, step)
            for made in exchange.rounds:
                told = proposed.get((timeline, step, made.unit), [])
                if (found := {portions for number, portions in told if number == made.round}) != {trained}:
                    unit = made.unit
                    yield f"E2 timeline {timeline} proposed {found} of {unit} for step {step}, and trained {trained}"


def portions_once(history: History, shape: Shape) -> Iterator[str]:
    """E3: no portion counts twice in outer weights, and in the end those count whose islands took part."""
    newest = {}
    for one in history:
        if isinstance(one, Merged):
            newest[one.timeline, one.stage] = one
            if twice := [portion for portion, times in one.theta if times != 1]:
                yield f"E3 {one.peer} counts portions {twice} more than once after step {one.step}"
    for one in newest.values():
        counted = [portion for portion, _ in one.theta]
        if one.step == course_of(shape, 0).steps - 1 and counted != counting(history, shape):
            yield f"E3 in the end the outer weights of timeline {one.timeline}, stage {one.stage} count {counted}"


def outer_weights_equal(history: History, shape: Shape) -> Iterator[str]:
    """E4: after an outer step all replicas of all islands hold the same outer weights."""
    held: dict[int, Merged] = {}
    for one in history:
        if isinstance(one, Merged):
            first = held.setdefault(one.step, one)
            if first.theta != one.theta:
                yield f"E4 after step {one.step} {first.peer} holds {first.theta}, {one.peer} {one.theta}"


def exchange_first(history: History, shape: Shape) -> Iterator[str]:
    """E5: a replica merges once the exchange is durable that names its island, and the row of its island; envoys of
    each island that it names hold its means."""
    made: dict[int, Exchanged] = {}
    durable: dict[int, set[int]] = {}
    composed = {
        (record.timeline, record.step, record.unit, record.round) for record in history if isinstance(record, Composed)
    }
    for one in history:
        if isinstance(one, Rows) and (exchange := one.exchange) is not None:
            if exchange.step in made:
                yield f"E5 outer step {exchange.step} was exchanged twice"
            made[exchange.step] = exchange
            for of in exchange.rounds:
                for timeline in exchange.islands:
                    if (timeline, exchange.step, of.unit, of.round) not in composed:
                        yield f"E5 nobody on timeline {timeline} holds {of.unit} of step {exchange.step}, {of.round}"
        for row in one.rows if isinstance(one, Rows) else ():
            if not course_of(shape, row.timeline % shape.islands).is_outer(row.step):
                continue
            durable.setdefault(row.step, set()).add(row.timeline)
            known = made.get(row.step)
            rounds = {of.unit: of.round for of in known.rounds} if known is not None else {}
            if known is None or row.timeline not in known.islands + known.late or row.rounds != rounds:
                yield f"E5 the row of outer step {row.step} on timeline {row.timeline} is not of {known}"
        if isinstance(one, Merged) and (one.step not in made or one.timeline not in durable.get(one.step, set())):
            yield f"E5 {one.peer} merged outer step {one.step}, durable on timelines {durable.get(one.step)}"


def anchor_gap(history: History, shape: Shape) -> Iterator[str]:
    """Islands hold one of two outer versions: an exchange is made once a replica of each stage of all that it names has
    made the one before."""
    merged = {(timeline, stage): 0 for timeline in range(shape.islands) for stage in range(STAGES)}  # newest version
    before = 0
    for one in history:
        if isinstance(one, Merged):
            place = (one.timeline, one.stage)
            merged[place] = max(one.step + 1, merged.get(place, 0))
        if isinstance(one, Rows) and (exchange := one.exchange) is not None:
            for timeline in exchange.islands + exchange.late:
                if (found := [merged.get((timeline, stage)) for stage in range(STAGES)]) != [before] * STAGES:
                    yield f"timeline {timeline} is at {found}, and {exchange} is made behind {before}"
            before = exchange.step + 1
        for fork in one.forks if isinstance(one, Rows) else ():
            merged |= {(fork.timeline, stage): fork.version for stage in range(STAGES)}


def quorum(history: History, shape: Shape) -> Iterator[str]:
    """An exchange has `least` islands, whose envoys composed one mean."""
    means: dict[tuple[int, UnitName, Round], set[str]] = {}
    for one in history:
        if isinstance(one, Composed):
            means.setdefault((one.step, one.unit, one.round), set()).add(one.mean)
        if isinstance(one, Rows) and (exchange := one.exchange) is not None:
            if len(exchange.islands) < max(1, shape.least):
                yield f"{exchange} has fewer islands than {shape.least}"
            found = [means.get((exchange.step, of.unit, of.round), set()) for of in exchange.rounds]
            if any(len(each) != 1 for each in found):
                yield f"the envoys of {exchange} composed {found}"


def late_once(history: History, shape: Shape) -> Iterator[str]:
    """An island that was late is in the next exchange of the fragment, or lost; none is late behind which it ends, or
    the job is saved, or an island begins."""
    made, course = exchanges(history), course_of(shape, 0)
    kept = {one.steps for one in history if isinstance(one, Kept)}
    forks = {fork.version for one in history if isinstance(one, Rows) for fork in one.forks}
    for step, one in made.items():
        if not one.late:
            continue
        if course.outer_at(step).behind == shape.steps:
            yield f"{one} is the last of its fragment"
            continue
        following = next_of_fragment(course, step).step
        if following in made and {*one.late} & {*made[following].late}:
            yield f"{one} and then {made[following]}"
        for version in range(step + 1, following + 1):
            behind = made.get(version - 1)
            is_there = behind is not None and {*one.late} & {*behind.islands, *behind.late}
            is_used = version in forks or (
                course.inner_steps(version) in kept and course.level_from(version) == version
            )
            if is_there and is_used:
                yield f"the job is saved or divided with version {version} behind {one}"


def islands_together(history: History, shape: Shape) -> Iterator[str]:
    """E6: an island trains behind an outer step only if it took part in it, or began behind it as a copy of another."""
    may: dict[int, int] = dict.fromkeys(range(shape.islands), 0)  # up to the outer step behind this version
    for one in history:
        for row in one.rows if isinstance(one, Rows) else ():
            course = course_of(shape, row.timeline % shape.islands)
            behind = course.outer_before(row.step)
            if may.get(row.timeline) != behind:
                yield f"E6 timeline {row.timeline} made step {row.step}, and took part up to {may.get(row.timeline)}"
            if course.is_outer(row.step):
                may[row.timeline] = row.step + 1
        may |= {fork.timeline: fork.version for fork in one.forks} if isinstance(one, Rows) else {}


def leases_tile(history: History, shape: Shape) -> Iterator[str]:
    """Leases of a period give its microbatches to the islands that had them, from steps on that nobody has begun; and
    each island trains in each step what was durable when that began, and something."""
    leases = leases_of(shape)
    computed: dict[tuple[int, int, int], set[int]] = {}
    begun: dict[int, int] = {}  # by island: inner steps
    for one in history if shape.by_speed else ():
        if isinstance(one, Computed):
            island = one.timeline % shape.islands
            inner = course_of(shape, island).inner_steps(one.step)
            computed.setdefault((one.timeline, one.step, one.stage), set()).add(one.index)
            begun[island] = max(begun.get(island, 0), inner + 1)
            if inner >= leases.decided:
                yield f"island {island} began step {inner}, and leases were durable up to {leases.decided}"
            if one.index >= leases.count(island, inner):
                yield f"island {island} computed microbatch {one.index} in step {inner}, more than its lease has"
        if isinstance(one, Rows):
            steps = course_of(shape, 0).inner_steps
            begun |= {fork.timeline % shape.islands: steps(fork.version) for fork in one.forks}
        if isinstance(one, Rows) and (cut := one.cut) is not None:
            late = {island for island, step in cut.from_step.items() if cut.leases and step < begun.get(island, 0)}
            if late or not leases.fits(cut):
                yield f"{cut} does not fit; islands {late} have begun these steps"
                return
            leases.cut(cut)
        for row in one.rows if isinstance(one, Rows) else ():
            course = course_of(shape, row.timeline % shape.islands)
            size = leases.count(row.timeline % shape.islands, course.inner_steps(row.step))
            for stage in range(STAGES) if not course.is_outer(row.step) else ():
                if (made := computed.get((row.timeline, row.step, stage), set())) != set(range(size)) or not size:
                    yield f"timeline {row.timeline} made {sorted(made)} of step {row.step}; its lease has {size}"


def checkpoints_level(history: History, shape: Shape) -> Iterator[str]:
    """A checkpoint has a part of every stage of islands that took part in the outer step before it: of all, if none may
    be lost. They are numbered by island, without gaps. Each counts what all had merged, and has pending what it has
    trained and not proposed."""
    for at, kept in enumerate(history):
        if not isinstance(kept, Kept):
            continue
        before = history[:at]
        first = max((n for n, record in enumerate(before) if isinstance(record, Saving)), default=0)
        parts = {
            (record.number, record.stage): (record.timeline, record.pending, record.theta)
            for record in before[first:]
            if isinstance(record, HandedOver) and record.steps == kept.steps and record.number >= 0  # it has a part
        }
        exchanged = exchanges(before).get(course_of(shape, 0).version_after(kept.steps) - 1)
        took_part = () if exchanged is None else exchanged.islands
        saved = {timeline for timeline, _, _ in parts.values()} & {*took_part} if shape.may_lose else took_part
        theta = tuple((portion, 1) for portion in counting_up_to(before, shape, kept.steps))
        lives = begun(before, shape)
        wanted = {
            (number, stage): (timeline, pending(shape, lives, timeline, kept.steps), theta)
            for number, timeline in enumerate(sorted(saved, key=lambda timeline: timeline % shape.islands))
            for stage in range(STAGES)
        }
        if parts != wanted or not parts:
            yield f"the checkpoint after step {kept.steps} has {parts}"


def pending(shape: Shape, lives: dict[int, tuple[int, int]], timeline: int, steps: int) -> tuple[int, ...]:
    """What the island on a timeline has trained in so many inner steps, and not proposed yet."""
    course = course_of(shape, timeline % shape.islands)
    first = [course.inner_steps(lives[timeline][0])] * course.fragments
    for merge in course.outer:
        if merge.behind <= steps:
            first[merge.fragment] = max(first[merge.fragment], merge.captured)
    found = [numbers(course.inner.at(inner).portion, course) for inner in range(steps)]
    return tuple(n for inner, of in enumerate(found) for n, since in zip(of, first, strict=True) if inner >= since)


def counting_up_to(history: History, shape: Shape, steps: int) -> list[int]:
    """As `counting`, of the outer steps up to so many inner steps."""
    course = course_of(shape, 0)
    last = course.version_after(steps)
    kept = [
        replace(record, exchange=None)
        if isinstance(record, Rows) and record.exchange is not None and record.exchange.step >= last
        else record
        for record in history
    ]
    return counting(kept, shape)


def stops_in_time(history: History, shape: Shape) -> Iterator[str]:
    """A pause that was asked for is kept at the next level version behind which no island owes what it has trained, or
    people are told that the job goes on."""
    trained: int | None = None  # such versions since it was asked for
    course, settled = course_of(shape, 0), 0
    for one in history:
        if isinstance(one, Asked):
            trained = 0
        elif isinstance(one, GoesOn):
            trained = None
        elif isinstance(one, Rows) and (made := one.exchange) is not None:
            if made.late and course.outer_at(made.step).behind < shape.steps:
                settled = max(settled, next_of_fragment(course, made.step).step + 1)
            is_level = settled <= made.step + 1 == course.level_from(made.step)
            trained = None if trained is None else trained + is_level
            if trained is not None and trained > 1:
                yield "a pause was asked for, and the job trains on"


def succeeds(history: History, shape: Shape) -> Iterator[str]:
    """The job ends well, or paused if a person may ask for that: what is done to it may cost time only."""
    ends = [record for record in history if isinstance(record, Ended)]
    if len(ends) != 1 or ends[0].state not in ("succeeded", *(["paused"] if shape.stops else [])):
        yield f"it ended as {ends}"


CHECKERS: tuple[Checker, ...] = (
    rows_in_order,
    microbatches_once,
    spans_tile,
    portions_once,
    outer_weights_equal,
    exchange_first,
    anchor_gap,
    quorum,
    late_once,
    islands_together,
    leases_tile,
    checkpoints_level,
    stops_in_time,
    succeeds,
)


def faults(history: History, shape: Shape) -> list[str]:
    return [fault for checker in CHECKERS for fault in checker(history, shape)]
