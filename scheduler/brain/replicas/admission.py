"""Admission of peers to a job at work: commands to joiners, their reports, and the verdict (state/pool.py).

begin ──▶ LoadStage, Follow ──▶ Loaded ──▶ judged with every event ─┬─ new enough, the right bytes ──▶ admitted
              ▲                                                     ├─ too old ──▶ answered: it goes on following
              └── every commit, and its first digest ──▶ Follow     └─ other bytes, other sizes, too slow ──▶ refused

A joiner that waits builds its stage and hears no Follow, so it fetches nothing until `begin` comes for it once more.

Decision: docs/decisions/028.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from scheduler.brain.commit.commits import Commits
from scheduler.brain.commit.digests import Expel, Remedy, vote
from scheduler.brain.inputs import Join, ReplicaRecord
from scheduler.brain.outputs import Admitted, Fail, Send
from scheduler.brain.replicas.rebalancing import Moves
from scheduler.brain.routing.dispatch import Dispatch
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.pool import Joiner, choose_donors
from swarm.errors import JobFailed
from swarm.text import counted, listed
from swarm.types import PeerId, UnitName
from swarm.wire.messages import Admit, Committed, Event, Failed, Follow, Hello, Loaded, LoadStage

JOINER_BYTES_PER_S_MIN = 1e6
JOIN_S_MIN = 600.0
COMPILE_S_MAX = 1800.0


@dataclass(frozen=True, slots=True)
class Admission:
    """The joiners of one job, and the messages between them and the job."""

    _state: BrainState
    _loading: Loading
    _dispatch: Dispatch
    _commits: Commits
    _moves: Moves
    _rng: Random

    def begin(self, join: Join, now_s: float) -> None:
        """Let a peer fetch what its stage holds."""
        replica, joiners = join.replica, self._state.joiners
        if not join.waits and (joiner := joiners.fetches(replica.peer, now_s)) is not None:
            self._tell(joiner)
            return
        joiner = joiners.begin(replica, now_s, waits=join.waits)
        self._state.outbox.note("info", f"stage server {replica.peer} joins stage {replica.stage}")
        self._state.outbox.put(Send(replica.peer, self._loading.command(replica.stage, joiner.number)))
        self._tell(joiner)

    def tell(self, stage: int | None = None) -> None:
        """Send a new version to all joiners, or the known digest of a stage to its joiners."""
        for joiner in self._state.joiners:
            if stage is None or joiner.replica.stage == stage:
                self._tell(joiner)

    def hear(self, peer: PeerId, event: Event, now_s: float) -> None:
        """Handle an event of a joiner; events about an earlier life as a replica are ignored."""
        joiner = self._state.joiners.get(peer)
        assert joiner is not None
        match event:
            case Loaded() if self._state.joiners.reported(peer, event):
                fault = self._loading.unfit(joiner.replica, event)
                if fault:
                    self.refuse(joiner, fault, now_s)
            case Hello() if event.join == joiner.number and event.job == self._state.settings.job:
                self._tell(joiner)
            case Hello():
                self.refuse(joiner, "its session broke before it knew what to fetch", now_s)
            case Failed() if event.job == self._state.settings.job:
                self.refuse(joiner, event.message, now_s)

    def awaits(self, peer: PeerId, event: Event) -> bool:
        """Whether a joiner says for the first time that it has a state that is new enough."""
        joiner = self._state.joiners.get(peer)
        if joiner is None or joiner.report is not None or not isinstance(event, Loaded):
            return False
        return event.join == joiner.number and event.version >= self._state.progress.agreed

    def refuse(self, joiner: Joiner, reason: str, now_s: float) -> None:
        """Turn the joiner away, at least for now."""
        peer = joiner.replica.peer
        self._state.joiners.failed(peer, reason, now_s)
        told = f"stage server {peer} could not join stage {joiner.replica.stage}: {reason}"
        self._state.outbox.note("warning", told)
        self._state.outbox.release(peer, reason)

    def judge(self, now_s: float) -> None:
        """Admit the joiners whose reported state is right and new enough, and answer the others.

        One at a time: a joiner that was admitted is a donor of those after it.
        """
        for joiner in self._state.joiners:
            report = joiner.report
            if report is None and now_s >= self._too_long_s(joiner):
                self.refuse(joiner, "it takes too long to fetch the state", now_s)
            if report is None:
                continue
            if report.version < self._state.progress.agreed:
                self._state.joiners.answer(joiner)
                self._tell(joiner)
                continue
            digest = self._state.progress.digest_at(joiner.replica.stage, report.version)
            if digest and digest != report.digest:
                fault = f"its state of version {report.version} is not that of the replicas"
                self.refuse(joiner, fault, now_s)
            elif digest:
                self._state.joiners.admitted(joiner.replica.peer)
                self._admit(joiner, report, now_s)

    def times_s(self) -> list[float]:
        """When each joiner that still fetches will have taken too long."""
        return [self._too_long_s(joiner) for joiner in self._state.joiners if joiner.report is None]

    def _admit(self, joiner: Joiner, report: Loaded, now_s: float) -> None:
        """The joiner is a replica from now on."""
        settings, pool, outbox = self._state.settings, self._state.pool, self._state.outbox
        replica, version, took_s = joiner.replica, report.version, now_s - joiner.since_s
        peer = replica.peer
        pool.joined(replica, report, now_s)
        self._dispatch.add(peer)
        self._dispatch.open_window()
        self._moves.fetched(replica.stage, took_s)
        outbox.put(Admitted(peer, replica.stage))
        took = f"it took {took_s:.1f} s to get the weights after {counted(version, 'step')}"
        outbox.note("info", f"{pool.name(peer)} joined: {took}")
        outbox.send(peer, Admit(settings.job, settings.timeline, joiner.number, version))
        self._loading.begins_with(peer, report)
        self._commits.send_since(peer, version)

    def _tell(self, joiner: Joiner) -> None:
        """Tell a joiner what is new: versions, digest, donors, and that its report was seen."""
        if joiner.waits:
            return
        settings, progress, replica = self._state.settings, self._state.progress, joiner.replica
        version = progress.committed
        known = progress.digest_at(replica.stage, version)
        agreed = (version, known) if known else (progress.agreed, progress.agreed_digest(replica.stage))
        donors = choose_donors(self._state.pool.donors(replica.stage, version, replica.peer), self._rng)
        follow = Follow(settings.job, settings.timeline, joiner.number, version, *agreed, donors, joiner.answered)
        self._state.outbox.put(Send(replica.peer, follow))

    def _too_long_s(self, joiner: Joiner) -> float:
        """When a joiner will have taken too long: moves wait for it, and it counts as a replica to come."""
        if joiner.waits:
            return math.inf
        settings = self._state.settings
        fetch_s = settings.state_bytes[joiner.replica.stage] / JOINER_BYTES_PER_S_MIN if settings.state_bytes else 0.0
        return joiner.since_s + JOIN_S_MIN + (COMPILE_S_MAX if settings.compiles else 0.0) + fetch_s


PROBES_HINT = "give each kind of device stages of its own: start its stage servers with --stage N"


class Loading:
    """Loading: the state that each replica must load, and the check that all loaded states fit together.

    Replicas of a stage must stay equal bit for bit: they begin with the same version, the same bytes and the same
    number of elements in each unit, and their optimizers give the same bits.

    The loading of one job; `elements` is the size of each unit, as all that loaded it say.
    """

    def __init__(self, state: BrainState) -> None:
        self.elements: dict[UnitName, int] = {}
        self._state = state
        self._places: Sequence[str] = ()  # where the optimizer of each stage runs
        self._step_together = step_together(len(state.settings.split), state.settings.units)

    def find_places(self) -> None:
        """Settle, once and for all, where the optimizer of each stage runs."""
        devices = [[self._state.pool[peer].replica.device for peer in peers] for peers in self._state.pool.by_stage]
        self._places = step_places(devices, self._step_together)
        if self._state.settings.steps_on_host:
            self._places = ("cpu",) * len(self._places)

    def begin(self) -> None:
        """Tell every replica to load its stage."""
        self.find_places()
        for standing in self._state.pool.standings():
            self.send(standing.replica)
        mixed = [str(stage) for stage, place in enumerate(self._places) if place == "cpu"]
        if mixed and not self._state.settings.steps_on_host:
            told = f"unequal devices: the optimizer of stage {', '.join(mixed)} runs on the CPU"
            self._state.outbox.note("info", told)

    def send(self, replica: ReplicaRecord) -> None:
        self._state.outbox.send(replica.peer, self.command(replica.stage))

    def command(self, stage: int, join: int = 0) -> LoadStage:
        """How a stage is loaded; `join` is the number of a joiner, 0 for a replica."""
        settings = self._state.settings
        return LoadStage(
            settings.job,
            settings.timeline,
            stage,
            settings.split,
            settings.first_step,
            settings.spec_json,
            settings.files,
            step_on=self._places[stage],
            join=join,
        )

    def missing(self) -> list[PeerId]:
        return [standing.replica.peer for standing in self._state.pool.standings() if standing.loaded is None]

    def digests(self) -> dict[int, str]:
        return {report.stage: report.digest for report in self._reports().values()}

    def loaded(self, peer: PeerId, event: Loaded) -> list[Remedy]:
        """Note that a replica has loaded. Returns a remedy if it loaded another state than ordered."""
        pool, settings = self._state.pool, self._state.settings
        replica, name = pool[peer].replica, pool.name(peer)
        expected = {unit for unit, stages in settings.units.items() if replica.stage in stages}
        units = [size.unit for size in event.units]
        # One that joined later, and tells of it again after a restart of the scheduler, began with a later version.
        version = max(event.version, settings.first_step) if event.join else settings.first_step
        if (event.stage, event.version, sorted(units)) != (replica.stage, version, sorted(expected)):
            held = f"stage {event.stage}, version {event.version}, units {listed(units)}"
            wanted = f"stage {replica.stage}, version {version}, units {listed(expected)}"
            if settings.recover and len(pool.by_stage[replica.stage]) > 1:
                return [Expel(peer, f"it loaded {held} instead of {wanted}")]
            return [Fail(JobFailed.code, f"{name} loaded {held} instead of {wanted}", "")]
        pool[peer].loaded = event
        if event.join:
            self.begins_with(peer, event)
        return []

    def compare(self) -> list[Remedy]:
        """All have loaded; gives remedies for replicas that do not fit with the others."""
        found = next(filter(None, self._differences()), [])
        self._state.ledger.violations += bool(found)
        if not found:
            for report in self._reports().values():
                self.elements.update({size.unit: size.elements for size in report.units})
        return found

    def begins_with(self, peer: PeerId, report: Loaded) -> None:
        """The replica joined with a version: it made no commit before that, and has that one's outcome."""
        version = report.version
        self._state.pool[peer].since = version
        before = self._state.progress.runs.get(version - 1)
        if before is not None:
            stage = self._state.pool.stage_of(peer)
            before.commits[peer] = Committed(report.timeline, version - 1, version, stage, report.digest)

    def unfit(self, replica: ReplicaRecord, event: Loaded) -> str:
        """Why a joiner can never serve beside the replicas; empty if it can."""
        settings, stage, committed = self._state.settings, replica.stage, self._state.progress.committed
        sizes = {size.unit: size.elements for size in event.units}
        expected = {unit: self.elements.get(unit) for unit, stages in settings.units.items() if stage in stages}
        if (event.job, event.timeline, event.stage) != (settings.job, settings.timeline, stage):
            return f"it loaded stage {event.stage} of job {event.job}"
        if sizes != {unit: elements for unit, elements in expected.items() if elements is not None}:
            return f"it has {sizes} parameters, the stage {expected}"
        if event.version > committed:
            self._state.ledger.violations += 1
            return f"it says version {event.version}, the newest is {committed}"
        return self._unlike_probes(stage, {replica.peer: event.probe}, {replica.peer: replica.device})

    def _differences(self) -> Iterator[list[Remedy]]:
        """Remedies where stages that share a unit differ in its size, the optimizer's results or the loaded bytes."""
        reports, settings, by_stage = self._reports(), self._state.settings, self._state.pool.by_stage
        for unit in settings.units:
            sizes = {peer: {size.unit: size.elements for size in one.units} for peer, one in reports.items()}
            said = {peer: found[unit] for peer, found in sizes.items() if unit in found}
            yield vote(said, f"the number of elements of unit {unit}", by_stage, recover=settings.recover)
        for stage, together in enumerate(self._step_together):
            probes = {peer: one.probe for peer, one in reports.items() if one.stage in together}
            fault, hint = self._unlike_probes(stage, {}, {}), PROBES_HINT
            yield vote(probes, "what their optimizers give", by_stage, recover=settings.recover, fault=fault, hint=hint)
        for stage, version in sorted({(report.stage, report.version) for report in reports.values()}):
            alike = {peer: one.digest for peer, one in reports.items() if (one.stage, one.version) == (stage, version)}
            yield vote(alike, f"the bytes of stage {stage} after loading", by_stage, recover=settings.recover)

    def _unlike_probes(self, stage: int, probes: dict[PeerId, str], devices: dict[PeerId, str]) -> str:
        """Why replicas that share weights with the stage do not fit; also `probes` and `devices`. Empty if they fit."""
        stages = self._step_together[stage]
        known = {peer: one.probe for peer, one in self._reports().items() if one.stage in stages}
        at = {peer: self._state.pool[peer].replica.device for peer in known}
        return explain_probes(known | probes, at | devices, stages)

    def _reports(self) -> dict[PeerId, Loaded]:
        pairs = ((standing.replica.peer, standing.loaded) for standing in self._state.pool.standings())
        return {peer: report for peer, report in pairs if report is not None}


def device_kind(device: str) -> str:
    """The kind of a device, without its number: "cuda:1 NVIDIA H100" is "cuda NVIDIA H100"."""
    name, space, model = device.partition(" ")
    return name.partition(":")[0] + space + model


def step_together(stages: int, units: Mapping[UnitName, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """For each stage the stages that share weights with it, itself included, in order."""
    groups = [{stage} for stage in range(stages)]
    for members in units.values():
        joined = set().union(*(groups[stage] for stage in members))
        for stage in joined:
            groups[stage] = joined
    return tuple(tuple(sorted(group)) for group in groups)


def step_places(devices: Sequence[Sequence[str]], together: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Decides which devices may serve together, and where each stage's optimizer runs.

    Replicas of a stage must stay equal bit for bit. Devices of one kind compute alike, so the optimizer runs on them.
    In a stage with several kinds of devices all replicas run it on their CPU, which costs a copy of weights and
    gradient per step. A probe (`Loaded.probe`) shows the bits that each replica really computes; if the probes differ,
    the job must not start.

    Stages that share a unit (first and last, with tied embeddings) hold the same weights, so they count as one here.

    Where the optimizer of each stage runs, "device" or "cpu"; `devices` has the replicas' devices per stage.
    """
    kinds = [{device_kind(device) for stage in group for device in devices[stage]} for group in together]
    return tuple("device" if len(found) == 1 else "cpu" for found in kinds)


def explain_probes(probes: Mapping[PeerId, str], devices: Mapping[PeerId, str], stages: tuple[int, ...]) -> str:
    """Why replicas with these probes cannot serve together; empty if they can."""
    alike: dict[str, list[PeerId]] = {}
    for peer in sorted(probes):
        alike.setdefault(probes[peer], []).append(peer)
    if len(alike) < 2:
        return ""
    camps = " against ".join(
        ", ".join(f"{peer} ({devices[peer] or 'unknown device'})" for peer in peers) for peers in alike.values()
    )
    if len(stages) == 1:
        where = f"stage {stages[0]}"
    else:
        where = f"stages {' and '.join(map(str, stages))}, which share the tied embedding,"
    return (
        f"the optimizer gives other bits on some replicas of {where} than on others: {camps}; "
        f"their weights would drift apart, so they cannot be mixed: let machines of one kind serve it"
    )
