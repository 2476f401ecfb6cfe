"""Jobs that an earlier `swarm up` on the same folder left open: the scheduler goes on with them by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from client.records import Job, record
from client.shell import Shell
from client.up.fleet import POLL_S
from swarm.rpc.channel import translate
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb

UNSAVED_S_MAX = 2.0  # until the scheduler has said how far jobs are


@asynccontextmanager
async def telling_what_is_unsaved(shell: Shell, jobs: Any) -> AsyncIterator[None]:
    """Say of each job at work, when the body is cancelled, from which step it goes on at the next start."""
    try:
        yield
    except asyncio.CancelledError:
        with contextlib.suppress(grpc.RpcError):
            reply = await jobs.List(pb.ListRequest(state=JobState.RUNNING.value), timeout=UNSAVED_S_MAX)
            for job in (record(Job, view) for view in reply.jobs):
                if job.step > (saved := job.checkpoint_step):
                    where = f"step {saved}, its newest checkpoint" if saved else "step 0, as it has no checkpoint"
                    shell.say(f"job {job.id} is at step {job.step}; the next swarm up goes on with it from {where}")
                    shell.say(
                        f"to lose no step: swarm pause {job.id} before you stop, swarm resume {job.id} afterwards"
                    )
        raise


async def left_open(shell: Shell, jobs: Any, name: str) -> Job | None:
    """The newest open job of this name, if there is one; a job that was told to stop is waited for until it has."""
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
    """The command of `swarm` that goes on with an open job and follows it, and what a person is told of that."""
    verb = ["resume"] if job.state == JobState.PAUSED else ["status", "--watch"]
    told = (
        f"job {job.id} is open, at step {job.step} of {job.steps}: going on with it, as it was submitted; to begin "
        f"anew: swarm cancel {job.id} in another terminal, then start again"
    )
    return [*verb, job.id], told
