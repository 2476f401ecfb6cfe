"""`swarm trace`: where the time of a step goes, as a file that Perfetto shows."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from client.connection import dial
from client.flags import JobName
from client.records import file_name
from client.shell import Shell
from swarm.errors import InvalidConfig
from swarm.wire import jobs_pb2 as pb

SCHEDULER = "scheduler"


def trace(
    context: typer.Context,
    job: JobName,
    step: Annotated[
        int | None,
        typer.Argument(
            metavar="[STEP]",
            min=1,
            help="As swarm status counts; of the newest steps of a job at work.",
            show_default="the newest that is complete",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write.", show_default="JOB-step-STEP.json")
    ] = None,
) -> None:
    """Write a step of a job as a Chrome trace, one track for each replica: route, forward, boundary, backward, average,
    row, commit. Open it at https://ui.perfetto.dev, which keeps it on your machine."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        found = scheduler.call("Trace", pb.TraceRequest(job=job, step=step or 0))
    path = out or Path(f"{file_name(found.job)}-step-{found.step}.json")
    try:
        path.write_text(json.dumps(chrome_trace(found)) + "\n")
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error.strerror or error}", hint="--out FILE") from None
    parts = summary(found)
    if shell.json:
        shell.data({"job": found.job, "step": found.step, "path": str(path), "every": found.every, "parts": parts})
        return
    shell.out.print(summary_table(parts))
    kept = f"; one microbatch of {found.every} is in it" if found.every > 1 else ""
    shell.say(f"step {found.step} of {found.job} is in {path}{kept}; open it at https://ui.perfetto.dev")


def chrome_trace(found: pb.StepTrace) -> dict[str, Any]:
    """The trace in the format of chrome://tracing: a process for each stage, a thread for each of its replicas.

    Spans that may overlap others of their track are asynchronous events, which are shown beside it.
    """
    places: dict[str, tuple[int, int]] = {SCHEDULER: (0, 0)}  # process and thread
    for span in found.spans:
        if span.stage >= 0:
            places.setdefault(span.track, (span.stage + 1, len(places)))
    names = {process: f"stage {process - 1}" if process else SCHEDULER for process, _ in places.values()}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}} for process, name in names.items()
    ]
    for track, (process, thread) in places.items():
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": track}})
    for number, span in enumerate(found.spans):
        process, thread = places.get(span.track, places[SCHEDULER])
        begin_us, end_us = span.begin_s * 1e6, (span.begin_s + span.duration_s) * 1e6
        name = span.name if span.index < 0 else f"{span.name} {span.index}"
        event = {"name": name, "cat": span.name, "pid": process, "tid": thread, "ts": begin_us}
        if span.index >= 0:
            event["args"] = {"microbatch": f"{found.step - 1}:{span.index}", "attempt": span.attempt}
        if span.beside:
            events += [event | {"ph": "b", "id": number}, event | {"ph": "e", "id": number, "ts": end_us}]
        else:
            events.append(event | {"ph": "X", "dur": end_us - begin_us})
    about = {"job": found.job, "step": found.step, "every": found.every, "begin_unix_s": found.begin_unix_s}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def summary(found: pb.StepTrace) -> dict[str, dict[str, float]]:
    """Per kind of span: the number, the usual and the longest duration in seconds."""
    durations: dict[str, list[float]] = {}
    for span in found.spans:
        kind = "average" if span.name.startswith("average ") else span.name
        durations.setdefault(kind, []).append(span.duration_s)
    return {
        kind: {"spans": len(found), "median_s": median(found), "longest_s": max(found)}
        for kind, found in durations.items()
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def summary_table(parts: dict[str, dict[str, float]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("PART", "SPANS", "MEDIAN", "LONGEST"):
        table.add_column(name, justify="left" if name == "PART" else "right")
    for kind, numbers in parts.items():
        table.add_row(kind, f"{numbers['spans']:g}", _ms(numbers["median_s"]), _ms(numbers["longest_s"]))
    return table
