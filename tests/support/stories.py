"""Ten situations that teach what a job's brain does; tests/transcripts has each as a text.

`python -m tests.support.stories` writes the texts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from scheduler.brain.inputs import (
    AskToLeave,
    CheckpointKept,
    CheckpointNotKept,
    Input,
    Join,
    PeerBack,
    PeerGone,
    PeerSuspect,
    ReplicaRecord,
    Resumed,
    Tick,
)
from scheduler.brain.outputs import CommitRow
from scheduler.brain.replay import replay
from scheduler.brain.transcript import Transcript
from swarm.types import Microbatch, PeerId, Round
from swarm.wire.messages import (
    Average,
    Committed,
    Follow,
    Hello,
    Loaded,
    ReportedCell,
    RoundFailed,
    Route,
    SaveStage,
    UnitSize,
)
from tests.support.brain import JOB, S0, S1, A, B, C, Swarm

FOLDER = Path(__file__).parent.parent / "transcripts"
J = PeerId("j")


def at(swarm: Swarm, now_s: float, happened: Input) -> None:
    """Something happens at a time; what follows happens then too."""
    swarm.now_s = now_s
    swarm.tell(happened)


def one_microbatch() -> Swarm:
    """One microbatch passes two stages, its gradients are averaged and committed, and the weights are saved."""
    swarm = Swarm.loaded({A: 0, C: 1}, steps=1, microbatches=1)
    swarm.answer(Route)
    swarm.answer(Average)
    swarm.commit()
    swarm.answer(SaveStage)
    at(swarm, 2.0, CheckpointKept(1))
    return swarm


def a_replica_dies() -> Swarm:
    """A replica dies in the middle of a step: all that it did for the step is done again by the other one."""
    swarm = Swarm.loaded({A: 0, B: 0, C: 1}, steps=1, microbatches=2, recover=True)
    swarm.answer(Route, peer=A)
    swarm.answer(Route, peer=C)
    at(swarm, 2.0, PeerGone(A, "its process ended"))
    swarm.until_averaging()
    return swarm


def two_holders() -> Swarm:
    """A suspect finishes after all: two replicas hold one microbatch, and the smaller contribution is void."""
    swarm = Swarm.loaded({A: 0, B: 0, C: 1}, steps=1, microbatches=3, recover=True)
    late = swarm.pop(Route, peer=A)
    at(swarm, 2.0, PeerSuspect(A, "silent for 3 s"))
    swarm.answer(Route)
    at(swarm, 3.0, PeerBack(A))
    for peer, route in late[:1]:
        swarm.obey(peer, route)
    return swarm


def a_round_fails() -> Swarm:
    """Two replicas cannot exchange slices: the round is repeated at once, and after a pause when it fails again."""
    swarm = Swarm.averaging({A: 0, B: 0, C: 1}, steps=1, microbatches=1)
    swarm.answer(Average, peer=C)
    for _ in range(2):
        ((_, average),) = swarm.pop(Average, peer=A)
        swarm.pop(Average, peer=B)
        swarm.hear(A, RoundFailed(0, 0, S0, average.round, "E1101: no answer", B))
    at(swarm, swarm.brain.due_s, Tick())
    swarm.answer(Average)
    return swarm


def a_straggler() -> Swarm:
    """A replica takes far longer than the others: its microbatch is given to another one."""
    swarm = Swarm.loaded({A: 0, B: 0, C: 1}, steps=1, microbatches=2, recover=True)
    swarm.answer(Route, peer=A)
    at(swarm, 200.0, Tick())
    swarm.answer(Route, peer=A)
    return swarm


def a_restart() -> Swarm:
    """The scheduler was killed: the next start learns from its replicas what they hold, and goes on there."""
    row = CommitRow(0, 0, {S0: Round(2, 1), S1: Round(2, 2)}, 1.0, 1.0, 1.0, 0.1, False, 8)
    swarm = Swarm({A: 0, C: 1}, Resumed({A: 0, C: 1}, 1, (row,), (), 5.0), microbatches=2, recover=True)
    for peer, stage, unit in ((A, 0, S0), (C, 1, S1)):
        cells = (ReportedCell(Microbatch(0, 1, 0), 3, True, True, float(stage)),)
        swarm.hear(peer, Hello(peer, 1, 2, "0", f"at {peer}", "", "cpu", 1, 1, -1, JOB, 0, 1, cells, stage, 3))
        swarm.hear(peer, Loaded(JOB, 0, stage, 0, "start", (UnitSize(unit, 1000),)))
        swarm.hear(peer, Committed(0, 0, 1, stage, "after"))
    return swarm


def a_peer_joins() -> Swarm:
    """An idle stage server joins a stage at work: it fetches the state, and is a replica when its digest is right."""
    swarm = Swarm.loaded({A: 0, C: 1}, microbatches=1, recover=True)
    at(swarm, 2.0, Join(ReplicaRecord(J, 1, "at j", 0)))
    ((_, follow),) = swarm.pop(Follow)
    at(swarm, 3.0, Tick())
    swarm.hear(J, Loaded(JOB, 0, 0, 0, "start", (UnitSize(S0, 1000),), join=follow.join))
    return swarm


def a_replica_leaves() -> Swarm:
    """A replica is drained: it takes no new work, finishes its step, and is released when nothing depends on it."""
    swarm = Swarm.loaded({A: 0, B: 0, C: 1}, microbatches=2, recover=True)
    at(swarm, 2.0, AskToLeave(B, "drained"))
    swarm.until_averaging()
    swarm.answer(Average)
    swarm.commit()
    return swarm


def a_checkpoint_fails() -> Swarm:
    """The storage is full when the final weights are saved: the stage servers keep them, and it is tried again."""
    swarm = Swarm.written({A: 0, C: 1}, steps=1, microbatches=1)
    swarm.commit()
    swarm.answer(SaveStage)
    at(swarm, 2.0, CheckpointNotKept(1, "disk_full", "no space left on the disk"))
    at(swarm, swarm.brain.due_s, Tick())
    swarm.answer(SaveStage)
    at(swarm, 4.0, CheckpointKept(1))
    return swarm


def a_stage_is_lost() -> Swarm:
    """The last replica of a stage is lost: the job stalls, to resume from its newest checkpoint."""
    swarm = Swarm.loaded({A: 0, C: 1}, microbatches=1, recover=True)
    at(swarm, 7.0, PeerGone(C, "not heard for 5 s"))
    return swarm


STORIES: tuple[Callable[[], Swarm], ...] = (
    one_microbatch,
    a_replica_dies,
    two_holders,
    a_round_fails,
    a_straggler,
    a_restart,
    a_peer_joins,
    a_replica_leaves,
    a_checkpoint_fails,
    a_stage_is_lost,
)


def path_of(story: Callable[[], Swarm]) -> Path:
    return FOLDER / f"{story.__name__}.txt"


def text_of(story: Callable[[], Swarm]) -> str:
    """What the story teaches, then each input with what the brain decides, out of its transcript."""
    transcript = Transcript(story().transcript)

    def lines() -> Iterator[str]:
        yield f"{story.__doc__}\n"
        for step in replay(transcript, transcript.brain()):
            assert step.is_same
            yield from step.lines()

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in STORIES:
        path_of(one).write_text(text_of(one), encoding="utf-8")
