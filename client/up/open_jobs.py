"""Jobs that are open when `swarm up` stops or starts.

    the first Ctrl-C ─▶ each job at work is noted and paused, which saves it ─▶ all ends
    the next start   ─▶ the noted jobs are resumed; with those that waited, the scheduler goes on by itself

Not chosen: to save without a pause, because a job at work goes on with steps that would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from client.records import Job, record
from client.shell import Shell
from client.up.fleet import POLL_S
from swarm.rpc.channel import translate
from swarm.text import counted
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb

ANSWER_S_MAX = 5.0  # of the scheduler, while this process stops
SAVED = "saved-jobs.json"  # in the data folder: jobs that are paused only because swarm up stopped
_ON_THE_WAY = (JobState.RUNNING, JobState.PAUSING)


@asynccontextmanager
async def saving_jobs(shell: Shell, jobs: Any, folder: Path) -> AsyncIterator[None]:
    """Pause each job at work when the body is cancelled, and wait until it is saved; `go_on` resumes it.

    Its name is noted in `folder` before it is paused: whatever ends this process, the next one knows of it. If the
    scheduler ends or does not answer, it is said from which step a job goes on.
    """
    try:
        yield
    except asyncio.CancelledError:
        with contextlib.suppress(grpc.RpcError):
            reply = await jobs.List(pb.ListRequest(state=JobState.RUNNING.value), timeout=ANSWER_S_MAX)
            open_jobs = [record(Job, view) for view in reply.jobs]
            unsaved = {job.id: job for job in open_jobs if job.step > job.checkpoint_step}
            try:
                await _save(shell, jobs, folder, unsaved)
            except (grpc.RpcError, OSError):
                for job in unsaved.values():
                    shell.say(_unsaved(job))
        raise


async def _save(shell: Shell, jobs: Any, folder: Path, unsaved: dict[str, Job]) -> None:
    """Pause these jobs; each leaves `unsaved` once it has stopped. OSError, RpcError."""
    if not unsaved:
        return
    shell.say(
        f"saving {counted(len(unsaved), 'job')}: {', '.join(unsaved)}; once more kills, and loses what is not saved"
    )
    _note(folder, [*_noted(folder), *unsaved])
    said: dict[str, str] = {}
    for job_id in unsaved:
        await jobs.Pause(pb.JobRequest(job=job_id), timeout=ANSWER_S_MAX)
    while unsaved:
        for job_id in list(unsaved):
            job = record(Job, await jobs.Get(pb.JobRequest(job=job_id), timeout=ANSWER_S_MAX))
            told = f"job {job.id} is {job.state} at step {job.step}" + (f": {job.reason}" if job.reason else "")
            if job.state not in _ON_THE_WAY:
                del unsaved[job_id]
                told = f"job {job.id} is saved at step {job.step}" if job.state == JobState.PAUSED else told
            if said.get(job_id) != told:
                said[job_id] = told
                shell.say(told)
        await asyncio.sleep(POLL_S)


async def go_on(shell: Shell, jobs: Any, folder: Path) -> None:
    """Resume the jobs that an earlier `swarm up` paused when it stopped."""
    for job_id in _noted(folder):
        try:
            job = await _stopped(shell, jobs, job_id)
            if job.state == JobState.PAUSED:
                await jobs.Resume(pb.ResumeRequest(job=job_id, **{"from": "latest"}), timeout=shell.timeout_s)
                shell.say(f"job {job_id} goes on from step {job.step}")
        except grpc.RpcError as error:
            told = translate(error, shell.scheduler)
            shell.say(f"job {job_id} was not resumed: {told.message}; go on with: swarm resume {job_id}")
    _note(folder, [])


async def _stopped(shell: Shell, jobs: Any, job_id: str) -> Job:
    """The job, once it is paused if it is about to be."""
    while True:
        job = record(Job, await jobs.Get(pb.JobRequest(job=job_id), timeout=shell.timeout_s))
        if job.state != JobState.PAUSING:
            return job
        await asyncio.sleep(POLL_S)


def _unsaved(job: Job) -> str:
    saved = job.checkpoint_step
    where = f"step {saved}, its newest checkpoint" if saved else "step 0, as it has no checkpoint"
    return f"job {job.id} is at step {job.step} and not saved; the next swarm up goes on with it from {where}"


def _noted(folder: Path) -> list[str]:
    try:
        noted = json.loads((folder / SAVED).read_bytes())
    except (OSError, ValueError):
        return []
    return list(dict.fromkeys(map(str, noted))) if isinstance(noted, list) else []


def _note(folder: Path, names: list[str]) -> None:
    if not names:
        (folder / SAVED).unlink(missing_ok=True)
        return
    part = folder / f".{SAVED}"
    part.write_text(json.dumps(names))
    part.replace(folder / SAVED)


async def left_open(shell: Shell, jobs: Any, name: str) -> Job | None:
    """The newest open job of this name, if there is one. Waits first for a job that is being stopped."""
    said = False
    while True:
        try:
            reply = await jobs.List(pb.ListRequest(), timeout=shell.timeout_s)
        except grpc.RpcError as error:
            raise translate(error, shell.scheduler) from None
        held = next((record(Job, view) for view in reply.jobs if view.name == name), None)
        if held is None or held.state not in (JobState.PAUSING, JobState.CANCELLING):
            return held
        if not said:
            shell.say(f"job {held.id} is {held.state}: waiting until it has stopped")
            said = True
        await asyncio.sleep(POLL_S)


def going_on(job: Job) -> tuple[list[str], str]:
    """The command of `swarm` that goes on with an open job and follows it, and the line for people."""
    verb = ["resume"] if job.state == JobState.PAUSED else ["status", "--watch"]
    told = (
        f"job {job.id} is open, at step {job.step} of {job.steps}: going on with it, as it was submitted; to begin "
        f"anew: swarm cancel {job.id} in another terminal, then start again"
    )
    return [*verb, job.id], told
