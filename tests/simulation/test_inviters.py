"""The claim: with trust.inviter_quota nobody's stage servers are half of a stage, when a job starts and ever after."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    "rule", [{"trust__inviter_quota": True}, {"limits__max_replicas": 3}], ids=lambda rule: next(iter(rule))
)
def test_one_that_comes_back_after_a_restart_is_released_if_another_took_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any]
) -> None:
    """Another of its inviter, or anybody if the job has as many as it takes."""
    task = Task.make(tmp_path, training__steps=6, pipeline__stages=1, limits__min_replicas=3, **rule)

    async def lose_touch(run: Run) -> None:
        run.rig.inviter = inviter
        for name in ("alice-0", "bob-0", "alice-1"):
            add_peer(run, name)
        await run.until_step(1)
        placed = run.job.stages[0]
        assert len(placed) == 3
        (spare,) = (one.peer for one in run.rig.parts.allocator.idle())
        away = next(peer for peer in placed if inviter(peer) == "alice")
        reaches, is_away = run.rig.network.reaches, True

        async def without(owner: str, address: str) -> bool:
            held_up = is_away and (owner, address) == (f"address-of-{away}", "scheduler")
            return not held_up and await reaches(owner, address)

        monkeypatch.setattr(run.rig.network, "reaches", without)
        await run.rig.kill_scheduler()
        await run.rig.start_scheduler()
        run.job = run.rig.jobs.registry.find(run.job.record.id)
        run.rig.slowness |= dict.fromkeys(run.rig.servers, 40.0)
        while not (known := run.rig.membership.get(spare)) or not known.job:
            await asyncio.sleep(0.001)
        is_away = False
        while run.job.brain is not None and not run.job.record.state.is_final:
            (serving,) = run.job.brain.peers
            assert len(serving) <= 3
            if run.job.spec.trust.inviter_quota:
                assert max(Counter(map(inviter, serving)).values()) == 1
            await asyncio.sleep(0.1)
        back = run.rig.membership.get(away)
        assert back is not None
        assert not back.job

    train(task, 1, 3, lose_touch)
