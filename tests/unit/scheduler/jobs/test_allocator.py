"""A turn of the waiting jobs: what it costs, and which peers count as able to serve."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.brain.fleet import allocation
from scheduler.brain.fleet.allocation import Fewer, Reservations
from scheduler.brain.fleet.membership import BESIDE_OTHERS, Measured, Membership
from scheduler.jobs import allocator
from scheduler.jobs.allocator import Allocator
from scheduler.jobs.cuts import pool_of, with_split
from scheduler.jobs.job import Job, Waiting
from scheduler.storage.job_record import JobRecord, JobTokens
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, spec_from_json
from swarm.limits import JOBS_OPEN_MAX
from swarm.types import JobId, JobState, PeerId
from swarm.wire.messages import Hello
from tests.support.simulated import small_spec

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@dataclass
class Scene:
    """An allocator whose jobs never get further than to be placed."""

    jobs: list[Job]  # in their order
    members: Membership = field(default_factory=Membership)
    placed: dict[JobId, list[PeerId]] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[list[PeerId]] = field(default_factory=list)  # of the newest job, by island
    meanwhile: Callable[[], object] = lambda: None  # happens while the data of a job is opened
    opened: JobSpec | None = None  # for which the data was opened

    def __post_init__(self) -> None:
        files = SimpleNamespace(opened=self._open)
        stores = SimpleNamespace(files=files, threads=None)
        ports = SimpleNamespace(stores=stores, settle_s=0.0)
        registry = SimpleNamespace(
            all=lambda: self.jobs,
            at_work=lambda: [job for job in self.jobs if job.waiting is None],
            waiting=lambda: [job for job in self.jobs if job.waiting is not None],
            enter=self._enter,
            cut_anew=lambda job, spec, said: setattr(job, "spec", spec),
            say=lambda *_: None,
        )
        peers = SimpleNamespace(
            changed_s=0.0,
            reservations=Reservations(),
            wake=self.wake,
            assign=lambda job, peer, stage: self.members.assign(peer, job.record.id, stage, 0),
        )
        runner = SimpleNamespace(begin=self._begin)
        made: list[Any] = [ports, registry, peers, self.members, runner]
        self.allocator = Allocator(*made)

    async def _open(self, spec: JobSpec, tokens: JobTokens, owner: str) -> None:
        self.opened = spec
        self.meanwhile()

    def _begin(self, job: Job, batches: Any, islands: Any) -> None:
        self.begun = [[record.peer for record in island] for island in islands]

    async def _enter(self, job: Job, state: JobState, reason: str, **changes: Any) -> None:
        if state is JobState.LOADING:
            self.placed[job.record.id], job.waiting = list(changes["peers"]), None
        job.record = job.record.entered(state, reason, 0.0)

    def join(self, *peers: PeerId, pinned_stage: int = -1, memory_bytes: int = 1 << 30) -> None:
        for peer in peers:
            self.members.hello(Hello(peer, 1, 1, "0", "at", "http", "cpu", 1, memory_bytes, pinned_stage), 0.0)

    def turn(self) -> dict[JobId, list[PeerId]]:
        """Who started, with which peers."""
        asyncio.run(self.allocator._start_waiting())
        return self.placed


def spec(folder: Path, stages: int, priority: int = 0, **changes: Any) -> JobSpec:
    made = small_spec(folder / "text.txt", pipeline__stages=stages, limits__priority=priority, **changes)
    return resolve(made, Basis(257, stages=stages))


def waits(id_: str, of: JobSpec) -> Job:
    tokens = JobTokens((), "uint16", 257, 1.0, 256)
    return Job(JobRecord(JobId(id_), id_, JobState.PLACING, "", 0.0, 0.0, "{}", tokens), of, waiting=Waiting(0.0))


async def turns_beside(work: Coroutine[Any, Any, None]) -> int:
    """How many turns others had while it worked."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    await work
    beside.cancel()
    return turns


def test_a_turn_of_many_waiting_jobs_is_linear_and_lets_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asked all before it anew what they keep: 300 of them stopped every commit for seconds."""
    calls: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        counted = getattr(module, name)

        def call(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return counted(*args, **named)

        monkeypatch.setattr(module, name, call)

    for module, name in ((allocation, "place"), (allocation, "least"), (allocator, "needs"), (allocator, "PendingJob")):
        count(module, name)
    specs = [spec(tmp_path, 3, priority) for priority in (9, 5, 1, 0)]
    each = JOBS_OPEN_MAX // len(specs)
    scene = Scene([waits(f"{of.limits.priority}-{number}", of) for of in specs for number in range(each)])
    scene.join(A, B)  # one too few
    for busy in range(14):
        scene.join(PeerId(f"busy-{busy}"))
        scene.members.assign(PeerId(f"busy-{busy}"), JobId("other"), 0, 0.0)

    for needs in (JOBS_OPEN_MAX, 0):  # what a job needs is known at the next turn
        calls.clear()
        assert asyncio.run(turns_beside(scene.allocator._start_waiting())) >= JOBS_OPEN_MAX - 1
        assert calls["PendingJob"] == JOBS_OPEN_MAX
        assert calls["needs"] == needs
        assert JOBS_OPEN_MAX <= calls["place"] <= 2 * JOBS_OPEN_MAX
        assert calls["least"] <= JOBS_OPEN_MAX
    assert scene.placed == {}


def test_others_work_while_it_is_found_out_what_waiting_jobs_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each peer that came or went, a thousand waiting jobs were looked at in one go."""
    jobs = [waits(str(number), spec(tmp_path, 3)) for number in range(100)]
    for job in jobs:
        job.waiting = Waiting(0.0, tries_again_s=1e12)
    working = waits("working", spec(tmp_path, 1))
    working.waiting = None
    scene = Scene([*jobs, working])
    scene.join(A)
    for busy in range(8):
        scene.join(PeerId(f"busy-{busy}"))
        scene.members.assign(PeerId(f"busy-{busy}"), JobId("other"), 0, 0.0)
    turns = 0
    needed: list[int] = []  # of each job, when others have had so many turns
    handed = asyncio.Event()
    found_out, hand_out = allocator.needs, scene.allocator._hand_out_idle

    def find_out(*args: Any) -> Any:
        needed.append(turns)
        return found_out(*args)

    def hand_out_and_say() -> None:
        hand_out()
        handed.set()

    async def others() -> None:
        nonlocal turns
        while not handed.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        scene.wake.set()
        task = asyncio.create_task(scene.allocator.run())
        await others()
        task.cancel()

    monkeypatch.setattr(allocator, "needs", find_out)
    monkeypatch.setattr(scene.allocator, "_hand_out_idle", hand_out_and_say)
    asyncio.run(run())
    assert len(needed) == len(jobs)
    assert max(Counter(needed).values()) == 1, "one job a turn"


def test_nothing_is_kept_for_a_job_that_only_a_quarantined_peer_could_complete(tmp_path: Path) -> None:
    """The low one waited forever for peers that were kept for one that could never start."""

    def jobs() -> list[Job]:
        return [waits("high", spec(tmp_path, 3, 1)), waits("low", spec(tmp_path, 2))]

    sound, quarantined, suspect = Scene(jobs()), Scene(jobs()), Scene(jobs())
    for scene in (sound, quarantined, suspect):
        scene.join(A, B, C)
    sound.members.assign(C, JobId("other"), 0, 0.0)
    assert sound.turn() == {}
    assert sound.jobs[1].record.reason.endswith("others are kept for high")
    for scene in (quarantined, suspect):
        scene.members.quarantine(C, 0.0, "wrong numbers")
    suspect.members.disconnected(C, 1, 0.0)
    assert quarantined.turn() == suspect.turn() == {"low": [A, B]}


def test_a_peer_pinned_to_a_stage_that_islands_lack_is_not_counted_for_them(tmp_path: Path) -> None:
    """Two islands of two stages have four places, but no stage 2."""
    islands = spec(tmp_path, 2, 1, islands__count=2, averaging__mode="diloco")
    scene = Scene([waits("high", islands), waits("low", spec(tmp_path, 2))])
    scene.join(A, B)
    scene.join(C, pinned_stage=2)
    scene.join(PeerId("d"))
    assert scene.turn() == {"low": [A, B, PeerId("d")]}
    other = Scene([waits("high", islands), waits("low", spec(tmp_path, 2))])
    other.join(A, B, PeerId("d"))
    other.join(C, pinned_stage=1)
    assert list(other.turn()) == ["high"]


def test_what_a_job_needs_follows_its_job_file(tmp_path: Path) -> None:
    scene = Scene([])
    job = waits("one", spec(tmp_path, 3))
    before = scene.allocator._needs(job, 3)
    assert scene.allocator._needs(job, 3) is before
    job.spec = spec(tmp_path, 3, training__microbatch_sequences=4)
    assert scene.allocator._needs(job, 3) > before


def test_a_job_that_is_cancelled_while_others_are_tried_is_not_started(tmp_path: Path) -> None:
    jobs = [waits("pauses", spec(tmp_path, 3)), waits("cancelled", spec(tmp_path, 3)), waits("last", spec(tmp_path, 3))]
    jobs[0].waiting = Waiting(0.0, tries_again_s=1e12)
    scene = Scene(jobs)
    scene.join(A, B, C)

    async def cancel() -> None:
        turn = asyncio.create_task(scene.allocator._start_waiting())
        await asyncio.sleep(0)  # the turn is past the first job
        jobs[1].waiting = None
        await turn

    asyncio.run(cancel())
    assert scene.placed == {"last": [A, B, C]}


def test_a_job_that_changes_while_its_data_is_opened_is_decided_anew(tmp_path: Path) -> None:
    """Its shards, up to 4,096, were mapped on the event loop, for 0.17 s."""
    job = waits("job", spec(tmp_path, 2))
    scene = Scene([job])
    scene.join(A, B)
    scene.meanwhile = lambda: scene.members.leaving(B, 0.0)
    assert scene.turn() == {}
    assert scene.wake.is_set()
    scene.meanwhile = lambda: None
    scene.join(C)
    assert scene.turn() == {"job": [A, C]}

    cancelled = waits("cancelled", spec(tmp_path, 1))
    scene = Scene([cancelled])
    scene.join(A)
    scene.meanwhile = lambda: setattr(cancelled, "waiting", None)
    assert scene.turn() == {}


ISLANDS = {"averaging__mode": "diloco", "islands__count": 2, "limits__no_progress_s": 100.0}


def went_on(of: JobSpec, timeline: int = 1) -> Job:
    """A job that waits on a timeline of its own, with the state of one that was resumed."""
    job = waits("job", of)
    job.record = replace(job.record, timeline=timeline)
    return job


@dataclass
class Clock:
    now_s: float = 1.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(allocator, "now_s", made)
    return made


def test_a_job_that_goes_on_begins_without_an_island_once_it_has_waited_for_it(tmp_path: Path, clock: Clock) -> None:
    """One of two sites never came back, and the job waited for ever."""
    scene = Scene([went_on(spec(tmp_path, 2, **ISLANDS))])
    scene.join(A)
    clock.now_s = 500.0
    assert scene.turn() == {}
    assert scene.allocator._look_again_s() == allocator.LOOK_AGAIN_S
    scene.join(B)
    assert scene.turn() == {}
    assert scene.jobs[0].waiting is not None
    assert scene.jobs[0].waiting.fewer == Fewer(1, 2, 600.0), "from when one could begin"
    clock.now_s = 599.0
    assert scene.turn() == {}
    assert scene.allocator._look_again_s() == 1.0
    clock.now_s = 600.0
    assert scene.turn() == {"job": [A, B]}
    assert scene.jobs[0].record.reason == "2 peers for 2 stages in 1 of 2 islands"
    assert scene.begun == [[A, B], []]

    both = Scene([went_on(spec(tmp_path, 1, **ISLANDS))])
    both.join(A)
    assert both.turn() == {}
    clock.now_s = 1e6
    both.join(B)
    assert both.turn() == {"job": [A, B]}
    assert both.begun == [[A], [B]], "there are stage servers for all its islands"


def test_whoever_leaves_while_a_job_waits_lets_it_wait_anew(tmp_path: Path, clock: Clock) -> None:
    scene = Scene([went_on(spec(tmp_path, 1, **ISLANDS))])
    scene.join(A)
    assert scene.turn() == {}
    scene.members.disconnected(A, 1, 2.0)
    clock.now_s = 90.0
    assert scene.turn() == {}
    scene.members.hello(Hello(A, 1, 1, "0", "at", "http", "cpu", 1, 1 << 30, -1), 95.0)
    clock.now_s = 120.0
    assert scene.turn() == {}
    clock.now_s = 220.0
    assert scene.turn() == {"job": [A]}


@pytest.mark.parametrize(("timeline", "least"), [(0, 1), (1, 2)])
def test_a_first_start_and_a_job_that_wants_all_its_islands_wait_for_all(
    tmp_path: Path, clock: Clock, timeline: int, least: int
) -> None:
    scene = Scene([went_on(spec(tmp_path, 1, islands__min=least, **ISLANDS), timeline)])
    scene.join(A)
    for clock.now_s in (1.0, 1e6):
        assert scene.turn() == {}
    assert scene.jobs[0].waiting == Waiting(0.0)


def test_a_job_with_fewer_islands_has_no_more_replicas_of_a_stage_than_it_takes(tmp_path: Path, clock: Clock) -> None:
    of = spec(tmp_path, 1, islands__count=4, limits__max_replicas=2, training__global_batch_sequences=16,
              averaging__mode="diloco", limits__min_replicas=2)  # fmt: skip
    scene = Scene([went_on(of)])
    scene.join(A, B, C)
    assert scene.turn() == {}
    clock.now_s = 1e6
    assert scene.turn() == {"job": [A, B]}


def test_those_on_loopback_serve_a_job_together_and_with_no_other(tmp_path: Path) -> None:
    """One on loopback got a stage beside one of another machine, which dialled its own loopback and found another."""
    scene = Scene([waits("job", spec(tmp_path, 2))])
    scene.join(A, B, C)
    for peer in (A, B):
        scene.members.reached(peer, 1, BESIDE_OTHERS)
    assert scene.turn() == {JobId("job"): [A, B]}

    scene = Scene([waits("job", spec(tmp_path, 2))])
    scene.join(A, C)
    scene.members.reached(A, 1, BESIDE_OTHERS)
    assert scene.turn() == {}

    job = waits("job", spec(tmp_path, 2))
    scene = Scene([job])
    scene.join(A, B)
    for stage, peer in enumerate((A, B)):
        scene.members.assign(peer, job.record.id, stage, 0.0)
        scene.members.reached(peer, 1, BESIDE_OTHERS)
    run: Any = SimpleNamespace(replicas_at_start=2, brain=SimpleNamespace())
    at_work = scene.allocator._running(job, run)
    assert (at_work.site, at_work.apart) == (allocator.ON_LOOPBACK, True), "whoever is elsewhere does not join it"


FOUR = {"config__num_hidden_layers": 12, "limits__no_progress_s": 100.0}
RECUT = {"pipeline__recut": "stall", **FOUR}


def test_a_job_goes_on_with_the_stages_that_are_possible_once_it_has_waited_for_its_own(
    tmp_path: Path, clock: Clock
) -> None:
    """Half of a fleet was gone for good, and the job waited for ever."""
    scene = Scene([went_on(spec(tmp_path, 4, **RECUT))])
    scene.join(A)
    clock.now_s = 500.0
    assert scene.turn() == {}
    assert scene.jobs[0].waiting is not None
    assert scene.jobs[0].waiting.fewer == Fewer(1, None, 600.0)
    scene.join(B)
    clock.now_s = 599.0
    assert scene.turn() == {}
    assert scene.jobs[0].waiting.fewer == Fewer(2, None, 600.0)
    assert scene.allocator._look_again_s() == 1.0
    before = scene.jobs[0].spec
    clock.now_s = 600.0
    assert scene.turn() == {"job": [A, B]}
    after = scene.jobs[0].spec
    assert after.split == (6, 6)
    assert after == before.having("pipeline", split=(6, 6), stages=2), "nothing else changed"
    assert scene.jobs[0].record.reason == "2 peers for 2 stages"


def test_a_job_whose_stage_servers_come_back_begins_as_it_was_cut(tmp_path: Path, clock: Clock) -> None:
    scene = Scene([went_on(spec(tmp_path, 4, **RECUT))])
    scene.join(A, B)
    assert scene.turn() == {}
    clock.now_s = 100.0
    scene.join(C, PeerId("d"))
    assert scene.turn() == {"job": [A, B, C, "d"]}
    assert scene.jobs[0].spec.split == (3, 3, 3, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},  # as a person cut it
        {"pipeline__recut": "off"},
        {"pipeline__recut": "stall", "limits__on_stall": "pause"},
        {"pipeline__recut": "stall", "limits__on_stall": "fail"},
        {"pipeline__recut": "stall", "limits__min_replicas": 3},
    ],
)
def test_a_job_that_is_not_to_be_cut_anew_waits_as_long_as_it_takes(
    tmp_path: Path, clock: Clock, changes: dict[str, Any]
) -> None:
    scene = Scene([went_on(spec(tmp_path, 4, **FOUR, **changes))])
    scene.join(A, B)
    for clock.now_s in (1.0, 1e6):
        assert scene.turn() == {}


def test_a_job_of_before_there_was_this_key_is_not_cut_anew(tmp_path: Path, clock: Clock) -> None:
    values = spec(tmp_path, 4, **FOUR).model_dump(mode="json")
    del values["pipeline"]["recut"]
    scene = Scene([went_on(spec_from_json(json.dumps(values)))])
    scene.join(A)
    for clock.now_s in (1.0, 1e6):
        assert scene.turn() == {}


def submitted_before(folder: Path, **changes: Any) -> Job:
    """A job for which nobody was there when it was submitted."""
    asked = small_spec(folder / "text.txt", **FOUR | changes)
    job = waits("job", resolve(asked, Basis(257)))
    job.asked = asked
    return job


def test_a_job_that_is_submitted_before_its_stage_servers_is_cut_when_it_is_placed(tmp_path: Path) -> None:
    """It had one stage for ever."""
    scene = Scene([submitted_before(tmp_path, pipeline__overlap=0)])
    assert scene.jobs[0].spec.split == (12,)
    scene.join(A, B, C, PeerId("d"))
    assert len(scene.turn()["job"]) == 4
    assert scene.jobs[0].spec.split == (6, 6)
    assert scene.jobs[0].asked is None
    assert scene.begun == [[A, B, C, PeerId("d")]]


def test_of_an_unmeasured_stage_server_the_median_is_assumed_when_it_is_placed_and_when_stages_are_counted() -> None:
    scene = Scene([])
    scene.join(A, B, C, PeerId("d"))
    for peer, speed in ((A, 3e9), (B, 1e9), (C, 2e9)):
        known = scene.members.find(peer)
        known.measured = Measured((), speed, 1e6, 2e6, 0.02)
    here = scene.members.idle_peers()
    assert [candidate.speed for candidate in scene.allocator._candidates(here)] == [3e9, 1e9, 2e9, 2e9]
    for odd in (0.0, math.nan, math.inf, -1.0):
        here[3].measured = Measured((), odd, odd, odd, odd)
        pool = pool_of(here)
        assert pool is not None
        assert [peer.speed for peer in pool.peers] == [3e9, 1e9, 2e9, 2e9]
        assert (pool.peers[3].up_bits_per_s, pool.peers[3].down_bits_per_s) == (8e6, 16e6)


def test_a_cut_at_the_placement_keeps_what_decides_the_model_and_its_weights(tmp_path: Path) -> None:
    """With more stage servers the model had more narrow places than the checkpoint that it was to begin from."""
    job = submitted_before(
        tmp_path,
        model__narrow={"kind": "maxout", "factor": 4},
        training__microbatch_sequences="auto",
        training__global_batch_sequences=64,
    )
    scene, before = Scene([job]), job.spec
    scene.join(*(PeerId(f"peer-{number:02}") for number in range(24)))
    scene.turn()
    assert job.spec == with_split(before, (6, 6))


def test_a_cut_that_memory_holds_only_with_smaller_microbatches_has_data_of_that_size(tmp_path: Path) -> None:
    """It trained on the microbatches of the cut before: every boundary tensor was refused."""
    job = submitted_before(
        tmp_path,
        config__num_hidden_layers=4,
        pipeline__overlap=0,
        training__microbatch_sequences="auto",
        training__global_batch_sequences=64,
    )
    scene, before = Scene([job]), job.spec
    scene.join(A, B, C, PeerId("d"), memory_bytes=1500 << 10)
    assert len(scene.turn()["job"]) == 4
    assert job.spec.training.microbatches > before.training.microbatches
    assert scene.opened == job.spec


def test_no_cut_is_taken_that_a_job_file_may_not_name(tmp_path: Path) -> None:
    long = spec(tmp_path, 2, pipeline__recut="stall", data__sequence_length=16384, training__microbatch_sequences=60,
                training__global_batch_sequences=60, config__max_position_embeddings=16384)  # fmt: skip
    scene = Scene([went_on(long)])
    scene.join(A, memory_bytes=1 << 40)
    assert scene.turn() == {}
    assert scene.jobs[0].waiting == Waiting(0.0), "a Route may not carry so many tokens and targets to one stage"


def test_a_job_that_waits_behind_another_keeps_its_cut(tmp_path: Path, clock: Clock) -> None:
    scene = Scene([went_on(spec(tmp_path, 4, **RECUT))])
    scene.join(A, B, C, PeerId("d"))
    for busy in (C, PeerId("d")):
        scene.members.assign(busy, JobId("other"), 0, 0.0)
    for clock.now_s in (1.0, 1e6):
        assert scene.turn() == {}
    scene.members.leaving(C, 1e6)
    assert scene.turn() == {}
    assert scene.jobs[0].waiting is not None
    assert scene.jobs[0].waiting.fewer == Fewer(2, None, 1e6 + 100.0), "from when not enough were there, busy or not"


def test_another_cut_is_looked_for_only_when_others_are_there(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with many layers it took seconds, at every turn of every job that waited."""
    looked: list[int] = []

    def look(job: Any, model: Any, here: Any, is_allowed: Any) -> Any:
        looked.append(len(here))
        return allocation.cut_here(job, model, here, is_allowed)

    monkeypatch.setattr(allocator, "cut_here", look)
    scene = Scene([went_on(spec(tmp_path, 4, **RECUT))])
    scene.join(A)
    for clock.now_s in (1.0, 2.0, 3.0):
        scene.turn()
    scene.join(B)
    for clock.now_s in (4.0, 5.0):
        scene.turn()
    assert looked == [1, 2]


@pytest.mark.parametrize("changes", [{"pipeline__stages": 1}, {"pipeline__split": (12,)}, {"pipeline__recut": "off"}])
def test_a_person_who_says_the_stages_gets_them_also_if_more_stage_servers_come(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    scene = Scene([submitted_before(tmp_path, **changes)])
    scene.join(A, B, C, PeerId("d"))
    scene.turn()
    assert scene.jobs[0].spec.split == (12,)


def test_a_job_that_is_paused_while_it_is_cut_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submitted_before(tmp_path)
    scene = Scene([job])
    scene.join(A, B, C, PeerId("d"))

    async def meanwhile(threads: object, work: Callable[[], Any]) -> Any:
        job.waiting = None
        return work()

    monkeypatch.setattr(allocator, "run_blocking", meanwhile)
    assert scene.turn() == {}
    assert (job.spec.split, scene.begun) == ((12,), [])
