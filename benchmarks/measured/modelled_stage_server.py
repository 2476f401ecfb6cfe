"""A stage server with modelled compute.

    python -m benchmarks.measured.modelled_stage_server --compute S --step S FLAGS

The product's own program, its processes, sessions, links and rounds; only that a forward and a backward take S seconds
each, and the optimizer its own, on any machine: what the tiny model's own computation leaves of them is slept on the
compute thread. So a dozen of them share two cores, and what is measured is the protocol and not an accelerator. The
two parts of a split backward take half of that each, as in torch's schedule ZBV; with --whole, before FLAGS, none is
split. With S 0 the computations take their own time. With --harmed, before FLAGS, it can be made slower meanwhile, as a
tests.chaos.harmed_stage_server.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measured.modelled import takes
from stage_server.lean_imports import lean_imports

with lean_imports():
    from stage_server.__main__ import cli
    from stage_server.brain.splitting import Splitting
    from swarm.model.stage import Stage
from swarm.process.lifecycle import run_cli
from tests.chaos.harmed_stage_server import Harm, harm_file, put

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--compute", compute_s, "--step", step_s, *rest]:
            takes(Stage, "forward", float(compute_s))
            takes(Stage, "backward", lambda *_, keep=False, **__: float(compute_s) / (2 if keep else 1))
            takes(Stage, "weigh", float(compute_s) / 2)
            takes(Stage, "apply", float(step_s))
            if rest[:1] == ["--harmed"]:
                del rest[0]
                put(Harm(harm_file(Path(rest[rest.index("--data-dir") + 1]))))
            if rest[:1] == ["--whole"]:
                Splitting.next = lambda *_: False  # type: ignore[method-assign]
                del rest[0]
            sys.argv = ["stage_server", *rest]
            run_cli(cli, "swarm stage-server")
        case _:
            raise SystemExit("usage: --compute SECONDS --step SECONDS, then the program's own flags")
