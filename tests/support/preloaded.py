"""What a scheduler, a stage server and `swarm up` import, once for all that the tests fork from this process."""

from __future__ import annotations

from stage_server.lean_imports import lean_imports

with lean_imports():
    import stage_server.app

import client.up.up
import scheduler.app
import swarm.relay.app

__all__ = ["client", "scheduler", "stage_server", "swarm"]
