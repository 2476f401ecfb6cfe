"""The topics of the broker. All are hints: nothing that is lost here breaks an invariant.

Several swarms share a broker when each has a name of its own.
"""

from __future__ import annotations

import re

from swarm.errors import UsageError

DEFAULT_SWARM = "default"


def check_swarm(name: str) -> str:
    """The name of a swarm; UsageError if it cannot be one."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name):
        raise UsageError(f'--swarm is a name of letters a-z, digits and "-", not "{name[:80]}"', hint="--swarm team-a")
    return name


def scheduler(swarm: str = DEFAULT_SWARM) -> str:
    """Where the scheduler announces its address (retained, with a last will)."""
    return f"swarm/v1/{_level(swarm)}/scheduler"


def peer(peer_id: str, swarm: str = DEFAULT_SWARM) -> str:
    """Where a stage server announces that it is here (retained, with a last will)."""
    return f"swarm/v1/{_level(swarm)}/peers/{_level(peer_id)}"


def job(job_id: str, swarm: str = DEFAULT_SWARM) -> str:
    """Where the scheduler publishes the state of a job."""
    return f"swarm/v1/{_level(swarm)}/jobs/{_level(job_id)}"


def _level(name: str) -> str:
    assert name, "a topic level must not be empty"
    assert not set(name) & set("/+#\0"), f"{name!r} is not one topic level"
    return name
