"""Passes news of stage servers to their jobs: events, changes of state, and files of a stage's weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict, dataclass, field, replace

from scheduler.brain.fleet.membership import NO_FELLOWS, Fellows, Membership, Peer, Transition, offer
from scheduler.brain.inputs import Input, PeerGone, RelaysHere, Unreached
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.jobs.islands import of_job, timelines
from scheduler.jobs.job import Job, JobRun, now_s, speed_of
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.runner import JobRunner
from scheduler.storage.drains import Drains
from scheduler.storage.job_log import LogLine
from scheduler.storage.stores import Stores
from swarm.errors import CheckpointFailed, Refused
from swarm.job.footprint import flight_room
from swarm.limits import LOG_LINE_CHARACTERS_MAX, LOG_LINES_AT_ONCE, LOG_LINES_PER_S, Bucket
from swarm.types import NO_JOB, JobId, JobState, PeerId, PeerState
from swarm.wire.messages import (
    Calibrated,
    Event,
    FetchRequest,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    Logged,
    Release,
    Saved,
    StoreHeader,
)


@dataclass(eq=False)
class PeerListener:
    """Passes events to the driver of the sender's job, and to metrics, logs and drains."""

    _ports: SchedulerPorts
    _registry: JobRegistry
    _membership: Membership
    _peers: Peers
    _runner: JobRunner
    _drains: Drains
    _tasks: asyncio.TaskGroup
    _served: dict[PeerId, JobId] = field(default_factory=dict)  # the job that each serves, or served last
    _lines: dict[PeerId, Bucket] = field(default_factory=dict)
    _muted: set[PeerId] = field(default_factory=set)

    def on_transition(self, transition: Transition) -> None:
        if transition.after is PeerState.GONE:
            job = self._registry.get(self._served.get(transition.peer, NO_JOB))
            if job is not None and job.run is not None and transition.peer in job.record.peers:
                job.run.lost_s[transition.peer] = now_s()
            for held in (self._served, self._lines):
                held.pop(transition.peer, None)
            self._muted.discard(transition.peer)
        self._peers.on_transition(transition)

    def fellows_of(self, known: Peer) -> Fellows:
        """The replicas with which a silent peer may be late, as its job says."""
        job = self._registry.get(known.job)
        brain = None if job is None else job.brain
        return brain.fellows_of(known.hello.peer) if isinstance(brain, IslandsBrain) else NO_FELLOWS

    def on_relays(self, here: bool) -> None:
        """The last relay of the swarm has left, or one is here again."""
        self._registry.relays_here = here  # for the jobs that begin later
        self._tell_all(RelaysHere(here))

    def on_reach(self, unreached: tuple[PeerId, ...]) -> None:
        """The scheduler cannot dial these, of all stage servers."""
        self._registry.unreached = unreached
        self._tell_all(Unreached(unreached))

    def _tell_all(self, happened: Input) -> None:
        for job in self._registry.all():
            if job.run is not None:
                job.run.driver.tell(happened)

    def on_event(self, peer: PeerId, event: Event) -> None:
        known = self._membership.get(peer)
        if known is None or self._peers.is_stopping:
            return
        self._ports.metrics.peer_heard(peer, self._ports.wall_s())
        if known.job:
            self._served[peer] = known.job
        match event:
            case Hello():
                self._attached(known, event)
            case Logged():
                self._logged(known, event)
            case Leaving():
                self._peers.leave(peer, event.reason)
            case Calibrated():
                self._membership.calibrated(peer, event)
                self._ports.log.info("peer calibrated", peer=peer, **asdict(event))
            case Heartbeat(links=links) if links:
                self._membership.measured(peer, links, speed_of(self._registry.get(known.job), known))
            case _:
                self._at_work(known, event)

    def _attached(self, known: Peer, hello: Hello) -> None:
        """A session begins. A drained peer stays drained, unless its process started anew."""
        self._ports.metrics.peer_attached(hello.peer, hello.product, hello.device, self._ports.wall_s())
        self._reattach(known, hello)
        if reason := self._drains.reason(hello):
            self._peers.leave(hello.peer, reason)
        elif self._drains.is_over(hello):
            self._tasks.create_task(self._drains.forget(hello.peer))

    def _reattach(self, known: Peer, hello: Hello) -> None:
        """The peer's job hears of the session, or takes the peer back, or the peer gives the job up."""
        present = known.job
        job = self._registry.get(present or hello.job)
        is_barred = known.state is PeerState.QUARANTINED
        if job is not None and job.run is not None and present:
            self._tell(job.run, hello)
        elif (
            job is not None
            and job.run is not None
            and not is_barred
            and self._peers.is_of(job, hello)
            and job.run.brain.admits(hello)
            and self._peers.may_return(job, hello)
        ):
            self._peers.adopt(job, hello)
            self._tell(job.run, hello, flight_room(job.spec, hello.stage, offer(hello)))
        else:
            if hello.job:
                self._peers.send(hello.peer, Release(hello.job, "the job has ended, or went on without this peer"))
            for other in self._registry.all() if not present else ():
                self._tell_gone(other, hello.peer)

    def _tell_gone(self, job: Job, peer: PeerId) -> None:
        """After a restart of the scheduler an island hears of a peer that is here and no longer has its stage."""
        run = job.run if peer in job.record.peers else None
        if run is not None and isinstance(run.brain, IslandsBrain) and run.brain.awaits_back(peer):
            run.driver.tell(PeerGone(peer, "it came back without its stage"))

    def _tell(self, run: JobRun, hello: Hello, room: int = 0) -> None:
        """The job's brain hears of the session, and of those cells alone that the peer was given."""
        cells = self._ports.stores.stamps.known(hello)
        run.driver.on_event(hello.peer, replace(hello, cells=cells), room, doubted=len(cells) < len(hello.cells))

    def _logged(self, known: Peer, line: Logged) -> None:
        """A line for the log of the job that the peer serves, or served last; while that loads, a download goes on."""
        if line.job != self._served.get(known.hello.peer) or self._registry.get(line.job) is None:
            return
        if not self._may_log(known):
            return
        told = LogLine(
            line.time_unix_s, line.level, known.hello.peer, known.stage, line.message[:LOG_LINE_CHARACTERS_MAX]
        )
        self._ports.stores.logs.append(line.job, told)
        job = self._registry.get(known.job)
        if job is not None and job.run is not None and job.record.state is JobState.LOADING:
            job.run.driver.made_progress()

    def _may_log(self, known: Peer) -> bool:
        """Whether the peer may log one more line now; the log says once that lines are left out."""
        peer, at_s = known.hello.peer, now_s()
        if self._lines.setdefault(peer, Bucket(LOG_LINES_PER_S, LOG_LINES_AT_ONCE)).take(at_s):
            self._muted.discard(peer)
            return True
        if peer not in self._muted:
            self._muted.add(peer)
            text = f"says more than {LOG_LINES_PER_S:.0f} lines a second: some are left out"
            line = LogLine(self._ports.wall_s(), "warning", peer, known.stage, text)
            self._ports.stores.logs.append(self._served[peer], line)
        return False

    def _at_work(self, known: Peer, event: Event) -> None:
        """An event for the brain of the peer's job."""
        peer, job = known.hello.peer, self._registry.get(known.job)
        if job is None or job.run is None:
            return
        if isinstance(event, Loaded) and event.job == known.job and not job.run.brain.is_joining(peer):
            self._peers.serving(peer)
            self._tasks.create_task(self._runner.note_if_running(job))
        job.run.driver.on_event(peer, event)


@dataclass(eq=False)
class JobTransfer:
    """Moves state for jobs at work; every chunk that a job waits for counts as progress."""

    _stores: Stores
    _registry: JobRegistry

    async def held(self, header: StoreHeader) -> int:
        """How many first bytes of the file are here already; `store` goes on from there."""
        job = self._registry.get(header.job)
        if job is None or job.run is None or job.run.sink is None:
            return 0
        return await job.run.sink.held(of_job(job.spec, header, job.run.brain))

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Take a file of a stage's state for the job's checkpoint."""
        job = self._registry.get(header.job)
        if job is None or (run := job.run) is None or run.sink is None:
            raise Refused(f"job {header.job} collects nothing")

        part = Saved(header.job, header.timeline, header.version, header.stage, ())

        async def counted() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
                if run.brain.awaits(header.peer, part):  # and the sink has taken the chunk, as it asks for the next one
                    run.driver.made_progress()

        told = of_job(job.spec, header, run.brain)
        try:
            return await run.sink.put(told, counted())
        except CheckpointFailed as error:
            run.driver.checkpoint_written(told.version, error.reason, str(error))
            raise

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        """Bytes of a file that a job at work starts from; NotFound or Refused."""
        job = self._registry.get(request.job)
        if job is None or (run := job.run) is None or request.timeline not in timelines(job):
            raise Refused(f"job {request.job} does not load anything on timeline {request.timeline}")
        async for chunk in self._stores.files.state(job.record, job.start).read(request, self._stores.threads):
            if job.record.state is JobState.LOADING:  # later nobody needs it: who joins has its state from a replica
                run.driver.made_progress()
            yield chunk
