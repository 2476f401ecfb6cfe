"""Loading: the state that each replica must load, and the check that all loaded states fit together.

Replicas of a stage must stay equal bit for bit: they begin with the same version, the same bytes and the same number of
elements in each unit, and their optimizers give the same bits (devices.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.brain.commit.digests import Expel, Remedy, vote
from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.outputs import Fail
from scheduler.brain.replicas.devices import explain_probes, step_places, step_together
from scheduler.brain.state.brain_state import BrainState
from swarm.errors import JobFailed
from swarm.text import listed
from swarm.types import PeerId, UnitName
from swarm.wire.messages import Committed, Loaded, LoadStage

PROBES_HINT = "give each kind of device stages of its own: start its stage servers with --stage N"


class Loading:
    """The loading of one job; `elements` is the size of each unit, as all that loaded it say."""

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
        return [one.replica.peer for one in self._state.pool.standings() if one.loaded is None]

    def digests(self) -> dict[int, str]:
        return {one.loaded.stage: one.loaded.digest for one in self._state.pool.standings() if one.loaded is not None}

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
        for stage, version in sorted({(one.stage, one.version) for one in reports.values()}):
            alike = {peer: one.digest for peer, one in reports.items() if (one.stage, one.version) == (stage, version)}
            yield vote(alike, f"the bytes of stage {stage} after loading", by_stage, recover=settings.recover)

    def _unlike_probes(self, stage: int, probes: dict[PeerId, str], devices: dict[PeerId, str]) -> str:
        """Why replicas that share weights with the stage do not fit; also `probes` and `devices`. Empty if they fit."""
        stages = self._step_together[stage]
        known = {peer: one.probe for peer, one in self._reports().items() if one.stage in stages}
        at = {peer: self._state.pool[peer].replica.device for peer in known}
        return explain_probes(known | probes, at | devices, stages)

    def _reports(self) -> dict[PeerId, Loaded]:
        return {one.replica.peer: one.loaded for one in self._state.pool.standings() if one.loaded is not None}
