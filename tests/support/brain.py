"""One job's brain and obedient replicas, which a test makes answer one command at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, Self

from scheduler.brain import inputs, settings
from scheduler.brain.inputs import Happened, Input, ReplicaRecord, Resumed, RowDurable, Start, Tick
from scheduler.brain.outputs import CommitRow, Fail, Note, Output, Send, WriteCommit
from scheduler.brain.replay import spell, spell_output
from scheduler.brain.settings import BrainSettings
from scheduler.brain.transcript import Recorder
from swarm import types
from swarm.job.placement import Candidate
from swarm.types import JobId, PeerId, Round, RoundFault, UnitName
from swarm.wire import messages
from swarm.wire.messages import Average, Command, Commit, Committed, Event, Hello, Loaded, LoadStage, RoundFailed, Route
from tests.support.scripted import ScriptedReplica
from tests.support.situations import value_of

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
        sent = [(output.peer, output.command) for output in outputs if isinstance(output, Send)]
        self.inbox += [pair for pair in sent if not (isinstance(pair[1], Average) and pair[1].ahead)]  # they come again
        self.rows += [output.row for output in outputs if isinstance(output, WriteCommit)]
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
        found = [pair for pair in self.inbox if isinstance(pair[1], kinds) and peer in (None, pair[0])]
        self.inbox = [pair for pair in self.inbox if pair not in found]
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
        found = [output for output in self.outputs if isinstance(output, Fail)]
        assert len(found) == 1
        return found[0]


def at(swarm: Swarm, now_s: float, happened: Input) -> None:
    """Something happens at a time; what follows happens then too."""
    swarm.now_s = now_s
    swarm.tell(happened)


def sends(outputs: list[Output], *kinds: type[Command]) -> list[Send]:
    return [output for output in outputs if isinstance(output, Send) and isinstance(output.command, kinds)]


def routes_in(outputs: list[Output]) -> list[tuple[PeerId, Route]]:
    sent = [(output.peer, output.command) for output in outputs if isinstance(output, Send)]
    return [(peer, command) for peer, command in sent if isinstance(command, Route)]


def hello(peer: str, version: int = 1, stage: int = 0, **changes: Any) -> Hello:
    """What a peer says that dials and holds a version of a stage."""
    name = PeerId(peer)
    return replace(Hello(name, 1, 1, "0", f"at {peer}", "", "cpu", 1, 0, -1, JOB, 0, version, (), stage), **changes)


# Situations as text ---------------------------------------------------------------------------------------------------

NAMES = {
    **{name: value for module in (types, settings, inputs, messages) for name, value in vars(module).items()},
    "JOB": JOB,
    "inf": math.inf,
    "nan": math.nan,
    "eight_and_step": lambda step: 8 + step,
    "Candidate": Candidate,
    "hello": hello,
    **types.JobState.__members__,
}
ALWAYS = {"LoadStage", "Route", "Average", "Commit", "WriteCommit", "BeginCheckpoint", "info", "debug"}  # not shown
GRACE_S = 5.0
_REPEATED = re.compile(r"(?:every (\S+) s, )?(\d+) times: (.*)")


class Player:
    """Plays a job's brain from lines (tests/support/situations.py). Peers do as they are told, when they are told to.

    job a b | c d, steps=3        begin a job: the replicas of each stage, and settings
    restart 1, overlap=2          ... as the fourth start of the scheduler finds it, after so many commits
    show Release Note             from here on only these are shown, be they commands, outputs, or levels of notes
    at 7.0                        the time from here on
    answer Route Average a c      the peers, or all, do what they were told
    drop Route a                  a command is lost
    averaging | written | write | commit
    step                          written and committed
    a does Route, finite=False    a does the next such command (or the newest, told ahead) and says so, but for this
    a says Leaving("SIGTERM")     an event, or any input: PeerGone(a, "killed")
    a fails "no answer", b        the newest round of its stage failed: why, whom it accuses, RoundFault
    a dials 1, attempt=7          a says Hello, what it has loaded, and the commit of that version
    back 1 a c                    so do these
    j joins 0                     j is sent to that stage
    j holds 2, "after"            a joiner has that version of the state
    ask waiting_for               what the brain says
    twice LINE                    the peers repeat what they say
    every 10 s, 4 times: LINE then LINE
    wait                          until the brain has asked for
    """

    def __init__(self) -> None:
        self.shown: set[str] = set()
        self.joins: dict[str, int] = {}
        self.swarm: Any = None

    def play(self, line: str) -> list[str]:
        known = self.swarm
        before = len(known.outputs) if known is not None else 0
        said = self._do(line)
        outputs = [] if self.swarm is None else self.swarm.outputs[before if self.swarm is known else 0 :]
        return [*self._told(outputs), *said]

    def _do(self, line: str) -> list[str]:
        verb, _, rest = line.partition(" ")
        said, _, event = rest.partition(" ")
        if repeated := _REPEATED.fullmatch(line):
            pause_s, times, again = repeated.groups()
            for input_ in again.split(" then ") * int(times):
                if pause_s:
                    at(self.swarm, self.swarm.now_s + float(pause_s), Tick())
                self._do(input_)
        elif verb == "twice":
            again = list(self.swarm.inbox)
            self._do(rest)
            self.swarm.inbox += again
            self._do(rest)
        elif verb == "ask":
            return self._ask(rest)
        elif verb in ("averaging", "written"):
            getattr(self.swarm, f"until_{verb}")()
        elif verb in ("write", "commit"):
            getattr(self.swarm, verb)()
        elif verb == "wait":
            at(self.swarm, self.swarm.brain.due_s, Tick())
        elif verb == "step":
            self.swarm.until_written()
            self.swarm.commit()
        elif said in ("does", "says", "fails", "dials", "joins", "holds"):
            getattr(self, f"_{said}")(PeerId(verb), event)
        elif verb.islower():
            getattr(self, f"_{verb}")(rest)
        else:
            self.swarm.tell(value_of(line, NAMES))
        return []

    def _told(self, outputs: list[Output]) -> Iterator[str]:
        shown = [(peer, text) for peer, kind, text in map(self._spelled, outputs) if text and self._shows(kind)]
        for text, alike in groupby(shown, key=lambda pair: pair[1]):
            peers = ", ".join(peer for peer, _ in alike)
            yield f"to {peers}: {text}" if peers else text

    def _shows(self, kind: str) -> bool:
        return kind in self.shown if self.shown else kind not in ALWAYS

    @staticmethod
    def _spelled(output: Output) -> tuple[str, str, str]:
        if isinstance(output, Send):
            return output.peer, type(output.command).__name__, spell(output.command)
        kind = output.level if isinstance(output, Note) else type(output).__name__
        return "", kind, spell_output(output)

    def _job(self, told: str) -> None:
        pools, _, rest = told.partition(",")
        stages = {PeerId(name): stage for stage, pool in enumerate(pools.split("|")) for name in pool.split()}

        def made(hidden: str = "", begin: Resumed | None = None, **changes: Any) -> Swarm:
            records = [ReplicaRecord(peer, 1, f"at {peer}" * (peer not in hidden), at) for peer, at in stages.items()]
            return Swarm(stages, begin or Start(tuple(records)), **changes)

        self.swarm = value_of(f"made({rest})", {**NAMES, "made": made})

    def _restart(self, told: str) -> None:
        def made(committed: int = 1, **changes: Any) -> Swarm:
            rows = tuple(
                CommitRow(0, step, {S0: Round(3, 1), S1: Round(3, 1)}, 1.0, 1.0, 1.0, 0.1, False, 8)
                for step in range(committed)
            )
            begin = Resumed({A: 0, B: 0, C: 1, D: 1}, committed, rows, (), GRACE_S)
            return Swarm(begin=begin, **{"epoch": 4, "steps": 9, "microbatches": 2, "recover": True} | changes)

        self.swarm = value_of(f"made({told})", {**NAMES, "made": made})

    def _show(self, told: str) -> None:
        self.shown = set(told.split())

    def _at(self, told: str) -> None:
        self.swarm.now_s = float(told)

    def _answer(self, told: str) -> None:
        words = told.split()
        kinds = [getattr(messages, word) for word in words if word[0].isupper()]
        for peer in [PeerId(word) for word in words if word.islower()] or [None]:
            self.swarm.answer(*kinds, peer=peer)

    def _drop(self, told: str) -> None:
        kind, _, peer = told.partition(" ")
        assert self.swarm.pop(getattr(messages, kind), peer=peer or None), f"nobody was told to {kind}"

    def _ask(self, told: str) -> list[str]:
        name, _, rest = told.partition(" ")
        found = getattr(self.swarm.brain, name)
        found = value_of(f"found({rest})", {**NAMES, "found": found}) if callable(found) else found
        return found if name == "story" else [spell(found)]

    def _does(self, peer: PeerId, told: str) -> None:
        kind, _, changes = told.partition(",")
        asked = getattr(messages, kind)
        sent = [(send.peer, send.command) for send in sends(self.swarm.outputs, asked) if send.peer == peer]
        (_, command), *others = self.swarm.pop(asked, peer=peer) or sent[-1:]
        self.swarm.inbox += others
        self.swarm.obey(peer, command, **value_of(f"dict({changes})", {**NAMES, "dict": dict}))

    def _says(self, peer: PeerId, told: str) -> None:
        self.swarm.hear(peer, value_of(told, NAMES))

    def _fails(self, peer: PeerId, told: str) -> None:
        def fails(
            why: str, accused: str = "", cause: RoundFault = RoundFault.MEMBER, unit: str = "", *, agrees: bool = False
        ) -> None:
            unit = unit or f"stage-{self.swarm.stage_of[peer]}"
            asked = [send.command for send in sends(self.swarm.outputs, Average) if send.peer == peer]
            newest = next(ask for ask in reversed(asked) if isinstance(ask, Average) and ask.unit == unit)
            if accused == "an owner":
                accused = next(
                    member.peer for member in newest.members if member.stop > member.start and member.peer != peer
                )
            pairs = [(peer, accused), (PeerId(accused), peer)]
            for by, other in pairs if agrees else pairs[:1]:
                event = RoundFailed(0, newest.step, newest.unit, newest.round, why, other, cause)
                self.swarm.hear(by, event)

        value_of(f"fails({told})", {**RoundFault.__members__, "True": True, "fails": fails})

    def _dials(self, peer: PeerId, told: str) -> None:
        def dials(version: int = 1, *, doubted: bool = False, **changes: Any) -> None:
            stage = self.swarm.stage_of[peer]
            self.swarm.tell(Happened(peer, hello(peer, version, stage, **changes), doubted=doubted))
            self.swarm.hear(peer, self.swarm.holding(peer))
            if version:
                self.swarm.hear(peer, Committed(0, version - 1, version, stage, "after"))

        value_of(f"dials({told})", {**NAMES, "dials": dials})

    def _back(self, told: str) -> None:
        version, *peers = told.split()
        for peer in peers:
            self._dials(PeerId(peer), version)

    def _joins(self, peer: PeerId, told: str) -> None:
        self.swarm.stage_of[peer] = int(told)
        self.swarm.tell(inputs.Join(ReplicaRecord(peer, 1, f"at {peer}", int(told))))
        ((_, load),) = self.swarm.pop(LoadStage, peer=peer)
        self.joins[peer] = load.join

    def _holds(self, peer: PeerId, told: str) -> None:
        def holds(version: int = 0, digest: str = "start", join: int = self.joins[peer]) -> None:
            self.swarm.hear(peer, self.swarm.holding(peer, version, digest, join))

        value_of(f"holds({told})", {"holds": holds})
