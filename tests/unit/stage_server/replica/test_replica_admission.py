"""Replica.admit: a tensor that cannot belong here is refused by its header, before anything is allocated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from stage_server.ports import Assignment, ReplicaId
from stage_server.replica.replica import Replica
from stage_server.state.loading import build_stage
from swarm.errors import CorruptFrame, Refused, StaleMessage
from swarm.model.islands.exchange import proposal_bytes
from swarm.types import Direction, EvaluationBatch, JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire.messages import Boundary, EvaluationBoundary, Event, LoadStage, Need, Slice
from tests.support.devices import InlineDevice
from tests.support.ports import ports_of
from tests.support.sim.network import SimNetwork
from tests.support.specs import tiny_spec

JOB = JobId("job")
SHAPE = (2, 16, 24)
ELEMENTS = 2 * 16 * 24


@asynccontextmanager
async def replica_of(
    compression: str, averaging: str = "none", outer: dict[str, Any] | None = None, mode: str = "diloco"
) -> AsyncIterator[Replica]:
    """Stage 1 of 2, loaded."""
    threads = torch.get_num_threads()
    spec = tiny_spec(
        2,
        pipeline={"compression": compression},
        averaging={"compression": averaging} | ({"mode": mode} if outer else {}),
        islands={"count": 2 if outer else 1},
        outer=outer or {},
    )
    events: list[Event] = []

    async with asyncio.TaskGroup() as tasks:
        command = LoadStage(JOB, 0, 1, (1, 1), 0, spec.model_dump_json())
        assignment = Assignment.of(command, ReplicaId(JOB, PeerId("b"), 1, 1))
        ports = ports_of(InlineDevice(lambda: 0.0), SimNetwork(Random(0)).peer_links("b"), events.append, tasks)
        yield Replica(assignment, *await build_stage(assignment, ports), ports)
        await ports.work.close()
    torch.set_num_threads(threads)


AT, SENDER = Microbatch(0, 0, 0), PeerId("a")
BOUNDARY = Boundary(JOB, AT, Direction.FORWARD, 1, 1, SENDER, 1, "float32", SHAPE, "none", 4 * ELEMENTS)
EVALUATION = EvaluationBoundary(JOB, EvaluationBatch(0, 0, 0), 1, 1, SENDER, 1, "float32", SHAPE, "none", 4 * ELEMENTS)
QUESTION = Need(JOB, AT, Direction.BACKWARD, 1, 1, SENDER, 1)
SLICE = Slice(JOB, 0, 0, UnitName("stage-1"), Round(1, 1), False, 0, SENDER, 1, "float64", 10, 80)
ON_THE_WIRE = {
    "none": ("float32", 4 * ELEMENTS),
    "bfloat16": ("bfloat16", 2 * ELEMENTS),
    "int8": ("int8", ELEMENTS + 4 * 3),  # 768 values are three blocks
}


@pytest.mark.parametrize("compression", ON_THE_WIRE)
async def test_a_boundary_tensor_has_the_dtype_and_the_bytes_of_the_jobs_codec(compression: str) -> None:
    dtype, size = ON_THE_WIRE[compression]
    header = replace(BOUNDARY, codec=compression, dtype=dtype, total_bytes=size)
    async with replica_of(compression) as replica:
        replica.admission.check(header)
        for wrong in (size - 1, size + 1, ELEMENTS, 0, 1 << 50):
            with pytest.raises(CorruptFrame, match=f"has {size} bytes, not {wrong}"):
                replica.admission.check(replace(header, total_bytes=wrong))
        for other, (other_dtype, other_size) in ON_THE_WIRE.items():
            if other != compression:
                with pytest.raises(CorruptFrame, match="this job sends boundary tensors as"):
                    replica.admission.check(replace(header, codec=other, dtype=other_dtype, total_bytes=other_size))
                with pytest.raises(CorruptFrame, match="the header says"):
                    replica.admission.check(replace(header, dtype=other_dtype, total_bytes=other_size))
        with pytest.raises(CorruptFrame, match="boundary tensors are"):
            replica.admission.check(replace(header, shape=(ELEMENTS,)))


async def test_with_auto_a_boundary_tensor_is_what_its_header_says() -> None:
    async with replica_of("auto") as replica:
        for name, (dtype, size) in ON_THE_WIRE.items():
            header = replace(BOUNDARY, codec=name, dtype=dtype, total_bytes=size)
            replica.admission.check(header)
            with pytest.raises(CorruptFrame, match=f"has {size} bytes"):
                replica.admission.check(replace(header, total_bytes=size + 1))
        for other in ("float16", "auto", "zip"):
            with pytest.raises(CorruptFrame, match="none or bfloat16 or int8"):
                replica.admission.check(replace(BOUNDARY, codec=other))


async def test_in_an_outer_step_a_slice_is_a_whole_coded_proposal_and_in_others_none() -> None:
    """int8 in blocks per parameter; steps 1 and 3 are outer ones."""
    async with replica_of("none", outer={"every_steps": 1, "compression": "int8"}) as replica:
        size = proposal_bytes(replica._stage, UnitName("stage-1"), 1)
        given = replace(SLICE, step=1, dtype="uint8", elements=size, total_bytes=size)
        replica.admission.check(given)
        for change in (
            {"dtype": "float64", "elements": size // 8},
            {"averaged": True},
            {"start": 1},
            {"elements": size - 1},
            {"total_bytes": size + 1},
        ):
            with pytest.raises(CorruptFrame):
                replica.admission.check(replace(given, **change))  # type: ignore[arg-type]
        replica.admission.check(SLICE)
        with pytest.raises((CorruptFrame, Refused)):
            replica.admission.check(replace(given, step=0))
        with pytest.raises(StaleMessage):
            replica.admission.check(replace(given, timeline=1))


async def test_with_gaia_a_proposal_has_a_bit_for_each_number_at_least_and_is_never_longer_than_without() -> None:
    async with replica_of("none", outer={"every_steps": 1}, mode="gaia") as replica:
        size = proposal_bytes(replica._stage, UnitName("stage-1"), 1)
        for elements in (size // 32 + 1, size - 4, size):
            given = replace(SLICE, step=1, dtype="uint8", elements=elements, total_bytes=elements)
            replica.admission.check(given)
            for wrong in (elements - 1, elements + 1):
                with pytest.raises(CorruptFrame, match=f"has {elements} bytes, not {wrong}"):
                    replica.admission.check(replace(given, total_bytes=wrong))
        for elements in (0, size // 32 - 1, size + 1):
            given = replace(SLICE, step=1, dtype="uint8", elements=elements, total_bytes=elements)
            with pytest.raises(CorruptFrame, match=f"has {size} bytes at most, not {elements}"):
                replica.admission.check(given)


async def test_a_slice_is_a_float_within_its_unit() -> None:
    async with replica_of("int8") as replica:
        replica.admission.check(SLICE)
        replica.admission.check(replace(SLICE, dtype="float32", total_bytes=40))
        for change in ({"dtype": "int8", "total_bytes": 10}, {"total_bytes": 79}, {"elements": 0}):
            with pytest.raises(CorruptFrame):
                replica.admission.check(replace(SLICE, **change))
        with pytest.raises(Refused, match="leaves unit"):
            replica.admission.check(replace(SLICE, start=1 << 40))


@pytest.mark.parametrize(("averaging", "size"), [("bfloat16", 20), ("int8", 14)])
async def test_a_compressed_slice_has_the_dtype_and_the_bytes_of_the_jobs_codec(averaging: str, size: int) -> None:
    async with replica_of("none", averaging) as replica:
        replica.admission.check(replace(SLICE, dtype=averaging, total_bytes=size))
        with pytest.raises(CorruptFrame, match=f"has {size} bytes, not {size + 1}"):
            replica.admission.check(replace(SLICE, dtype=averaging, total_bytes=size + 1))
        for other in ("float32", "float64", "float16", "zip" * 100):
            with pytest.raises(CorruptFrame, match=f"this job sends slices as {averaging}, not"):
                replica.admission.check(replace(SLICE, dtype=other, total_bytes=40))


async def test_what_is_meant_for_another_job_timeline_or_stage_is_refused() -> None:
    async with replica_of("none") as replica:
        replica.admission.check(BOUNDARY)
        replica.admission.check(EVALUATION)
        replica.admission.check(QUESTION)
        later = (
            replace(BOUNDARY, microbatch=Microbatch(1, 0, 0)),
            replace(EVALUATION, batch=EvaluationBatch(1, 0, 0)),
            replace(QUESTION, microbatch=Microbatch(1, 0, 0)),
            replace(SLICE, timeline=1),
        )
        others = [replace(header, job=JobId("other")) for header in (BOUNDARY, EVALUATION, QUESTION, SLICE)]
        for header in (*later, *others):
            with pytest.raises(StaleMessage, match="this replica serves job job, timeline 0"):
                replica.admission.check(header)
        for tensor in (BOUNDARY, replace(BOUNDARY, direction=Direction.BACKWARD), EVALUATION):
            with pytest.raises(Refused, match="a tensor for stage 0 came to stage 1"):
                replica.admission.check(replace(tensor, stage=0))
        with pytest.raises(Refused, match="a question to stage 0 came to stage 1"):
            replica.admission.check(replace(QUESTION, stage=0))
        with pytest.raises(Refused, match="has no unit"):
            replica.admission.check(replace(SLICE, unit=UnitName("stage-0")))
