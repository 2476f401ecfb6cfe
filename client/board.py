"""The board of `swarm top`: all jobs, and one of them in full, with its replicas by stage, its loss and its reason.

Not chosen: textual with its keys, because one picture that stays true is enough, and rich is here anyway.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from client.records import Explanation, Job, Peer, Step
from client.views import FittedTable, facts_table, job_values, jobs_table, number, peer_reason, peer_values, state
from swarm.text import counted, duration, size

BARS = "▁▂▃▄▅▆▇█"
CURVE_COLUMNS = 60


@dataclass(frozen=True, slots=True)
class Board:
    """The content of the board; `focus` is the job whose stages are shown."""

    address: str
    now_unix_s: float
    jobs: Sequence[Job]
    troubles: Sequence[str]
    peers: Sequence[Peer]
    focus: Job | None = None
    steps: Sequence[Step] = ()  # of the focus, oldest first
    why: Explanation | None = None


def board_values(board: Board) -> dict[str, Any]:
    """The board as JSON values."""
    return {
        "scheduler": board.address,
        "troubles": list(board.troubles),
        "jobs": [job_values(job) for job in board.jobs],
        "peers": [peer_values(peer) for peer in board.peers],
        "focus": board.focus.id if board.focus is not None else None,
        "facts": [] if board.why is None else [{"topic": fact.topic, "text": fact.text} for fact in board.why.facts],
    }


def board_view(board: Board) -> RenderableType:
    """The board for a person, the most important first: a low terminal cuts the end."""
    parts: list[RenderableType] = [_headline(board)]
    parts += [Text(f"scheduler: {trouble}", style="yellow") for trouble in board.troubles]
    parts += [Text(""), jobs_table(board.jobs) if board.jobs else Text("no jobs are open", style="dim")]
    if board.focus is not None:
        parts += [Text(""), Rule(Text(board.focus.id), align="left", style="dim"), *_focus(board, board.focus)]
    idle = [peer.id for peer in board.peers if not peer.job]
    if idle:
        parts += [Text(""), Text.assemble(("without a job  ", "dim"), ", ".join(idle))]
    return Group(*parts)


def sparkline(values: Iterable[float], columns: int = CURVE_COLUMNS) -> str:
    """The values as bars, the newest at the right; of more values than columns, means of neighbours."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(columns, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    steps = len(BARS) - 1
    return "".join(BARS[round((mean - low) / (high - low) * steps) if high > low else 0] for mean in means)


def _headline(board: Board) -> Text:
    by_state = Counter(peer.state for peer in board.peers)
    peers = ", ".join(f"{count} {name}" for name, count in sorted(by_state.items())) or "none"
    return Text.assemble(
        ("scheduler ", "dim"),
        board.address,
        ("   stage servers ", "dim"),
        peers,
        ("   jobs ", "dim"),
        f"{len(board.jobs)} open",
    )


def _focus(board: Board, job: Job) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if job.step:
        grid = Table.grid(padding=(0, 2))
        curve = sparkline(step.loss for step in board.steps)
        grid.add_row(Text("loss", style="dim"), Text(number(job.loss)), Text(curve, style="cyan"))
        parts.append(grid)
    parts.append(_replicas(board, job))
    if board.why is not None:
        parts += [Text(""), facts_table(board.why.facts)]
    return parts


def _replicas(board: Board, job: Job) -> RenderableType:
    """A row for each replica, in order of islands and stages; a stage without any has one too."""
    by_id = {peer.id: peer for peer in board.peers}
    islands = [(str(island.island), set(island.peers)) for island in job.islands]
    rows = []
    for name_of_island, members in islands or [("", set())]:
        for stage in job.stages:
            layers = counted(stage.layers, "layer")
            names = [name for name in stage.peers if name in members or not islands]
            for at, name in enumerate(names or ("-",)):
                peer = by_id.get(name, Peer(id=name))
                is_first = at == 0
                rows.append(
                    (
                        *((Text(name_of_island if is_first and stage is job.stages[0] else ""),) if islands else ()),
                        Text(str(stage.stage) if is_first else ""),
                        Text(layers if is_first else ""),
                        Text(name),
                        state(peer.state or "nobody serves it"),
                        Text(f"{peer.pace_s * 1000:.0f} ms" if peer.pace_s else "-"),
                        Text(str(peer.outstanding)),
                        Text(peer.device or "-"),
                        Text(size(peer.memory_bytes) if peer.memory_bytes else "-"),
                        Text(duration(board.now_unix_s - peer.since_unix_s) if peer.since_unix_s else "-"),
                        Text(peer_reason(peer)),
                    )
                )
    columns = ("STAGE", "LAYERS", "PEER", "STATE", "PACE", "WORK", "DEVICE", "MEMORY", "SINCE", "REASON")
    columns = (*(("ISLAND",) if islands else ()), *columns)
    return FittedTable(columns, rows, dropped_first=("MEMORY", "SINCE", "DEVICE", "LAYERS", "WORK", "PACE"))
