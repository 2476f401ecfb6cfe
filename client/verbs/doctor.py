"""`swarm doctor`: finds, from this machine, what keeps a swarm from working, and names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from client.connection import dial, identity_for
from client.doctor import probes, rules
from client.doctor.bundle import write_bundle
from client.doctor.rules import Finding, Grade
from client.shell import Shell
from client.transfer.submission import check
from client.views import job_values, peer_values
from swarm.errors import SwarmError
from swarm.job.spec import load_job

JOBS_IN_BUNDLE = 50
_STYLE = {Grade.OK: "green", Grade.WARNING: "yellow", Grade.FAILED: "red", Grade.SKIPPED: "dim"}


def doctor(
    context: typer.Context,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Where a stage server here would listen: the scheduler dials it.")
    ] = probes.LISTEN_PORT,
    broker: Annotated[str, typer.Option(metavar="URL", help="Also look for this broker.", show_default=False)] = "",
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also check this job file and its data.", show_default=False)
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="ZIP", help="Write it all into a file for somebody who helps; no secrets."),
    ] = None,
) -> int:
    """Look at this machine, the scheduler, the stage servers and the ways between them, and say what to do. Exit code 1
    if something fails."""
    shell: Shell = context.obj
    findings: list[Finding] = []
    swarm: dict[str, Any] = {}
    for finding in _all(shell, port, broker, job, swarm):
        findings.append(finding)
        if not shell.json:
            _show(shell, finding)
    values = [finding_values(finding) for finding in findings]
    if bundle is not None:
        write_bundle(bundle, values, probes.environment(), swarm)
        shell.say(f"written to {bundle}")
    if shell.json:
        shell.data(values)
    count = sum(finding.verdict is Grade.FAILED for finding in findings)
    if not shell.json:
        shell.say("nothing fails" if not count else f"{count} of {len(findings)} fail")
    return 1 if count else 0


def finding_values(finding: Finding) -> dict[str, Any]:
    """A finding as JSON values."""
    return {
        "check": finding.check,
        "verdict": finding.verdict.value,
        "text": finding.text,
        "hint": finding.hint or None,
        "numbers": dict(finding.numbers),
    }


def _all(shell: Shell, port: int, broker: str, job: Path | None, swarm: dict[str, Any]) -> Iterator[Finding]:
    """Each finding as it is made; `swarm` is filled with the scheduler's answers about jobs and stage servers."""
    yield from probes.machine()
    if job is not None:
        yield from probes.guarded("job file", _job(job))
    if broker:
        yield probes.broker(broker)
    yield (found := probes.name(shell.scheduler))
    if found.verdict is Grade.FAILED:
        return
    try:
        identity = identity_for(shell)
        scheduler = dial(shell)
    except SwarmError as error:
        yield rules.not_asked(error)
        return
    with scheduler:
        try:
            answer = scheduler.check_protocol()
        except SwarmError as error:
            yield rules.of_error("scheduler", error)
            return
        yield rules.ok("scheduler", f"{shell.scheduler} answers: version {answer.product}, epoch {answer.epoch}")
        yield from probes.guarded("network", probes.network(scheduler, identity, port))
        yield from probes.guarded("swarm", probes.swarm(scheduler))
        with suppress(SwarmError):  # which is among the findings
            views, troubles = scheduler.jobs(all=True, limit=JOBS_IN_BUNDLE)
            swarm["jobs"] = [job_values(view) for view in views]
            swarm["peers"] = [peer_values(view) for view in scheduler.peers()]
            swarm["troubles"] = troubles


def _job(path: Path) -> Iterator[Finding]:
    spec, corpus = check(load_job(path))
    yield rules.ok("job file", f"{path}: {spec.name}, {len(corpus.sources)} data files")


def _show(shell: Shell, finding: Finding) -> None:
    line = Text.assemble((f"{finding.verdict:<8}", _STYLE[finding.verdict]), f" {finding.check:<21} ", finding.text)
    shell.out.print(line, soft_wrap=True)
    if finding.hint and finding.verdict is not Grade.OK:
        shell.out.print(Text(f"{'':<31}{finding.hint}", style="dim"), soft_wrap=True)
