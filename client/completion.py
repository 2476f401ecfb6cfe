"""Completion behind TAB: jobs, stage servers and steps; nothing if no scheduler answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from client.connection import dial
from client.shell import Shell
from swarm.errors import SwarmError

ANSWER_S_MAX = 2.0
OFFERED_MAX = 100
_UNANSWERED = (SwarmError, OSError)  # of the machine too: between the words of a command no error helps


def jobs(values: dict[str, Any], incomplete: str) -> list[str]:
    """Ids of jobs, the newest first; `values` are the flags and arguments so far, by name."""
    try:
        with dial(_shell(values), ANSWER_S_MAX) as scheduler:
            found, _ = scheduler.jobs(all=True, limit=OFFERED_MAX)
    except _UNANSWERED:
        return []
    return _beginning((job.id for job in found), incomplete)


def peers(values: dict[str, Any], incomplete: str) -> list[str]:
    """Ids of stage servers."""
    try:
        with dial(_shell(values), ANSWER_S_MAX) as scheduler:
            return _beginning((peer.id for peer in scheduler.peers()), incomplete)
    except _UNANSWERED:
        return []


def jobs_and_peers(values: dict[str, Any], incomplete: str) -> list[str]:
    """Jobs and stage servers, as `swarm explain` takes both."""
    return jobs(values, incomplete) + peers(values, incomplete)


def steps(values: dict[str, Any], incomplete: str) -> list[str]:
    """The steps at which the named job has a checkpoint."""
    job = values.get("job")
    if not isinstance(job, str):
        return []
    try:
        with dial(_shell(values), ANSWER_S_MAX) as scheduler:
            found = [str(one.step) for one in scheduler.checkpoints(job)]
    except _UNANSWERED:
        return []
    return _beginning(iter(["latest", *reversed(found)]), incomplete)


def _shell(values: dict[str, Any]) -> Shell:
    shell = Shell(quiet=True)
    shell.take(**{name: values.get(name) for name in ("scheduler", "insecure", "profile", "config")})
    shell.settle()
    return shell


def _beginning(names: Iterator[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
