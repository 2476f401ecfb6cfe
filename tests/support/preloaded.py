"""What a scheduler and a stage server import, once for all that the tests fork from this process."""

from __future__ import annotations

from stage_server.lean_imports import lean_imports

with lean_imports():
    import stage_server.app

import scheduler.app

__all__ = ["scheduler", "stage_server"]
