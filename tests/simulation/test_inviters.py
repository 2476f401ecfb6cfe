"""The claim: with trust.inviter_quota nobody's stage servers are half of a stage, when a job starts and ever after."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from swarm.types import PeerId
from tests.support.scenes import Run, Task, add_peer, serves, train


def inviter(peer: PeerId) -> str:
    """As their names say; most of them are "peer"."""
    return peer.rpartition("-")[0]


def most_of_one(run: Run) -> int:
    """The most replicas of one inviter in a stage."""
    return max(max(Counter(map(inviter, peers)).values()) for peers in run.job.stages.values() if peers)


def test_a_lost_replica_is_not_replaced_by_one_of_an_inviter_who_has_one_there(tmp_path: Path) -> None:
    task = Task.make(tmp_path, training__steps=6, limits__min_replicas=3, trust__inviter_quota=True)

    async def lose(run: Run) -> None:
        run.rig.inviter = inviter
        for name in ("alice-0", "alice-1", "bob-0", "bob-1"):
            add_peer(run, name)
        await run.until_step(1)
        assert most_of_one(run) == 1
        lost = next(peer for peer in run.job.stages[0] if inviter(peer) == "alice")
        run.rig.kill(lost)
        await run.until_step(4)
        assert len(run.job.stages[0]) == 2, "four of an inviter who has one there are idle"
        unused = run.rig.parts.allocator.idle()
        assert len(unused) == 4
        assert all("trust.inviter_quota" in one.why_not[run.job.record.id] for one in unused)
        await serves(run, add_peer(run, "carol-0"))
        assert len(run.job.stages[0]) == 3
        assert most_of_one(run) == 1

    train(task, 6, 3, lose)
