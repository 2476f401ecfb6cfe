"""The claim: with `pipeline.overlap = "auto"` more of a step is late on slow links, as jobs before measured them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from swarm.types import JobState, PeerId
from tests.support.devices import Steady
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, small_spec, write_text

FAST_S = 0.002


@pytest.mark.usefixtures("late_after_a_minute")
@pytest.mark.parametrize(("travel_s", "late"), [(FAST_S, 2), (0.2, 5), (2.0, 8)])
def test_the_next_job_hides_the_links_that_the_one_before_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, travel_s: float, late: int
) -> None:
    """By its size the last stage computes 0.26 s, and tensors travel 0.2 s there and 0.2 s back: 3 more.

    As often as between stages they are taken to travel to the scheduler and back.
    """
    draft = small_spec(
        write_text(tmp_path),
        pipeline__stages=2,
        pipeline__overlap="auto",
        config__num_hidden_layers=2,
        config__vocab_size=257,
        training__global_batch_sequences=16,
        training__microbatch_sequences=1,
        training__lookahead=0.3,
        training__steps=3,
    )
    tokens = Tokens.make(tmp_path, resolved(draft))

    def delay(sender: str, receiver: str) -> float:
        """Tensors take so long, all else does not."""
        return FAST_S if "scheduler" in (sender, receiver) else travel_s

    async def act(rig: Rig) -> str:
        monkeypatch.setattr(rig.network.weather, "delay", delay)
        for name, stage in (("first", 0), ("last", 1)):
            rig.add_peer(PeerId(name), rig.tasks, Random(name), stage=stage, device_type=Steady)
        while len(rig.membership.idle_peers()) < 2:
            await asyncio.sleep(0.1)
        before = await rig.jobs.submit(draft, tokens.of_job(), {})
        assert before.spec.overlap == 2, "nothing was measured yet"
        assert before.reason == "waits for peers"
        await rig.finished(before)
        assert before.record.state is JobState.SUCCEEDED, before.record.reason
        after = await rig.jobs.submit(draft, tokens.of_job(), {})
        assert after.spec.overlap == late
        said = after.reason
        await rig.finished(after)
        assert after.record.state is JobState.SUCCEEDED, after.record.reason
        return said

    said = play(tokens, 0, act)
    if late == 2:
        assert said == "waits for peers"
    else:
        assert f"; {late - 2} microbatches more overlap because of the links, on which" in said
