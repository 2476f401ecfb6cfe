"""A stage server that dies at an exact point: `python -m tests.chaos.failing_stage_server --at POINT --hit N FLAGS`."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Callable
from typing import Any

from stage_server.lean_imports import lean_imports

with lean_imports():
    from stage_server.__main__ import cli
    from stage_server.brain.cell import CellTable
    from stage_server.replica.averaging import all_reduce, rounds
    from stage_server.replica.replica import Replica
    from stage_server.session.server import StageServer
from swarm.model.stage import Stage
from swarm.process.lifecycle import run_cli
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.wire.messages import Averaged, Boundary, Committed, Event
from tests.chaos.failpoints import Failpoint, take_flags

ON_THE_WAY_S = 0.03  # an event that was emitted has left the process by then


def computed_send(point: Failpoint) -> None:
    """A tensor is computed, and no neighbour has it."""
    point.before(CellTable, "computed_forward")
    point.before(CellTable, "computed_backward")


def taken_acknowledged(point: Failpoint) -> None:
    """A tensor was taken in, and its sender does not know."""
    point.after(Replica, "receive", lambda _, header, payload: isinstance(header, Boundary))


def acknowledged(point: Failpoint) -> None:
    """A neighbour has acknowledged a tensor, and nothing more was done about it."""
    point.after(GrpcPeerLinks, "send", lambda _, address, header, payload: isinstance(header, Boundary))


def reduced_averaged(point: Failpoint) -> None:
    """The mean is known here, and the scheduler does not hear of it."""
    point.after(rounds, "run_round")


def parts_sum(point: Failpoint) -> None:
    """A carrier has the parts of its site, and nobody has their sum."""
    point.before(all_reduce, "sum_of_parts")


def parts_stop(point: Failpoint) -> None:
    """Not a death: the same carrier stops."""
    point.signal = signal.SIGSTOP
    parts_sum(point)


def averaged_row(point: Failpoint) -> None:
    """The scheduler hears that the round is done, and then loses the member."""
    _at_event(Averaged, lambda: asyncio.get_running_loop().call_later(ON_THE_WAY_S, point.passed), after=True)


def commit_apply(point: Failpoint) -> None:
    """The commit has come, and the optimizer has not run."""
    point.before(Replica, "_commit")


def applied_committed(point: Failpoint) -> None:
    """The optimizer has run, and nobody knows."""
    _at_event(Committed, point.passed, after=False)


def nan_gradient(point: Failpoint) -> None:
    """Not a death: one gradient that comes from behind is not a number."""
    original = Stage.backward
    left = [point._left]

    def backward(self: Stage, microbatch: Any, g: Any = None, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            sys.stderr.write(f"failpoint hit: {point.name}\n")
            sys.stderr.flush()
            g = math.nan * g if g is not None else g
        return original(self, microbatch, g, **kwargs)

    Stage.backward = backward  # type: ignore[method-assign]


def _at_event(kind: type[Event], act: Callable[[], object], *, after: bool) -> None:
    original = StageServer.emit

    def emit(self: StageServer, event: Event) -> None:
        if isinstance(event, kind) and not after:
            act()
        original(self, event)
        if isinstance(event, kind) and after:
            act()

    StageServer.emit = emit  # type: ignore[method-assign]


POINTS: dict[str, Callable[[Failpoint], None]] = {
    "compute/send": computed_send,
    "taken/ack": taken_acknowledged,
    "ack/next": acknowledged,
    "reduce/Averaged": reduced_averaged,
    "parts/sum": parts_sum,
    "parts/stop": parts_stop,
    "Averaged/row": averaged_row,
    "Commit/apply": commit_apply,
    "apply/Committed": applied_committed,
    "nan": nan_gradient,
}

if __name__ == "__main__":
    name, hit, rest = take_flags(sys.argv[1:])
    POINTS[name](Failpoint(name, hit))
    sys.argv = ["stage_server", *rest]
    run_cli(cli, "swarm stage-server")
