"""The claim: a liar among three is caught and quarantined, nobody else is, and what it spoiled is computed again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from swarm.errors import NotAllowed
from swarm.reference.trainer import train_local
from swarm.types import JobState, PeerState
from tests.simulation.engine.liars import LIAR, Lie, checked_spec, play
from tests.support.simulated import Rig, Tokens


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("lie", "share", "stage"), [("zeros", 1.0, 0), ("sign", 0.2, 1), ("stale", 1.0, 1)])
def test_the_job_ends_with_the_weights_of_one_process(tmp_path: Path, lie: Lie, share: float, stage: int) -> None:
    spec = checked_spec(tmp_path, 1.0, training__steps=3)
    tokens = Tokens.make(tmp_path, spec)

    async def release(rig: Rig) -> None:
        known = rig.membership.find(LIAR)
        assert (known.state, known.reason) == (PeerState.QUARANTINED, rig.parts.peers.quarantine.record(LIAR).told)
        assert await rig.jobs.free(LIAR) == LIAR
        assert known.state is PeerState.IDLE
        with pytest.raises(NotAllowed, match="nothing is held against"):
            await rig.jobs.free(LIAR)
        await rig.kill_scheduler()
        await rig.start_scheduler()
        await asyncio.sleep(5.0)
        assert rig.membership.find(LIAR).state is PeerState.IDLE

    outcome = play(spec, tokens, lie, share, 1, stage=stage, then=release if lie == "zeros" else None)
    assert outcome.state is JobState.SUCCEEDED, outcome.reason
    assert outcome.caught is not None
    assert outcome.caught.lies_committed == 0, "every hop is checked"
    assert outcome.accused == ()
    assert outcome.is_quarantined == (lie != "zeros")
    assert outcome.sha256 == train_local(spec, tokens.batches(spec)).sha256
    assert f"stage {stage} was" in outcome.evidence or lie == "zeros"


def test_honest_replicas_are_not_accused_although_some_are_lost(tmp_path: Path) -> None:
    spec = checked_spec(tmp_path, 1.0, training__steps=3)
    tokens = Tokens.make(tmp_path, spec)
    outcome = play(spec, tokens, "zeros", 0.0, 2, peers=5)
    assert (outcome.state, outcome.accused, outcome.caught) == (JobState.SUCCEEDED, (), None)
    assert outcome.sha256 == train_local(spec, tokens.batches(spec)).sha256
