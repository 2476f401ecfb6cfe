"""State on its way between stage servers and storage: stages of a checkpoint come in, files of a start go out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from scheduler.jobs.registry import JobRegistry
from scheduler.storage.stores import Stores
from swarm.errors import CheckpointFailed, Refused
from swarm.messages import FetchRequest, StoreHeader


class JobTransfer:
    """Moves state for jobs at work; every chunk counts as progress."""

    def __init__(self, stores: Stores, registry: JobRegistry) -> None:
        self._stores = stores
        self._registry = registry

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Take a file of a stage's state for the job's checkpoint."""
        job = self._registry.get(header.job)
        run = job.run if job is not None else None
        if run is None or run.sink is None:
            raise Refused(f"job {header.job} collects nothing")

        async def counted() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                run.driver.made_progress()
                yield chunk

        try:
            return await run.sink.put(header, counted())
        except CheckpointFailed as error:
            run.driver.checkpoint_written(header.version, error.reason, str(error))
            raise

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        """Bytes of a file that a job at work starts from; NotFound or Refused."""
        job = self._registry.get(request.job)
        if job is None or (run := job.run) is None or job.record.timeline != request.timeline:
            raise Refused(f"job {request.job} does not load anything on timeline {request.timeline}")
        async for chunk in self._stores.files.state(job.record.files, job.start).read(request, self._stores.threads):
            run.driver.made_progress()
            yield chunk
