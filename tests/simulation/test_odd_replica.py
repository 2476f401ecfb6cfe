"""The claim: one replica that is broken costs the job nothing but itself; the weights stay those of one process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.jobs.driver import JobDriver
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import OutOfMemory
from swarm.reference.trainer import train_local
from swarm.types import JobState, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Averaged, Committed, Event, Failed, Loaded, ParameterNorm
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, small_spec, write_text

PEERS = 6  # three for each of two stages
TOO_LARGE = 10**6


def broken(event: Event) -> Event | None:
    """What a replica says that is broken in one way; None: this event is as it should be."""
    match event:
        case Averaged(norms=norms):
            return replace(event, norms=tuple(ParameterNorm(norm.name, math.inf) for norm in norms))
        case Committed() | Loaded():
            return replace(event, digest="odd")
        case Accumulated(microbatch=microbatch):
            return replace(event, microbatch=Microbatch(microbatch.timeline, microbatch.step, TOO_LARGE))
    return None


@pytest.mark.parametrize("kind", [Loaded, Averaged, Committed, Accumulated, Failed])
def test_one_broken_replica_of_three_costs_the_job_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Event]
) -> None:
    spec = resolved(small_spec(write_text(tmp_path), pipeline__stages=2))
    tokens, real = Tokens.make(tmp_path, spec), JobDriver.on_event
    expected = train_local(spec, tokens.batches(spec)).sha256
    liar = PeerId("peer-3")

    def lie(driver: JobDriver, peer: PeerId, event: Any) -> None:
        if peer == liar and kind is Failed and isinstance(event, Loaded):
            event = Failed(event.job, OutOfMemory.code, "needs 9 GiB, has 8", "use more stages")
        elif peer == liar and kind is not Failed and isinstance(event, kind):
            event = broken(event) or event
        real(driver, peer, event)

    monkeypatch.setattr(JobDriver, "on_event", lie)

    async def act(rig: Rig) -> None:
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
        await rig.finished(job)
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        assert job.record.timeline == 0, "it was taken back"
        assert job.record.weights_sha256 == expected
        assert kind is Accumulated or job.unfit.why(liar, 1)  # a few events are too few to be expelled for
        said = [line.message for line in rig.jobs.stores.logs.of(job.record.id).kept()[0]]
        assert not [line for line in said if line.startswith(f"{liar} is to join")], said

    play(tokens, PEERS, act)
