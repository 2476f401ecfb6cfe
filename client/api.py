"""A swarm from Python: what the `swarm` command does, as methods that give values.

    import swarm

    with swarm.Client("127.0.0.1:7950") as client:
        job = client.submit("job.toml", changes={"training.steps": 100})
        for job in client.watch(job):
            print(job.state, job.step, job.loss)
        client.pull(job, "./model")

Every method raises a `swarm.errors.SwarmError`. Its text names the way out; its codes are the command line's.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

from client.connection import dial
from client.records import (
    Checkpoint,
    Explanation,
    Job,
    LogLine,
    Peer,
    Step,
    raise_unless_succeeded,
    record,
)
from client.shell import Shell
from client.transfer.download import Pulled, download
from client.transfer.precision import Dtype
from client.transfer.submission import check, send
from swarm.checkpoint.storage import LATEST
from swarm.job.changes import changed_spec, changed_values
from swarm.job.spec import JobSpec, new_job, put_value, read_job
from swarm.limits import JOBS_LISTED_MAX
from swarm.wire import jobs_pb2 as pb


class Client:
    """A connection to a scheduler; close it, or use it as a context manager.

    Where a method takes a job, it takes a `Job`, or a name, an id or the beginning of one.
    """

    def __init__(
        self,
        scheduler: str = "",
        *,
        timeout_s: float | None = None,
        insecure: bool = False,
        profile: str = "",
        quiet: bool = True,
    ) -> None:
        """`scheduler` is HOST:PORT; without it SWARM_SCHEDULER, the profile's, or the scheduler of this machine.

        `profile` is a [profile.NAME] of the user's config file. The certificate comes from `swarm login`; with
        `insecure` there is none. Unless it is `quiet`, uploads and downloads say on stderr how far they are.
        SchedulerUnreachable, NotAdmitted, CertificateEnded, InvalidConfig.
        """
        self._shell = Shell(quiet=quiet)
        address = scheduler or os.environ.get("SWARM_SCHEDULER") or None
        self._shell.take(scheduler=address, timeout_s=timeout_s, insecure=insecure, profile=profile or None)
        self._shell.settle()
        self._scheduler = dial(self._shell)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._scheduler.close()

    # Jobs ------------------------------------------------------------------------------------------------------------

    def submit(self, job: str | Path | Mapping[str, Any], *, changes: Mapping[str, Any] | None = None) -> Job:
        """Check a job, tokenise and upload its data, and start it.

        `job` is the path of a job file, or the content of one as nested values. `changes` sets values by their dotted
        keys, as `--set` does: {"training.steps": 100}. InvalidConfig names the key that is wrong.
        """
        spec, corpus = check(_spec(job, changes or {}), self._shell.say)
        return send(self._shell, self._scheduler, spec, corpus)

    def jobs(self, *, all: bool = False, state: str = "", limit: int = JOBS_LISTED_MAX) -> list[Job]:
        """Open jobs, or jobs in `state`, or with `all` also ended jobs; the newest first."""
        return self._scheduler.jobs(all=all, state=state, limit=limit)[0]

    def status(self, job: str | Job) -> Job:
        """The job as it is now."""
        return self._scheduler.get(_id(job))

    def watch(self, job: str | Job) -> Iterator[Job]:
        """The job now and after every change, until it has ended; a lost connection is dialled again."""
        return self._scheduler.follow(_id(job), self._shell.say)

    def wait(self, job: str | Job) -> Job:
        """The job once it has succeeded; JobEnded if it failed or was cancelled."""
        (seen,) = deque(self.watch(job), maxlen=1)
        raise_unless_succeeded(seen)
        return seen

    def cancel(self, job: str | Job, *, checkpoint: bool = True) -> Job:
        """Save the job, unless `checkpoint` is False, and stop it."""
        request = pb.CancelRequest(job=_id(job), reason="cancelled by its user", no_checkpoint=not checkpoint)
        return self._scheduler.job("Cancel", request)

    def pause(self, job: str | Job) -> Job:
        """Save the job and free its stage servers; `watch` tells when it is paused."""
        return self._scheduler.job("Pause", pb.JobRequest(job=_id(job)))

    def resume(self, job: str | Job, *, step: int | None = None, changes: Mapping[str, Any] | None = None) -> Job:
        """Continue a job from its newest sound checkpoint, or from a step's, perhaps with other values."""
        name, spec_json = _id(job), ""
        if changes:
            before = self._scheduler.get(name).spec
            keys = [f"{key}=" for key in changes]
            after = _changed(changed_values(deepcopy(before), keys), changes)
            spec_json = changed_spec(before, after, "changes").model_dump_json()
        which = LATEST if step is None else str(step)
        return self._scheduler.job("Resume", pb.ResumeRequest(job=name, spec_json=spec_json, **{"from": which}))

    def remove(self, job: str | Job) -> int:
        """Remove an ended job with everything that it made; gives the bytes that this freed."""
        return int(self._scheduler.call("Remove", pb.JobRequest(job=_id(job))).freed_bytes)

    # What they made and did ------------------------------------------------------------------------------------------

    def checkpoints(self, job: str | Job, *, verify: bool = False) -> list[Checkpoint]:
        """The job's checkpoints, oldest first; with `verify` the scheduler reads every byte of them."""
        return self._scheduler.checkpoints(_id(job), verify=verify)

    def history(self, job: str | Job, *, every: int = 0) -> list[Step]:
        """Loss, gradient norm and so on of the committed steps, oldest first; with `every` = N only every N-th."""
        return list(self._scheduler.history(_id(job), every))

    def pull(
        self, job: str | Job, folder: str | Path, *, step: int | None = None, dtype: Dtype = "keep", force: bool = False
    ) -> Pulled:
        """Fetch the model of the newest checkpoint, or of a step's, as a Hugging Face folder."""
        which = LATEST if step is None else str(step)
        seen = self._scheduler.get(_id(job))
        return download(self._shell, self._scheduler, seen, Path(folder), step=which, dtype=dtype, force=force)

    def logs(self, job: str | Job, *, follow: bool = False, level: str = "info") -> Iterator[LogLine]:
        """The log lines of a job's processes, oldest first; with `follow` until the job has ended."""
        request = pb.LogsRequest(job=_id(job), follow=follow, level=level, stage=-1)
        for entry in self._scheduler.logs(request, self._shell.say):
            yield record(LogLine, entry)

    def explain(self, about: str | Job | Peer) -> Explanation:
        """Why a job waits or is slow, or why a stage server gets little work or none."""
        return record(Explanation, self._scheduler.call("Explain", pb.ExplainRequest(about=_id(about))))

    # Stage servers ---------------------------------------------------------------------------------------------------

    def peers(self, *, state: str = "", stage: int = -1) -> list[Peer]:
        """The stage servers: all, or only those in `state`, or serving `stage` of their job."""
        return self._scheduler.peers(state=state, stage=stage)


def _id(about: str | Job | Peer) -> str:
    return about if isinstance(about, str) else about.id


def _spec(job: str | Path | Mapping[str, Any], changes: Mapping[str, Any]) -> JobSpec:
    if isinstance(job, Mapping):
        return new_job(_changed(deepcopy(dict(job)), changes), "job")
    return new_job(_changed(read_job(Path(job)), changes), str(job))


def _changed(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those at dotted keys replaced, in place."""
    for key, value in changes.items():
        put_value(values, key, value)
    return values
