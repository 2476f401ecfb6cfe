"""The claim: a liar among three is caught and quarantined, nobody else is, and what it spoiled is computed again."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest

from scheduler.brain.state.links import ROUNDS_MAX
from swarm.errors import NotAllowed
from swarm.job.spec import TrustSection
from swarm.reference.trainer import train_local
from swarm.types import JobState, PeerState
from tests.simulation.engine.liars import (
    LIAR,
    Lie,
    Poison,
    adding_false,
    blaming,
    checked_spec,
    clipped_spec,
    giving_false_means,
    play,
    poisoning,
    saving_false,
)
from tests.support.effort import others
from tests.support.scenes import resolved
from tests.support.simulated import Rig, Tokens, small_spec, write_text

SPOILT = 0.5  # nats per byte


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


@pytest.mark.parametrize(("lie", "optimizer", "peers"), [("zeros", False, 6), ("sign", True, 6), ("random", False, 4)])
def test_what_is_saved_is_what_others_hash(tmp_path: Path, lie: Lie, optimizer: bool, peers: int) -> None:
    spec = checked_spec(tmp_path, trust=TrustSection(second_hash=True), training__steps=3, checkpoint__every_steps=1)
    tokens = Tokens.make(tmp_path, spec)
    share = 1.0 if peers == 6 else 0.5  # of two, one that always contradicts the other stops the job
    liar = saving_false(lie, share, Random(2), optimizer=optimizer)
    outcome = play(spec, tokens, lie, 0.0, 1, peers=peers, stage=1, build=liar)
    assert outcome.state is JobState.SUCCEEDED, outcome.reason
    assert outcome.lies
    assert outcome.accused == ()
    assert outcome.is_quarantined == (peers == 6)
    assert outcome.sha256 == train_local(spec, tokens.batches(spec)).sha256
    assert ("second hash" in outcome.evidence) == (peers == 6)


@pytest.mark.parametrize(
    ("trust", "steps", "seed", "liar", "told"),
    [
        ({"second_owner": 1.0}, 6, 1, {"device": giving_false_means}, "second owner"),
        ({"recount": 1.0}, 4, 2, {"build": adding_false}, "recount"),
    ],
)
def test_who_gives_out_false_means_or_adds_false_gradients_is_caught(
    tmp_path: Path, trust: dict[str, Any], steps: int, seed: int, liar: dict[str, Any], told: str
) -> None:
    spec = checked_spec(tmp_path, trust=TrustSection(**trust), training__steps=steps)
    outcome = play(spec, Tokens.make(tmp_path, spec), "zeros", 0.0, seed, stage=0, **liar)
    assert outcome.state is JobState.SUCCEEDED, outcome.reason
    assert outcome.lies
    assert (outcome.is_quarantined, outcome.accused) == (True, ())
    assert told in outcome.evidence


def test_honest_replicas_are_not_accused_although_some_are_lost(tmp_path: Path) -> None:
    trust = TrustSection(spot_check=1.0, recount=1.0, second_owner=1.0, second_hash=True)
    spec = checked_spec(tmp_path, trust=trust, training__steps=3)
    tokens = Tokens.make(tmp_path, spec)
    outcome = play(spec, tokens, "zeros", 0.0, 2, peers=5)
    assert (outcome.state, outcome.accused, outcome.caught) == (JobState.SUCCEEDED, (), None)
    assert outcome.sha256 == train_local(spec, tokens.batches(spec)).sha256


@pytest.mark.parametrize("codec_name", ["int8", *others("none")])
def test_a_false_part_does_not_spoil_what_is_learned_where_parts_are_clipped(tmp_path: Path, codec_name: str) -> None:
    """How much falls to the liar is chance, which matters where parts are clipped: the median of three plays."""
    loss: dict[tuple[str, Poison], float] = {}
    plays: dict[tuple[str, Poison], int] = {("mean", "none"): 1, ("mean", "scale"): 1, ("centered_clip", "scale"): 3}
    for (aggregate, poison), count in plays.items():
        spec = clipped_spec(tmp_path, aggregate, training__steps=10, averaging__compression=codec_name)
        tokens = Tokens.make(tmp_path, spec)
        made = [
            play(spec, tokens, "zeros", 0.0, seed, peers=8, stage=1, build=poisoning(poison))
            for seed in range(1, 1 + count)
        ]
        assert all((run.state, run.accused) == (JobState.SUCCEEDED, ()) for run in made), made
        loss[aggregate, poison] = median(run.loss for run in made)
    assert loss["centered_clip", "scale"] < loss["mean", "none"] + 0.3 * SPOILT
    assert loss["mean", "scale"] > loss["mean", "none"] + SPOILT


def test_a_second_owner_gets_the_same_clipped_mean(tmp_path: Path) -> None:
    """And an owner that gives out another one is caught, also while somebody's parts are clipped."""
    spec = clipped_spec(tmp_path, "centered_clip", training__steps=6)
    spec = spec.model_copy(update={"trust": TrustSection(second_owner=1.0)})
    tokens = Tokens.make(tmp_path, spec)
    clipped = play(spec, tokens, "zeros", 0.0, 1, peers=8, stage=1, build=poisoning("noise"))
    assert (clipped.state, clipped.accused, clipped.is_quarantined) == (JobState.SUCCEEDED, (), False)
    caught = play(spec, tokens, "zeros", 0.0, 1, peers=8, stage=1, device=giving_false_means)
    assert (caught.is_quarantined, caught.accused) == (True, ())


HELD_S_MAX = 150.0  # of virtual time, in all
LEFT = re.compile("peer=(\\S+) reason='it cannot average with the others")


def test_who_falsely_blames_relays_holds_a_job_up_for_a_bounded_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It held the step up until the job was taken back for standing still, and then again."""
    spec = small_spec(write_text(tmp_path), pipeline__stages=2, config__num_hidden_layers=2, training__steps=3)
    spec = resolved(spec)
    tokens = Tokens.make(tmp_path, spec)
    seen: dict[str, float] = {}

    async def then(rig: Rig) -> None:
        job = rig.jobs.registry.find("rig")
        seen.update(timeline=job.record.timeline, at_s=asyncio.get_running_loop().time())

    outcome = play(spec, tokens, "zeros", 0.0, 1, stage=0, build=blaming, then=then)
    assert outcome.state is JobState.SUCCEEDED, outcome.reason
    assert outcome.lies > ROUNDS_MAX
    assert seen["timeline"] == 0
    left = set(LEFT.findall(capsys.readouterr().out))
    assert left == {LIAR}, "whom it names keep their places"
    assert seen["at_s"] < HELD_S_MAX
    assert outcome.sha256 == train_local(spec, tokens.batches(spec)).sha256
