"""The jobs that the caller of a method sees: everything that a service says of jobs goes through here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from scheduler.brain.explain.facts import Fact
from scheduler.brain.fleet.membership import NO_JOB, Peer
from scheduler.brain.members.projects import ANYBODY, JobAccess, Person, judge, not_owner, sees
from scheduler.jobs.job import Job
from scheduler.jobs.registry import JobRegistry
from scheduler.storage.job_record import JobRecord
from swarm.errors import NotFound, SwarmError
from swarm.pki.names import Role
from swarm.types import JobId

OTHERS = "a job of another project"
_WORD = re.compile(r"[a-z0-9-]+")  # of the characters of ids


class SeenJobs:
    """Finds jobs for the caller that `asks` names; `refused` hears of a method that the caller may not use."""

    def __init__(
        self,
        registry: JobRegistry,
        asks: Callable[[], Person] = lambda: ANYBODY,
        refused: Callable[[str, SwarmError], None] = lambda method, error: None,
    ) -> None:
        self._registry = registry
        self.person = asks
        self._refused = refused

    def all(self) -> list[Job]:
        """The newest first."""
        return self.among(self._registry.all())

    def among(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if self.is_seen(job)]

    def is_seen(self, job: Job) -> bool:
        return sees(self.person(), job.record.project)

    def find(self, method: str, reference: str) -> Job:
        """The job that the caller means, for one of the methods that name a job.

        `reference` is an id, the beginning of one, or a name; or PROJECT/ and one of these. For an admin, jobs of the
        own project come first. NotFound, with the same words for a job of others and for none; NotOwner.
        """
        person = self.person()

        def judged(record: JobRecord) -> JobAccess:
            return judge(person, method, record.project, record.owner)

        job = self._named(reference, person.project, lambda record: judged(record) is not JobAccess.UNKNOWN)
        if judged(job.record) is JobAccess.NOT_OWNER:
            error = not_owner(method, job.record.id, job.record.owner)
            self._refused(method, error)
            raise error
        return job

    def _named(self, reference: str, home: str, exists: Callable[[JobRecord], bool]) -> Job:
        exact = self._registry.get(JobId(reference))
        if exact is not None and exists(exact.record):
            return exact
        project, slash, name = reference.rpartition("/")
        within = project if slash else home
        try:
            return self._registry.find(name, lambda record: record.project == within and exists(record))
        except NotFound:
            if slash:
                raise
            return self._registry.find(reference, exists)

    # What is said of others' jobs --------------------------------------------------------------------------------

    def knows_all_of(self, peer: Peer) -> bool:
        """Whether the caller may see the job that the stage server serves."""
        if self.person().role is Role.ADMIN or peer.job == NO_JOB:
            return True
        job = self._registry.get(peer.job)
        return job is not None and self.is_seen(job)

    def shown(self, text: str) -> str:
        """The text without the ids of jobs that the caller does not see."""

        def masked(word: re.Match[str]) -> str:
            job = self._registry.get(JobId(word[0]))
            return word[0] if job is None or self.is_seen(job) else OTHERS

        return _WORD.sub(masked, text)

    def facts(self, facts: Iterable[Fact]) -> list[Fact]:
        return [replace(fact, text=self.shown(fact.text)) for fact in facts]
