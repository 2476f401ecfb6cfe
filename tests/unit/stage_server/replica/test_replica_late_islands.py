"""A stage of an island that was late ends with the bits of one process, and so does a replica that joins it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from stage_server.ports import Assignment, ReplicaId
from stage_server.replica.replica import commit
from stage_server.state.donor import Donor, chunks_of, names_of, sizes_in, unpack_records
from stage_server.state.joiner import missed_record
from swarm.job.families import HEAD
from swarm.job.islands import island_spec, outer_courses
from swarm.job.outer_log import OuterRecord, TookPart
from swarm.job.spec import JobSpec
from swarm.model.islands.exchange import decoded, mean_proposal, merge_of_deltas, proposed
from swarm.model.stage import Stage
from swarm.reference.islands import ReferenceOuterSteps
from swarm.reference.trainer import build_stages
from swarm.types import Hop, JobId, PeerId, Round
from swarm.wire.messages import Commit, LoadStage, StateRequest, UnitRound
from tests.support.devices import InlineDevice
from tests.support.one_process import CPU, drift, spec_of
from tests.support.sim.network import SimNetwork

MODES = [
    ("diloco", {"every_steps": 2}),
    ("streaming", {"every_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.5}),
    ("gaia", {"every_steps": 2, "overlap_steps": 1, "threshold": 0.2}),
]


def train(islands: Sequence[Sequence[Stage]], seed: int) -> None:
    """An inner step of each island, the same wherever the seed is."""
    drift([list(stages) for stages in islands], seed, scale=1e-2)
    for stage in (stage for stages in islands for stage in stages):
        stage.apply(stage.version, {}, learning_rate=0.0, scale=1.0, skip=True)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("mode", "outer"), MODES)
async def test_what_a_late_island_fetches_and_merges_makes_the_bits_of_one_process(
    mode: str, outer: dict[str, Any], skip: bool
) -> None:
    """The others have trained on, and their logs have no room. `skip`: what they proposed was not finite."""
    spec = spec_of(mode, steps=8, **outer)
    course = outer_courses(spec)[0]
    due, all_ = course.outer[0], [(outer.behind, outer.fragment) for outer in course.outer]
    exchanges = TookPart([OuterRecord(due.behind, (0,), {}, due.fragment, (1,))], 2, all_)
    islands, twins = ([build_stages(island_spec(spec), CPU) for _ in range(2)] for _ in range(2))
    steps = ReferenceOuterSteps(spec, twins)
    for step in range(due.behind):
        for each in (islands, twins):
            train(each, seed=10 * step)
            if skip and step + 1 == due.captured:
                each[0][0].weights.newest()[HEAD].data.fill_(math.inf)
                each[0][0].proposals.capture(each[0][0].weights.newest().items(), each[0][0].version)
        assert steps.after(step, {0: 3, 1: 5}, exchanges) == ([due.fragment] if skip and step + 1 == due.behind else [])

    (first,), (late,) = islands
    (unit,) = first.units
    rounds = () if skip else (UnitRound(unit, Round(1, 1)),)
    command = Commit(0, due.step, due.step + 1, rounds, 0.0, 1.0, skip)
    mean = mean_proposal([decoded(first, unit, due.step, proposed(first, unit, due.step))], [3])
    of = [assigned(spec, island) for island in range(2)]
    donors = [Donor(one, stage, InlineDevice(lambda: 0.0), 0) for one, stage in zip(of, (first, late), strict=True)]
    donors[0].committed(*commit(of[0], first, donors[0], command, {} if skip else {unit: mean}))
    assert first.digest() == twins[0][0].digest()
    joiner = joined(spec, late)
    while not course.is_outer(first.version):
        inner = Commit(0, first.version, first.version + 1, (), 0.0, 1.0, True)
        donors[0].committed(*commit(of[0], first, donors[0], inner, {}))

    network = SimNetwork(Random(0))
    network.add_receiver("of 0", None, donor=donors[0])  # type: ignore[arg-type]
    fetched = {}
    if not skip:
        donor = Hop(PeerId("of 0"), 1, 0, "of 0")
        record = await missed_record(due.step, of[1], [donor], late, network.peer_links("of 1"))
        fetched = late.places_at(due.step).means_of(record.gradients)
    rebased = replace(command, timeline=1, rebases=True)
    donors[1].committed(*commit(of[1], late, donors[1], rebased, fetched))
    assert late.digest() == twins[1][0].digest()

    for chunk in chunks_of(joiner):
        asks = StateRequest(JobId("job"), 1, 0, "records", chunk.index, due.step, due.step + 1, PeerId("joiner"), 1)
        _, payload = await donors[1].give(asks)
        (record,) = unpack_records(memoryview(payload), [sizes_in(joiner, due.step, chunk)])
        deltas = None if record.skip else record.gradients
        merge = merge_of_deltas(joiner, spec, due.step, names_of(chunk), deltas, rebases=record.rebases)
        joiner.replay_merge(due.step, names_of(chunk), merge)
    assert joiner.settle(late.version) == late.digest()
    await network.close()


def assigned(spec: JobSpec, island: int) -> Assignment:
    """The one stage of an island; its timeline has the island's number."""
    command = LoadStage(JobId("job"), island, 0, spec.split, 0, spec.model_dump_json())
    return Assignment.of(command, ReplicaId(JobId("job"), PeerId(f"of {island}"), 1, 0))


def joined(spec: JobSpec, stage: Stage) -> Stage:
    """A copy of a stage, as a joiner fetches it."""
    (made,) = build_stages(island_spec(spec), CPU)
    names = [name for name, _ in stage.parameter_sizes()]
    made.absorb(names, stage.version, memoryview(stage.snapshot(names)))
    made.settle(stage.version)
    return made
