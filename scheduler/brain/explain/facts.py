"""Why a job waits, why a peer gets little work or none: facts with their numbers, for people.

A fact is a topic and a sentence. Unknown things are left out: a replica that was never measured has no pace, and the
limiting stage is unknown as long as no replica of some stage was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING

from scheduler.brain.explain.step_times import StepTimes
from scheduler.brain.fleet.membership import Peer
from scheduler.brain.fleet.quarantine import TrustRecord
from scheduler.brain.state.pool import Leave
from swarm.text import bandwidth, counted, size, spoken_duration
from swarm.types import IslandState, JobId, JobState, Memory, PeerId, PeerState, UnitName, needs_text
from swarm.wire.messages import LinkSpeed

if TYPE_CHECKING:
    from scheduler.brain.checkpoint.schedule import OpenCheckpoint

# Capacities that differ by less than this share of the greatest are alike.
ALIKE = 0.01
# A replica is called slow if it takes this many times the median of its stage, and fast if the median takes this many
# times what it takes.
UNLIKE_PACE = 1.25
SLOW_BYTES_PER_S = 10e6 / 8  # a link below this is named, with what takes long because of it
SHOWN = 8  # replicas of a stage by name
WAITING_STATES = (JobState.QUEUED, JobState.PLACING, JobState.STALLED)


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement: its topic, a sentence, and the numbers in it by name, units last."""

    topic: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def fact(topic: str, text: str, **numbers: float) -> Fact:
    """A fact whose numbers are all floats."""
    return Fact(topic, text, {name: float(number) for name, number in numbers.items()})


@dataclass(frozen=True, slots=True)
class ReplicaStanding:
    """One replica as its job's brain sees it."""

    peer: PeerId
    stage: int
    pace_s: float  # device seconds per microbatch; 0 = never measured
    outstanding: int  # hops given and not finished
    contributions: int  # microbatches that it accumulated in the open and the newest closed steps
    suspect: bool = False
    leave: Leave | None = None
    asked_s: float = nan  # when it was asked to leave
    needs_donors: bool = False  # it joined, and still needs something that only others have

    @property
    def gets_work(self) -> bool:
        """Whether new microbatches may be given to it."""
        return not self.suspect and (self.leave is None or self.leave.until is None)


@dataclass(frozen=True, slots=True)
class JoinerStanding:
    """A peer that fetches the state of a stage."""

    peer: PeerId
    stage: int
    since_s: float
    has_reported: bool  # its state is complete, and is being compared
    waits: bool = False  # for an exchange between islands, and fetches nothing before


@dataclass(frozen=True, slots=True)
class IslandStanding:
    """One of the islands of a job; peers are by stage."""

    number: int
    steps: int  # that all its replicas made
    exchanges: int  # and outer steps
    peers: tuple[tuple[PeerId, ...], ...]
    waiting_for: str  # and how late it is or was, with what was done about that
    own: Situation | None = None  # as its own brain sees it
    numbers: tuple[int, ...] = ()  # of each of its newest steps, from 1; 0: an outer step
    share: tuple[int, int] | None = None  # of the microbatches of a step, where shares follow speed: so many of all
    state: IslandState = IslandState.TRAINING
    waited_s: Mapping[IslandState, float] = field(default_factory=dict)  # at exchanges so far, in which state
    relieved: int = 0  # microbatches that others train in its place, so far
    late: int = 0  # exchanges so far that were made without it, and it keeps its steps

    @property
    def is_lost(self) -> bool:
        """Whether it has no replicas until it begins anew; its steps and exchanges mean nothing."""
        return not self.peers

    @property
    def microbatches_per_s(self) -> float:
        """How many its slowest stage can do; 0 if that is not known."""
        capacities = [self.own.capacity(stage) or 0.0 for stage in range(self.own.stages)] if self.own else [0.0]
        return min(capacities)


@dataclass(frozen=True, slots=True)
class Situation:
    """A running job as its brain sees it; times are by the scheduler's clock."""

    is_running: bool  # not loading, saving its last checkpoint or gathering after a restart
    stages: int
    agreed: int  # steps on whose commit all replicas agree
    waiting_for: str
    rebalancing: str  # the newest decision's reason
    replicas: tuple[ReplicaStanding, ...]
    joiners: tuple[JoinerStanding, ...] = ()
    moves: int = 0
    newest_move: tuple[PeerId, Leave, float] | None = None  # a replica that was released for another stage, and when
    links: Mapping[tuple[PeerId, PeerId], float] = field(default_factory=dict)  # avoided until then
    checkpoint: OpenCheckpoint | None = None
    rebalanced_s: float = nan  # when that decision was taken; nan = never
    steps: tuple[StepTimes, ...] = ()  # the newest, oldest first
    islands: tuple[IslandStanding, ...] = ()  # of a job with outer steps
    outer_rounds: Mapping[str, int] = field(default_factory=dict)  # between islands so far, by outcome
    state_bytes: tuple[int, ...] = ()  # of each stage, as it is saved; empty: not known
    averages: Mapping[UnitName, str] = field(default_factory=dict)  # in what form, of units whose members name sites

    def island_of(self, peer: PeerId) -> int | None:
        """The island that a peer serves; None if the job has none, or the peer serves none."""
        return next((island.number for island in self.islands for pool in island.peers if peer in pool), None)

    def of_stage(self, stage: int) -> list[ReplicaStanding]:
        """The replicas of a stage, in order of peer id."""
        return sorted((replica for replica in self.replicas if replica.stage == stage), key=attrgetter("peer"))

    def capacity(self, stage: int) -> float | None:
        """Microbatches per second of the replicas that get work; None if no replica was ever measured.

        Unmeasured replicas count like the fastest of the stage, as in routing.
        """
        at_work = [replica for replica in self.of_stage(stage) if replica.gets_work]
        measured = [replica.pace_s for replica in at_work if replica.pace_s > 0.0]
        if at_work and not measured:
            return None
        return sum(1.0 / (replica.pace_s or min(measured)) for replica in at_work)

    def limiting(self) -> int | None:
        """The stage with the least capacity; None if it is not known, or if no stage stands out."""
        capacities = [self.capacity(stage) for stage in range(self.stages)]
        known = [capacity for capacity in capacities if capacity is not None]
        if len(known) < self.stages or self.stages < 2 or min(known) >= max(known) * (1.0 - ALIKE):
            return None
        return known.index(min(known))

    def get(self, peer: PeerId) -> ReplicaStanding | None:
        return next((replica for replica in self.replicas if replica.peer == peer), None)


@dataclass(frozen=True, slots=True)
class JobStanding:
    """The facts about a job that need no brain; `needs` is what a replica of each stage takes."""

    id: JobId
    state: JobState
    reason: str
    for_s: float  # in this state
    hint: str
    step: int
    steps: int
    microbatches: int  # per step
    step_s: float  # per step lately; nan = not known
    needs: tuple[Memory, ...]
    min_replicas: int
    overlap: int = 0  # microbatches of a step that use weights one step old
    goes_back: int = 0  # the step to which it would go back now, if it lost a stage
    host_step_s: float = 0.0  # that the optimizer of the largest stage takes on a core of its host; 0: on the device


@dataclass(frozen=True, slots=True)
class IdlePeer:
    """A peer without work, and why each running job does not use it."""

    peer: PeerId
    offer: Memory
    why_not: Mapping[JobId, str] = field(default_factory=dict)


# Jobs ----------------------------------------------------------------------------------------------------------------


def explain_job(
    job: JobStanding, situation: Situation | None, idle: Sequence[IdlePeer], now_s: float, peers: Sequence[Peer] = ()
) -> list[Fact]:
    """Why a job waits, or what limits its speed; without a `situation` it does not run. `peers`: those at the job."""
    facts = [fact("state", f"{job.state.value} for {spoken_duration(job.for_s)}: {job.reason}", for_s=job.for_s)]
    if job.hint:
        facts.append(Fact("hint", job.hint))
    facts.append(_progress(job))
    if job.host_step_s:
        took = spoken_duration(job.host_step_s)
        text = f"runs on the hosts: up to {took} of a step where a host has one core, less with more"
        facts.append(fact("optimizer", text, host_step_s=job.host_step_s))
    if situation is None:
        return [*facts, *(_wanting(job, idle) if job.state in WAITING_STATES else ())]
    facts.append(Fact("waits for", situation.waiting_for.replace("waits for ", "", 1)))
    facts += [_island(island) for island in situation.islands]
    facts += [_stage(situation, stage) for stage in range(situation.stages)]
    facts += _risks(job, situation)
    facts.append(_overlap(job, situation))
    for form in sorted(set(situation.averages.values())):
        units = sorted(unit for unit, text in situation.averages.items() if text == form)
        facts.append(Fact("averages", f"{form} ({', '.join(units)})"))
    if situation.is_running:
        facts.append(_rebalancing(situation, now_s))
    facts += _moves(situation, now_s)
    facts += [_joiner(joiner, now_s) for joiner in situation.joiners]
    for replica in situation.replicas:
        if replica.suspect:
            facts.append(
                Fact("suspect", f"{replica.peer} (stage {replica.stage}) gets no work until it is heard again")
            )
        if replica.leave is not None:
            facts.append(Fact("leaving", f"{replica.peer} {_leaves(situation, replica, now_s)}"))
    for server in idle:
        if job.id in server.why_not:
            facts.append(Fact("idle", f"{server.peer} is not used: {server.why_not[job.id]}"))
    facts += _links(situation.links, now_s)
    facts += _slow_link(situation, peers)
    facts += _checkpoint(situation.checkpoint, now_s)
    return facts


def _progress(job: JobStanding) -> Fact:
    numbers: dict[str, float] = {"step": job.step, "steps": job.steps}
    text = f"step {job.step} of {job.steps}"
    if isfinite(job.step_s) and job.step_s > 0.0 and job.state is JobState.RUNNING:
        rate = job.microbatches / job.step_s
        text += f"; {job.step_s:.3g} s per step of {counted(job.microbatches, 'microbatch')}, {_rate(rate)}"
        numbers |= {"step_s": job.step_s, "microbatches_per_s": rate}
    return fact("progress", text, **numbers)


def _overlap(job: JobStanding, situation: Situation) -> Fact:
    """How much of a step its busiest stage computes, and how much of that are late microbatches: the overlap hides only
    that much of what the stage would idle for."""
    text = f"{job.overlap} of the {counted(job.microbatches, 'microbatch')} of a step use weights one step old"
    numbers: dict[str, float] = {"microbatches": job.overlap}
    capacities = [situation.capacity(stage) for stage in range(situation.stages)]
    known = [capacity for capacity in capacities if capacity]
    if len(known) == situation.stages and isfinite(job.step_s) and job.step_s > 0.0:
        busy = min(1.0, job.microbatches / min(known) / job.step_s)
        text += f"; the busiest stage computes for {busy:.0%} of a step, filling, averaging and commit take the rest"
        hidden = busy * job.overlap / job.microbatches
        if round(100 * hidden):
            text += f"; the overlap hides up to {hidden:.0%} of a step"
        numbers |= {"busy_ratio": busy, "hidden_ratio": hidden}
    return fact("overlap", text, **numbers)


def _wanting(job: JobStanding, idle: Sequence[IdlePeer]) -> list[Fact]:
    """The stage servers that a job needs to be placed, beside the idle ones."""
    stages = len(job.needs)
    peers = stages * job.min_replicas
    has_devices = any(server.offer.host_bytes for server in idle)
    sizes = needs_text([need if has_devices else Memory(need.total_bytes) for need in job.needs])
    each = f" x {job.min_replicas} replicas" if job.min_replicas > 1 else ""
    needs = f"{counted(peers, 'stage server')} ({counted(stages, 'stage')}{each}); memory: {sizes}"
    found = ", ".join(f"{server.peer} ({server.offer})" for server in idle) or "nobody"
    return [fact("needs", needs, stage_servers=peers), fact("idle", f"{len(idle)}: {found}", stage_servers=len(idle))]


def _island(one: IslandStanding) -> Fact:
    who = "; ".join(f"stage {stage}: {', '.join(pool)}" for stage, pool in enumerate(one.peers))
    made = f"step {one.steps}, {counted(one.exchanges, 'exchange')}"
    if one.share is not None:
        made += f", {one.share[0]} of the {counted(one.share[1], 'microbatch')} of a step"
    if one.relieved:
        made += f"; others trained {counted(one.relieved, 'microbatch')} in its place so far"
    topic = f"island {one.number}"
    if one.is_lost:
        return fact(topic, one.waiting_for, island=one.number)
    text = "; ".join(filter(None, [made, one.waiting_for, who]))
    return fact(topic, text, island=one.number, step=one.steps, exchanges=one.exchanges)


def _stage(situation: Situation, stage: int) -> Fact:
    pool = situation.of_stage(stage)
    at_work = sum(replica.gets_work for replica in pool)
    numbers: dict[str, float] = {"stage": stage, "replicas": len(pool), "at_work": at_work}
    replicas = counted(len(pool), "replica")
    text = replicas if at_work == len(pool) else f"{replicas}, of which {at_work} get{'s' * (at_work == 1)} work,"
    capacity = situation.capacity(stage)
    if capacity is None:
        text += ", not measured yet"
    else:
        does = "do" if len(pool) != 1 else "does"
        is_estimate = any(replica.gets_work and not replica.pace_s for replica in pool)
        text += f" {does} {_rate(capacity)}" + (" (estimated)" if is_estimate else "")
        numbers["microbatches_per_s"] = capacity
    if situation.limiting() == stage:
        others = [situation.capacity(other) or 0.0 for other in range(situation.stages) if other != stage]
        text += f": it limits the job (the next one does {min(others):.3g})"
    paces = [(replica.peer, replica.pace_s) for replica in pool[:SHOWN]]
    named = ", ".join(f"{peer} {f'{pace_s:.3g} s' if pace_s else 'not measured'}" for peer, pace_s in paces)
    more = f", and {len(pool) - SHOWN} more" if len(pool) > SHOWN else ""
    return fact(f"stage {stage}", f"{text}; {named}{more}" if named else text, **numbers)


def _risks(job: JobStanding, situation: Situation) -> list[Fact]:
    """The stages whose only replica takes steps with it, if it is lost; the others of a lost island go on."""
    if not situation.is_running or situation.islands or job.step <= job.goes_back:
        return []
    cost = job.step - job.goes_back
    alone = [stage for stage in range(situation.stages) if len(situation.of_stage(stage)) == 1]
    facts = [
        fact("risk", f"stage {stage} has one replica; its loss costs {counted(cost, 'step')}", steps=cost)
        for stage in alone[:SHOWN]
    ]
    more = len(alone) - SHOWN
    return facts + ([Fact("risk", f"so has {counted(more, 'other stage')}")] if more > 0 else [])


def _rebalancing(situation: Situation, now_s: float) -> Fact:
    """The newest decision. It was measured when it was taken, so it may name another stage than the facts above."""
    ago = f"{spoken_duration(now_s - situation.rebalanced_s)} ago: " if isfinite(situation.rebalanced_s) else ""
    return Fact("rebalancing", f"{ago}{situation.rebalancing}")


def _moves(situation: Situation, now_s: float) -> list[Fact]:
    if situation.newest_move is None:
        return []
    peer, leave, at_s = situation.newest_move
    ago = spoken_duration(now_s - at_s)
    text = f"{situation.moves} so far; the newest {ago} ago: {peer} to stage {leave.target}: {leave.reason}"
    return [fact("moves", text, moves=situation.moves)]


def _joiner(joiner: JoinerStanding, now_s: float) -> Fact:
    does = "it waits for an exchange" if joiner.waits else "it fetches the stage's state"
    does = "its state is complete and is compared" if joiner.has_reported else does
    for_s = now_s - joiner.since_s
    text = f"{joiner.peer} has been joining stage {joiner.stage} for {spoken_duration(for_s)}: {does}"
    return fact("joining", text, stage=joiner.stage, for_s=for_s)


def _leaves(situation: Situation, replica: ReplicaStanding, now_s: float) -> str:
    leave = replica.leave
    assert leave is not None
    where = f"to move from stage {replica.stage} to {leave.target}" if leave.target is not None else "to leave"
    ago = f" {spoken_duration(now_s - replica.asked_s)} ago" if isfinite(replica.asked_s) else ""
    return f"was asked {where}{ago} ({leave.reason}): {_until_released(situation, replica)}"


def why_it_stays(situation: Situation, peer: PeerId) -> str:
    """The reason why a leaving peer is still here; empty if it is no longer a replica."""
    replica = situation.get(peer)
    if replica is None:
        return ""
    if replica.suspect:
        return "it is suspect: it hands over when it is heard again, or its uncommitted work is done again"
    if replica.leave is None:
        return "it was asked to leave"
    return _until_released(situation, replica)


def _until_released(situation: Situation, replica: ReplicaStanding) -> str:
    leave, stage = replica.leave, replica.stage
    assert leave is not None
    if leave.until is None:
        if not situation.is_running:
            return f"it stays until the job runs; now it {situation.waiting_for}"
        coming = [joiner.peer for joiner in situation.joiners if joiner.stage == stage]
        who = f"{', '.join(coming)} joins" if coming else "no one joins: start another stage server"
        return f"it is the last of stage {stage} and stays until another one has joined; {who}"
    if situation.agreed < leave.until:
        steps = counted(leave.until - situation.agreed, "step")
        return f"it takes no new work; {steps} to finish, {counted(replica.outstanding, 'microbatch')} outstanding"
    if situation.checkpoint is not None and replica.peer in situation.checkpoint.savers:
        return f"it hands over stage {stage} for the checkpoint at step {situation.checkpoint.version}"
    return "it is about to be released"


def _links(links: Mapping[tuple[PeerId, PeerId], float], now_s: float) -> list[Fact]:
    return [
        Fact("link", f"{one} and {other} cannot reach each other; avoided for {spoken_duration(until_s - now_s)} more")
        for (one, other), until_s in sorted(links.items())
    ]


def _slow_link(situation: Situation, peers: Sequence[Peer]) -> list[Fact]:
    """The slowest link between replicas of the job, if it is slow, what takes long because of it, and what helps."""
    at_work = {replica.peer: replica.stage for replica in situation.replicas}
    links = [(link, known.hello.peer) for known in peers for link in known.measured.links if link.to in at_work]
    found = [(link, peer) for link, peer in links if peer in at_work and 0.0 < link.bytes_per_s < SLOW_BYTES_PER_S]
    if not found:
        return []
    link, peer = min(found, key=lambda one: one[0].bytes_per_s)
    stage = at_work[peer]
    takes, numbers = [], {"bytes_per_s": link.bytes_per_s, "receipt_s": link.receipt_s}
    if stage < len(situation.state_bytes):
        state_bytes = situation.state_bytes[stage]
        numbers["save_s"] = state_bytes / link.bytes_per_s
        what = f"a save of stage {stage} ({size(state_bytes)}), or a join from {peer}"
        takes.append(f"{what}, takes {spoken_duration(numbers['save_s'])}")
    averaged_s = [step.averaged_s - step.full_s for step in situation.steps if isfinite(step.averaged_s - step.full_s)]
    if averaged_s:
        numbers["averaging_s"] = averaged_s[-1]
        takes.append(f"averaging the newest step took {spoken_duration(averaged_s[-1])}")
    costs = f": at that rate {', and '.join(takes)}" if takes else ""
    text = (
        f"{peer} sends {bandwidth(link.bytes_per_s)} to {link.to}, the slowest link of the job{costs}. What helps: "
        f'pipeline.compression = "auto" and averaging.compression = "int8", fewer saves (checkpoint.every_steps), '
        f"or another place for {peer}"
    )
    return [Fact("slow link", text, numbers)]


def _speed(link: LinkSpeed) -> Fact:
    text = f"{bandwidth(link.bytes_per_s)} to {link.to}, a receipt after {1000 * link.receipt_s:.3g} ms at best"
    return fact("link", text, bytes_per_s=link.bytes_per_s, receipt_s=link.receipt_s)


def _checkpoint(held: OpenCheckpoint | None, now_s: float) -> list[Fact]:
    if held is None:
        return []
    waits = ", ".join(f"stage {stage} ({peer})" for peer, stage in sorted(held.savers.items(), key=lambda one: one[1]))
    doing = f"waits for {waits}" if waits else "is being written and read back" if held.is_writing else "is complete"
    for_s = now_s - held.since_s
    text = f"the one of step {held.version} has been under way for {spoken_duration(for_s)}: {doing}"
    return [fact("checkpoint", text, step=held.version, for_s=for_s)]


# Peers ---------------------------------------------------------------------------------------------------------------


def explain_peer(
    known: Peer, situation: Situation | None, idle: IdlePeer | None, waiting: Mapping[JobId, str], now_s: float
) -> list[Fact]:
    """Why a peer gets little work or none; `situation` belongs to its job, `waiting` are the jobs that want peers."""
    peer, for_s = known.hello.peer, now_s - known.since_s
    facts = [fact("state", f"{known.state.value} for {spoken_duration(for_s)}: {known.reason}", for_s=for_s)]
    if known.state is PeerState.SUSPECT:
        silent_s = now_s - known.heard_s
        told = f"not heard for {spoken_duration(silent_s)}: it gets no work"
        facts.append(fact("suspect", told, silent_s=silent_s))
    if known.unreached:
        hint = "start it with --listen or --announce HOST:PORT that others reach, or with --via-relay beside a relay"
        site = "if all stage servers of a job are in one place, give each the same --site NAME instead"
        facts.append(Fact("network", f"{known.unreached}: it gets no stage beside others; {hint}; {site}"))
    if known.job:
        island = situation.island_of(peer) if situation is not None else None
        where = f"stage {known.stage}" + (f" of island {island}" if island is not None else "")
        facts.append(fact("serves", f"{where} of {known.job}", stage=known.stage))
    else:
        facts += _unused(known, idle, waiting)
    if situation is None:
        return facts
    joiner = next((joiner for joiner in situation.joiners if joiner.peer == peer), None)
    if joiner is not None:
        facts.append(_joiner(joiner, now_s))
    replica = situation.get(peer)
    if replica is None:
        return facts
    if replica.needs_donors:
        told = "it computes, and has commits to make of steps that were averaged without it: the others have the means"
        facts.append(Fact("joining", told))
    facts += [_work(situation, replica), _pace(situation, replica)]
    facts += [_speed(link) for link in known.links]
    if replica.leave is not None:
        facts.append(Fact("leaving", _leaves(situation, replica, now_s)))
    facts += _links({pair: until_s for pair, until_s in situation.links.items() if peer in pair}, now_s)
    if situation.checkpoint is not None and peer in situation.checkpoint.savers:
        facts += _checkpoint(situation.checkpoint, now_s)
    return facts


def _unused(known: Peer, idle: IdlePeer | None, waiting: Mapping[JobId, str]) -> list[Fact]:
    """Why no job has the peer."""
    if known.state is PeerState.DRAINING:
        told = "it is drained: it gets no work until it is started again, or an admin says swarm peers undrain"
        return [Fact("not used", f"{told} {known.hello.peer}")]
    if known.state is PeerState.QUARANTINED:
        freed = f"swarm identity release {known.hello.peer}"
        return [Fact("not used", f"it is quarantined for wrong numbers, until an admin releases it: {freed}")]
    if known.state is not PeerState.IDLE:
        return []
    waits = [Fact("not used", f"{job} waits: {reason}") for job, reason in waiting.items()]
    if idle is None or not idle.why_not:
        return waits or [Fact("not used", "no job is at work that could use it")]
    return waits + [Fact("not used", f"{job}: {reason}") for job, reason in idle.why_not.items()]


def _work(situation: Situation, replica: ReplicaStanding) -> Fact:
    pool = situation.of_stage(replica.stage)
    mine, total = replica.contributions, sum(replica.contributions for replica in pool)
    pending = sum(replica.outstanding for replica in pool)
    numbers: dict[str, float] = {"outstanding": replica.outstanding, "replicas": len(pool)}
    open_ = f"{counted(replica.outstanding, 'microbatch')} outstanding of the stage's {pending}"
    if not total:
        return fact("work", f"nothing of the newest steps is done at stage {replica.stage} yet; {open_}", **numbers)
    share = mine / total
    numbers |= {"share": share, "contributions": mine, "stage_contributions": total}
    did = f"did {mine} of {counted(total, 'microbatch')} of the newest steps at stage {replica.stage}: {share:.0%}"
    many = len(pool)
    beside = ", it is the only replica" if many == 1 else f"; an equal share of {many} replicas is {1 / many:.0%}"
    return fact("work", f"{did}{beside}; {open_}", **numbers)


def _pace(situation: Situation, replica: ReplicaStanding) -> Fact:
    others = [replica.pace_s for replica in situation.of_stage(replica.stage) if replica.pace_s > 0.0]
    if not replica.pace_s:
        return Fact("pace", "not measured yet: it is taken to be as fast as the fastest of its stage")
    middle = median(others)
    times = replica.pace_s / middle
    slow = " (slow)" if times >= UNLIKE_PACE else " (fast)" if times * UNLIKE_PACE <= 1.0 else ""
    text = f"{replica.pace_s:.3g} s per microbatch{slow}, the median of stage {replica.stage} is {middle:.3g} s"
    return fact("pace", text, pace_s=replica.pace_s, median_s=middle)


def _rate(per_s: float) -> str:
    return f"{per_s:.3g} microbatches/s"


LOADED = "all replicas are loaded"
RESUMED = "goes on after a restart of the scheduler"
AWAITS_DATABASE = "waits for the database, which takes no writes; nothing is lost meanwhile"


@dataclass(frozen=True, slots=True)
class Team:
    """The replicas of a job, present and coming."""

    replicas: int
    suspects: int = 0
    leaving: int = 0
    joining: int = 0

    @property
    def text(self) -> str:
        facts = (
            f"{self.suspects} of them {'is' if self.suspects == 1 else 'are'} not heard" if self.suspects else "",
            f"{self.leaving} of them {'leaves' if self.leaving == 1 else 'leave'}" if self.leaving else "",
            f"{self.joining} more {'joins' if self.joining == 1 else 'join'}" if self.joining else "",
        )
        return ", ".join((f"trains with {counted(self.replicas, 'stage server')}", *filter(None, facts)))


def reason_at_work(stored: str, team: Team, *, awaits_database: bool, unsaved: str) -> str:
    """Why a running job is as it is; `unsaved` is the fault of its newest checkpoint.

    A reason that its brain gave when it went on stands: it could not pause, or not save the last weights.
    """
    if awaits_database:
        return AWAITS_DATABASE
    if stored not in (LOADED, RESUMED):
        return stored
    return "; ".join(filter(None, (team.text, unsaved)))


def machines_lost(lost: int, back: int, *, are_enough: bool) -> str:
    """What became of the stage servers that a running job lost lately, for a person; "" if it lost none.

    `back`: as many of them serve it again; `are_enough`: it has as many replicas as when it began.
    """
    if not lost:
        return ""
    text = "one machine was lost" if lost == 1 else f"{lost} machines were lost"
    if back >= lost:
        text += f" and {'is' if lost == 1 else 'are'} back"
    elif are_enough:
        text += " and replaced"
    return f"{text}; no step lost"


HOLDERS_SHOWN = 8  # holders by name


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
    """The queue of waiting jobs: a job's place in it, and the jobs that hold the stage servers that it could use."""

    waiting: tuple[JobId, ...]
    holders: tuple[Holder, ...]
    priorities: Mapping[JobId, int] = field(default_factory=dict)  # of those that wait

    def text(self, job: JobId) -> str:
        """In a few words; empty if the job waits alone and no job has stage servers."""
        facts = [self._place(job)] if len(self.waiting) > 1 else []
        if self.holders:
            taken = counted(sum(holder.stage_servers for holder in self.holders), "stage server")
            first, more = self.holders[0].job, len(self.holders) - 1
            facts.append(f"{first} and {more} more have {taken}" if more else f"{first} has {taken}")
        return "; ".join(facts)

    def facts(self, job: JobId) -> list[Fact]:
        """In full."""
        before = self.waiting[: self.waiting.index(job)]
        named = f": {', '.join(map(self._named, before[-HOLDERS_SHOWN:]))} before it" if before else ""
        facts = [fact("queue", f"{self._place(job)}{named}", place=len(before) + 1, waiting=len(self.waiting))]
        for holder in self.holders[:HOLDERS_SHOWN]:
            text = f"{holder.job} has {counted(holder.stage_servers, 'stage server')}"
            text += f", step {holder.step} of {holder.steps}" if holder.steps else ""
            left = {"left_s": holder.left_s} if isfinite(holder.left_s) else {}
            text += f", about {spoken_duration(holder.left_s)} left at this speed" if left else ""
            facts.append(fact("in use", text, stage_servers=holder.stage_servers, **left))
        if (more := len(self.holders) - HOLDERS_SHOWN) > 0:
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


def explain_trust(record: TrustRecord, now_unix_s: float) -> list[Fact]:
    """The facts against a stage server: its quarantine, and each strike."""
    facts = []
    if record.is_quarantined:
        for_s = max(0.0, now_unix_s - record.since_unix_s)
        facts.append(fact("quarantined", f"for {spoken_duration(for_s)}: {record.told}", for_s=for_s))
    for strike in record.strikes:
        ago_s = max(0.0, now_unix_s - strike.unix_s)
        how = "proven by a third" if strike.is_proven else "not proven by a third"
        checked = f"{counted(strike.checked, 'hop')} of it had been checked in that job"
        text = f"{spoken_duration(ago_s)} ago: {strike.evidence}; {how}; {checked}"
        facts.append(fact("strike", text, ago_s=ago_s, checked=strike.checked))
    return facts
