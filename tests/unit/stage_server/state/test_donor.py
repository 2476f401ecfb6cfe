"""stage_server.state.donor and the stage's snapshots: what is given can be put together to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from stage_server.brain.rejoin import WANTED_COMMITS, TensorSize, cut
from stage_server.state.donor import SERVED_MAX, Donor, Record, chunks_of, names_of, pack_records, unpack_records
from stage_server.state.joiner import missed_record
from swarm.errors import CorruptFrame, Refused, RetryElsewhere, StaleMessage
from swarm.job.course import TIMELINES_MAX, IslandCourse, OuterCourse
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.types import Hop, JobId, PeerId
from swarm.wire.messages import Commit, StateRequest
from tests.support.devices import InlineDevice
from tests.support.ports import assignment_of
from tests.support.scenes import resolved
from tests.support.sim.network import SimNetwork
from tests.support.simulated import small_spec, stale, write_text

CPU = torch.device("cpu")
RATE = 1e-2


def spec_of(folder: Path, **changes: Any) -> JobSpec:
    spec = small_spec(write_text(folder), pipeline__stages=1, **changes)
    return resolved(spec)


def means(stage: Stage, step: int) -> dict[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {unit: torch.randn(one.elements, generator=generator) for unit, one in stage.units.items()}


def commit(stage: Stage, step: int, *, skip: bool = False, donor: Donor | None = None) -> None:
    gradients = means(stage, step)
    stage.apply(step, {} if skip else gradients, learning_rate=RATE, scale=0.5, skip=skip)
    if donor is not None:
        donor.committed(*donor.record(Commit(0, step, step + 1, (), RATE, 0.5, skip), {} if skip else gradients))


def donor_of(stage: Stage, log_bytes: int = 1 << 30) -> Donor:
    return Donor(assignment_of(stage._spec, peer="donor"), stage, InlineDevice(lambda: 0.0), log_bytes)


def request(part: str, chunk: int = 0, start: int = 0, stop: int = 0) -> StateRequest:
    return StateRequest(JobId("job"), 0, 0, part, chunk, start, stop, PeerId("joiner"), 1)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "muon"])
@pytest.mark.parametrize("versions", [(0, 0), (0, 3), (1, 2), (3, 1)], ids=str)
def test_chunks_of_different_versions_are_brought_up_to_one_state(
    tmp_path: Path, staleness: int, optimizer: str, versions: Sequence[int]
) -> None:
    spec = spec_of(
        tmp_path,
        **stale(staleness),
        training__optimizer=optimizer,
        config__tie_word_embeddings=True,
        **({"training__momentum": 0.9} if optimizer == "sgd" else {}),
    )
    whole, joined = Stage(spec, 0, CPU), Stage(spec, 0, CPU)
    names = [name for name, _ in whole.parameter_sizes()]
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    snapshots: dict[int, bytes] = {}
    last, skipped = 4, 2
    records = []
    for step in range(last + 1):
        for half, version in enumerate(versions):
            if version == step:
                snapshots[half] = whole.snapshot(halves[half])
        records.append(whole.places.gradients_of(means(whole, step)))
        if step < last:
            commit(whole, step, skip=step == skipped)
    for half, version in enumerate(versions):
        assert len(snapshots[half]) == joined.state_bytes(halves[half])
        joined.absorb(halves[half], version, memoryview(snapshots[half]))
        for step in range(version, last):
            skip = step == skipped
            gradients = {} if skip else {name: records[step][name] for name in halves[half]}
            joined.replay(step, halves[half], gradients, learning_rate=RATE, scale=0.5, skip=skip)
    assert joined.settle(last) == whole.digest()
    assert joined.version == last
    assert joined.snapshot(names) == whole.snapshot(names), "the version before is the same as well"
    # And they go on alike.
    commit(whole, last)
    commit(joined, last)
    assert joined.digest() == whole.digest()


async def test_a_donor_gives_its_state_and_the_records_of_its_log(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    stage = Stage(spec, 0, CPU)
    donor = donor_of(stage)
    donor.share()
    for step in range(3):
        commit(stage, step, skip=step == 1, donor=donor)
    (chunk,) = chunks_of(stage)
    reply, payload = await donor.give(request("state"))
    assert (reply.version, reply.reach, payload) == (3, 0, stage.snapshot(names_of(chunk)))
    reply, payload = await donor.give(request("records", start=1, stop=9))
    assert (reply.version, reply.reach) == (3, 0)
    sizes = dict(stage.parameter_sizes())
    skipped, last = unpack_records(memoryview(payload), [sizes] * 2)
    assert skipped == Record(RATE, 0.5, True, {})
    expected = stage.places.gradients_of(means(stage, 2))
    assert all(torch.equal(last.gradients[name].view(one.shape), one) for name, one in expected.items())
    reply, payload = await donor.give(request("records", start=3, stop=4))
    assert (reply.version, payload) == (3, b""), "not committed yet"
    with pytest.raises(Refused):
        await donor.give(request("state", chunk=1))


class CommittingDevice(InlineDevice):
    """A device that commits a step right behind the first work that it is given."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__(lambda: 0.0)
        self._step = step

    def run(self, work: Callable[[], Any]) -> Any:
        result, step = super().run(work), self._step
        self._step = lambda: None
        step()
        return result


async def test_nothing_is_logged_until_a_joiner_asks_and_then_all_that_its_chunk_lacks(tmp_path: Path) -> None:
    """Two averaged gradients were held for joiners that never came: 8 bytes for each parameter."""
    stage = Stage(spec_of(tmp_path), 0, CPU)
    device = CommittingDevice(lambda: commit(stage, 2, donor=donor))
    donor = Donor(assignment_of(stage._spec, peer="donor"), stage, device, 1 << 30)
    for step in range(2):
        commit(stage, step, donor=donor)
    assert not donor._records
    reply, _ = await donor.give(request("state"))
    assert reply.version == 2, "the commit came right behind the chunk"
    for step in range(3, 2 + WANTED_COMMITS):
        commit(stage, step, donor=donor)
    assert list(donor._records) == list(range(2, 2 + WANTED_COMMITS))
    commit(stage, 2 + WANTED_COMMITS, donor=donor)
    assert not donor._records, "nobody has asked since"


async def test_a_log_is_bounded_in_bytes_and_says_where_it_begins(tmp_path: Path) -> None:
    stage = Stage(spec_of(tmp_path), 0, CPU)
    donor = donor_of(stage, log_bytes=0)
    donor.share()
    for step in range(5):
        commit(stage, step, donor=donor)
    reply, payload = await donor.give(request("records", start=2, stop=5))
    assert (reply.reach, payload) == (3, b""), "two records are kept whatever the limit"
    reply, _ = await donor.give(request("records", start=3, stop=5))
    assert (reply.version, reply.reach) == (5, 3)


async def test_other_islands_get_the_records_of_outer_steps_and_nothing_else(tmp_path: Path) -> None:
    """The donor lives on timeline 7, the second of three islands; steps 2 and 5 are outer ones."""
    stage = Stage(spec_of(tmp_path), 0, CPU)
    assignment = assignment_of(stage._spec, peer="donor", timeline=7)
    assignment = replace(assignment, course=OuterCourse(IslandCourse(4, 2, 3, 1)), islands=3)
    donor = Donor(assignment, stage, InlineDevice(lambda: 0.0), 1 << 30)
    for step in range(3):
        commit(stage, step, donor=donor)
    for timeline in (6, 7, 8, 6 + 3 * TIMELINES_MAX):
        reply, _ = await donor.give(replace(request("records", start=2, stop=3), timeline=timeline))
        assert (reply.version, reply.reach) == (3, 2), "inner steps are not kept for them"
    of_others = [
        replace(request("records", start=1, stop=2), timeline=6),
        replace(request("records", start=1, stop=3), timeline=6),
        replace(request("records", start=2, stop=2), timeline=6),
        replace(request("state"), timeline=8),
        replace(request("records", start=2, stop=3), timeline=5),
        replace(request("records", start=2, stop=3), timeline=5 + 3 * TIMELINES_MAX),
        replace(request("records", start=2, stop=3), timeline=9),
        replace(request("records", start=2, stop=3), timeline=6, stage=1),
        replace(request("records", start=2, stop=3), timeline=6, job=JobId("another")),
    ]
    for wrong in of_others:
        with pytest.raises(StaleMessage):
            await donor.give(wrong)


@pytest.mark.parametrize("skip", [False, True])
async def test_the_newest_outer_step_is_kept_until_the_next_however_short_the_log_is(
    tmp_path: Path, skip: bool
) -> None:
    """Steps 2 and 5 are outer ones. An island that was late asks for the first when the others are about to make the
    second."""
    stage = Stage(spec_of(tmp_path), 0, CPU)
    assignment = replace(assignment_of(stage._spec), course=OuterCourse(IslandCourse(4, 2, 2, 0)), islands=2)
    donor = Donor(assignment, stage, InlineDevice(lambda: 0.0), 0)
    for step in range(5):
        commit(stage, step, skip=skip and step == 2, donor=donor)
    asks = replace(request("records", start=2, stop=3), timeline=1)
    reply, payload = await donor.give(asks)
    assert (reply.version, reply.reach) == (3, 2)
    (record,) = unpack_records(memoryview(payload), [dict(stage.parameter_sizes())])
    assert (record.skip, len(record.gradients)) == (skip, 0 if skip else len(stage.parameter_sizes()))
    reply, _ = await donor.give(request("records", start=1, stop=2))
    assert reply.reach > 1, "of other steps the log alone is kept"
    commit(stage, 5, donor=donor)
    commit(stage, 6, donor=donor)
    reply, _ = await donor.give(asks)
    assert reply.reach > 2


async def test_joiners_beyond_a_number_are_turned_away(tmp_path: Path) -> None:
    stage = Stage(spec_of(tmp_path), 0, CPU)
    donor = donor_of(stage)
    for part, other in (("state", "records"), ("records", "state")):
        donor._served[part] = SERVED_MAX
        with pytest.raises(RetryElsewhere):
            await donor.give(request(part))
        await donor.give(request(other))
        del donor._served[part]
    assert donor._served.total() == 0


def test_damaged_records_are_refused() -> None:
    sizes = {"a": 3}
    raw = pack_records([Record(1.0, 1.0, False, {"a": torch.ones(3)})], ["a"])
    assert unpack_records(memoryview(raw), [sizes])[0].gradients["a"].tolist() == [1.0, 1.0, 1.0]
    for damaged in (raw[:-1], raw + b"0", b""):
        with pytest.raises(CorruptFrame):
            unpack_records(memoryview(damaged), [sizes])


async def test_a_record_that_says_that_nothing_changed_is_not_believed(tmp_path: Path) -> None:
    stage = Stage(spec_of(tmp_path), 0, CPU)
    network = SimNetwork(Random(1))
    for name, skip in (("liar", True), ("honest", False)):
        donor = donor_of(Stage(spec_of(tmp_path), 0, CPU))
        donor.share()
        donor.committed(*donor.record(Commit(0, 0, 1, (), RATE, 0.5, skip), {} if skip else means(stage, 0)))
        network.add_receiver(name, None, donor=donor)  # type: ignore[arg-type]
    donors = [Hop(PeerId(name), 1, 0, name) for name in ("liar", "honest")]
    joiner = assignment_of(stage._spec, peer="joiner")
    record = await missed_record(0, joiner, donors, stage, network.peer_links("joiner"))
    assert not record.skip
    assert record.gradients.keys() == dict(stage.parameter_sizes()).keys()
    await network.close()


def test_a_tensor_is_never_cut(tmp_path: Path) -> None:
    chunks = cut(
        [TensorSize("large", 1000), TensorSize("small", 1)],
        chunk_bytes=64,
        element_bytes=16,
        gradient_bytes=4,
        whole_tensors=True,
    )
    assert [names_of(chunk) for chunk in chunks] == [("large",), ("small",)]
