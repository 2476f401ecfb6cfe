"""The claim: with `pipeline.compression = "auto"` a slow link gets int8 and a fast one float32, and the job goes on."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from swarm.types import JobState, PeerId
from swarm.wire.messages import Boundary, TensorHeader
from tests.support.devices import Steady
from tests.support.scenes import play, resolved
from tests.support.sim.fabric import Observer
from tests.support.simulated import Rig, Tokens, small_spec, write_text

FAST_S, SLOW_S = 0.002, 1.0
FAST, SLOW = "address-of-fast", "address-of-slow"


class Codecs(Observer):
    """Notes the codecs of what travels on each link, in order."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], list[str]] = {}

    def sending(self, owner: str, address: str, header: TensorHeader) -> None:
        if isinstance(header, Boundary):
            self.seen.setdefault((owner, address), []).append(header.codec)


@pytest.mark.usefixtures("late_after_a_minute")
def test_a_slow_link_gets_int8_and_a_fast_one_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolved(
        small_spec(
            write_text(tmp_path),
            pipeline__stages=2,
            pipeline__compression="auto",
            pipeline__rebalance=False,
            config__num_hidden_layers=2,
            config__hidden_size=64,
            data__sequence_length=64,
            training__reproducible=False,
            training__steps=12,
        )
    )
    tokens, codecs = Tokens.make(tmp_path, spec), Codecs()

    def delay(sender: str, receiver: str) -> float:
        """Tensors to and from one replica take a second, all else does not."""
        return SLOW_S if SLOW in (sender, receiver) and "scheduler" not in (sender, receiver) else FAST_S

    async def act(rig: Rig) -> str:
        monkeypatch.setattr(rig.network.weather, "delay", delay)
        monkeypatch.setattr(rig.network, "observer", codecs)
        for name, stage in (("first", 0), ("fast", 1), ("slow", 1)):
            rig.add_peer(PeerId(name), rig.tasks, Random(name), stage=stage, device_type=Steady)
        while len(rig.membership.idle_peers()) < 3:
            await asyncio.sleep(0.1)
        job = await rig.jobs.submit(spec, tokens.of_job(), {})
        await rig.finished(job)
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        return job.record.weights_sha256

    assert play(tokens, 0, act)
    first = "address-of-first"
    for one, other, codec in ((first, FAST, "none"), (FAST, first, "none"), (first, SLOW, "int8")):
        used = codecs.seen[one, other]
        assert used[0] == "bfloat16", "it was not measured yet"
        assert used[-1] == codec, (one, other, used)
        assert sum(before != after for before, after in pairwise(used)) == 1, "no flapping"
