"""Completion behind TAB: jobs, stage servers and steps; nothing if no scheduler answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from client.connection import Scheduler, dial
from client.shell import Shell
from swarm.errors import SwarmError

ANSWER_S_MAX = 2.0
OFFERED_MAX = 100


def jobs(values: dict[str, Any], incomplete: str) -> list[str]:
    """Ids of jobs, the newest first; `values` are the flags and arguments so far, by name."""
    return _offered(
        values, incomplete, lambda scheduler: [job.id for job in scheduler.jobs(all=True, limit=OFFERED_MAX)[0]]
    )


def peers(values: dict[str, Any], incomplete: str) -> list[str]:
    """Ids of stage servers."""
    return _offered(values, incomplete, lambda scheduler: [peer.id for peer in scheduler.peers()])


def jobs_and_peers(values: dict[str, Any], incomplete: str) -> list[str]:
    """Jobs and stage servers, as `swarm explain` takes both."""
    return jobs(values, incomplete) + peers(values, incomplete)


def steps(values: dict[str, Any], incomplete: str) -> list[str]:
    """The steps at which the named job has a checkpoint."""
    job = values.get("job")
    if not isinstance(job, str):
        return []

    def found(scheduler: Scheduler) -> list[str]:
        return ["latest", *(str(checkpoint.step) for checkpoint in reversed(scheduler.checkpoints(job)))]

    return _offered(values, incomplete, found)


def _offered(values: dict[str, Any], incomplete: str, ask: Callable[[Scheduler], list[str]]) -> list[str]:
    shell = Shell(quiet=True)
    try:
        shell.take(**{name: values.get(name) for name in ("scheduler", "insecure", "profile", "config")})
        shell.settle()
        with dial(shell, ANSWER_S_MAX) as scheduler:
            return [name for name in ask(scheduler) if name.startswith(incomplete)]
    except (SwarmError, OSError):  # of the machine too: between the words of a command no error helps
        return []
