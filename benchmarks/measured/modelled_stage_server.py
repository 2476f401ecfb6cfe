"""A stage server with modelled compute.

    python -m benchmarks.measured.modelled_stage_server --compute S --step S FLAGS

The product's own program, its processes, sessions, links and rounds; only that a forward and a backward take S seconds
each, and the optimizer its own, on any machine: what the tiny model's own computation leaves of them is slept on the
compute thread. So a dozen of them share two cores, and what is measured is the protocol and not an accelerator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from stage_server.lean_imports import lean_imports

with lean_imports():
    from stage_server.__main__ import cli
    from swarm.model.stage import Stage
from swarm.process.lifecycle import run_cli


def takes(
    owner: Any,
    name: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Let every call of `owner.name` last so long, or as long as it does by itself if that is longer."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = clock()
        result = original(*args, **kwargs)
        sleep(max(0.0, began_s + seconds - clock()))
        return result

    setattr(owner, name, call)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--compute", compute_s, "--step", step_s, *rest]:
            takes(Stage, "forward", float(compute_s))
            takes(Stage, "backward", float(compute_s))
            takes(Stage, "apply", float(step_s))
            sys.argv = ["stage_server", *rest]
            run_cli(cli, "swarm stage-server")
        case _:
            raise SystemExit("usage: --compute SECONDS --step SECONDS, then the program's own flags")
