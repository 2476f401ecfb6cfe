"""One job's brain and obedient replicas, which a test makes answer one command at a time."""

from __future__ import annotations

from typing import Any, Self

from scheduler.brain.inputs import Happened, Input, ReplicaRecord, Resumed, RowDurable, Start
from scheduler.brain.outputs import CommitRow, Fail, Output, Send, WriteCommit
from scheduler.brain.settings import BrainSettings
from scheduler.brain.transcript import Recorder
from swarm.types import JobId, PeerId, UnitName
from swarm.wire.messages import Average, Command, Commit, Event, Loaded, LoadStage, Route
from tests.support.scripted import ScriptedReplica

JOB = JobId("job")
A, B, C, D = (PeerId(name) for name in "abcd")  # a and b serve stage 0, c and d stage 1
S0, S1 = UnitName("stage-0"), UnitName("stage-1")


class Swarm:
    """A brain with obedient replicas that a test can make answer one command at a time."""

    def __init__(self, peers: dict[PeerId, int] | None = None, begin: Resumed | None = None, **changes: Any) -> None:
        self.stage_of = peers or {A: 0, B: 0, C: 1, D: 1}
        stages = 1 + max(self.stage_of.values())
        values: dict[str, Any] = {
            "job": JOB,
            "epoch": 3,
            "timeline": 0,
            "steps": 2,
            "microbatches": 4,
            "split": (1,) * stages,
            "spec_json": "{}",
            "overlap": 0,
            "max_in_flight": None,
            "units": {UnitName(f"stage-{stage}"): (stage,) for stage in range(stages)},
            "grad_clip_norm": 1.0,
            "averaging_timeout_s": 5.0,
            "fail_on_nonfinite": False,
            "learning_rate": lambda step: 0.5 - 0.1 * step,
            "tokens_of": lambda step: 8,
        }
        self.transcript: list[str] = []
        self.recorder = Recorder(BrainSettings(**{**values, **changes}), 0, self.transcript.append)
        self.brain = self.recorder.brain
        self.outputs: list[Output] = []  # all that was decided, in order
        self.inbox: list[tuple[PeerId, Command]] = []  # commands that no replica has answered
        self.rows: list[CommitRow] = []
        self.now_s = 1.0  # when things happen that a test gives no time
        replicas = [ReplicaRecord(peer, 1, f"at {peer}", stage) for peer, stage in self.stage_of.items()]
        self.tell(begin or Start(tuple(replicas)), 0.0)

    def take(self, outputs: list[Output]) -> list[Output]:
        self.outputs += outputs
        sent = [(one.peer, one.command) for one in outputs if isinstance(one, Send)]
        self.inbox += [one for one in sent if not (isinstance(one[1], Average) and one[1].ahead)]  # these come again
        self.rows += [one.row for one in outputs if isinstance(one, WriteCommit)]
        self.brain.validate()
        return outputs

    def tell(self, happened: Input, now_s: float | None = None) -> list[Output]:
        return self.take(self.recorder.step(happened, self.now_s if now_s is None else now_s))

    def hear(self, peer: PeerId, event: Event) -> list[Output]:
        return self.tell(Happened(peer, event))

    def write(self) -> list[Output]:
        return self.tell(RowDurable(self.rows[-1].step))

    def commit(self) -> None:
        self.write()
        self.answer(Commit)

    def pop(self, *kinds: type[Command], peer: PeerId | None = None) -> list[tuple[PeerId, Any]]:
        """Take the unanswered commands of these kinds out of the inbox."""
        found = [one for one in self.inbox if isinstance(one[1], kinds) and peer in (None, one[0])]
        self.inbox = [one for one in self.inbox if one not in found]
        return found

    def answer(self, *kinds: type[Command], peer: PeerId | None = None) -> None:
        for to, command in self.pop(*kinds, peer=peer):
            if self.reply(to, command) is not None:
                self.obey(to, command)

    def obey(self, peer: PeerId, command: Command, **changes: Any) -> list[Output]:
        """Let a replica say what `reply` has; gives what is decided."""
        event = self.reply(peer, command, **changes)
        assert event is not None, f"nothing is said to {command}"
        return self.hear(peer, event)

    def reply(self, peer: PeerId, command: Command, **changes: Any) -> Event | None:
        """What an obedient replica says to a command."""
        return self._replica(peer).answer(command, **changes)

    def holding(self, peer: PeerId, version: int = 0, digest: str = "start", join: int = 0) -> Loaded:
        """What a peer that holds a version of its stage says."""
        return self._replica(peer).loaded(version, digest, join=join)

    def _replica(self, peer: PeerId) -> ScriptedReplica:
        return ScriptedReplica(JOB, peer, self.stage_of[peer], self.brain.settings.units)

    def until_averaging(self) -> None:
        self.answer(LoadStage)
        while self.brain.counts().in_flight:
            assert any(isinstance(command, Route) for _, command in self.inbox), "nobody has what is in flight"
            self.answer(Route)

    def until_written(self) -> None:
        self.until_averaging()
        self.answer(Average)

    @classmethod
    def loaded(cls, *args: Any, **changes: Any) -> Self:
        """A job whose replicas have loaded."""
        swarm = cls(*args, **changes)
        swarm.answer(LoadStage)
        return swarm

    @classmethod
    def averaging(cls, *args: Any, **changes: Any) -> Self:
        """A job whose first step is full."""
        swarm = cls(*args, **changes)
        swarm.until_averaging()
        return swarm

    @classmethod
    def written(cls, *args: Any, **changes: Any) -> Self:
        """A job whose first row is to be written."""
        swarm = cls.averaging(*args, **changes)
        swarm.answer(Average)
        return swarm

    @classmethod
    def durable(cls, *args: Any, **changes: Any) -> Self:
        """A job whose first commit was sent."""
        swarm = cls.written(*args, **changes)
        swarm.write()
        return swarm

    @property
    def failure(self) -> Fail:
        found = [one for one in self.outputs if isinstance(one, Fail)]
        assert len(found) == 1
        return found[0]


def sends(outputs: list[Output], *kinds: type[Command]) -> list[Send]:
    return [one for one in outputs if isinstance(one, Send) and isinstance(one.command, kinds)]


def routes_in(outputs: list[Output]) -> list[tuple[PeerId, Route]]:
    sent = [(one.peer, one.command) for one in outputs if isinstance(one, Send)]
    return [(peer, command) for peer, command in sent if isinstance(command, Route)]
