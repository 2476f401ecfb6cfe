"""A stage server that says it has added every microbatch that it was not given: `python -m tests.support.boaster`.

It takes them for added itself, so that what it reports, and the set that it names in a round, fit together.
"""

from __future__ import annotations

from stage_server.__main__ import cli
from stage_server.session.server import StageServer
from swarm.job.spec import spec_from_json
from swarm.process.lifecycle import run_cli
from swarm.types import Microbatch
from swarm.wire.messages import Hello

_HELLO = StageServer._hello


def boast(server: StageServer) -> Hello:
    replica, load = server._replica, server._load_stage
    if replica is not None and load is not None:
        cells = replica.cells
        for step in range(cells.version, cells.version + 1 + cells.staleness):
            for index in range(spec_from_json(load.spec_json).training.microbatches):
                cell = cells._cell(Microbatch(cells.timeline, step, index))
                if not cell.attempt:
                    cell.attempt, cell.reported = 1, True
    return _HELLO(server)


if __name__ == "__main__":
    StageServer._hello = boast  # type: ignore[method-assign]
    run_cli(cli, "swarm stage-server")
