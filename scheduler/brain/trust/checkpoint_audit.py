"""The audit of checkpoints: second opinions on the files that a replica hands over for a checkpoint.

    SaveStage ──▶ the saver sends files ──▶ the scheduler hashes what it stores ──┐
    HashStage ──▶ two others hash the files that they would send ─────────────────┴─ alike ──▶ accepted, vouched for
                                                  unlike ──┬─ a majority: the odd one is wrong ──┬─▶ saved again,
                                                           └─ none: unclear ─────────────────────┘   by another

The saver's own hashes do not count: the stored files must match the hashes of the others. Two witnesses are
asked at once if a stage has three replicas, because a third would have moved on later. A witness that has not answered
some time after the saver's last file is left out. Without any witness the stage is accepted, and the log says so.

Decision: docs/decisions/061.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from scheduler.brain.checkpoint.collection import CheckpointCollector
from scheduler.brain.checkpoint.schedule import CheckpointSchedule, OpenCheckpoint
from scheduler.brain.commit.digests import Remedy, outvoted
from scheduler.brain.inputs import Stored
from scheduler.brain.outputs import Vouch
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.trust.inquiry import ReplicaAudit
from scheduler.brain.trust.strikes import SHOWN, Strikes
from swarm.text import listed
from swarm.types import PeerId
from swarm.wire.messages import Event, Hashed, HashStage, ParameterHash

WITNESSES = 2
PATIENCE_S = 30.0  # beyond the time that the saver took
GUARD = "second hash"


@dataclass(frozen=True, slots=True)
class Word:
    """The hashes of a stage's state by one of its replicas: sha256 of each file, and of each of the weights."""

    files: Mapping[str, str]
    parameters: tuple[ParameterHash, ...]

    @property
    def content(self) -> tuple[object, ...]:
        return tuple(sorted(self.files.items())), self.parameters

    def unlike(self, other: Word) -> tuple[str, str]:
        """The first difference between the two, and this one's value there."""
        for path in sorted(self.files.keys() | other.files.keys()):
            if self.files.get(path) != other.files.get(path):
                return path, self.files.get(path, "nothing")[:SHOWN]
        mine, theirs = ({tensor.name: tensor.sha256 for tensor in word.parameters} for word in (self, other))
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return f"the hash of {name}", mine.get(name, "nothing")[:SHOWN]
        return "the shape of a tensor", "another"


@dataclass(slots=True)
class _Stage:
    """One stage of the checkpoint under way."""

    awaited: set[PeerId]
    words: dict[PeerId, Word] = field(default_factory=dict)  # of the witnesses
    stored: dict[PeerId, dict[str, str]] = field(default_factory=dict)  # hashes of the files of each sender, by path
    due_s: float = inf  # then the witnesses are no longer waited for


class CheckpointAudit(ReplicaAudit):
    """The second opinions on the checkpoints of one job."""

    def __init__(
        self, state: BrainState, saving: CheckpointSchedule, collector: CheckpointCollector, strikes: Strikes
    ) -> None:
        self._state, self._saving, self._collector, self._strikes = state, saving, collector, strikes
        self._of: OpenCheckpoint | None = None  # the checkpoint that `_stages` are of
        self._stages: dict[int, _Stage] = {}

    def hear(self, peer: PeerId, event: Event | Stored, now_s: float) -> bool:
        """Note a stored file of a replica, or a witness's hashes; a witness that cannot hash has no say."""
        if not isinstance(event, Stored | Hashed) or self._of is None or self._of.version != event.version:
            return False
        stage, settings = self._stages.get(event.stage), self._state.settings
        if stage is None:
            return False
        if isinstance(event, Stored):
            stage.stored.setdefault(peer, {})[event.path] = event.sha256
            return True
        if (event.job, event.timeline) != (settings.job, settings.timeline) or peer not in stage.awaited:
            return False
        stage.awaited.discard(peer)
        if event.fault:
            told = f"{self._state.pool.name(peer)} could not hash its state: {event.fault}"
            self._state.outbox.note("warning", told)
        else:
            stage.words[peer] = Word({file.path: file.sha256 for file in event.files}, event.parameters)
        return True

    def look_at_checkpoint(self, now_s: float) -> list[Remedy]:
        """Ask witnesses about a new checkpoint while its version is held, and compare the stages that are there."""
        if self._saving.open is not self._of:
            self._begin(self._saving.open)
        if (held := self._of) is None:
            return []
        for index, (saver, event) in list(held.claims.items()):
            stage = self._stages[index]
            if stage.due_s == inf:
                stage.due_s = now_s + (now_s - held.since_s) + PATIENCE_S
            if now_s < stage.due_s and any(map(self._state.pool.may_answer, stage.awaited - {saver})):
                continue
            words = {peer: word for peer, word in stage.words.items() if peer in self._state.pool and peer != saver}
            stored = stage.stored.get(saver, {})
            if any(word.files.keys() - stored.keys() for word in words.values()):
                del held.claims[index]  # of an earlier request: what it sends now is on its way
                continue
            said = {**words, saver: Word(stored, event.parameters)}
            if odd := outvoted({peer: word.content for peer, word in said.items()}):
                return self._contradicted(index, saver, said, odd, now_s)
            self._accept(index, saver, said)
        return []

    def times_s(self) -> list[float]:
        claims = self._of.claims if self._of is not None else {}
        return [stage.due_s for index, stage in self._stages.items() if index in claims]

    def _begin(self, held: OpenCheckpoint | None) -> None:
        """Begin with another checkpoint, or none: order replicas other than the savers to hash their files."""
        self._of, self._stages = held, {}
        for saver, index in held.savers.items() if held is not None else ():
            self._ask_others(saver, index)

    def _ask_others(self, saver: PeerId, index: int) -> None:
        assert self._of is not None
        settings = self._state.settings
        command = HashStage(settings.job, settings.timeline, self._of.version, settings.saving.optimizer)
        witnesses = [peer for peer in self._collector.eager(index) if peer != saver][:WITNESSES]
        self._stages[index] = _Stage(set(witnesses))
        for peer in witnesses:
            self._state.outbox.send(peer, command)

    def _accept(self, index: int, saver: PeerId, said: Mapping[PeerId, Word]) -> None:
        assert self._of is not None
        if len(said) == 1:
            self._state.outbox.note("info", f"{self._what(index)} is as {saver} says: nobody else has hashed it")
            self._of.rests_on_one = True
        _, event = self._of.claims.pop(index)
        self._saving.saved(saver, event)
        self._state.outbox.put(Vouch(self._of.version, said[saver].files))

    def _contradicted(
        self, index: int, saver: PeerId, said: Mapping[PeerId, Word], odd: tuple[PeerId, ...], now_s: float
    ) -> list[Remedy]:
        """The hashes differ: refuse the stored files, and let another replica save the stage again."""
        self._saving.at_once = True  # if nobody has this version any more
        if len(odd) < len(said):
            if saver not in odd:
                self._accept(index, saver, {peer: word for peer, word in said.items() if peer not in odd})
            return self._strikes.prove({peer: self._evidence(index, peer, said) for peer in odd}, now_s)
        text = self._evidence(index, saver, said)
        if (fault := self._strikes.unclear(text, said)) is not None:
            return [fault]
        self._state.conclude(self._collector.refuse(saver, index, f"unclear who is right: {text}", now_s))
        if self._saving.open is self._of and self._of is not None:
            (another,) = (peer for peer, stage in self._of.savers.items() if stage == index)
            self._ask_others(another, index)
        return []

    def _what(self, index: int) -> str:
        assert self._of is not None
        return f"stage {index} of the checkpoint at step {self._of.version}"

    def _evidence(self, index: int, peer: PeerId, said: Mapping[PeerId, Word]) -> str:
        """The hashes of a replica against the others'."""
        others = [other for other in sorted(said) if said[other].content != said[peer].content]
        what, mine = said[peer].unlike(said[others[0]])
        _, theirs = said[others[0]].unlike(said[peer])
        alike = [other for other in others if said[other].content == said[others[0]].content]
        return f"{what} of {self._what(index)} was {mine}, {listed(alike)} got {theirs} ({GUARD})"
