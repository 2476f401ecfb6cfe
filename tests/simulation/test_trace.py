"""Where the time of a step went is known of the newest steps, in order, also after a replica was lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler.api.views import step_trace
from scheduler.brain import trace
from scheduler.brain.inputs import Happened, Tick
from scheduler.brain.outputs import CommitRow, WriteCommit
from scheduler.brain.trace import SCHEDULER, Trace, TracedSpan
from scheduler.jobs.job import Job
from swarm.errors import NotAllowed, NotFound
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Averaged
from tests.support.scenes import play, resolved
from tests.support.simulated import WALL_START_UNIX_S, Rig, Tokens, small_spec, write_text

STEPS, STAGES = 20, 2


def trained(tmp_path: Path, look: Callable[[Rig, Job, int], None], **changes: object) -> Job:
    """Train; `look` is called after each step that was committed, with how many are."""
    settings = {"pipeline__stages": STAGES, "training__steps": STEPS} | changes
    spec = resolved(small_spec(write_text(tmp_path), **settings))
    tokens = Tokens.make(tmp_path, spec)
    jobs: list[Job] = []

    async def act(rig: Rig) -> None:
        job = await rig.jobs.submit(spec, tokens.of_job(), {})
        seen = 0
        async for _ in rig.jobs.watch(job):
            if job.progress.steps_done > seen:
                seen = job.progress.steps_done
                look(rig, job, seen)
        jobs.append(job)

    play(tokens, 4, act)
    return jobs[0]


def of(job: Job) -> Trace:
    assert job.run is not None
    return job.run.driver.trace


def check(spans: list[TracedSpan], microbatches: int) -> None:
    """Each microbatch went down and came back; then came average, row and commit; no track computes two at a time."""
    by_index: dict[int, list[TracedSpan]] = defaultdict(list)
    for span in spans:
        assert span.end_s >= span.begin_s
        if span.index >= 0 and not span.name.startswith("boundary"):
            by_index[span.index].append(span)
    assert sorted(by_index) == list(range(microbatches))
    turns = [(name, stage) for name in ("forward", "backward") for stage in range(STAGES)]
    for own in by_index.values():
        ended = {(span.name, span.stage): span.end_s for span in own}
        assert sorted(ended) == sorted([("route", -1), *turns])
        assert len(ended) == len(own)
        way = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
        assert all(ended[one] <= ended[two] for one, two in pairwise([("route", -1), *way]))
    (row,) = [span for span in spans if span.name == "row"]
    last_s = max(span.end_s for own in by_index.values() for span in own)
    averages = [span.end_s for span in spans if span.name.startswith("average")]
    assert last_s <= max(averages) <= row.begin_s
    assert all(row.end_s <= span.begin_s < span.end_s for span in spans if span.name == "commit")
    tracks: dict[str, list[TracedSpan]] = defaultdict(list)
    for span in spans:
        if not span.beside and span.track != SCHEDULER:
            tracks[span.track].append(span)
    for own in tracks.values():
        assert all(one.end_s <= two.begin_s for one, two in pairwise(sorted(own, key=lambda one: one.end_s)))


def test_a_step_has_the_spans_of_each_microbatch_and_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    checked = 0

    def look(rig: Rig, job: Job, seen: int) -> None:
        nonlocal checked
        newest = of(job).newest()
        assert len(of(job).steps()) <= trace.STEPS_KEPT
        if newest is not None:
            spans = of(job).spans(newest)
            check(spans, job.spec.training.microbatches)
            names = {span.name for span in spans}
            assert {"boundary forward", "boundary backward", "average stage-0", "average stage-1", "commit"} <= names
            assert len([span for span in spans if span.name == "commit"]) == 4
            checked += 1
        if seen == STEPS - 2:
            assert STEPS - 4 <= (newest or 0) < STEPS, "it keeps up"

    ended = trained(tmp_path, look)
    assert checked > STEPS // 2
    with pytest.raises(NotAllowed, match="has succeeded: only a job at work"):
        step_trace(ended, 0, 1.0)


def test_what_a_lost_replica_had_is_traced_where_it_was_done_again(tmp_path: Path) -> None:
    killed: list[PeerId] = []
    traced: dict[int, list[TracedSpan]] = {}

    def look(rig: Rig, job: Job, seen: int) -> None:
        if seen == 5:
            killed.append(job.stages[0][0])
            rig.kill(killed[0])
        newest = of(job).newest()
        if newest is not None:
            traced[newest] = of(job).spans(newest)

    trained(tmp_path, look)
    after = [spans for step, spans in traced.items() if step > 9]
    assert after
    assert all(span.track != killed[0] for spans in after for span in spans)
    again = [spans for spans in traced.values() if any(span.attempt > 1 for span in spans)]
    for spans in again:
        indexes = {span.index for span in spans if span.name == "backward"}
        assert len(indexes) == len({(span.index, span.stage) for span in spans if span.name == "backward"}) / STAGES


def test_of_a_large_step_some_microbatches_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "HOPS_MAX", 4)
    shown: set[frozenset[int]] = set()

    def look(rig: Rig, job: Job, seen: int) -> None:
        newest = of(job).newest()
        if newest is not None:
            shown.add(frozenset(span.index for span in of(job).spans(newest) if span.index >= 0))

    trained(tmp_path, look)
    assert shown == {frozenset({0, 4})}, "of 6 microbatches"


def test_what_a_member_repeats_without_end_is_kept_once_and_no_more_than_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace, "AVERAGES_MAX", 3)
    told = Trace()
    row = CommitRow(0, 0, {}, 1.0, 1.0, 1.0, 1e-3, False, 8)
    told.watching(lambda _happened, _now_s: [WriteCommit(row)])(Tick(), 1.0)
    watched = told.watching(lambda _happened, _now_s: [])

    def averaged(number: int, now_s: float) -> list[TracedSpan]:
        event = Averaged(0, 0, UnitName("stage-0"), Round(1, number), "", (), 0.5)
        watched(Happened(PeerId("a"), event), now_s)
        return [span for span in told.spans(0) if span.name == "average stage-0"]

    for now_s in (2.0, 3.0, 4.0):
        (span,) = averaged(1, now_s)
        assert (span.begin_s, span.end_s) == (1.5, 2.0)
    assert [len(averaged(number, 5.0)) for number in (2, 3, 4, 5)] == [2, 3, 3, 3]


def test_people_count_steps_from_one_and_times_from_the_first_span(tmp_path: Path) -> None:
    def look(rig: Rig, job: Job, seen: int) -> None:
        if seen == 1 and of(job).newest() is None:
            with pytest.raises(NotFound, match="no trace of a complete step"):
                step_trace(job, 0, WALL_START_UNIX_S)
        if seen < 10:
            return
        now_unix_s = WALL_START_UNIX_S + asyncio.get_running_loop().time()
        found = step_trace(job, 0, now_unix_s)
        assert found.step == (of(job).newest() or 0) + 1
        assert found.spans[0].begin_s == 0.0
        assert now_unix_s - 60.0 < found.begin_unix_s < now_unix_s
        assert step_trace(job, found.step - 1, now_unix_s).begin_unix_s < found.begin_unix_s
        with pytest.raises(NotFound, match=r"no trace of step 99 of job rig-\w+: steps \d+ to \d+ are known"):
            step_trace(job, 99, now_unix_s)

    trained(tmp_path, look)
