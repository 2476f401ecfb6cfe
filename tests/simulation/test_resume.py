"""The claim: a job that was stopped, by whatever, goes on at any number of stages and ends with the same bits."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from client.transfer.upload import File
from swarm.checkpoint.reader import Checkpoint, fault_of, list_checkpoints
from swarm.checkpoint.storage import MANIFEST, LocalStorage
from swarm.errors import InvalidConfig, NotAllowed, NotFound
from swarm.job.spec import JobSpec
from swarm.reference.checkpoints import LocalCheckpoints
from swarm.reference.trainer import train_local
from swarm.types import JobState, PeerId
from swarm.wire.messages import Accumulated, StateFile, StoreHeader
from tests.support.scenes import PEERS, Desk, at_desk, make_spec, of_desk, resolved
from tests.support.simulated import Tokens, small_spec, stale, write_text

MAX_RUNTIME_S = 0.5  # some of the steps
CPU = torch.device("cpu")


def changed(spec: JobSpec, section: str, **values: object) -> JobSpec:
    """The spec with other values, resolved again."""
    held = spec.model_dump()
    held[section] |= values
    if section == "pipeline" and "stages" in values:
        held["pipeline"]["split"] = "auto"
    return resolved(JobSpec.model_validate(held))


@pytest.mark.parametrize(
    ("staleness", "optimizer", "tied", "counts", "dtype", "narrow"),
    [
        (1, "muon", True, (2, 3, 1), "float32", "none"),
        (0, "sgd", False, (3,), "float32", "none"),
        (1, "adamw", True, (2,), "bfloat16_parameters", "none"),
        (1, "muon", False, (2, 1), "float32", "bottleneck"),
    ],
)
def test_a_checkpoint_of_four_stages_goes_on_at_any_number_bitwise(
    tmp_path: Path, staleness: int, optimizer: str, tied: bool, counts: tuple[int, ...], dtype: str, narrow: str
) -> None:
    """Muon keeps the momentum of matrices, and for the rest what AdamW and LAMB do; SGD keeps its momentum."""
    spec = make_spec(
        tmp_path,
        pipeline__stages=4,
        **stale(staleness),
        training__optimizer=optimizer,
        training__momentum=0.9 if optimizer == "sgd" else 0.0,
        model__dtype=dtype,
        model__narrow={"kind": narrow},
        config__tie_word_embeddings=tied,
        checkpoint__every_steps=3,
    )
    tokens = Tokens.make(tmp_path, spec)
    expected = train_local(spec, tokens.batches(spec), device=CPU)

    async def act(desk: Desk) -> None:
        job = await desk.submit(spec)
        await desk.rig.finished(job)
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        assert job.record.weights_sha256 == expected.sha256
        kept = desk.checkpoints(job)
        assert [checkpoint.step for checkpoint in kept] == [3, 6]
        assert all(fault_of(checkpoint) == "" for checkpoint in kept)
        assert {file.path for file in kept[0].files} >= {
            "optimizer/embed.safetensors",
            "optimizer/head.safetensors",
            *(f"optimizer/layer-{layer:04d}.safetensors" for layer in range(4)),
            *(f"model/model-{stage:05d}-of-00004.safetensors" for stage in range(1, 5)),
        }
        for stages in counts:
            other = changed(changed(spec, "pipeline", stages=stages), "checkpoint", resume_from=f"{job.record.id}:3")
            again = await desk.submit(other)
            told = desk.rig.jobs.stores.logs.of(again.record.id).kept()[0]
            assert f"; starts at step 3 from step-00000003 of {job.record.id}" in told[0].message
            await desk.rig.finished(again)
            assert again.record.state is JobState.SUCCEEDED, again.record.reason
            assert again.record.weights_sha256 == expected.sha256
            rows = await desk.rig.store.commits(again.record.id)
            assert [row["step"] for row in rows] == [3, 4, 5]
        local = train_local(spec, tokens.batches(spec), device=CPU, start=kept[0])
        assert local.sha256 == expected.sha256
        assert local.losses == expected.losses[3:]

    at_desk(spec, tokens, act)


@of_desk(checkpoint__every_steps=3)
async def test_a_job_keeps_the_checkpoint_that_its_name_meant_when_it_was_submitted(desk: Desk) -> None:
    """A job that started from NAME:latest had that name itself. When it was resumed, it looked for its beginning in its
    own checkpoints, of which there were none."""
    expected = train_local(desk.spec, desk.tokens.batches(desk.spec), device=CPU)
    jobs = desk.rig.jobs
    first = await desk.submit()
    await desk.rig.finished(first)
    step = desk.checkpoints(first)[0].step
    for named, at in (("rig", "latest"), (first.record.id[:-1], f"{step}")):
        longer = changed(changed(desk.spec, "training", steps=8), "checkpoint", resume_from=f"{named}:{at}")
        again = await desk.submit(longer if at == "latest" else changed(longer, "training", steps=6))
        pinned = f"{first.record.id}:{6 if at == 'latest' else step}"
        assert again.spec.checkpoint.resume_from == pinned
        assert JobSpec.model_validate_json(again.record.spec_json).checkpoint.resume_from == pinned
        await jobs.cancel(again, "before it has begun")
        assert again.record.state is JobState.CANCELLED, again.record.reason
        await jobs.resume(again, "latest", None)
        assert again.start is not None
        assert (again.start.job, again.start.step) == (first.record.id, int(pinned.rpartition(":")[2]))
        await desk.rig.finished(again)
        assert again.record.state is JobState.SUCCEEDED, again.record.reason
        if at != "latest":
            assert again.record.weights_sha256 == expected.sha256


def sent(checkpoint: Checkpoint, root: Path) -> tuple[StateFile, ...]:
    """Put a checkpoint's files where the scheduler keeps what was uploaded."""
    assert isinstance(checkpoint.storage, LocalStorage)
    home = checkpoint.storage.root / checkpoint.name
    manifest = File.of((home / MANIFEST).read_bytes())
    files = [StateFile(MANIFEST, manifest.size_bytes, manifest.sha256)]
    files += [
        StateFile(file.path, file.size_bytes, file.sha256)
        for file in checkpoint.files
        if file.path.endswith(".safetensors") or file.path == "trainer_state.json"
    ]
    (root / "shards").mkdir(exist_ok=True)
    for file in files:
        shutil.copy(home / file.path, root / "shards" / f"{file.sha256}.bin")
    return tuple(files)


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_new_job_keeps_the_narrow_places_of_its_start_in_every_cut(tmp_path: Path, is_sent: bool) -> None:
    """Once more stage servers came, its cut asked for more places than its weights had: it failed as it loaded them."""

    def spec_of(start: str = "", **narrow: object) -> JobSpec:
        return small_spec(
            write_text(tmp_path),
            config__num_hidden_layers=6,
            model__narrow={"kind": "maxout"} | narrow,
            pipeline__overlap=0,
            training__steps=4 if start else 2,
            checkpoint__resume_from=start,
        )

    tokens = Tokens.make(tmp_path, resolved(spec_of()))

    async def act(desk: Desk) -> None:
        rig = desk.rig
        source = await desk.submit(spec_of(**({} if is_sent else {"every": 1})))
        await rig.finished(source)
        found = desk.checkpoints(source)[-1]
        files, start = (sent(found, tmp_path), "folder") if is_sent else ((), f"{source.record.id}:2")
        others: tuple[dict[str, object], ...] = ({"kind": "none"}, {"kind": "anchor"}, {"factor": 2}, {"every": 2})
        for other in others:
            with pytest.raises(InvalidConfig, match=rf"model\.narrow\.{next(iter(other))} = "):
                await desk.submit(spec_of(start, **other), files=files)
            if is_sent:  # who sends a folder has looked at it
                continue
            with pytest.raises(InvalidConfig, match=r"model\.narrow\."):
                await rig.jobs.check(spec_of(start, **other), tokens.of_job())
        checked = await rig.jobs.check(spec_of(start), tokens.of_job())
        assert is_sent or checked.model.narrow == source.spec.model.narrow
        rig.kill(PeerId("peer-0"))
        while rig.membership.idle_peers():
            await asyncio.sleep(1.0)
        job = await desk.submit(spec_of(start), files=files)
        assert (job.spec.model.narrow, job.spec.split) == (source.spec.model.narrow, (6,))
        for number in range(8):
            rig.add_peer(PeerId(f"new-{number}"), rig.tasks, Random(number))
        await rig.finished(job)
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        assert job.spec.model.narrow == source.spec.model.narrow
        assert len(job.spec.split) > 1

    at_desk(resolved(spec_of()), tokens, act, peers=1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_pause_and_resume_at_another_number_of_stages_change_no_bit(tmp_path: Path, staleness: int) -> None:
    spec = make_spec(tmp_path, **stale(staleness), checkpoint__every_steps=0)
    tokens = Tokens.make(tmp_path, spec)
    expected = train_local(spec, tokens.batches(spec), device=CPU)

    async def act(desk: Desk) -> None:
        jobs = desk.rig.jobs
        job = await desk.submit(spec)
        await desk.until_step(job, 2)
        await jobs.pause(job, "paused by its user")
        assert job.record.state is JobState.PAUSING
        await jobs.pause(job, "twice")
        await desk.until_state(job, JobState.PAUSED)
        assert job.record.reason == "paused by its user"
        (kept,) = desk.checkpoints(job)
        assert kept.step == job.progress.steps_done >= 2
        assert len(desk.rig.membership.idle_peers()) == PEERS, "peers are free for other jobs"
        other = await desk.submit(changed(spec, "training", steps=1, warmup_steps=0))
        await desk.rig.finished(other)
        assert other.record.state is JobState.SUCCEEDED, other.record.reason

        with pytest.raises(InvalidConfig, match=r"data\.sequence_length cannot change"):
            await jobs.resume(job, "latest", changed(spec, "data", sequence_length=32))
        with pytest.raises(InvalidConfig, match=r"training\.steps = 1 is reached"):
            await jobs.resume(job, "latest", changed(spec, "training", steps=1, warmup_steps=0))
        with pytest.raises(NotFound, match="no checkpoint at step 77"):
            await jobs.resume(job, "77", None)
        await jobs.resume(job, "latest", changed(spec, "pipeline", stages=4))
        with pytest.raises(NotAllowed):
            await jobs.resume(job, "latest", None)
        await desk.rig.finished(job)
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        assert job.record.weights_sha256 == expected.sha256
        assert job.record.timeline == 1
        assert job.progress.steps_done == 6
        assert job.progress.tokens == sum(tokens.batches(spec).tokens_of(step) for step in range(6))
        with pytest.raises(NotAllowed, match="only a paused"):
            await jobs.resume(job, "latest", None)

    at_desk(spec, tokens, act)


@of_desk(pipeline__overlap="auto", training__steps=12, training__global_batch_sequences=16, checkpoint__every_steps=0)
async def test_a_resume_at_another_cut_keeps_the_overlap_or_chooses_it_anew_and_the_checkpoint_says_which(
    desk: Desk,
) -> None:
    """`pipeline.overlap = "auto"` becomes a number at submit. Resumed at another cut, a job kept the number that was
    chosen for the first one and did not say so, and no test read what its checkpoints say of it."""
    jobs = desk.rig.jobs
    job = await desk.submit()
    for until, overlap, said in (
        (
            1,
            job.spec.overlap,
            "2 of 8 microbatches overlap .*, as with the cut before; --set pipeline.overlap=auto",
        ),
        (4, "auto", "3 of 8 microbatches overlap .*; the first step does not overlap$"),
    ):
        await desk.until_step(job, until)
        await jobs.pause(job, "paused by its user")
        await desk.until_state(job, JobState.PAUSED)
        assert late_in(desk.checkpoints(job)[-1]) == 2
        values = job.spec.model_dump()
        values["pipeline"] |= {"stages": 3, "split": "auto", "overlap": overlap}
        await jobs.resume(job, "latest", JobSpec.model_validate(values))
        assert re.search(rf"goes on at step .*; {said}", job.record.reason), job.record.reason
    begun = desk.checkpoints(job)[-1]
    await desk.rig.finished(job)
    assert late_in(desk.checkpoints(job)[-1]) == job.spec.overlap == 3
    expected = train_local(job.spec, desk.tokens.batches(job.spec), device=CPU, start=begun)
    assert job.record.weights_sha256 == expected.sha256


def late_in(checkpoint: Checkpoint) -> int:
    """The late microbatches of a step, as the checkpoint says."""
    return int(checkpoint.trainer_state()["overlap"]["microbatches"])


@of_desk(checkpoint__every_steps=0, limits__max_runtime_s=MAX_RUNTIME_S)
async def test_a_job_that_has_run_as_long_as_it_may_is_paused_with_all_saved(desk: Desk) -> None:
    expected = train_local(desk.spec, desk.tokens.batches(desk.spec), device=CPU)
    job = await desk.submit()
    pauses = 0
    await desk.until_state(job, JobState.PAUSED)
    while job.record.state is JobState.PAUSED:
        pauses += 1
        assert pauses < 10
        assert f"limits.max_runtime_s = {MAX_RUNTIME_S:g} has passed" in job.record.reason
        assert desk.checkpoints(job)[-1].step == job.progress.steps_done
        await desk.rig.jobs.resume(job, "latest", None)
        await desk.until_state(job, JobState.PAUSED, JobState.SUCCEEDED)
    assert pauses > 0
    assert job.record.weights_sha256 == expected.sha256


@of_desk(checkpoint__every_steps=0)
async def test_cancel_saves_what_was_trained_and_resume_goes_on_bitwise(desk: Desk) -> None:
    expected = train_local(desk.spec, desk.tokens.batches(desk.spec), device=CPU)
    jobs = desk.rig.jobs
    job = await desk.submit()
    await desk.until_step(job, 2)
    await jobs.cancel(job, "cancelled by its user")
    assert job.record.state is JobState.CANCELLING
    await desk.until_state(job, JobState.CANCELLED)
    (kept,) = desk.checkpoints(job)
    await jobs.cancel(job, "again")
    await jobs.resume(job, f"{kept.step}", None)
    await desk.rig.finished(job)
    assert job.record.weights_sha256 == expected.sha256

    # At once: without a checkpoint, by a second cancel, or before anything was trained.
    job = await desk.submit()
    await desk.until_step(job, 1)
    await jobs.cancel(job, "x", checkpoint=False)
    await desk.until_state(job, JobState.CANCELLED)
    assert desk.checkpoints(job) == []
    with pytest.raises(NotFound, match="no checkpoint"):
        await jobs.resume(job, "latest", None)
    await jobs.resume(job, "0", None)
    await desk.until_step(job, 1)
    await jobs.cancel(job, "x")
    await jobs.cancel(job, "now")
    await desk.until_state(job, JobState.CANCELLED)
    assert desk.checkpoints(job) == []
    job = await desk.submit()
    await desk.until_state(job, JobState.LOADING)
    await jobs.cancel(job, "x")
    await desk.until_state(job, JobState.CANCELLED)
    assert job.progress.steps_done == 0


@of_desk(checkpoint__every_steps=2, training__steps=8, limits__on_stall="fail")
async def test_a_failed_job_goes_on_from_its_newest_checkpoint_and_leaves_the_other_future_behind(
    desk: Desk, tmp_path: Path
) -> None:
    expected = train_local(desk.spec, desk.tokens.batches(desk.spec), device=CPU)
    jobs, rig = desk.rig.jobs, desk.rig
    job = await desk.submit()
    while not desk.checkpoints(job):
        await asyncio.sleep(0.01)
    await desk.until_step(job, 3)
    for peer in list(job.stages[1]):
        rig.kill(peer)
    await desk.until_state(job, JobState.FAILED)
    assert f"swarm resume {job.record.id}" in job.record.hint
    done = job.progress.steps_done
    newest = desk.checkpoints(job)[-1]
    # The newest is damaged: the one before is used, and that is said.
    if newest.step == 2:
        await jobs.resume(job, "latest", None)
    else:
        path = tmp_path / "jobs" / job.record.id / "checkpoints" / newest.name / "optimizer" / "embed.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        await jobs.resume(job, "latest", None)
        assert f"{newest.name} was skipped" in desk.said(job)
    assert job.progress.steps_done == 2 <= done
    await rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert job.record.weights_sha256 == expected.sha256
    assert job.progress.tokens == sum(desk.tokens.batches(desk.spec).tokens_of(step) for step in range(8))
    assert [checkpoint.timeline for checkpoint in desk.checkpoints(job)][-2:] == [1, 1]
    assert desk.sample("swarm_checkpoint_size_bytes", job_id=job.record.id) > 0


@of_desk(checkpoint__every_steps=2, checkpoint__keep_last=9, training__steps=20)
async def test_a_future_that_was_taken_up_again_is_the_one_that_counts(desk: Desk) -> None:
    jobs = desk.rig.jobs

    async def train_until(step: int) -> None:
        await desk.until_step(job, step)
        await jobs.pause(job, "x")
        await desk.until_state(job, JobState.PAUSED)

    job = await desk.submit()
    await train_until(5)
    far = job.progress.steps_done
    await jobs.resume(job, "2", None)
    await train_until(3)
    await jobs.resume(job, f"{far}", None)
    assert job.progress.tokens == sum(desk.tokens.batches(desk.spec).tokens_of(step) for step in range(far))
    await jobs.cancel(job, "x", checkpoint=False)
    await desk.until_state(job, JobState.CANCELLED)
    await jobs.resume(job, "latest", None)
    assert (job.start is not None and (job.start.timeline, job.start.step)) == (0, far)
    assert (job.newest is not None and (job.newest.timeline, job.newest.step)) == (0, far)
    await jobs.cancel(job, "x", checkpoint=False)


@of_desk(checkpoint__every_steps=1, checkpoint__keep_last=2, checkpoint__keep_every_steps=2)
async def test_old_checkpoints_go_and_multiples_stay(desk: Desk) -> None:
    job = await desk.submit(changed(desk.spec, "training", steps=7))
    await desk.rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    written = [int(step) for step in re.findall(r"step-(\d+) is kept", desk.said(job))]
    assert written[-1] == 7
    multiples = {step for step in written if step % 2 == 0}
    assert [checkpoint.step for checkpoint in desk.checkpoints(job)] == sorted(multiples | set(written[-2:]))
    assert multiples or len(written) > 2


@of_desk(checkpoint__every_steps=2, training__steps=8)
async def test_a_checkpoint_that_cannot_be_written_costs_nothing_but_itself(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_local(desk.spec, desk.tokens.batches(desk.spec), device=CPU)
    full = True
    real = desk.rig.parts.transfer.store

    async def store(header: StoreHeader, chunks: object) -> str:
        if full and header.path.startswith("optimizer/") and header.version in (2, 8):
            header = StoreHeader(**{name: getattr(header, name) for name in header.__slots__} | {"path": "../x"})
        return await real(header, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.rig.parts.transfer, "store", store)
    job = await desk.submit()
    while desk.said(job).count("job is running: the final weights (step 8) could not be saved") < 3:
        await asyncio.sleep(0.1)
    assert "the checkpoint at step 2 could not be written" in desk.said(job)
    assert desk.sample("swarm_checkpoint_failures_total", job_id=job.record.id, reason="peer") == 4
    assert job.record.state is JobState.RUNNING
    assert "tries again in 4 s" in job.record.reason
    assert "the newest checkpoint is that of step" in job.record.reason
    full = False
    await desk.rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert job.record.weights_sha256 == expected.sha256


@of_desk(limits__on_nonfinite="pause", checkpoint__every_steps=0)
async def test_a_step_that_is_not_finite_can_pause_the_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = desk.rig.parts.listener.on_event

    def poison(peer: PeerId, event: object) -> None:
        if isinstance(event, Accumulated) and event.stage == 1 and event.microbatch.step == 1:
            event = replace(event, finite=False)
        real(peer, event)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.rig.parts.listener, "on_event", poison)
    job = await desk.submit()
    await desk.until_state(job, JobState.PAUSED)
    assert "step 1 was not finite" in job.record.reason
    rows = await desk.rig.store.commits(job.record.id)
    assert [row["skip"] for row in rows][:2] == [False, True]
    assert desk.checkpoints(job)[-1].step == job.progress.steps_done


def test_the_reference_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, checkpoint__every_steps=2, training__optimizer="muon", pipeline__stages=1)
    tokens = Tokens.make(tmp_path, spec)
    batches = tokens.batches(spec)
    said: list[str] = []
    storage = LocalStorage(tmp_path / "kept")
    kept = LocalCheckpoints(storage, spec, {}, said.append)
    whole = train_local(
        spec,
        batches,
        on_commit=lambda stages, report: kept.after(stages, report.step + 1, report.loss, report.tokens) and None,
    )
    assert [checkpoint.step for checkpoint in list_checkpoints(storage)[0]] == [2, 4]
    assert len(said) == 2
    for start in list_checkpoints(storage)[0]:
        for stages in (1, 3):
            assert train_local(changed(spec, "pipeline", stages=stages), batches, start=start).sha256 == whole.sha256
    with pytest.raises(InvalidConfig, match=r"training\.seed = 5"):
        train_local(changed(spec, "training", seed=5), batches, start=start)
