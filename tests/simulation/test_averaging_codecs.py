"""The claim: with `averaging.compression` fewer bytes travel, all replicas agree, and the model learns as well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarm.types import JobState
from swarm.wire.messages import Slice, TensorHeader
from tests.support.scenes import Run, play, resolved
from tests.support.sim.fabric import Observer
from tests.support.simulated import Rig, Tokens, small_spec, write_text

SHARE = {"bfloat16": 0.5, "int8": 0.254}  # of float32


class Bytes(Observer):
    """Bytes of slices on the wire, by what their headers say they are."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def sending(self, owner: str, address: str, header: TensorHeader) -> None:
        if isinstance(header, Slice):
            self.of[header.dtype] += header.total_bytes


def trained(folder: Path, compression: str, *, killing: bool = False, **changes: Any) -> tuple[float, Counter[str]]:
    """The loss of the last step, and the bytes of all slices; two replicas for each of two stages."""
    spec = resolved(
        small_spec(
            write_text(folder),
            pipeline__stages=2,
            config__num_hidden_layers=2,
            training__steps=12,
            training__reproducible=False,
            training__learning_rate=3e-3,
            averaging__compression=compression,
            **changes,
        )
    )
    tokens, seen = Tokens.make(folder, spec), Bytes()

    async def act(rig: Rig) -> float:
        rig.network.observer = seen
        job = await rig.jobs.submit(spec, tokens.of_job(), {})
        if killing:
            await Run(rig, job, rig.rng).until_step(7)
            rig.kill(job.stages[1][0])
        await rig.finished(job)
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        return job.progress.loss

    return play(tokens, 4, act, limit_s=600.0), seen.of


def test_fewer_bytes_are_averaged_and_the_model_learns_as_well(tmp_path: Path) -> None:
    plain, raw = trained(tmp_path, "none")
    assert set(raw) == {"float32"}
    for compression, share in SHARE.items():
        loss, seen = trained(tmp_path, compression)
        assert set(seen) == {compression}
        assert seen[compression] <= 1.01 * share * raw["float32"]
        assert loss == pytest.approx(plain, rel=0.005)


def test_a_replica_is_lost_and_steps_overlap_while_slices_are_compressed(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path, "none", pipeline__overlap="all")
    loss, seen = trained(tmp_path, "int8", killing=True, pipeline__overlap="all")
    assert set(seen) == {"int8"}
    assert loss == pytest.approx(plain, rel=0.01)
