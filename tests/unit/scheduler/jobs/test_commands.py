"""What callers send is looked at aside, so that the event loop serves everybody else meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.brain.fleet.allocation import PendingJob
from scheduler.brain.fleet.memory_split import needs
from scheduler.brain.fleet.placement import Candidate
from scheduler.jobs.brain_settings import model_costs
from scheduler.jobs.commands import Jobs, _for_sites, _resolve, check_hops
from scheduler.jobs.job import split_of
from scheduler.storage.job_record import JobTokens
from swarm.errors import InvalidConfig, OutOfMemory
from swarm.job.spec import JobSpec
from swarm.limits import HOPS_MAX, SUBMITS_MAX
from swarm.types import JobId, Memory, PeerId
from tests.support.memories import memories
from tests.support.simulated import small_spec


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SUBMITS_MAX + 2) as made:
        yield made


def commands(threads: ThreadPoolExecutor) -> Jobs:
    ports = SimpleNamespace(stores=SimpleNamespace(threads=threads), metrics=None, rng=None, wall_s=None)
    allocator = SimpleNamespace(idle=None)
    nothing = cast(Any, None)
    return Jobs(cast(Any, ports), nothing, nothing, nothing, nothing, cast(Any, allocator), nothing, nothing)


def test_what_a_caller_sent_is_looked_at_on_a_thread(threads: ThreadPoolExecutor) -> None:
    assert asyncio.run(commands(threads).aside(threading.get_ident)) != threading.get_ident()


def test_a_few_are_looked_at_a_time_and_others_have_threads_left(threads: ThreadPoolExecutor) -> None:
    at_work, go = threading.Semaphore(0), threading.Event()

    def look() -> None:
        at_work.release()
        assert go.wait(30)

    async def many() -> int:
        asked = commands(threads)
        looks = [asyncio.create_task(asked.aside(look)) for _ in range(SUBMITS_MAX + 2)]
        loop = asyncio.get_running_loop()
        try:
            for _ in range(SUBMITS_MAX):
                assert await loop.run_in_executor(threads, at_work.acquire, True, 30)
            return int(await loop.run_in_executor(threads, at_work.acquire, True, 0.2))
        finally:
            go.set()
            await asyncio.gather(*looks)

    assert asyncio.run(many()) == 0, "one more than SUBMITS_MAX was looked at"


def test_a_step_has_so_many_hops(tmp_path: Path) -> None:
    """A job of a million microbatches a step was accepted, and the scheduler stood still for seconds when it began."""

    def check(microbatches: int, split: list[int]) -> None:
        batch = {"training__global_batch_sequences": microbatches, "training__microbatch_sequences": 1}
        check_hops(small_spec(tmp_path, pipeline__stages=len(split), pipeline__split=split, **batch))

    check(HOPS_MAX, [3])
    check(HOPS_MAX // 2, [2, 1])
    with pytest.raises(InvalidConfig, match=f"{HOPS_MAX} microbatches; with 2 stages, {HOPS_MAX // 2} is the limit"):
        check(HOPS_MAX, [2, 1])


def test_a_job_has_no_name_that_commands_would_take_for_a_flag(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """`swarm cancel --d95f3a` is no way to name a job."""
    spec = small_spec(tmp_path).model_copy(update={"name": "-"})
    with pytest.raises(InvalidConfig, match="taken for a flag"):
        asyncio.run(commands(threads)._vetted(spec, cast(Any, None)))


def test_a_job_that_leaves_it_open_has_an_island_for_each_site_that_can_serve_one_alone() -> None:
    spec = small_spec(
        Path("text.txt"), averaging__mode="diloco", islands__count="auto", pipeline__stages=2,
        training__global_batch_sequences=8,
    )  # fmt: skip
    tokens = JobTokens((), "uint16", 257, 3.0, 256)

    def at(**sites: int) -> list[Candidate]:
        return [Candidate(PeerId(f"{s}{n}"), site=s, offer=Memory(n + 1 << 30)) for s in sites for n in range(sites[s])]

    resolved, memory = _for_sites(spec, tokens, at(lyon=3, berlin=2, rome=1), [Memory(7)])
    assert (resolved.islands.count, memory) == (2, list(memories(1 << 30, 2 << 30))), (
        "the cut must suit the smaller site"
    )
    assert _resolve(resolved, memory, tokens, memory)[0].island_count == 2
    for one, peers in ((spec, at(lyon=4, rome=1)), (small_spec(Path("text.txt")), at(lyon=3, berlin=2))):
        assert _for_sites(one, tokens, peers, [7]) == (one, [7])
    assert _resolve(spec, [Memory(7 << 30)] * 2, tokens, [Memory(7 << 30)] * 2)[0].islands.count == 1


@pytest.mark.parametrize("rich", [3, 1])
def test_each_site_can_serve_the_cut_of_a_job_whose_islands_follow_the_sites(rich: int) -> None:
    """Those of the smaller site would hold the model in one stage, which fits nobody at the other."""
    spec = small_spec(
        Path("text.txt"), averaging__mode="diloco", islands__count="auto", pipeline__stages="auto",
        training__global_batch_sequences=8, config__num_hidden_layers=8, model__recompute=False,
        training__optimizer_on="device", pipeline__max_in_flight=8,
    )  # fmt: skip
    tokens = JobTokens((), "uint16", 257, 3.0, 256)
    one = spec.model_copy(update={"islands": spec.islands.model_copy(update={"count": 1, "min": 1})})
    resolved = _resolve(one, [Memory(1 << 40)] * 6, tokens, [Memory(1 << 40)] * 6)[0]
    costs = model_costs(resolved)
    small = max(need.total_bytes for need in needs(costs, (4, 4), 4)) + 1
    peers = [Candidate(PeerId(f"l{n}"), site="lyon", offer=Memory(small)) for n in range(6)]
    peers += [Candidate(PeerId(f"b{n}"), site="berlin", offer=Memory(1 << 40)) for n in range(rich)]
    chosen, memory = _for_sites(spec, tokens, peers, [Memory(small)])
    count = chosen.island_count
    assert count == (2 if rich == 3 else 1)
    if count == 2:
        cut = split_of(_resolve(chosen, memory, tokens, memory)[0])
        job = PendingJob(JobId("j"), needs(costs, cut, len(peers) // 2) * 2, 1, 0.0, islands=2)
        assert job.plan(peers).plan is not None


def wide_job(**changes: object) -> JobSpec:
    spec = small_spec(
        Path("text.txt"), training__global_batch_sequences=64, training__microbatch_sequences="auto",
        pipeline__stages="auto", pipeline__overlap="auto", config__num_hidden_layers=2, data__sequence_length=512,
    )  # fmt: skip
    return spec.model_copy(update=changes)


TOKENS = JobTokens((), "uint16", 32_000, 3.0, 256)


def filled(spec: JobSpec, idle: Sequence[int], present: Sequence[int]) -> JobSpec:
    """The spec as it is resolved beside machines without a device, which offer so many bytes each."""
    return _resolve(spec, list(memories(*idle)), TOKENS, list(memories(*present)))[0]


def largest(resolved: JobSpec, split: Sequence[int]) -> int:
    """Bytes of the largest of the stages of a cut, for two peers."""
    return max(need.total_bytes for need in needs(model_costs(resolved), split, 2))


def test_a_microbatch_that_was_left_open_is_as_small_as_the_offered_memory_asks_for() -> None:
    """A model of 30 million parameters was refused by machines of 4 GiB, since "auto" had microbatches of 4 GiB."""
    plain = filled(wide_job(), [1 << 40] * 2, [1 << 40] * 2)
    most = largest(plain, split_of(plain))
    assert plain.training.microbatch_sequences == 4
    sizes = []
    for offered in (most, most * 2 // 3, most // 2):
        memory = [offered] * 2
        found = filled(wide_job(), memory, memory)
        assert largest(found, split_of(found)) <= offered
        sizes.append(found.training.microbatch_sequences)
    assert sizes == [4, 2, 1]


def smallest(resolved: JobSpec) -> int:
    """Bytes of one layer with embedding or head, in two stages."""
    return max(model_costs(resolved).stage_memory(1, stage, 2, 1).total_bytes for stage in (0, 1))


def test_a_microbatch_that_was_given_stays_as_it_is() -> None:
    training = wide_job().training.model_copy(update={"microbatch_sequences": 4})
    pipeline = wide_job().pipeline.model_copy(update={"overlap": 0, "max_in_flight": 8})
    model = wide_job().model.model_copy(update={"recompute": False})
    given = wide_job(training=training, pipeline=pipeline, model=model)
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
    assert largest(found, split_of(found)) <= busy[0]


def test_steps_overlap_only_where_their_second_copy_of_the_weights_fits() -> None:
    spec = small_spec(
        Path("text.txt"), training__global_batch_sequences=64, training__microbatch_sequences=1,
        pipeline__stages=2, pipeline__overlap="auto", config__num_hidden_layers=4, config__hidden_size=512,
    )  # fmt: skip
    plain = filled(spec, [1 << 40] * 2, [1 << 40] * 2)
    assert plain.overlap
    without = plain.model_copy(update={"pipeline": plain.pipeline.model_copy(update={"overlap": 0})})
    memory = [largest(without, split_of(plain))] * 2
    found = filled(spec, memory, memory)
    assert not found.overlap
    assert largest(found, split_of(found)) <= memory[0]
