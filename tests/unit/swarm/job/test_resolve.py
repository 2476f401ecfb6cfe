"""What "auto" becomes: an island for each site, a cut that memory holds, and what a job does without for that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler.brain.fleet.allocation import PendingJob
from swarm.errors import OutOfMemory
from swarm.job.changes import changed_values
from swarm.job.footprint import fewest_in_flight, model_costs
from swarm.job.memory_split import needs
from swarm.job.placement import Candidate
from swarm.job.resolve import Basis, choice_text, choices, lighter, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.types import JobId, Memory, PeerId
from tests.support.memories import memories
from tests.support.simulated import small_spec


def open_job(**changes: object) -> JobSpec:
    """A job that leaves all that takes memory at "auto"; microbatches of up to 4 sequences."""
    values: dict[str, object] = {
        "training__global_batch_sequences": 64, "training__microbatch_sequences": "auto", "data__sequence_length": 512,
        "pipeline__stages": "auto", "pipeline__overlap": "auto", "pipeline__max_in_flight": "auto",
        "model__recompute": "auto", "training__optimizer_on": "auto",
    }  # fmt: skip
    return small_spec(Path("text.txt"), **(values | changes))


def plain(spec: JobSpec) -> JobSpec:
    return resolve(spec, Basis(257, stages=2, idle=memories(0, 0), present=memories(0, 0)))


def test_the_first_choice_is_what_the_job_does_where_memory_is_not_short() -> None:
    spec = open_job()
    first, fewest = next(choices(spec, plain(spec)))
    assert (plain(first), fewest) == (plain(spec), False)
    assert choice_text(plain(spec), plain(spec)) == ""


def test_what_costs_least_is_given_up_first_and_the_optimizers_place_last() -> None:
    spec = open_job()
    tried = [
        (
            chosen.training.optimizer_on, chosen.model.recompute, fewest,
            chosen.pipeline.overlap, chosen.training.microbatch_sequences,
        )
        for chosen, fewest in choices(spec, plain(spec))
    ]  # fmt: skip
    assert tried[:4] == [
        ("device", False, False, "auto", 4), ("device", False, False, "auto", 2),
        ("device", False, False, "auto", 1), ("device", False, False, 0, 4),
    ]  # fmt: skip
    assert tried[-1] == ("host", True, True, 0, 1)
    kept = {place: [cost[place] for cost in tried] for place in range(3)}
    assert all(before <= after for before, after in pairwise(kept[0])), "device before host"
    assert kept[1] == sorted(kept[1][: len(tried) // 2]) * 2
    assert len(set(tried)) == len(tried) == 48


def test_what_the_job_file_says_is_no_choice() -> None:
    spec = open_job(
        training__microbatch_sequences=4, pipeline__overlap=2, pipeline__max_in_flight=7, model__recompute=False,
        training__optimizer_on="device",
    )  # fmt: skip
    ((only, fewest),) = choices(spec, plain(spec))
    assert (plain(only), fewest) == (plain(spec), False)


def test_the_fewest_in_flight_keep_each_stage_of_each_replica_at_work() -> None:
    assert (fewest_in_flight(3, 7), fewest_in_flight(4, 2)) == (6, 4)


def test_people_are_told_each_choice() -> None:
    spec = open_job()
    *_, (last, _) = choices(spec, plain(spec))
    few = last.having("pipeline", max_in_flight=2)
    assert choice_text(plain(few), plain(spec)) == (
        "to fit the memory on offer: microbatches of 1 sequence, steps do not overlap, at most 2 microbatches in "
        "flight, forward is computed again for backward, the optimizer runs on the hosts"
    )
    assert not choice_text(plain(spec).having("training", microbatch_sequences=1), plain(few)), "it takes all that back"


def test_each_setting_that_is_left_comes_once_and_with_those_before() -> None:
    ways = list(lighter(plain(open_job(pipeline__overlap=2))))
    assert [setting for setting, _ in ways] == [
        "training.microbatch_sequences = 1", "model.recompute = true", "pipeline.overlap = 0",
        'training.optimizer_on = "host"', 'model.dtype = "bfloat16_parameters"', "pipeline.max_in_flight = 1",
    ]  # fmt: skip
    assert not list(lighter(ways[-1][1]))
    assert [setting for setting, _ in lighter(ways[1][1])] == [setting for setting, _ in ways[2:]]


def test_a_job_that_leaves_it_open_has_an_island_for_each_site_that_can_serve_one_alone() -> None:
    spec = small_spec(
        Path("text.txt"), averaging__mode="diloco", islands__count="auto", pipeline__stages=2,
        training__global_batch_sequences=8,
    )  # fmt: skip

    def at(**sites: int) -> list[Candidate]:
        return [Candidate(PeerId(f"{s}{n}"), site=s, offer=Memory(n + 1 << 30)) for s in sites for n in range(sites[s])]

    def islands(one: JobSpec, **sites: int) -> int:
        peers = at(**sites)
        memory = [peer.offer for peer in peers]
        return resolve(one, Basis(257, idle=memory, present=memory, lasting=peers)).island_count

    assert islands(spec, lyon=3, berlin=2, rome=1) == 2
    assert islands(spec, lyon=4, rome=1) == islands(spec) == 1
    two = spec.having("islands", min=2)
    assert islands(two, lyon=4, rome=1) == islands(two) == 2, "it has as many as it asks for at least"
    assert islands(small_spec(Path("text.txt")), lyon=3, berlin=2) == 1
    gaia = spec.having("averaging", mode="gaia").having("training", global_batch_sequences=16)
    assert islands(gaia, lyon=3, berlin=2, rome=2, oslo=2) == 4
    assert islands(gaia, lyon=4, rome=1) == islands(gaia) == 2, "it is for several"


@pytest.mark.parametrize("rich", [3, 1])
def test_each_site_can_serve_the_cut_of_a_job_whose_islands_follow_the_sites(rich: int) -> None:
    """Those of the smaller site would hold the model in one stage, which fits nobody at the other."""
    spec = small_spec(
        Path("text.txt"), averaging__mode="diloco", islands__count="auto", pipeline__stages="auto",
        training__global_batch_sequences=8, config__num_hidden_layers=8, model__recompute=False,
        training__optimizer_on="device", pipeline__max_in_flight=8,
    )  # fmt: skip
    costs = model_costs(resolve(spec, Basis(257, idle=memories(*[1 << 40] * 6))))
    small = max(need.total_bytes for need in needs(costs, (4, 4), 4)) + 1
    peers = [Candidate(PeerId(f"l{n}"), site="lyon", offer=Memory(small)) for n in range(6)]
    peers += [Candidate(PeerId(f"b{n}"), site="berlin", offer=Memory(1 << 40)) for n in range(rich)]
    memory = [peer.offer for peer in peers]
    found = resolve(spec, Basis(257, idle=memory, present=memory, lasting=peers))
    assert found.island_count == (2 if rich == 3 else 1)
    if rich == 3:
        cut = found.split
        job = PendingJob(JobId("j"), needs(costs, cut, len(peers) // 2) * 2, 1, 0.0, islands=2)
        assert job.plan(peers).plan is not None


def wide_job() -> JobSpec:
    return small_spec(
        Path("text.txt"), training__global_batch_sequences=64, training__microbatch_sequences="auto",
        pipeline__stages="auto", pipeline__overlap="auto", config__num_hidden_layers=2, data__sequence_length=512,
    )  # fmt: skip


def filled(spec: JobSpec, idle: Sequence[int], present: Sequence[int]) -> JobSpec:
    """The spec as it is resolved beside machines without a device, which offer so many bytes each."""
    return resolve(spec, Basis(32_000, idle=memories(*idle), present=memories(*present)))


def largest(resolved: JobSpec, split: Sequence[int]) -> int:
    """Bytes of the largest of the stages of a cut, for two peers."""
    return max(need.total_bytes for need in needs(model_costs(resolved), split, 2))


def test_a_microbatch_that_was_left_open_is_as_small_as_the_offered_memory_asks_for() -> None:
    """A model of 30 million parameters was refused by machines of 4 GiB, since "auto" had microbatches of 4 GiB."""
    plain = filled(wide_job(), [1 << 40] * 2, [1 << 40] * 2)
    most = largest(plain, plain.split)
    assert plain.training.microbatch_sequences == 4
    sizes = []
    for offered in (most, most * 2 // 3, most // 2):
        memory = [offered] * 2
        found = filled(wide_job(), memory, memory)
        assert largest(found, found.split) <= offered
        sizes.append(found.training.microbatch_sequences)
    assert sizes == [4, 2, 1]


def smallest(resolved: JobSpec) -> int:
    """Bytes of one layer with embedding or head, in two stages."""
    return max(model_costs(resolved).stage_memory(1, stage, 2, 1).total_bytes for stage in (0, 1))


def test_a_microbatch_that_was_given_stays_as_it_is() -> None:
    given = wide_job().having("training", microbatch_sequences=4).having("model", recompute=False)
    given = given.having("pipeline", overlap=0, max_in_flight=8)
    costs = model_costs(filled(given, [1 << 40] * 2, [1 << 40] * 2))
    memory = [costs.stage_memory(0, 1, 2, 1).total_bytes - 1] * 2
    with pytest.raises(OutOfMemory, match="the head alone needs about") as caught:
        filled(given, memory, memory)
    assert caught.value.hint.startswith("set training.microbatch_sequences = 1: then it needs")
    assert filled(wide_job(), memory, memory).training.microbatch_sequences < 4


def test_a_job_waits_for_a_busy_machine_with_what_would_fit_it() -> None:
    small, busy = 1 << 20, smallest(filled(wide_job(), [1 << 40], [1 << 40])) - 1
    found = filled(wide_job(), [small], [small, busy])
    assert smallest(found) <= busy


def test_a_job_that_waits_for_busy_machines_is_cut_so_that_they_can_hold_it() -> None:
    """While another job had all machines, a job of one stage of 4.1 GiB was accepted for machines of 3.9 GiB."""
    plain = filled(wide_job(), [1 << 40], [1 << 40])
    busy = [largest(plain, (1, 1))] * 2
    assert largest(plain, (2,)) > busy[0]
    found = filled(wide_job(), [], busy)
    assert largest(found, found.split) <= busy[0]


def test_steps_overlap_only_where_their_second_copy_of_the_weights_fits() -> None:
    spec = small_spec(
        Path("text.txt"), training__global_batch_sequences=64, training__microbatch_sequences=1,
        pipeline__stages=2, pipeline__overlap="auto", config__num_hidden_layers=4, config__hidden_size=512,
    )  # fmt: skip
    plain = filled(spec, [1 << 40] * 2, [1 << 40] * 2)
    assert plain.overlap
    without = plain.having("pipeline", overlap=0)
    memory = [largest(without, plain.split)] * 2
    found = filled(spec, memory, memory)
    assert not found.overlap
    assert largest(found, found.split) <= memory[0]


@pytest.mark.parametrize(
    ("changes", "becomes"),
    [
        ({}, "stall"),
        ({"pipeline__stages": 2}, "off"),
        ({"pipeline__split": (1, 2)}, "off"),
        ({"averaging__mode": "diloco"}, "off"),
        ({"pipeline__recut": "off"}, "off"),
        ({"pipeline__stages": 2, "pipeline__recut": "stall"}, "stall"),
    ],
)
def test_a_job_may_be_cut_anew_if_it_leaves_the_cut_open_or_says_so(changes: dict[str, object], becomes: str) -> None:
    found = filled(open_job(**changes), [1 << 40] * 2, [1 << 40] * 2)
    assert found.pipeline.recut == becomes
    assert resolve(found, Basis(257)) == found


def test_a_job_with_islands_cannot_ask_for_another_cut() -> None:
    with pytest.raises(ValueError, match="is for jobs without islands"):
        open_job(averaging__mode="diloco", pipeline__recut="stall")


def test_a_person_who_says_the_stages_at_a_resume_has_them_kept() -> None:
    stored = filled(open_job(), [1 << 40] * 2, [1 << 40] * 2).model_dump(mode="json")
    assert stored["pipeline"]["recut"] == "stall"
    for said, becomes in (
        ("pipeline.stages=2", "off"),
        ("pipeline.stages=auto", "stall"),
        ("training.steps=9", "stall"),
    ):
        key, _, value = said.partition("=")
        values = changed_values(json.loads(json.dumps(stored)), [said])
        section, _, name = key.partition(".")
        values[section][name] = int(value) if value.isdigit() else value
        assert resolve(parse_job(values), Basis(257)).pipeline.recut == becomes, said
