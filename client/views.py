"""How jobs and peers look: as JSON values, as tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from client.records import Fact, Island, Job, Peer
from client.shell import finite, utc
from swarm.job.schedule import perplexity
from swarm.text import bandwidth, counted, duration, size
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb

_STATE_STYLE = {
    "succeeded": "green",
    "running": "cyan",
    "serving": "cyan",
    "failed": "red",
    "gone": "red",
    "training": "cyan",
    "lost": "red",
    "late": "yellow",
    "suspect": "yellow",
    "cancelled": "yellow",
    "cancelling": "yellow",
    "stalled": "yellow",
    "pausing": "yellow",
    "paused": "yellow",
}


def job_values(view: Job, *, spec: bool = False) -> dict[str, Any]:
    stepped = view.step > 0
    always = ("id", "name", "state", "reason", "priority", "step", "steps", "skipped_steps", "lost_steps", "tokens")
    numbers = ("tokens_per_s", "eta_s", "unigram_entropy")
    once_stepped = ("loss", "learning_rate", "grad_norm")
    if_known = ("checkpoint_step", "weights_sha256", "error_code", "hint")
    of_stage = ("stage", "layers", "microbatches")
    values: dict[str, Any] = {
        **{name: getattr(view, name) for name in always},
        **{name: finite(getattr(view, name)) for name in numbers},
        **{name: finite(getattr(view, name)) if stepped else None for name in once_stepped},
        **{name: getattr(view, name) or None for name in if_known},
        "since": utc(view.since_unix_s),
        "created": utc(view.created_unix_s),
        "times_s": dict(view.times_s),
        "peer_s": view.peer_s,
        "evaluation": evaluation_values(view),
        "owner": view.owner or None,
        "stages": [
            {"peers": list(stage.peers), **{name: getattr(stage, name) for name in of_stage}} for stage in view.stages
        ],
        "islands": [_island_values(island) for island in view.islands],
        "ledger": {name: getattr(view, f"microbatches_{name}") for name in ("committed", "in_flight", "replayed")},
    }
    if spec and view.spec_json:
        values["spec"] = view.spec
    return values


def _island_values(island: Island) -> dict[str, Any]:
    names = ("island", "state", "step", "exchanges", "waits_for", "microbatches")
    speed = finite(island.microbatches_per_s)
    values = {name: getattr(island, name) for name in names}
    return {"peers": list(island.peers), **values, "microbatches_per_s": speed}


def islands_values(view: Job, peers: Sequence[Peer]) -> list[dict[str, Any]]:
    """The islands of a job, with the replicas of each stage and where they are."""
    return [
        _island_values(island) | {"sites": _sites(island, peers), "replicas": _replicas(view, island)}
        for island in view.islands
    ]


def _sites(island: Island, peers: Sequence[Peer]) -> list[str]:
    """Those that its stage servers have named."""
    return sorted({peer.site for peer in peers if peer.id in island.peers} - {""})


def _replicas(view: Job, island: Island) -> list[int]:
    """How many replicas of each stage an island has."""
    return [len(set(stage.peers) & set(island.peers)) for stage in view.stages]


def evaluation_values(view: Job) -> dict[str, Any] | None:
    """The newest validation loss as JSON values; None if there is none."""
    if not view.evaluation_step:
        return None
    loss = finite(view.evaluation_loss)
    return {"step": view.evaluation_step, "loss": loss, "perplexity": finite(perplexity(view.evaluation_loss))}


def evaluation_text(view: Job) -> str:
    """The newest validation loss for a person; empty if there is none."""
    if not view.evaluation_step:
        return ""
    return f"{number(view.evaluation_loss)} (perplexity {number(perplexity(view.evaluation_loss), 2)})"


def peer_values(view: Peer) -> dict[str, Any]:
    identity = ("id", "incarnation", "address", "device", "threads", "memory_bytes", "host_bytes", "product")
    return {
        **{name: getattr(view, name) for name in (*identity, "state", "reason", "outstanding")},
        "since": utc(view.since_unix_s),
        "http_address": view.http_address or None,
        "job": view.job or None,
        "stage": view.stage if view.job else None,
        "island": int(view.island) if view.island else None,
        "site": view.site or None,
        "pace_s": finite(view.pace_s),
        "links": [asdict(link) for link in view.links],
    }


def state(name: str) -> Text:
    return Text(name, style=_STATE_STYLE.get(name, ""))


def number(value: float, digits: int = 4) -> str:
    """A measurement, or a dash where there is none."""
    return "-" if finite(value) is None else f"{value:.{digits}f}"


def jobs_table(views: Sequence[Job]) -> RenderableType:
    now_unix_s = time.time()
    rows = []
    several, unequal = len({view.owner for view in views}) > 1, any(view.priority for view in views)
    for view in views:
        running = view.state == JobState.RUNNING
        rows.append(
            (
                Text(view.id),
                *((Text(view.owner or "-"),) if several else ()),
                state(view.state),
                *((Text(str(view.priority)),) if unequal else ()),
                Text(f"{view.step}/{view.steps}"),
                Text(number(view.loss) if view.step else "-"),
                Text(f"{view.tokens_per_s:.0f}" if running and view.step else "-"),
                Text(duration(view.eta_s) if running and view.step else "-"),
                Text(duration(now_unix_s - view.created_unix_s)),
                Text(view.reason),
            )
        )
    whose = ("OWNER",) if several else ()
    rank = ("PRIORITY",) if unequal else ()
    columns = ("ID", *whose, "STATE", *rank, "STEP", "LOSS", "TOKENS/S", "ETA", "AGE", "REASON")
    return FittedTable(columns, rows, dropped_first=("AGE", "TOKENS/S", "LOSS", "ETA", "STEP", *rank, *whose))


def job_table(view: Job) -> RenderableType:
    outer = Table.grid(padding=(0, 2))
    since = f" (for {duration(time.time() - view.since_unix_s)})" if view.since_unix_s else ""
    skipped = f", {view.skipped_steps} of them skipped: not finite" if view.skipped_steps else ""
    rows: list[tuple[str, RenderableType]] = [
        ("job", Text(view.id)),
        *([("owner", Text(view.owner))] if view.owner else []),
        ("state", Text.assemble(state(view.state), since)),
        ("reason", Text(view.reason or "-")),
        ("step", Text(f"{view.step} of {view.steps}{skipped}")),
    ]
    if view.hint:
        rows.append(("hint", Text(view.hint)))
    if view.priority:
        rows.append(("priority", Text(str(view.priority))))
    if view.step:
        rows += [
            ("loss", Text(f"{number(view.loss)} nats (guessing by frequency alone: {number(view.unigram_entropy)})")),
            ("gradient norm", Text(f"{view.grad_norm:.4f}")),
            ("learning rate", Text(f"{view.learning_rate:.3e}")),
            ("tokens", Text(f"{view.tokens} ({view.tokens_per_s:.0f} per second)")),
        ]
    if view.evaluation_step:
        rows.append(("validation loss", Text(f"{evaluation_text(view)} after step {view.evaluation_step}")))
    if view.state == JobState.RUNNING:
        rows.append(("time left", Text(duration(view.eta_s) if view.step else "-")))
    spent = [f"{name} {duration(view.times_s[name])}" for name in JobState if view.times_s.get(name, 0.0) >= 1.0]
    if spent:
        rows.append(("time spent", Text(f"{', '.join(spent)}; its stage servers {duration(view.peer_s)} together")))
    ledger = f"{view.microbatches_committed} committed, {view.microbatches_in_flight} in flight, "
    rows.append(("microbatches", Text(f"{ledger}{view.microbatches_replayed} done again")))
    for stage in view.stages:
        peers = ", ".join(stage.peers) or "no peers"
        facts = f"{counted(stage.layers, 'layer')}, {counted(stage.microbatches, 'microbatch')}: {peers}"
        rows.append((f"stage {stage.stage}", Text(facts)))
    for island in view.islands:
        made = f"step {island.step}, {counted(island.exchanges, 'exchange')}: {', '.join(island.peers)}; "
        rows.append((f"island {island.island}", Text(("" if island.is_lost else made) + island.waits_for)))
    if view.lost_steps:
        rows.append(("lost", Text("; ".join(filter(None, (f"{counted(view.lost_steps, 'step')} so far", view.lost))))))
    if view.checkpoint_step:
        rows.append(("checkpoint", Text(f"step {view.checkpoint_step} (all: swarm checkpoints {view.id})")))
    if view.weights_sha256:
        rows.append(("weights sha256", Text(view.weights_sha256)))
    for name, value in rows:
        outer.add_row(Text(name, style="dim"), value)
    return outer


def islands_table(view: Job, peers: Sequence[Peer]) -> RenderableType:
    """A row for each island of a job."""
    has_sites = any(_sites(island, peers) for island in view.islands)
    rows = [
        (
            Text(str(island.island)),
            state(island.state),
            *((Text(", ".join(_sites(island, peers)) or "-"),) if has_sites else ()),
            Text("-" if island.is_lost else str(island.step)),
            Text("-" if island.is_lost else str(island.exchanges)),
            Text("-" if island.is_lost else " ".join(map(str, _replicas(view, island)))),
            Text("-" if island.is_lost else str(island.microbatches)),
            Text(f"{island.microbatches_per_s:.3g}/s" if island.microbatches_per_s else "-"),
            Text(island.waits_for.removeprefix("waits for ")),
        )
        for island in view.islands
    ]
    site = ("SITE",) if has_sites else ()
    columns = ("ISLAND", "STATE", *site, "STEP", "EXCHANGES", "REPLICAS", "MICROBATCHES", "SPEED", "WAITS FOR")
    return FittedTable(columns, rows, dropped_first=("SPEED", "MICROBATCHES", "REPLICAS", "EXCHANGES"))


def _where(view: Peer) -> str:
    island = f" in island {view.island}" if view.island else ""
    return f"{view.stage}{island}" if view.job else "-"


def _memory(view: Peer) -> str:
    """What a stage server offers: of its device, and after a plus of its host."""
    beside = f" + {size(view.host_bytes)}" if view.host_bytes else ""
    return f"{size(view.memory_bytes)}{beside}" if view.memory_bytes else "-"


def peer_reason(view: Peer) -> str:
    """Why the stage server is in its state, for a table that has its job and stage in columns of their own."""
    return "" if view.job and view.reason == f"stage {view.stage} of {view.job}" else view.reason


def peers_table(views: Sequence[Peer]) -> RenderableType:
    now_unix_s, has_sites = time.time(), any(view.site for view in views)
    has_addresses = any(view.address for view in views)  # shown to admins only
    rows = [
        (
            Text(view.id),
            state(view.state),
            Text(_where(view)),
            Text(view.job or "-"),
            *((Text(view.site or "-"),) if has_sites else ()),
            Text(view.device),
            Text(str(view.threads)),
            Text(_memory(view)),
            Text(f"{view.pace_s * 1000:.0f} ms" if view.pace_s else "-"),
            Text(str(view.outstanding)),
            *((Text(view.address or "-"),) if has_addresses else ()),
            Text(duration(now_unix_s - view.since_unix_s) if view.since_unix_s else "-"),
            Text(peer_reason(view)),
        )
        for view in views
    ]
    address = ("ADDRESS",) if has_addresses else ()
    site = ("SITE",) if has_sites else ()
    columns = (
        "PEER",
        "STATE",
        "STAGE",
        "JOB",
        *site,
        "DEVICE",
        "THREADS",
        "MEMORY",
        "PACE",
        "WORK",
        *address,
        "SINCE",
    )
    dropped_first = (*address, "THREADS", "WORK", "DEVICE", "SINCE", "PACE", "MEMORY", *site, "STAGE", "JOB")
    return FittedTable((*columns, "REASON"), rows, dropped_first=dropped_first)


def links_table(views: Sequence[Peer]) -> RenderableType:
    """A row for each link of the stage servers, the slowest first."""
    links = sorted(((view, link) for view in views for link in view.links), key=lambda one: one[1].bytes_per_s)
    rows = [
        (
            Text(view.id),
            Text(link.to),
            Text(bandwidth(link.bytes_per_s)),
            Text(f"{link.receipt_s * 1000:.1f} ms"),
            Text(view.job),
        )
        for view, link in links
    ]
    return FittedTable(("FROM", "TO", "RATE", "RECEIPT", "JOB"), rows, dropped_first=("RECEIPT",))


def facts_table(facts: Iterable[Fact | pb.Fact], *first: tuple[str, str]) -> Table:
    """The facts of an explanation, below what comes `first`; a topic is named once."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for topic, text in (*first, *((fact.topic, fact.text) for fact in facts)):
        table.add_row(Text(topic if topic != before else "", style="dim"), Text(text))
        before = topic
    return table


class FittedTable:
    """A table without cut cells: where the terminal is too narrow, whole columns are left out, in a given order.

    The last column is a text: it wraps, and counts as TEXT_WIDTH at most.
    """

    TEXT_WIDTH = 26

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Text]], *, dropped_first: Sequence[str]) -> None:
        self._cells = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
        self._text = columns[-1]
        self._dropped_first = dropped_first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self._cells)
        for name in self._dropped_first:
            if self._width(shown) <= options.max_width:
                break
            shown.remove(name)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in shown:
            table.add_column(name, no_wrap=name != self._text)
        for row in zip(*(self._cells[name] for name in shown), strict=True):
            table.add_row(*row)
        yield table

    def _width(self, shown: Sequence[str]) -> int:
        widths = {name: max(len(name), *(cell.cell_len for cell in self._cells[name])) for name in shown}
        widths[self._text] = min(widths[self._text], self.TEXT_WIDTH)
        return sum(widths.values()) + 2 * (len(shown) - 1)
