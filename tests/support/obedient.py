"""A whole job in memory: the brain, and replicas that do as they are told, so that a test can make one of them lie.

Replicas keep what they accumulated as sets of microbatches. What they report as digests spells these sets, and whoever
commits or averages anything but each microbatch once fails the test.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from scheduler.brain.inputs import (
    CheckpointKept,
    Happened,
    Input,
    Join,
    ReplicaRecord,
    Resumed,
    RowDurable,
    Start,
    Stored,
    Tick,
)
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import (
    CommitRow,
    Fail,
    Finish,
    Note,
    Output,
    PublishCheckpoint,
    Send,
    Stopped,
    Struck,
    Unfit,
    Vouch,
    WriteCommit,
    WriteEvaluation,
)
from scheduler.brain.settings import BrainSettings, SavingRules
from swarm.types import Hop, JobId, Microbatch, PeerId, UnitName, set_digest
from swarm.wire.messages import (
    AbortRound,
    Accumulated,
    Admit,
    Average,
    Averaged,
    Check,
    Checked,
    Command,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Event,
    Follow,
    Forwarded,
    Hashed,
    HashStage,
    Hello,
    Loaded,
    LoadStage,
    ParameterHash,
    ParameterNorm,
    Recheck,
    Rechecked,
    Recount,
    Recounted,
    Release,
    ReportedCell,
    Route,
    Saved,
    SaveStage,
    StateFile,
    UnitSize,
    Void,
)

JOB = JobId("job")
STEPS, MICROBATCHES = 3, 3
HOOKS = {"lie", "falsify", "reduced", "recounted", "state_of"}


@dataclass
class Obedient:
    """What one replica holds."""

    peer: PeerId
    stage: int
    version: int = 0
    attempts: dict[Microbatch, int] = field(default_factory=dict)
    sums: dict[int, set[int]] = field(default_factory=dict)
    join: int = 0
    loaded: bool = False


class Swarm:
    """A job; `lie` may change or drop any event on its way to the brain."""

    def __init__(
        self, pools: Sequence[str] = ("abc", "def"), *, seed: int = 0, tied: bool = False, **changes: Any
    ) -> None:
        self.pools = pools
        units = {UnitName(f"stage-{stage}"): (stage,) for stage in range(len(pools))}
        if tied:
            units[UnitName("tied")] = (0, len(pools) - 1)
        values: dict[str, Any] = {
            "job": JOB, "epoch": 3, "timeline": 1, "steps": STEPS, "microbatches": MICROBATCHES,
            "split": (1,) * len(pools), "spec_json": "{}", "overlap": MICROBATCHES, "max_in_flight": None,
            "units": units, "grad_clip_norm": 1.0, "averaging_timeout_s": 5.0, "fail_on_nonfinite": False,
            "learning_rate": lambda step: 0.1, "tokens_of": lambda step: 8, "eval_every_steps": 1,
            "evaluation_microbatches": 2, "evaluation_tokens": 8, "saving": SavingRules(every_steps=2), "recover": True,
        }  # fmt: skip
        self.settings = BrainSettings(**(values | changes))
        self.rng = Random(seed)
        self.brain = JobBrain(self.settings, Random(seed))
        self.now_s = 0.0
        self.replicas = {
            PeerId(name): Obedient(PeerId(name), stage) for stage, pool in enumerate(pools) for name in pool
        }
        self.lie: Callable[[PeerId, Event], Event | None] = lambda peer, event: event
        # What a replica makes instead of a tensor, with trust.spot_check: "y" or "dx", its microbatch, and its name.
        self.falsify: Callable[[PeerId, str, Microbatch, str], str] = lambda peer, kind, microbatch, name: name
        self.made: dict[tuple[Microbatch, int], tuple[str, str]] = {}  # y and dx of the newest hop at each stage
        # With trust.second_owner, what a reader (or the owner) of a slice has taken of whom, computed, and holds.
        self.reduced: Callable[[PeerId, PeerId, tuple[PeerId, ...]], tuple[tuple[str, ...], str, str]] = (
            lambda reader, owner, members: (tuple(f"part of {member}" for member in members), "mean", "mean")
        )
        # With trust.recount, the sum of a replica (its second word) as a recounter gets it.
        self.recounted: Callable[[PeerId, PeerId], str] = lambda recounter, giver: f"part of {giver}"
        self.recounts: dict[tuple[PeerId, int], Recount] = {}
        # With trust.second_hash, the hash of what a replica stores or, asked for its word, hashes: "stored", "hashed".
        self.state_of: Callable[[PeerId, str, int], str] = lambda peer, kind, version: f"version {version}"
        self.vouched: list[Vouch] = []
        self.struck: list[Struck] = []
        self.inbox: deque[tuple[PeerId, Command]] = deque()
        self.told: list[tuple[PeerId, Command]] = []  # all that was sent
        self.rows: list[CommitRow] = []
        self.evaluated: dict[int, float] = {}
        self.notes: list[str] = []
        self.released: dict[PeerId, str] = {}
        self.unfit: list[Unfit] = []
        self.end: Output | None = None
        self.means: dict[Any, dict[int, list[int]]] = {}  # of each round, what each member put in, per stage
        self.averages: dict[Any, dict[PeerId, Average]] = {}
        self.averaged: set[Any] = set()

    @classmethod
    def trained(cls, pools: Sequence[str] = ("abc", "def"), **changes: Any) -> Swarm:
        """A job that was run to its end, with hooks such as `lie` and settings by name."""
        hooks = {name: changes.pop(name) for name in HOOKS & changes.keys()}
        swarm = cls(pools, **{"routing": "uniform", "eval_every_steps": 0} | changes)
        for name, hook in hooks.items():
            setattr(swarm, name, hook)
        swarm.start()
        swarm.run(most=20000)
        return swarm

    # The scheduler -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.step(Start(tuple(self.record(replica.peer, replica.stage) for replica in self.replicas.values())))

    def record(self, peer: PeerId, stage: int) -> ReplicaRecord:
        return ReplicaRecord(peer, 1, f"at {peer}", stage)

    def step(self, happened: Input) -> None:
        self.now_s += 0.001
        outputs = self.brain.step(happened, self.now_s)
        self.brain.validate()
        for output in outputs:
            match output:
                case Send(peer=peer, command=command):
                    self.inbox.append((peer, command))
                    self.told.append((peer, command))
                case WriteCommit(row=row):
                    assert row.step == len(self.rows)
                    self.rows.append(row)
                    self.step(RowDurable(row.step))
                case WriteEvaluation(row=evaluation):
                    self.evaluated[evaluation.version] = evaluation.loss
                case PublishCheckpoint(version=version):
                    self.step(CheckpointKept(version))
                case Note(message=message):
                    self.notes.append(message)
                case Unfit():
                    self.unfit.append(output)
                case Struck():
                    self.struck.append(output)
                case Vouch():
                    self.vouched.append(output)
                case Finish() | Fail() | Stopped():
                    self.end = output

    def restart(self) -> None:
        """The scheduler was killed; all that was on its way is lost, and the replicas dial the next one."""
        committed = len(self.rows)
        self.settings = replace(self.settings, epoch=4)
        self.brain, self.inbox = JobBrain(self.settings, Random(7)), deque()
        known = {replica.peer: replica.stage for replica in self.replicas.values() if replica.peer not in self.released}
        self.step(Resumed(known, committed, tuple(self.rows[-2:]), set(self.evaluated), 10.0))

    def hello(self, peer: PeerId) -> Hello:
        one = self.replicas[peer]
        cells = []
        for microbatch, attempt in sorted(one.attempts.items()):
            if microbatch.step >= one.version:
                is_added = microbatch.index in one.sums.get(microbatch.step, ())
                cells.append(ReportedCell(microbatch, attempt, is_added, True, self.loss_of(one, microbatch)))
        held = (JOB, 1, one.version, tuple(cells), one.stage, max(one.attempts.values(), default=0))
        return Hello(peer, 1, 1, "0", f"at {peer}", "", "cpu", 1, 1, -1, *held)

    # The replicas ------------------------------------------------------------------------------------------------

    def say(self, peer: PeerId, event: Event) -> None:
        told = self.lie(peer, event)
        if told is not None and self.end is None:
            self.step(Happened(peer, told))

    def join(self, name: str, stage: int) -> None:
        peer = PeerId(name)
        self.replicas[peer] = Obedient(peer, stage)
        self.step(Join(self.record(peer, stage)))

    def run(self, until: Callable[[], bool] = lambda: False, most: int = 3000) -> None:
        """Let the replicas do what they are told, until then or until the job has ended."""
        for _ in range(most):
            if self.end is not None or until():
                return
            if self.inbox:
                self.obey(*self.inbox.popleft())
            elif self.brain.due_s < self.now_s + 100.0:
                self.now_s = max(self.now_s, self.brain.due_s)
                self.step(Tick())
            else:
                return

    def obey(self, peer: PeerId, command: Command) -> None:
        one = self.replicas[peer]
        stage, settings = one.stage, self.settings
        match command:
            case Release(reason=reason):
                self.released[peer] = reason
            case LoadStage(join=join, version=version):
                one.version, one.join, one.loaded = version, join, True
                if not join:
                    self.say(peer, self.loaded(one))
            case Follow(version=version, digest=digest) if digest and one.join:
                one.version = version
                self.say(peer, self.loaded(one))
            case Admit():
                one.join = 0
            case Route(microbatch=microbatch, hops=hops) if hops[stage].peer == peer:
                attempt = hops[stage].attempt
                one.attempts[microbatch] = attempt
                held = one.sums.setdefault(microbatch.step, set())
                held.add(microbatch.index)
                loss = self.loss_of(one, microbatch)
                if stage < len(hops) - 1:
                    self.say(peer, Forwarded(microbatch, stage, attempt))
                digests = self.digests(stage, microbatch, hops)
                self.say(peer, Accumulated(microbatch, stage, attempt, True, loss, 0.1, 0.2, 0.0, digests))
                for command in [next(iter(told.values())) for told in self.averages.values()]:
                    self.average(command)
            case Check(microbatch=microbatch, stage=at, number=number) if at == stage:
                loss = self.loss_of(one, microbatch)
                self.say(peer, Checked(microbatch, stage, number, True, loss, self.again(peer, stage, microbatch)))
                asked = self.recounts.get((peer, number))
                if asked is not None and microbatch.index == asked.indexes[-1]:
                    here = [other for other in self.pools[at] if other != peer and other not in self.released]
                    sums = {PeerId(other): self.replicas[PeerId(other)].sums.get(asked.step) for other in here}
                    for giver in (other for other, held in sums.items() if held == {*asked.indexes}):
                        self.say(peer, Recounted(1, asked.step, number, self.recounted(peer, giver)))
            case Recount(number=number):
                self.recounts[peer, number] = command
            case Evaluate(batch=batch, hops=hops) if hops[-1].peer == peer:
                self.say(peer, Evaluated(batch, hops[-1].attempt, 2.0))
            case Void(step=step, attempt=attempt):
                gone = [one_ for one_, made in one.attempts.items() if one_.step == step and made <= attempt]
                for microbatch in gone:
                    del one.attempts[microbatch]
                    one.sums.get(step, set()).discard(microbatch.index)
            case Average():
                self.averages.setdefault((command.unit, command.round), {})[peer] = command
                self.average(command)
            case Recheck(owner=owner, verifier=verifier) if peer in (owner, verifier):
                told = self.averages.get((command.unit, command.round), {}).get(peer)
                if told is not None:
                    found = self.reduced(peer, owner, tuple(member.peer for member in told.members))
                    self.say(peer, Rechecked(1, command.step, command.unit, command.round, command.number, *found))
            case AbortRound(round=number, unit=unit):
                self.averages.pop((unit, number), None)
            case Commit(step=step, version=version):
                if version == one.version + 1:
                    one.version = version
                self.say(peer, Committed(1, step, version, stage, f"stage {stage} version {version}"))
            case HashStage(version=version):
                files = (StateFile(f"model/{stage}", 1, self.state_of(peer, "hashed", version)),)
                self.say(peer, Hashed(JOB, 1, version, stage, files, self.weights_of(stage)))
            case SaveStage(version=version, again=again):
                if settings.second_hash:
                    self.step(Stored(peer, version, stage, f"model/{stage}", self.state_of(peer, "stored", version)))
                self.say(peer, Saved(JOB, 1, version, stage, self.weights_of(stage), again=again))
            case _:
                assert settings.job

    def weights_of(self, stage: int) -> tuple[ParameterHash, ...]:
        return (ParameterHash(f"w{stage}", "float32", (1,), "00"),)

    def digests(self, stage: int, microbatch: Microbatch, hops: Sequence[Hop]) -> tuple[str, ...]:
        """What the hop of a route takes and makes: names that follow from those of its inputs."""
        if not self.settings.hashes_hops:
            return ()
        ys, dxs = [""], [""]
        for at, hop in enumerate(hops):
            ys.append(self.make("y", hop.peer, at, microbatch, ys[-1]) if at < len(hops) - 1 else "")
        for at, hop in reversed(list(enumerate(hops))):
            dxs.append(self.make("dx", hop.peer, at, microbatch, ys[at], dxs[-1]) if at else "")
        dxs.reverse()
        self.made[microbatch, stage] = ys[stage + 1], dxs[stage]
        return ys[stage], ys[stage + 1], dxs[stage + 1], dxs[stage]

    def again(self, peer: PeerId, stage: int, microbatch: Microbatch) -> tuple[str, ...]:
        """What a checker takes from the hops beside it, and makes."""
        last = len(self.pools) - 1
        x = self.made[microbatch, stage - 1][0] if stage else ""
        g = self.made[microbatch, stage + 1][1] if stage < last else ""
        y = self.make("y", peer, stage, microbatch, x) if stage < last else ""
        return x, y, g, self.make("dx", peer, stage, microbatch, x, g) if stage else ""

    def make(self, kind: str, peer: PeerId, stage: int, microbatch: Microbatch, *inputs: str) -> str:
        true = hashlib.sha256(repr((kind, stage, microbatch, inputs)).encode()).hexdigest()
        return self.falsify(peer, kind, microbatch, true)

    def loss_of(self, one: Obedient, microbatch: Microbatch) -> float:
        return 1.0 + microbatch.index if one.stage == len(self.pools) - 1 else 0.0

    def loaded(self, one: Obedient) -> Loaded:
        units = tuple(UnitSize(unit, 1000) for unit, stages in self.settings.units.items() if one.stage in stages)
        digest = f"stage {one.stage} version {one.version}"
        return Loaded(JOB, 1, one.stage, one.version, digest, units, "probe", one.join)

    def average(self, command: Average) -> None:
        """The round is over once all members were told of it and hold their sets, each microbatch once."""
        key = (command.unit, command.round)
        told = self.averages[key]
        if len(told) < len(command.members) or key in self.averaged:
            return
        held = [set_digest(self.replicas[member.peer].sums.get(command.step, ())) for member in command.members]
        if held != [member.digest for member in command.members]:
            return  # it was told ahead, or one of them has added another microbatch since, and has said so
        self.averaged.add(key)
        parts: dict[int, list[int]] = {}
        for member in command.members:
            replica = self.replicas[member.peer]
            parts.setdefault(replica.stage, []).extend(replica.sums.get(command.step, ()))
        for stage, indexes in parts.items():
            assert sorted(indexes) == list(range(MICROBATCHES)), (command.step, stage, indexes)
        for peer in [member.peer for member in command.members]:
            if told is not self.averages.get(key):
                return  # given up meanwhile
            norms = (ParameterNorm(f"w of {command.unit}", 4.0),)
            mean = f"mean of {command.unit} in step {command.step}"
            self.say(peer, Averaged(1, command.step, command.unit, command.round, mean, norms, 0.1))

    # What must have come of it -----------------------------------------------------------------------------------

    def assert_finished(self) -> None:
        assert isinstance(self.end, Finish), (self.end, self.notes[-5:], self.brain.waiting_for())
        assert [row.step for row in self.rows] == list(range(STEPS))
        for row in self.rows:
            assert (row.loss, row.norm, row.skip) == (
                sum(1.0 + index for index in range(MICROBATCHES)) / 8,
                (4.0 * len(self.settings.units)) ** 0.5,
                False,
            )
        if self.settings.eval_every_steps:
            assert self.evaluated == dict.fromkeys(range(1, STEPS + 1), 0.5)
