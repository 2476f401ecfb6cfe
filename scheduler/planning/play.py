"""The play: the scheduler's own brain leads modelled stage servers in virtual time. Its tokens/s are the prediction.

    trace ──▶ Membership, allocate ──▶ JobBrain ──▶ commands ──▶ modelled stage servers (stage_servers.py)
                                          ▲                         │ tensors by links: the sender's line, the way,
                                          └──────── events ─────────┘ the receiver's line; first come, first served

Nothing that decides is written again. Computations vary (lognormal). A joiner fetches its stage from the donor with the
fastest way. A job that stalls goes back to its newest checkpoint, once its stages can be served. Measured steps have
others behind them: the last step of a job is faster, since nothing is fed behind it.

Of a job with islands IslandsBrain leads all. Envoys send what islands propose beside boundary tensors: on a line or a
link one proposal goes after the other. Islands send all numbers, significant or not. Decision: docs/decisions/240.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from random import Random
from typing import TypeAlias

from scheduler.brain import inputs, outputs
from scheduler.brain.fleet.allocation import ActiveJob, PendingJob, Reservations, allocate, cut_here
from scheduler.brain.fleet.membership import NO_FELLOWS, Fellows, Membership, Peer, Transition
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.job import JobBrain
from scheduler.brain.settings import DEADLINES, REBALANCING, BrainSettings, DeadlineSettings
from scheduler.planning.bound import COMMIT_S, CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.pool import PeerPool, PoolPeer, candidates
from scheduler.planning.rounds import RoundTimes
from scheduler.planning.stage_servers import HopPart, ModelledServer, Turn
from scheduler.planning.trace import TraceEvent
from swarm.errors import BUG_HINT, SwarmError
from swarm.job.course import PLAIN, OuterCourse
from swarm.job.footprint import model_costs, stage_footprint
from swarm.job.islands import island_timeline, leases_of, outer_courses
from swarm.job.leases import Leases
from swarm.job.partition import microbatch_tokens, unit_names
from swarm.job.placement import Candidate
from swarm.job.resolve import PROPOSAL_BYTES
from swarm.job.spec import JobSpec
from swarm.text import counted
from swarm.types import PROTOCOL_VERSION, Decision, Hop, JobId, Memory, PeerId, PeerState, UnitName
from swarm.wire import messages

JOB = JobId("play")
LOOK_S = 0.5  # at who is silent
STALLS_MAX = 10  # on the way to a step: then the job stalls for ever
Leader: TypeAlias = JobBrain | IslandsBrain
Door: TypeAlias = Callable[[inputs.Input, float], list[outputs.Output]]


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job asks of each of its stages, one microbatch and one step at a time; with `islands`, in each island."""

    microbatches: int  # of a step; of an island's at most
    tokens: int  # of a microbatch
    work: tuple[float, ...]  # multiply-adds of a forward
    boundary_bytes: float  # of an activation, or of a gradient
    units: Mapping[UnitName, tuple[int, ...]]  # the stages that average each
    unit_bytes: Mapping[UnitName, float]
    state_bytes: tuple[int, ...]  # that a joiner fetches
    apply_s: tuple[float, ...]  # of an optimizer step
    reach_s: float = 0.0  # to the scheduler, one way
    needs: tuple[Memory, ...] = ()
    max_in_flight: int | None = None
    min_replicas: int = 1
    adds_up: bool = True  # the parts of a site, where that makes rounds shorter
    job: JobSpec | None = None  # as resolved; None: it has no islands, and is not cut anew
    moved: Mapping[UnitName, float] = field(default_factory=dict)  # the numbers of each unit in an exchange

    @property
    def islands(self) -> JobSpec | None:
        """The job, if it has outer steps."""
        return self.job if self.job is not None and self.job.has_outer_steps else None

    @property
    def step_tokens(self) -> int:
        """Of a step of the job."""
        return self.tokens * (self.job.training.microbatches if self.job is not None else self.microbatches)

    @property
    def pending(self) -> PendingJob:
        """The job as it waits for idle peers, with the stages of all islands."""
        count, needs = self.job.island_count if self.job else 1, self.needs or (Memory(),) * len(self.work)
        most = len(needs) * count * self.job.limits.max_replicas if self.job else 0
        return PendingJob(JOB, needs * count, self.min_replicas, 0.0, peers_max=most or None, islands=count)

    def placed(self, peers: Iterable[PoolPeer]) -> Decision[dict[PeerId, int]]:
        """Where a scheduler places idle peers when the job starts: on the stages of all islands, one by one."""
        return self.pending.plan(candidates(peers))


def workload(facts: CutBound, job: JobSpec | None = None) -> Workload:
    """What a resolved job asks of the stages of a cut. If it has islands, `facts` are of one of them."""
    job = job or facts.spec
    spec, stages = facts.spec, len(facts.split)
    tokens, units = microbatch_tokens(spec), unit_names(stages, spec.tied and stages > 1)
    unit_bits = (*facts.unit_bits, facts.tied_bits)
    fragments = float(job.outer.fragments) if job.has_outer_steps else 1.0
    feet = [stage_footprint(spec, layers, stage, stages) for stage, layers in enumerate(facts.split)]
    limit = spec.pipeline.max_in_flight
    return Workload(
        spec.training.microbatches, tokens, work=tuple(tokens * flops for flops in facts.flops),
        boundary_bytes=facts.boundary_bits / 8.0, units=units,
        unit_bytes={unit: bits / 8.0 for unit, bits in zip(units, unit_bits, strict=False)},
        state_bytes=tuple(foot.weights + foot.optimizer for foot in feet), apply_s=(facts.optimizer_s,) * stages,
        reach_s=(facts.commit_s - COMMIT_S) / 4.0, needs=facts.needs, max_in_flight=None if limit == "auto" else limit,
        min_replicas=spec.limits.min_replicas, adds_up=facts.adds_up, job=job,
        moved={unit: count / fragments for unit, count in zip(units, facts.unit_parameters, strict=False)},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlayRules:
    """How stage servers and their messages behave, and how much of a play is measured."""

    warm_up: int = 3  # steps
    measured: int = 8
    noise: float = 0.05  # of computations: sigma of a lognormal
    forward: float = 1.0 / 3.0  # of the time of forward and backward together
    owed_max: int = 0  # microbatches that may owe the gradients of their weights: 0 splits none
    looks_ahead: bool = True  # where some are late, an order waits on the device behind that which runs
    between_s: float = 0.001  # of a stage server's event loop, between two computations
    message_s: float = 0.0005  # to the scheduler or back, beside the way
    tensor_s: float = 0.002  # to pack and unpack a boundary tensor
    round_s: float = 0.01  # beside bytes and ways
    row_s: float = 0.004
    checkpoint_s: float = 600.0
    deadlines: DeadlineSettings = DEADLINES


RULES = PlayRules()


@dataclass(frozen=True, slots=True)
class Played:
    """What a play shows."""

    tokens_per_s: float
    step_s: float
    idle_ratio: float  # of the devices, while it was measured
    hops: int


@dataclass(slots=True, eq=False)
class _Averaging:
    """One attempt to average a unit: it begins once all members were told, hold their sets, and have read them."""

    command: messages.Average | messages.Exchange
    shares: Mapping[PeerId, int]  # microbatches of each member; of envoys none
    told: set[PeerId] = field(default_factory=set)
    asked: set[PeerId] = field(default_factory=set)
    read: int = 0


def _shares(command: messages.Average | messages.Exchange) -> dict[PeerId, int]:
    if isinstance(command, messages.Exchange):
        return {envoy.peer: 0 for envoy in command.envoys}
    return {member.peer: member.microbatches for member in command.members}


class Play:
    """One job, its brain and its stage servers. `decides` wraps the door of each brain, for a caller that watches."""

    def __init__(
        self,
        pool: PeerPool,
        plan: Plan,
        load: Workload,
        rules: PlayRules = RULES,
        seed: int = 0,
        decides: Callable[[Door], Door] = lambda door: door,
    ) -> None:
        self.now_s, self.hops = 0.0, 0
        self.committed_s: list[float] = []  # when each step of the job was committed, by all islands at work
        self.made: dict[tuple[int, int], tuple[float, int]] = {}  # by step and island: when, and how many tokens
        self.counts: Counter[str] = Counter()  # deaths, moves, stalls, ...
        self.reasons: Counter[str] = Counter()
        self.servers: dict[PeerId, ModelledServer] = {}
        self.brain: Leader
        self.courses: Sequence[OuterCourse] = ()  # of each island, if the job has any
        self._plan, self.load, self._rules, self._decides = plan, load, rules, decides
        self._peers = {PeerId(peer.name): peer for peer in pool.peers}
        self._pool, self._round_times = pool, RoundTimes(pool, adds_up=load.adds_up)
        self._rng, self._seed = Random(seed), seed
        self._timers: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = count()
        self._due_s = math.inf
        self._kept, self._kept_s = 0, 0.0  # the steps in the newest checkpoint, and when it was kept
        self._rows: dict[tuple[int, int], dict[int, list[Turn | None]]] = {}  # by timeline and step, then index
        self._rounds: dict[tuple[int, int, UnitName], _Averaging] = {}  # by timeline (-1: of all islands), step, unit
        self._ways: dict[tuple[PeerId, PeerId], tuple[float, float, tuple[str, str]]] = {}
        self._free_s: dict[tuple[str, str], float] = {}  # when what all peers of two ends share has carried all
        self._proposed_s: dict[object, float] = {}  # when a line or a link has carried all proposals
        self._means: dict[PeerId, int] = {}  # the newest outer step whose mean a peer has
        self._cut_at_s, self._stalled = math.inf, ""  # when a stalled job is cut anew, and why it stalled
        self._captured = 0  # the inner steps that count in outer weights
        self._membership, self._reservations = Membership(), Reservations()
        self._at_start = sum(map(len, plan.places))
        placed = {PeerId(name): stage for stage, names in enumerate(plan.places) for name in names}
        for name in placed:
            self._enter(name)
        self._begin(placed)

    # Running ---------------------------------------------------------------------------------------------------------

    def run(self) -> Played:
        """Play the warm-up, and then what is measured."""
        first, steps = self._rules.warm_up, self._rules.measured
        busy_s = -self.until(first) + self.until(first + steps)
        seconds = self.committed_s[first + steps - 1] - self.committed_s[first - 1]
        tokens_per_s = self.load.step_tokens * steps / seconds
        return Played(tokens_per_s, seconds / steps, 1.0 - busy_s / (seconds * len(self.servers)), self.hops)

    def until(self, step: int, end_s: float = math.inf) -> float:
        """Play until so many steps are committed, or the end; gives for how many seconds devices have computed.

        SwarmError if the job stalls too often on the way, or comes to rest.
        """
        stalls = self.counts["stalls"] + STALLS_MAX
        while len(self.committed_s) < step and self.now_s <= end_s:
            if not self._timers or self.counts["stalls"] == stalls:
                why = self._stalled or "nothing more happens"
                raise SwarmError(f"in its play the job never makes {counted(step, 'step')}: {why}", hint=BUG_HINT)
            self.turn()
        return sum(server.busy_s for server in self.servers.values())

    def run_until(self, end_s: float, progress: Callable[[float], None] = lambda now_s: None) -> None:
        """Play until this time; `progress` hears of the time now and then."""
        while self._timers and self._timers[0][0] <= end_s:
            self.turn()
            progress(self.now_s)
        self.now_s = end_s

    def turn(self) -> None:
        """Go on to what comes next."""
        at_s, _, act, values = heapq.heappop(self._timers)
        while self._due_s < at_s:
            self.now_s = self._due_s
            self._step(inputs.Tick())
        self.now_s = at_s
        act(*values)

    def later(self, seconds: float, act: Callable[..., None], *values: object) -> None:
        heapq.heappush(self._timers, (self.now_s + seconds, next(self._number), act, values))

    def _step(self, happened: inputs.Input) -> None:
        """Tell the brain, and carry out what it decides."""
        decided = self._decide(happened, self.now_s)
        self._due_s = self.brain.due_s
        for output in decided:
            match output:
                case outputs.Send(peer=peer, command=command):
                    self._send(peer, command)
                case outputs.WriteCommit(row=row):
                    self.later(self._rules.row_s, self._durable, self.brain, outputs.WriteRows((row,)))
                case outputs.WriteRows():
                    self.later(self._rules.row_s, self._durable, self.brain, output)
                case outputs.IslandLost(island=island):
                    self.counts["islands_lost"] += 1
                    self._forget(self._captured, island)
                case outputs.Note(message=message):
                    self.reasons[message] += 1
                case outputs.Released(peer=peer, reason=reason):
                    self._hear(self._membership.release(peer, self.now_s, reason))
                    self.later(0.0, self._allocate)
                case outputs.Independent(peer=peer):
                    self._hear(self._membership.serving(peer, self.now_s))
                case outputs.Left(peer=peer, target=target) if target is not None:
                    self.counts["moves"] += 1
                    self._reservations.reserve(peer, JOB, target, self.now_s)
                case outputs.Stopped():
                    self._stall(output)
                case outputs.Fail():
                    raise AssertionError(output)

    def _durable(self, brain: Leader, written: outputs.WriteRows) -> None:
        if brain is not self.brain or brain.is_over:
            return
        for row in written.rows:
            self._note(row)
            for unit in self.load.units:
                self._rounds.pop((-1 if self._is_outer(row.step) else row.timeline, row.step, unit), None)
            for turns in self._rows.pop((row.timeline, row.step), {}).values():
                for turn in turns:
                    if turn is not None:
                        self._drop(turn)
        if isinstance(brain, JobBrain):
            self._step(inputs.RowDurable(written.rows[0].step))
        else:
            self._step(inputs.RowsDurable(written.rows, written.shares))

    def _note(self, row: outputs.CommitRow) -> None:
        """A step, of an island if there are any, is on disk."""
        island, version = row.timeline % max(1, len(self.courses)), row.step + 1
        course = self.courses[island] if self.courses else PLAIN
        if course.is_outer(row.step):
            self._captured = course.outer_at(row.step).captured
        else:
            self.made[course.inner_steps(row.step), island] = self.now_s, row.tokens
            present = self.brain.present if isinstance(self.brain, IslandsBrain) else (0,)
            while all((len(self.committed_s), island) in self.made for island in present):
                self.committed_s.append(self.now_s)
        if self.now_s - self._kept_s >= self._rules.checkpoint_s and course.level_from(version) == version:
            self._kept, self._kept_s = course.inner_steps(version), self.now_s

    def _forget(self, step: int, *islands: int) -> None:
        """What was made from a step on does not count: of these islands, or of all."""
        for at, island in [key for key in self.made if key[0] >= step and key[1] in (islands or (key[1],))]:
            del self.made[at, island]

    def _send(self, peer: PeerId, command: messages.Command) -> None:
        server = self.servers[peer]
        turn = self._turn_of(server, command) if isinstance(command, messages.Route) else None
        if not isinstance(command, messages.Route) or turn is not None:
            self.later(self.load.reach_s + self._rules.message_s, self._obey, server, self.brain, command, turn)

    def _say(self, server: ModelledServer, event: messages.Event, after_s: float = 0.0) -> None:
        after_s += self.load.reach_s + self._rules.message_s
        self.later(after_s, self._heard, server, server.life, self.brain, event)

    def _heard(self, server: ModelledServer, life: object, brain: Leader, event: messages.Event) -> None:
        if server.is_alive and brain is self.brain and not brain.is_over:
            self._step(inputs.Happened(server.name, event))

    def _move(self, source: ModelledServer, target: ModelledServer, size_bytes: float) -> float:
        """When a tensor has arrived that is sent now: each line and the way between carry one thing after the other."""
        names, pool = (source.name, target.name), self._pool
        a, b = self._peers[source.name], self._peers[target.name]
        if names not in self._ways:
            link, ends = pool.link(a, b), (pool.end_of(a), pool.end_of(b))
            self._ways[names] = link.delay_s, link.bits_per_s, names if ends[0] == ends[1] else ends
        delay_s, bits_per_s, way = self._ways[names]
        bits = 8.0 * size_bytes
        begins_s = max(self.now_s, source.up_free_s)
        source.up_free_s = ends_s = begins_s + bits / a.up_bits_per_s
        if bits_per_s < max(a.up_bits_per_s, b.down_bits_per_s):  # else it never holds anything up
            begins_s = max(begins_s, self._free_s.get(way, 0.0))
            self._free_s[way] = ends_s = max(ends_s, begins_s + bits / bits_per_s)
        begins_s = max(begins_s + delay_s, target.down_free_s)
        target.down_free_s = ends_s = max(ends_s + delay_s, begins_s + bits / b.down_bits_per_s)
        return ends_s

    def _carry(self, source: Turn, target: Turn, *, forward: bool, asked: bool = False) -> None:
        """Send y or dx to the neighbour, which may have asked for it."""
        if not (source.server.is_alive and target.server.is_alive):
            return
        ends_s = self._move(source.server, target.server, self.load.boundary_bytes)
        if asked:
            ends_s += self._pool.delay_s(target.server.name, source.server.name)
        self.later(ends_s - self.now_s + self._rules.tensor_s, self._arrived, target, forward)

    def _arrived(self, turn: Turn, forward: bool) -> None:
        turn.x, turn.g = turn.x or forward, turn.g or not forward
        self._advance(turn)

    # Microbatches ----------------------------------------------------------------------------------------------------

    def _turn_of(self, server: ModelledServer, route: messages.Route) -> Turn | None:
        """The turn that a route gives to a stage server; None if it names another, or gives nothing new."""
        stage, where = server.stage, route.microbatch
        hop = route.hops[stage]
        if hop.peer != server.name:
            return None
        row = self._rows.setdefault((where.timeline, where.step), {}).setdefault(where.index, [None] * len(route.hops))
        before = row[stage]
        if before is not None and before.server is server and not before.is_over:
            if before.attempt < hop.attempt:
                before.attempt = hop.attempt
                if before.is_added:
                    self._report(before)
            return None
        if before is not None:
            self._drop(before)
        row[stage] = turn = Turn(where, server, row, hop.attempt, route.version < where.step)
        if before is not None:  # it asks its neighbours for what they sent to another
            self._ask(turn)
        return turn

    def _ask(self, turn: Turn) -> None:
        stage, row = turn.server.stage, turn.row
        if stage and (giver := row[stage - 1]) is not None and giver.y:
            self._carry(giver, turn, forward=True, asked=True)
        if stage + 1 < len(row) and (giver := row[stage + 1]) is not None and giver.dx:
            self._carry(giver, turn, forward=False, asked=True)

    def _drop(self, turn: Turn) -> None:
        turn.is_over = True
        if turn.dx and not turn.is_added:
            turn.server.owed -= 1

    def _advance(self, turn: Turn) -> None:
        if turn.server.is_alive and (part := turn.next()) is not None:
            turn.server.put(turn, part)

    def draw_s(self, server: ModelledServer, part: HopPart) -> float:
        """What a part of a microbatch takes at a stage server now."""
        rules = self._rules
        whole_s = self.load.work[server.stage] / self._peers[server.name].speed
        shares = (rules.forward, 1.0 - rules.forward)
        share = shares[part is not HopPart.FORWARD]
        if part in (HopPart.INPUTS, HopPart.WEIGHTS):  # of a backward that is split: half each
            share /= 2.0
        return whole_s * share * math.exp(self._rng.gauss(0.0, rules.noise))

    def computed(self, turn: Turn, part: HopPart, seconds: float, wait_s: float) -> None:
        """A stage server has computed a part of a microbatch."""
        if turn.is_over:
            return
        server, row = turn.server, turn.row
        stage, is_last = server.stage, server.stage == len(row) - 1
        if part is HopPart.FORWARD:
            turn.y, turn.forward_s, turn.wait_s = True, turn.forward_s + seconds, turn.wait_s + wait_s
            if is_last:
                turn.g = True
            else:
                self._say(server, messages.Forwarded(turn.microbatch, stage, turn.attempt))
                if (behind := row[stage + 1]) is not None and not behind.x:
                    self._carry(turn, behind, forward=True)
        else:
            turn.backward_s += seconds
            if part is not HopPart.WEIGHTS:
                turn.dx, turn.wait_s = True, turn.wait_s + wait_s
                if stage and (before := row[stage - 1]) is not None and not before.g:
                    self._carry(turn, before, forward=False)
            if part is not HopPart.INPUTS:
                turn.is_added = True
                self.hops += 1
                where = turn.microbatch
                server.added.setdefault((where.timeline, where.step), set()).add(where.index)
                self._report(turn)
                for unit, stages in self.load.units.items():  # a round that was told ahead may wait for this
                    if stage in stages and (known := self._rounds.get((where.timeline, where.step, unit))) is not None:
                        self._try(known, server)
        self._advance(turn)

    def _report(self, turn: Turn) -> None:
        loss = 1.0 if turn.server.stage == len(turn.row) - 1 else 0.0
        times = turn.forward_s, turn.backward_s, turn.wait_s
        where = turn.microbatch, turn.server.stage, turn.attempt
        self._say(turn.server, messages.Accumulated(*where, True, loss, *times))

    def _void(self, server: ModelledServer, void: messages.Void) -> None:
        """Compute again what was added up for a step."""
        server.added.pop((void.timeline, void.step), None)
        for row in self._rows.get((void.timeline, void.step), {}).values():
            turn = row[server.stage]
            if turn is not None and turn.server is server and turn.is_added:
                turn.y = turn.dx = turn.is_added = False
                self._advance(turn)

    def _obey(self, server: ModelledServer, brain: Leader, command: messages.Command, turn: Turn | None) -> None:
        if not server.is_alive or brain is not self.brain:
            return
        match command:
            case messages.Route() if turn is not None:
                turn.is_told, turn.x = True, turn.x or not server.stage
                self._advance(turn)
            case messages.Average() | messages.Exchange():
                where = -1 if isinstance(command, messages.Exchange) else command.timeline, command.step, command.unit
                known = self._rounds.get(where)
                if known is None or known.command.round < command.round:
                    known = self._rounds[where] = _Averaging(command, _shares(command))
                known.told.add(server.name)
                self._try(known, server)
            case messages.AbortRound(timeline=timeline, step=step, unit=unit, round=number):
                where = -1 if self._is_outer(step) else timeline, step, unit
                if (known := self._rounds.get(where)) is not None and known.command.round == number:
                    del self._rounds[where]
                    if isinstance(known.command, messages.Average) and known.read == len(known.shares):
                        self._round_times.aborted(known.command)
            case messages.Commit(step=step):
                if not self._is_outer(step) or self._means.get(server.name) == step:
                    self._apply(server, server.life, command)
                else:  # it was no envoy
                    moved = sum(self.load.moved[unit] for unit, at in self.load.units.items() if server.stage in at)
                    fetch_s = self._fetch_s(server, command.donors, 4.0 * moved)
                    self.later(fetch_s, self._apply, server, server.life, command)
            case messages.Void():
                self._void(server, command)
            case messages.LoadStage():
                self._serve(server, command)
            case messages.Follow() if command.join == server.join:
                if server.follow is None:
                    fetch_s = self._fetch_s(server, command.donors, self.load.state_bytes[server.stage])
                    server.fetched_s = self.now_s + fetch_s
                    self.later(fetch_s, self._offer, server, server.life)
                server.follow = command
                self._offer(server, server.life)
            case messages.Release():
                server.serve(-1)

    def _is_outer(self, step: int) -> bool:
        """Whether islands exchange there."""
        return bool(self.courses) and self.courses[0].is_outer(step)

    def _serve(self, server: ModelledServer, command: messages.LoadStage) -> None:
        load, rules, is_late = self.load, self._rules, 0 < self._plan.overlap < self.load.microbatches
        stage, join = command.stage, command.join
        late_behind, ahead = is_late and stage < len(load.work) - 1, is_late and rules.looks_ahead
        server.serve(stage, join=join, late_behind=late_behind, ahead=ahead, owed_max=rules.owed_max)
        server.timeline = command.timeline
        if not join:  # a first start takes no time, a later one fetches all states from the scheduler
            fetch_s = 8.0 * load.state_bytes[stage] / self._peers[server.name].down_bits_per_s
            is_here = command.held or not self.counts["stalls"]
            self._say(server, self._loaded(server, command.version), 0.0 if is_here else fetch_s)

    def _loaded(self, server: ModelledServer, version: int) -> messages.Loaded:
        sizes = self.load.unit_bytes.items()
        units = tuple(
            messages.UnitSize(unit, int(size / 4.0)) for unit, size in sizes if server.stage in self.load.units[unit]
        )
        at = JOB, server.timeline, server.stage, version
        return messages.Loaded(*at, f"{server.stage}.{version}", units, join=server.join)

    def _apply(self, server: ModelledServer, life: object, commit: messages.Commit) -> None:
        if life is server.life and server.is_alive:
            server.run(self.load.apply_s[server.stage], lambda: self._applied(server, commit))

    def _applied(self, server: ModelledServer, commit: messages.Commit) -> None:
        server.added.pop((commit.timeline, commit.step), None)
        server.committed()
        digest = f"{server.stage}.{commit.version}"
        self._say(server, messages.Committed(commit.timeline, commit.step, commit.version, server.stage, digest))

    def _try(self, round_: _Averaging, server: ModelledServer) -> None:
        """A member that was told of a round, and holds its set, reads its sums behind what its device has."""
        at = round_.command.timeline, round_.command.step
        is_told = server.name in round_.told and server.name not in round_.asked
        if is_told and len(server.added.get(at, ())) == round_.shares[server.name]:
            round_.asked.add(server.name)
            server.run(0.0, lambda: self._read(round_))

    def _read(self, round_: _Averaging) -> None:
        """The last member that has read its sums begins the round."""
        round_.read += 1
        if round_.read == len(round_.shares):
            command = round_.command
            if isinstance(command, messages.Exchange):
                seconds = self._exchange_s(command)
            else:
                size_bytes, fixed_s = self.load.unit_bytes[command.unit], self._rules.round_s
                seconds = self._round_times.begun(command, self._peers, size_bytes, fixed_s, self.now_s)
            for name in round_.shares:
                server = self.servers[name]
                self.later(seconds, self._averaged, server, server.life, round_, seconds)

    def _averaged(self, server: ModelledServer, life: object, round_: _Averaging, seconds: float) -> None:
        command, peer = round_.command, self._peers[server.name]
        if life is not server.life or round_ not in self._rounds.values():
            return
        if isinstance(command, messages.Exchange):
            self._means[server.name] = command.step
        where = server.timeline, command.step, command.unit, command.round
        lines = peer.up_bits_per_s / 8.0, peer.down_bits_per_s / 8.0
        self._say(
            server,
            messages.Averaged(*where, "mean", (messages.ParameterNorm(f"{command.unit}.w", 1.0),), seconds, *lines),
        )

    def _exchange_s(self, command: messages.Exchange) -> float:
        """What a round between islands takes: each sends what it proposes to all others; and three of the ways."""
        assert self.load.job is not None
        bits = 8.0 * PROPOSAL_BYTES[self.load.job.outer.compression] * self.load.moved[command.unit]
        ends_s, delay_s = self.now_s, 0.0
        for envoy, other in product(command.envoys, command.envoys):
            if envoy.timeline == other.timeline or not envoy.tokens:
                continue
            a, b = self._peers[envoy.peer], self._peers[other.peer]
            link, ends = self._pool.link(a, b), (self._pool.end_of(a), self._pool.end_of(b))
            way = ends if ends[0] != ends[1] else (envoy.peer, other.peer)
            carriers = (envoy.peer, "up"), way, (other.peer, "down")
            begins_s = max(self.now_s, *(self._proposed_s.get(carrier, 0.0) for carrier in carriers))
            sent_s = begins_s + bits / min(a.up_bits_per_s, link.bits_per_s, b.down_bits_per_s)
            self._proposed_s |= dict.fromkeys(carriers, sent_s)
            ends_s, delay_s = max(ends_s, sent_s), max(delay_s, link.delay_s)
        return ends_s - self.now_s + 3.0 * delay_s + self._rules.round_s

    def _fetch_s(self, server: ModelledServer, donors: Sequence[Hop], size_bytes: float) -> float:
        """How long so much is under way to a server, from the donor with the fastest way."""
        down = self._peers[server.name].down_bits_per_s
        ways = [
            min(self._peers[donor.peer].up_bits_per_s, self._pool.bits_per_s(donor.peer, server.name))
            for donor in donors
        ]
        return 8.0 * size_bytes / min(down, max(ways, default=down))

    def _offer(self, server: ModelledServer, life: object) -> None:
        """A joiner says that it has the newest state that it was told of, unless an answer is still to come."""
        follow, is_here = server.follow, life is server.life and server.is_alive
        if is_here and follow is not None and self.now_s >= server.fetched_s and follow.answered >= server.reports:
            server.reports += 1
            self._say(server, self._loaded(server, follow.version))

    # Peers -----------------------------------------------------------------------------------------------------------

    def come(self, peer: PoolPeer) -> None:
        """A peer starts, or starts anew."""
        name = PeerId(peer.name)
        self._peers[name] = peer
        self._round_times.lines_changed()
        self._enter(name)
        self.later(0.0, self._allocate)

    def die(self, name: str) -> None:
        """A peer falls silent for good."""
        server = self.servers[PeerId(name)]
        self.counts["deaths"] += server.is_alive and server.stage >= 0
        server.is_alive = False

    def leave(self, name: str) -> None:
        """A peer asks to hand its work over; it goes once nothing depends on it."""
        self._hear(self._membership.leaving(PeerId(name), self.now_s))

    def follow(self, trace: Iterable[TraceEvent]) -> None:
        """Let the events of a trace happen, and watch who is silent. Peers without a place are here too, idle."""
        for name in self._peers:
            if name not in self.servers:
                self._enter(name)
        self._await(iter(trace))
        self.watch()

    def _await(self, events: Iterator[TraceEvent]) -> None:
        if (event := next(events, None)) is not None:
            heapq.heappush(self._timers, (event.at_s, next(self._number), self._happen, (event, events)))

    def _happen(self, event: TraceEvent, events: Iterator[TraceEvent]) -> None:
        self._await(events)
        match event.kind:
            case "join":
                self.come(event.peer)
            case "die":
                self.die(event.peer.name)
            case _:
                self.leave(event.peer.name)

    def watch(self) -> None:
        """From now on look at who is silent, and hand out who is idle; without deaths nobody need look."""
        for server in self.servers.values():
            if server.is_alive:
                self._hear(self._membership.heard(server.name, self.now_s))
        self._hear(self._membership.tick(self.now_s, self._fellows_of))
        if self._membership.idle_peers():
            self._allocate()
        self.later(LOOK_S, self.watch)

    def _enter(self, name: PeerId) -> None:
        peer, before = self._peers[name], self.servers.get(name)
        server = self.servers[name] = ModelledServer(name, self, self._rules.between_s)
        server.incarnation = before.incarnation + 1 if before is not None else 1
        memory = peer.memory_bytes or 1 << 62
        hello = messages.Hello(
            name, server.incarnation, PROTOCOL_VERSION, "0", name, "", peer.device, 1, memory, -1, site=peer.site
        )
        self._hear(self._membership.hello(hello, self.now_s))

    def _hear(self, transitions: Sequence[Transition]) -> None:
        """Tell the brain of changed peers, as a driver does."""
        for moved in transitions:
            if moved.after in (PeerState.GONE, PeerState.DRAINING):
                self._reservations.end(moved.peer)
            if moved.job != JOB or self.brain.is_over:
                continue
            if moved.after is PeerState.GONE:
                self._step(inputs.PeerGone(moved.peer, moved.reason))
            elif moved.after is PeerState.SUSPECT:
                self._step(inputs.PeerSuspect(moved.peer, moved.reason, moved.session_lost))
            elif moved.before is PeerState.SUSPECT:
                self._step(inputs.PeerBack(moved.peer))
            if moved.after is PeerState.DRAINING:
                self._step(inputs.AskToLeave(moved.peer, moved.reason))

    def _fellows_of(self, peer: Peer) -> Fellows:
        brain = self.brain
        return brain.fellows_of(peer.hello.peer) if isinstance(brain, IslandsBrain) and peer.job == JOB else NO_FELLOWS

    def _allocate(self) -> None:
        """Let idle peers join, or begin again with them."""
        names = sorted(peer.hello.peer for peer in self._membership.idle_peers())
        load, stages, brain = self.load, len(self.load.work), self.brain
        idle = candidates(self._peers[name] for name in names)
        if brain.is_over:
            if (again := load.pending.plan(idle).plan or self._cut_anew(idle)) is not None:
                self._cut_at_s = math.inf
                self._begin(again)
            return
        here = [peer for peer in self._membership.peers() if peer.job == JOB]
        loading = {peer.hello.peer: peer.stage for peer in here if peer.state is PeerState.LOADING}
        staying = Counter((self._island_of(peer.hello.peer), peer.stage) for peer in here if not peer.leaving)
        islands = brain.present if isinstance(brain, IslandsBrain) else (0,)
        replicas = tuple(min(staying[island, stage] for island in islands) for stage in range(stages))

        def where(peer: Candidate, fits: Collection[int], coming: Mapping[PeerId, int]) -> Decision[int]:
            sent = {**loading, **coming}
            if isinstance(brain, IslandsBrain):
                sites = {name: self._peers[name].site for name in sent}
                return brain.where_to_join(peer, fits, self.now_s, sent, sites)
            return brain.where_to_join(peer, fits, self.now_s, sent)

        moving, (needs, most) = self._reservations.now(self.now_s), (load.pending.needs, load.pending.peers_max)
        room = None if most is None else max(0, most - len(here) - sum(name in moving for name in names))
        job = ActiveJob(JOB, needs[:stages], load.min_replicas, replicas, self._at_start, where, room)
        for join in allocate(idle, idle, (), (job,), moving).joins:
            self._reservations.end(join.peer)
            self._membership.assign(join.peer, JOB, join.stage, self.now_s)
            self.counts["joins"] += 1
            self._step(inputs.Join(self._record(join.peer, join.stage)))

    def _cut_anew(self, idle: Sequence[Candidate]) -> dict[PeerId, int] | None:
        """Where each peer serves, once a job that may be cut anew has waited in vain for stage servers for its cut."""
        job = self.load.job
        if job is None or job.pipeline.recut != "stall" or self.now_s < self._cut_at_s < math.inf:
            return None
        split, decision = cut_here(self.load.pending, model_costs(job), idle, lambda split: True)
        if decision.plan is None or self._cut_at_s == math.inf:
            self._cut_at_s = math.inf if decision.plan is None else self.now_s + job.limits.no_progress_s
            return None
        self.counts["recuts"] += 1
        self._plan = replace(self._plan, split=split)
        self.load = workload(CutBound(self._pool, job.having("pipeline", split=split, stages=len(split))))
        return decision.plan

    def _island_of(self, name: PeerId) -> int:
        return (self.brain.island_of(name) or 0) if isinstance(self.brain, IslandsBrain) else 0

    def _record(self, name: PeerId, stage: int) -> inputs.ReplicaRecord:
        peer = self._peers[name]
        return inputs.ReplicaRecord(name, self.servers[name].incarnation, name, stage, peer.device, site=peer.site)

    def _begin(self, placed: Mapping[PeerId, int]) -> None:
        """Start with each peer at its place: a stage of an island."""
        spec, stages, rng = self.load.islands, len(self.load.work), Random(self._seed + self.counts["stalls"])
        leases = leases_of(spec) if spec is not None else None
        self.courses = outer_courses(spec, leases) if spec is not None else ()
        records: list[list[inputs.ReplicaRecord]] = [[] for _ in self.courses or (PLAIN,)]
        for name, at in placed.items():
            self._reservations.end(name)
            self._membership.assign(name, JOB, at % stages, self.now_s)
            records[at // stages].append(self._record(name, at % stages))
        begin: inputs.Input
        starts, whole = tuple(inputs.Start(tuple(replicas)) for replicas in records), self._settings(leases)
        if spec is None:
            self.brain, begin = JobBrain(whole, rng), starts[0]
        else:
            settings = [
                replace(
                    whole, timeline=island_timeline(spec, whole.timeline, island), steps=course.steps,
                    first_step=course.version_after(self._kept),
                ) for island, course in enumerate(self.courses)
            ]  # fmt: skip
            patience = spec.outer.patience if isinstance(spec.outer.patience, float) else math.inf
            least, silence_s = spec.islands.min, spec.limits.no_progress_s
            self.brain = IslandsBrain(settings, self.courses, rng, least, patience, silence_s)
            begin = inputs.EachIsland(starts)
        self._decide = self._decides(self.brain.step)
        self._step(begin)
        for name in placed:
            self._membership.serving(name, self.now_s)

    def _settings(self, leases: Leases | None) -> BrainSettings:
        """Of the brain, or of an island's; `leases`: where they follow speed."""
        load, job, tokens = self.load, self.load.job, self.load.microbatches * self.load.tokens

        def tokens_of(portion: int) -> int:
            return tokens if leases is None else load.tokens * len(leases.numbers(portion))

        rebalances = job is None or (job.pipeline.rebalance and not job.has_outer_steps)
        return BrainSettings(
            job=JOB, epoch=1, timeline=self.counts["stalls"], steps=1 << 40, microbatches=load.microbatches,
            split=self._plan.split, spec_json="{}", overlap=self._plan.overlap, max_in_flight=load.max_in_flight,
            units=load.units, grad_clip_norm=1.0, averaging_timeout_s=60.0 if job is None else job.averaging.timeout_s,
            fail_on_nonfinite=False, recover=True, learning_rate=lambda step: 0.1, tokens_of=tokens_of, work=load.work,
            first_step=self._kept, state_bytes=load.state_bytes, deadlines=self._rules.deadlines,
            rebalance=replace(REBALANCING, rebalance=rebalances, min_replicas=load.min_replicas),
        )  # fmt: skip

    def _stall(self, stopped: outputs.Stopped) -> None:
        """A stage has no replica left: go back to the newest checkpoint, as soon as all stages can be served."""
        self.counts["stalls"] += 1
        self.counts["steps_done_again"] += len(self.committed_s) - self._kept
        del self.committed_s[self._kept :]
        self._forget(self._kept)
        self._captured, self._stalled = self._kept, stopped.reason
        self.reasons[stopped.reason] += 1
        self._rows.clear()
        self._rounds.clear()
        self._round_times.clear()
        self._due_s = math.inf
        self._reservations.end_of(JOB)
        for name, server in self.servers.items():
            server.serve(-1)
            self._hear(self._membership.release(name, self.now_s, stopped.reason))
        self.later(0.0, self._allocate)
