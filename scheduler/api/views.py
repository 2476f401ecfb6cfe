"""Jobs, stage servers, explanations and logs as one caller sees them, for the Jobs service and the page alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from scheduler.api.members.relays import RelayDesk
from scheduler.brain.explain.facts import Fact, JobQueue, explain_job
from scheduler.brain.fleet.membership import Membership, Peer
from scheduler.brain.members.persons import Person
from scheduler.jobs.commands import Jobs
from scheduler.jobs.islands import island_at
from scheduler.jobs.job import Job, now_s, speed_of
from scheduler.storage.job_log import LogLine
from swarm.checkpoint.reader import Checkpoint, Fault
from swarm.errors import InvalidConfig, NotAllowed, NotFound
from swarm.limits import REPLY_BYTES_MAX
from swarm.pki.names import Role
from swarm.process.logs import LOG_LEVELS
from swarm.text import without_passwords
from swarm.wire import jobs_pb2 as pb

# What stage servers and persons may write at length; names, states and paths are not cut.
_WORDS = frozenset({"reason", "hint", "lost", "address", "http_address", "device", "product", "site"})
View = TypeVar("View", pb.JobView, pb.PeerView, pb.Waste)
Reply = TypeVar("Reply", bound=Message)


def fitting(views: Iterable[View]) -> list[View]:
    """As many entries as fit a message, in order; entries beyond their share are shortened first."""
    found = list(views)
    if sum(map(_taken, found)) > REPLY_BYTES_MAX:
        share = REPLY_BYTES_MAX // len(found)
        for view in found:
            if _taken(view) > share:
                _shorten(view, share)
    fit: list[View] = []
    left = REPLY_BYTES_MAX
    for view in found:
        left -= _taken(view)
        if left < 0:
            break
        fit.append(view)
    return fit


def _taken(view: Message) -> int:
    return view.ByteSize() + 8  # what the list adds to each


def _shorten(view: Message, share: int) -> None:
    """Leave out what a list need not say of one: links to others, and all but the beginnings of its texts."""
    if "links" in view.DESCRIPTOR.fields_by_name:
        view.ClearField("links")
    texts = [one.name for one, _ in view.ListFields() if one.name in _WORDS]
    for name in texts:
        setattr(view, name, getattr(view, name)[: share // (8 * len(texts))])


def named(kind: type[Reply], *values: object, **others: Any) -> Reply:
    """A message with the fields of the values by name, each from the first value that has it, and `others`."""
    for name in kind.DESCRIPTOR.fields_by_name.keys() - others.keys():
        having = next((value for value in values if hasattr(value, name)), None)
        if having is not None:
            others[name] = getattr(having, name)
    return kind(**others)


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that is shown of jobs, stage servers and relays; `asks` says who looks."""

    jobs: Jobs
    membership: Membership
    asks: Callable[[], Person]
    wall_s: Callable[[], float]
    relays: RelayDesk | None = None

    def queue(self) -> JobQueue:
        return self.jobs.registry.queue()

    def job(self, job: Job, *, spec: bool = True, queue: JobQueue | None = None) -> pb.JobView:
        """The job as the caller sees it, with its `spec` or without; of one that waits, also its place among others."""
        view = job_view(job, self.wall_s(), spec=spec)
        if job.waiting is not None and (told := (queue or self.queue()).text(job.record.id)):
            view.reason = f"{view.reason}; {told}"
        return view

    def job_facts(self, job: Job) -> list[Fact]:
        """Why the job waits, or what limits its speed."""
        peers = [peer for peer in self.membership.peers() if peer.job == job.record.id]
        facts = explain_job(self.jobs.standing(job), job.situation(), self.jobs.idle(), job.clock_s(), peers)
        if job.waiting is not None:
            facts += self.queue().facts(job.record.id)
        return facts

    def peer(self, peer: Peer) -> pb.PeerView:
        return self._guarded(_peer_view(peer, self.jobs.registry.get(peer.job), now_s(), self.wall_s()))

    def relay_views(self) -> list[pb.PeerView]:
        return [] if self.relays is None else list(map(self._guarded, self.relays.views()))

    def _guarded(self, view: pb.PeerView) -> pb.PeerView:
        """The view; for a caller that is no admin, without addresses."""
        if self.asks().role is not Role.ADMIN:
            view.ClearField("address")
            view.ClearField("http_address")
        return view


def job_view(job: Job, now_unix_s: float, *, spec: bool = True) -> pb.JobView:
    """A job as clients see it, with its whole `spec` or without: it may be long."""
    record, progress, peers = job.record.counted(now_unix_s), job.progress, job.stages
    counts = job.brain.counts() if job.brain is not None else None
    committed = progress.steps_done * job.spec.training.microbatches
    waits = {"tokens_per_s": 0.0, "eta_s": math.nan} if job.awaits_database else {}
    return named(
        pb.JobView,
        progress,
        record,
        **waits,
        reason=job.reason,
        step=progress.steps_done,
        steps=job.spec.training.steps,
        grad_norm=progress.norm,
        unigram_entropy=record.tokens.unigram_entropy,
        stages=[
            pb.StageView(
                stage=stage,
                layers=layers,
                peers=peers.get(stage, []),
                microbatches=counts.microbatches if counts is not None else committed,
            )
            for stage, layers in enumerate(job.spec.split)
        ],
        microbatches_committed=committed,
        microbatches_in_flight=counts.in_flight if counts is not None else 0,
        microbatches_replayed=job.done_again,
        spec_json=without_passwords(record.spec_json) if spec else "",
        checkpoint_step=job.newest.step if job.newest is not None else 0,
        checkpoint_unix_s=job.newest.created_unix_s if job.newest is not None else 0.0,
        skipped_steps=progress.skipped,
        islands=_islands(job),
        priority=job.spec.limits.priority,
        times_s=record.times,
        lost_steps=record.repeats.steps,
        lost=job.lost,
    )


def _islands(job: Job) -> list[pb.IslandView]:
    """The islands of a job at work that has some."""
    situation = job.situation() if job.spec.has_outer_steps else None
    whole = job.spec.training.microbatches // job.spec.island_count
    return [
        named(
            pb.IslandView,
            island,
            island=island.number,
            peers=[peer for pool in island.peers for peer in pool],
            step=island.steps,
            waits_for=island.waiting_for,
            microbatches=whole if island.share is None else island.share[0],
        )
        for island in (situation.islands if situation is not None else ())
    ]


def _peer_view(peer: Peer, job: Job | None, now_s: float, now_unix_s: float) -> pb.PeerView:
    """A stage server; `job` is the one that it serves."""
    hello = peer.hello
    brain = job.brain if job is not None else None
    way = "via relay" if hello.via_relay else "(not reached)" if peer.unreached else ""
    return named(
        pb.PeerView,
        peer,
        hello,
        peer.measured,
        id=hello.peer,
        since_unix_s=now_unix_s - (now_s - peer.since_s),
        address=" ".join(filter(None, (hello.address, way))),
        pace_s=brain.pace_s(hello.peer) if brain is not None else 0.0,
        multiply_adds_per_s=speed_of(job, peer) or peer.measured.multiply_adds_per_s,
        outstanding=brain.outstanding(hello.peer) if brain is not None else 0,
        links=[named(pb.LinkView, link) for link in peer.links],
        island=f"{island_at(job, hello.peer)}" if job is not None and job.spec.has_outer_steps else "",
    )


def step_trace(job: Job, step: int, now_unix_s: float) -> pb.StepTrace:
    """The spans of a step of a job at work; 0: the newest that is complete. NotAllowed, NotFound."""
    if job.run is None:
        raise NotAllowed(
            f"job {job.record.id} {job.record.state.phrase}: only a job at work has traces of its newest steps",
            hint="ask while it trains",
        )
    trace = job.run.driver.trace
    newest = trace.newest()
    wanted = newest if step == 0 else step - 1
    spans = [] if wanted is None else trace.spans(wanted)
    if wanted is None or not spans:
        known = [made + 1 for made in trace.steps()]
        told = f"steps {known[0]} to {known[-1]} are known" if known else "no step is known yet"
        asked = f"step {step} of" if step else "a complete step of"
        hint = f"for the newest: swarm trace {job.record.id}"
        raise NotFound(f"there is no trace of {asked} job {job.record.id}: {told}", hint=hint)
    begin_s = spans[0].begin_s
    return pb.StepTrace(
        job=job.record.id,
        step=wanted + 1,
        every=trace.every,
        begin_unix_s=now_unix_s - (job.clock_s() - begin_s),
        spans=[
            named(pb.StepSpan, span, begin_s=span.begin_s - begin_s, duration_s=span.end_s - span.begin_s)
            for span in spans
        ],
    )


def checkpoint_view(checkpoint: Checkpoint | Fault, fault: str) -> pb.CheckpointView:
    """A checkpoint and what is wrong with it. Without a readable manifest only its step is known."""
    if isinstance(checkpoint, Fault):
        return pb.CheckpointView(step=checkpoint.step, loss=math.nan, fault=fault)
    return named(pb.CheckpointView, checkpoint, optimizer=bool(checkpoint.optimizer), fault=fault)


def explanation(kind: str, name: str, facts: Iterable[Fact]) -> pb.Explanation:
    return pb.Explanation(
        kind=kind,
        id=name,
        facts=[pb.Fact(topic=fact.topic, text=fact.text, numbers=dict(fact.numbers)) for fact in facts],
    )


def log_filter(request: pb.LogsRequest) -> Callable[[LogLine], bool]:
    """Tells which lines a client wants; InvalidConfig."""
    level = request.level or "info"
    if level not in LOG_LEVELS:
        raise InvalidConfig(f"level is one of {', '.join(LOG_LEVELS)}, not {level!r}")
    levels = LOG_LEVELS[LOG_LEVELS.index(level) :]

    def wanted(line: LogLine) -> bool:
        return (
            line.level in levels
            and (not request.peer or line.peer.startswith(request.peer))
            and (request.stage < 0 or line.stage == request.stage)
            and line.time_unix_s >= request.since_unix_s
            and (not request.after or line.number > request.after)
        )

    return wanted
