"""Gives idle peers to jobs; brain/fleet/allocation.py decides which job gets which."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from scheduler.brain.explain.facts import IdlePeer
from scheduler.brain.fleet.allocation import ActiveJob, PendingJob, StartTurn, allocate, cut_here, waits_on
from scheduler.brain.fleet.membership import BESIDE_OTHERS, Membership, Peer, filled, offer
from scheduler.brain.inputs import Join, ReplicaRecord
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.stall import stalled_hint, waiting
from scheduler.jobs.cuts import basis_of, cut_for, is_allowed, kept, pool_of, reached, with_split
from scheduler.jobs.islands import by_island, place_at, replicas_by_island, stage_at
from scheduler.jobs.job import Job, JobRun, now_s, peers_max
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.runner import JobRunner
from scheduler.storage.executor import run_blocking
from swarm.errors import SwarmError
from swarm.job.footprint import flight_room, model_costs
from swarm.job.memory_split import needs
from swarm.job.placement import Candidate, stages_for
from swarm.job.spec import JobSpec
from swarm.text import counted
from swarm.types import Decision, JobId, JobState, Memory, PeerId, PeerState
from swarm.wire.messages import Hello

ON_LOOPBACK = "(loopback)"  # the site of those that others do not reach: no owner may name one so
SETTLE_S_MAX = 10.0  # at most this long, if peers come and go all the time
LATER = "what it would train is left out until it begins anew behind an exchange"
LOOK_AGAIN_S = 5.0  # how often to look for a place for idle peers: a peer that failed to join may try again


@dataclass(slots=True)
class _Findings:
    """What takes long to find out of a waiting job, as long as its job file is this one."""

    spec: JobSpec
    needs: dict[int, tuple[Memory, ...]] = field(default_factory=dict)  # of each stage, by the replicas of a stage
    of: object = None  # the peers for which `cut` was found
    cut: tuple[tuple[int, ...], Decision[dict[PeerId, int]]] = ((), Decision(None, ""))


@dataclass(frozen=True, slots=True)
class _HowToBegin:
    """Each peer's stage, if a job can begin, and how it is cut then."""

    decision: Decision[dict[PeerId, int]]
    spec: JobSpec
    said: str = ""  # what memory has changed, for people


@dataclass(eq=False)
class Allocator:
    """Starts waiting jobs and lets idle peers join running ones."""

    _ports: SchedulerPorts
    _registry: JobRegistry
    _peers: Peers
    _membership: Membership
    _runner: JobRunner
    _found: dict[JobId, _Findings] = field(default_factory=dict)
    _unused: Mapping[PeerId, Mapping[JobId, str]] = field(default_factory=dict)  # why no running job took an idle peer

    async def run(self) -> None:
        """Start waiting jobs whenever there are peers for one, the highest priority first; forever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_again_s()):
                    await self._peers.wake.wait()
            self._peers.wake.clear()
            if self._registry.waiting():
                # Every new peer prolongs the wait. No event says that nothing has happened for a while, so sleep.
                until_s = now_s() + SETTLE_S_MAX
                while (wait_s := min(self._peers.changed_s + self._ports.settle_s, until_s) - now_s()) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(wait_s)
                await self._start_waiting()
            if self._registry.at_work() and self._membership.idle_peers():
                await self._learn_needs()
            self._hand_out_idle()

    def idle(self) -> list[IdlePeer]:
        """Peers without work, and why no job at work uses them."""
        return [
            IdlePeer(known.hello.peer, offer(known.hello), self._unused.get(known.hello.peer, {}))
            for known in self._membership.idle_peers()
        ]

    def _look_again_s(self) -> float | None:
        """When to look again although nothing has happened; None: never."""
        waiting = [job.waiting for job in self._registry.all() if job.waiting is not None]
        pauses_s = [wait.tries_again_s - now_s() for wait in waiting]
        pauses_s += [wait.fewer.at_s - now_s() for wait in waiting if wait.fewer is not None]
        idle_s = [LOOK_AGAIN_S] if self._membership.idle_peers() else []
        return min((pause_s for pause_s in pauses_s + idle_s if pause_s > 0.0), default=None)

    def _waiting(self, job: Job, peers: int) -> PendingJob:
        """The job as the brain sees it, if `peers` peers are available to it, with the stages of all islands."""
        assert job.waiting is not None
        most, *fewer = _island_counts(job)
        limits = job.spec.limits
        pending = PendingJob(
            job.record.id,
            self._needs(job, peers // most) * most,
            limits.min_replicas,
            now_s() - job.waiting.since_s,
            looks=_looks(job),
            peers_max=peers_max(job),
            unfit=self._all_unfit(job),
            islands=most,
        )
        of = (
            replace(
                pending,
                needs=self._needs(job, peers // islands) * islands,
                peers_max=peers_max(job, islands),
                islands=islands,
                is_part=True,
            )
            for islands in fewer
        )
        return replace(pending, fewer=tuple(of)) if fewer else pending

    def _needs(self, job: Job, peers: int) -> tuple[Memory, ...]:
        """What a replica of each stage takes; a job that waits is asked at every turn, and this takes long."""
        found, stages = self._found_of(job), len(job.spec.split)
        replicas = max(1, peers // stages)
        if replicas not in found.needs:
            found.needs[replicas] = needs(model_costs(job.spec), job.spec.split, replicas * stages)
        return found.needs[replicas]

    def _found_of(self, job: Job) -> _Findings:
        found = self._found.get(job.record.id)
        if found is None or found.spec is not job.spec:
            found = self._found[job.record.id] = _Findings(job.spec)
        return found

    async def _cut_here(
        self, job: Job, pending: PendingJob, turn: StartTurn
    ) -> tuple[tuple[int, ...], Decision[dict[PeerId, int]]]:
        """As `cut_here` for what is free; on a thread, and only when other peers are: it takes up to seconds."""
        found, of = self._found_of(job), (tuple(turn.free), pending.unfit)
        if found.of != of:
            may = partial(is_allowed, job.spec, job.record.tokens)
            find = partial(cut_here, pending, model_costs(job.spec), of[0], may)
            found.cut = await run_blocking(self._ports.stores.threads, find)
            found.of = of
        return found.cut

    async def _learn_needs(self) -> None:
        """Find out what waiting jobs need while idle peers are handed out. Others have their turn after each job."""
        for job in self._registry.waiting():
            for islands in _island_counts(job):
                self._needs(job, len(self._membership.lasting_peers()) // islands)
                await asyncio.sleep(0)

    def _all_unfit(self, job: Job) -> frozenset[PeerId]:
        """The peers that the job cannot use. One that is pinned to a stage serves it in the first island."""
        unfit = job.unfit.among(lambda peer: known.hello.incarnation if (known := self._membership.get(peer)) else None)
        if job.spec.island_count == 1:
            return unfit
        stages = len(job.spec.split)
        return unfit | {peer.hello.peer for peer in self._membership.peers() if peer.hello.pinned_stage >= stages}

    def _is_idle(self, peer: PeerId) -> bool:
        known = self._membership.get(peer)
        return known is not None and not known.job

    def _left(self, job: Job, peers: int) -> int | None:
        """How many more a job that has `peers` may take, beside those on their way to it; None: any number."""
        if (most := peers_max(job)) is None:
            return None
        moving = self._peers.reservations.now(now_s())
        coming = sum(reserved.job == job.record.id and self._is_idle(peer) for peer, reserved in moving.items())
        return max(0, most - peers - coming)

    def _running(self, job: Job, run: JobRun) -> ActiveJob:
        here = [peer for peer in self._membership.peers() if peer.job == job.record.id]
        staying = Counter(place_at(job, peer.hello.peer, peer.stage) for peer in here if not peer.leaving)
        # The job's brain hears of these peers one by one, and only after the allocation.
        loading = {peer.hello.peer: peer.stage for peer in here if peer.state is PeerState.LOADING}

        def where(peer: Candidate, stages: Collection[int], coming: Mapping[PeerId, int]) -> Decision[int]:
            if unfit := self._unfit(job, peer.peer):
                return Decision(None, unfit)
            sent = {**loading, **coming}
            if isinstance(run.brain, IslandsBrain):
                sites = {peer: known.hello.site for peer in sent if (known := self._membership.get(peer))}
                return run.brain.where_to_join(peer, stages, run.driver.now_s(), sent, sites)
            return run.brain.where_to_join(peer, stages, run.driver.now_s(), sent)

        split, brain, sites = job.spec.split, run.brain, {_site(peer) for peer in here}
        islands = brain.present if isinstance(brain, IslandsBrain) else (0,)
        return ActiveJob(
            job.record.id,
            needs(model_costs(job.spec), split, 1 + sum(map(len, job.stages.values())) // len(islands)),
            job.spec.limits.min_replicas,
            tuple(min(staying[island * len(split) + stage] for island in islands) for stage in range(len(split))),
            run.replicas_at_start,
            where,
            self._left(job, len(here)),
            min(sites, default="") if len(sites) == 1 else "",
            (len(here) == 1 and bool(here[0].unreached)) or sites == {ON_LOOPBACK},
        )

    def _hand_out_idle(self) -> None:
        """Let idle peers join running jobs."""
        idle = self._candidates(self._membership.idle_peers())
        if not idle:
            return
        at_work = self._registry.at_work()
        present = self._candidates(self._membership.lasting_peers())
        handed = allocate(
            idle,
            present,
            [self._waiting(job, len(present)) for job in self._registry.waiting()] if at_work else [],
            [self._running(job, job.run) for job in at_work if job.run is not None],
            self._peers.reservations.now(now_s()),
        )
        self._unused = handed.unused
        for join in handed.joins:
            job, peer = self._registry.get(join.job), self._membership.get(join.peer)
            assert peer is not None
            assert job is not None
            assert job.run is not None
            self._peers.assign(job, join.peer, join.stage)
            self._registry.say(job, "info", f"{join.peer} is to join: {join.reason}")
            job.run.driver.tell(Join(_replica(peer.hello, join.stage, job.spec)))

    def _candidates(self, peers: Sequence[Peer]) -> list[Candidate]:
        speeds = filled([peer.measured.multiply_adds_per_s for peer in peers])
        return [
            Candidate(
                hello.peer,
                hello.pinned_stage,
                speed=speed,
                offer=offer(hello),
                site=_site(peer),
                unreached=bool(peer.unreached),
            )
            for peer, speed in sorted(zip(peers, speeds, strict=True), key=lambda one: one[0].hello.peer)
            for hello in (peer.hello,)
        ]

    def _unfit(self, job: Job, peer: PeerId) -> str:
        known = self._membership.get(peer)
        return job.unfit.why(peer, known.hello.incarnation) if known is not None else ""

    async def _start_waiting(self) -> None:
        """Start the waiting jobs that can, the first first. Others of the scheduler have their turn after each."""
        jobs = self._registry.waiting()
        ids = {job.record.id for job in jobs}
        self._found = {job: found for job, found in self._found.items() if job in ids}
        turn = StartTurn(
            self._candidates(self._membership.idle_peers()),
            self._peers.reservations.now(now_s()),
            self._candidates(self._membership.lasting_peers()),
        )
        for priority, group in groupby(jobs, key=lambda job: job.spec.limits.priority):
            tried: list[tuple[Job, PendingJob]] = []
            for job in group:
                # One that waits no more was cancelled or paused while others were tried.
                if job.waiting is not None and (_looks(job) or not _pauses(job)):
                    tried.append((job, await self._try_to_start(job, turn)))
                await asyncio.sleep(0)
            if priority > jobs[-1].spec.limits.priority:
                for _ in turn.descend(self._still_waiting(tried)):
                    await asyncio.sleep(0)

    def _still_waiting(self, tried: Iterable[tuple[Job, PendingJob]]) -> Iterator[PendingJob]:
        """Those of the jobs that were tried and did not start, as they are now."""
        for job, pending in tried:
            if job.waiting is not None:
                yield replace(pending, looks=_looks(job))

    async def _try_to_start(self, job: Job, turn: StartTurn) -> PendingJob:
        """Start the job, if that is possible; the job as the brain saw it."""
        assert job.waiting is not None
        reserved, unfit = self._peers.reservations.now(now_s()), self._all_unfit(job)
        idle = {peer.hello.peer: peer for peer in self._membership.idle_peers()}
        turn.only({candidate for candidate in self._candidates(list(idle.values())) if candidate.peer not in reserved})
        pending = self._waiting(job, sum(peer not in unfit for peer in idle))
        decision = turn.offer(pending)
        if pending.looks:
            return pending
        waited, asked = job.waiting, job.asked
        start = await self._with_more_stages(job, asked, pending, turn, decision) if asked is not None else None
        if start is None and job.waiting is waited:
            start = await self._or_with_fewer(job, pending, turn, decision)
        if start is not None and job.waiting is waited:  # else it was cancelled or paused meanwhile
            await self._carry_out(job, pending, start, idle, turn)
        return pending

    async def _with_more_stages(
        self,
        job: Job,
        asked: JobSpec,
        pending: PendingJob,
        turn: StartTurn,
        as_it_is: Decision[dict[PeerId, int]],
    ) -> _HowToBegin | None:
        """How a job begins that was submitted before its stage servers came: cut as if it were submitted now.

        Its model stays. So does what decides its weights, unless memory holds it no other way.
        """
        stages, free = len(job.spec.split), {candidate.peer for candidate in turn.free}
        most = len(free) if as_it_is.plan is None else stages_for(len(free))
        if asked.pipeline.stages != "auto" or job.spec.pipeline.recut != "stall" or most <= stages:
            return None
        here = [peer for peer in self._membership.idle_peers() if peer.hello.peer in free]
        basis, pool = basis_of(self._membership, job.record.tokens, here), pool_of(reached(here))
        for weights in (True, False) if as_it_is.plan is None else (True,):
            cut = partial(cut_for, kept(asked, job.spec, weights=weights), basis, pool)
            with suppress(SwarmError):  # it waits on with the cut that it has
                spec, said = await run_blocking(self._ports.stores.threads, cut)
                decision = turn.offer(pending.with_cut(model_costs(spec), spec.split, len(here)))
                if len(spec.split) > stages and decision.plan is not None:
                    return _HowToBegin(decision, spec, said)
        return None

    async def _or_with_fewer(
        self, job: Job, pending: PendingJob, turn: StartTurn, decision: Decision[dict[PeerId, int]]
    ) -> _HowToBegin:
        """The decision, or a start with fewer islands or another cut once a job that cannot start as it is has waited
        for that."""
        waits = job.waiting
        assert waits is not None
        spec, before, as_it_is = job.spec, waits.fewer, _HowToBegin(decision, job.spec)
        is_open = spec.pipeline.recut == "stall" and spec.limits.on_stall == "wait"
        count, of, other = 0, pending.islands if pending.fewer else None, as_it_is
        if decision.plan is None and pending.fewer:
            count, begins = turn.offer_fewer(pending)
            other = _HowToBegin(begins, spec)
        elif decision.plan is None and is_open and not turn.may_serve(pending):
            split, begins = await self._cut_here(job, pending, turn)
            if count := len(split):
                other = _HowToBegin(begins, with_split(spec, split))
        now = waits_on(before, count, of, spec.limits.no_progress_s, now_s())
        waits.fewer = now
        if now is not None and now.at_s <= now_s():
            return other
        if now is not None and before is None:
            self._registry.say(job, "info", now.told(now_s()))
        return as_it_is

    async def _hint(self, job: Job, pending: PendingJob, turn: StartTurn) -> str:
        """Advice about a stalled job that cannot be placed."""
        split: tuple[int, ...] = ()
        if not job.spec.has_outer_steps:
            split, _ = await self._cut_here(job, pending, turn)
        return stalled_hint(job.record.id, job.stalls, len(split))

    async def _carry_out(
        self, job: Job, pending: PendingJob, start: _HowToBegin, idle: Mapping[PeerId, Peer], turn: StartTurn
    ) -> None:
        """Begin the job as it was decided, or say why it waits on."""
        decision, waited = start.decision, job.waiting
        assert waited is not None
        if decision.plan is None:
            stalled = job.record.state is JobState.STALLED
            state = JobState.STALLED if stalled else JobState.PLACING
            reason = waiting(waited.goes_on, decision.reason) if stalled else decision.reason
            if (job.record.state, job.record.reason) != (state, reason):
                changes = {"hint": await self._hint(job, pending, turn)} if stalled else {}
                if job.waiting is waited:
                    await self._registry.enter(job, state, reason, **changes)
            return
        places, hellos = decision.plan, {peer: idle[peer].hello for peer in decision.plan}
        try:
            batches = await self._ports.stores.files.opened(start.spec, job.record.tokens, job.record.owner)
        except SwarmError as error:
            if job.waiting is waited:
                await self._registry.enter(job, JobState.FAILED, error.message, error_code=error.code, hint=error.hint)
            return
        if job.waiting is not waited or not self._are_free(hellos):
            self._peers.wake.set()  # the job was cancelled meanwhile, or a peer left: decide anew
            return
        if start.spec is not job.spec:
            self._registry.cut_anew(job, start.spec, start.said)
        job.asked = None
        replicas = [_replica(idle[peer].hello, stage_at(job.spec, place), job.spec) for peer, place in places.items()]
        # No await until the driver exists: a cancel or a leave from now on must reach it.
        for replica in replicas:
            self._peers.assign(job, replica.peer, replica.stage)
        self._runner.begin(job, batches, replicas_by_island(job.spec, places, replicas))
        of_islands = by_island(job.spec, places)
        begin = [number for number, peers in enumerate(of_islands) if peers]
        described = [_describe(peers) for peers in of_islands]
        if len(of_islands) > 1:
            described = [f"island {number}: {described[number]}" for number in begin]
        self._registry.say(job, "info", f"placed: {'; '.join(described)}")
        islands = f" in each of {len(begin)} islands" if len(of_islands) > 1 else ""
        if len(begin) < len(of_islands):
            islands = f" in {len(begin)} of {len(of_islands)} islands"
            later = ", ".join(f"{number}" for number, peers in enumerate(of_islands) if not peers)
            self._registry.say(job, "warning", f"goes on without island {later}: {LATER}")
        told = f"{counted(len(places), 'peer')} for {counted(len(job.spec.split), 'stage')}{islands}"
        await self._registry.enter(job, JobState.LOADING, told, peers=dict(places), hint="")

    def _are_free(self, hellos: Mapping[PeerId, Hello]) -> bool:
        """Whether these peers, as they were then, can be given a stage still."""
        reserved = self._peers.reservations.now(now_s())
        idle = {peer.hello.peer: peer.hello for peer in self._membership.idle_peers()}
        return all(idle.get(peer) is hello and peer not in reserved for peer, hello in hellos.items())


def _site(peer: Peer) -> str:
    """Where it is, as far as that decides who may be its neighbours."""
    return ON_LOOPBACK if peer.unreached == BESIDE_OTHERS else peer.hello.site


def _island_counts(job: Job) -> range:
    """With how many islands the job may begin, the most first. Its first timeline has all."""
    most = job.spec.island_count
    return range(most, min(most, job.spec.islands.min) - 1 if job.record.timeline else most - 1, -1)


def _looks(job: Job) -> bool:
    """Whether a stalled job is still looking for its checkpoint."""
    return job.record.state is JobState.STALLED and job.waiting is not None and not job.waiting.goes_on


def _pauses(job: Job) -> bool:
    """Whether a job that stalled several times waits a while before it tries again."""
    return job.waiting is not None and now_s() < job.waiting.tries_again_s


def _replica(hello: Hello, stage: int, spec: JobSpec) -> ReplicaRecord:
    pinned, room = hello.pinned_stage >= 0, flight_room(spec, stage, offer(hello))
    return ReplicaRecord(hello.peer, hello.incarnation, hello.address, stage, hello.device, pinned, hello.site, room)


def _describe(peers: Mapping[PeerId, int]) -> str:
    stages = sorted(set(peers.values()))
    return "; ".join(f"stage {stage}: {', '.join(peer for peer in peers if peers[peer] == stage)}" for stage in stages)
