"""`python -m scheduler.planning`, also `swarm plan`: how to cut a job, and which peer serves which stage."""

from __future__ import annotations

from swarm.process.startup import quiet_start

with quiet_start():
    import json
    import os
    import subprocess
    import sys
    import time
    from dataclasses import replace
    from datetime import UTC, date, datetime
    from pathlib import Path
    from typing import Annotated, Literal

    import typer

    from scheduler.planning import islands, planner
    from scheduler.planning.picture import picture as drawing
    from scheduler.planning.plan import Plan, document, read_plan
    from scheduler.planning.planner import cut_as, plan_of
    from scheduler.planning.pool import PeerPool, read_pool
    from scheduler.planning.search import EFFORT, Search
    from scheduler.planning.table import lines
    from swarm.errors import INTERRUPTED, InvalidConfig, SwarmError, UsageError
    from swarm.hf.pretrained import ground
    from swarm.job.spec import JobSpec, load_job
    from swarm.process import lifecycle
    from swarm.text import counted

MEASURED_DAYS_MAX = 7  # of links; older ones are warned of
SAYS_EVERY_S = 0.5

cli = lifecycle.program()


@cli.command()
def plan(
    file: lifecycle.JobFile,
    pool: Annotated[
        Path | None,
        typer.Option(
            "--pool",
            metavar="FILE",
            help="The machines (TOML); if left out, what swarm peers pool says of the scheduler's.",
        ),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Whose stage servers to plan for.", show_default=False)
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            "--profile", "-p", metavar="NAME", help="Take the scheduler from [profile.NAME] of the config file."
        ),
    ] = "",
    overrides: lifecycle.JobChanges = None,
    by: Annotated[
        Literal["speed", "price"], typer.Option(help="What is sought: most tokens per second, or per money.")
    ] = "speed",
    seed: Annotated[
        int, typer.Option(min=0, help="Of the search, not of islands; equal facts and seeds give equal plans.")
    ] = 0,
    effort: Annotated[int, typer.Option(min=1, max=10**8, help="How many placements are compared at most.")] = EFFORT,
    compare: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Say how much better this is than another plan of the job.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg", help="Also draw the plan.", show_default=False)
    ] = None,
    output: Annotated[
        Literal["table", "json"], typer.Option("--output", "-o", help="json: the plan as a document.")
    ] = "table",
) -> None:
    """Say how a job is best cut and placed on a pool of machines, and how fast it would be. It creates nothing."""
    spec = ground(load_job(file, overrides or ()))
    if spec.has_outer_steps and picture is not None:
        raise InvalidConfig("a plan of islands has no picture", hint="leave --picture out")
    if spec.has_outer_steps and by == "price":
        raise UsageError("islands are planned for speed alone", hint="leave --by price out")
    machines = read_pool(pool) if pool is not None else _known(scheduler, profile)
    _warn_of_age(machines)
    if picture is not None:
        _check_writable(picture)
    before = _plan_to_compare(compare, machines, spec)
    try:
        if spec.has_outer_steps:
            chosen = islands.best(machines, spec, say=_say)
        else:
            chosen = _found(Search(machines, spec, seed=seed, effort=effort, by_price=by == "price"))
            if not chosen.is_stopped and by == "speed":
                chosen = _with_advice(machines, spec, chosen)
        if before is not None:
            chosen = _compared(machines, spec, compare, before, chosen)
    finally:
        _say("")
    resolved = cut_as(machines, spec, chosen)
    if output == "json":
        print(json.dumps(document(chosen, spec.name), indent=2))
    else:
        print(*lines(machines, resolved, chosen), sep="\n")
    if picture is not None:
        _write(picture, drawing(machines, resolved, chosen))
    if chosen.is_stopped:
        raise typer.Exit(INTERRUPTED)


def _known(scheduler: str, profile: str) -> PeerPool:
    """What the scheduler knows of its stage servers. The client asks it, as it has the user's certificate; it says
    itself what is wrong."""
    asks = [sys.executable, "-P", "-m", "client", "peers", "pool"]
    asks += [word for flag in (("--scheduler", scheduler), ("--profile", profile)) if flag[1] for word in flag]
    done = subprocess.run(asks, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    if "[[peer]]" not in done.stdout:
        raise InvalidConfig("no stage servers are here", hint="start some: swarm stage-server; or give --pool FILE")
    if "\nspeed = " not in done.stdout:
        told = "the stage servers have not measured themselves yet: they do once they have been idle for 10 s"
        raise InvalidConfig(told, hint="wait, and look with: swarm peers; or give --pool FILE")
    return read_pool(Path("swarm peers pool"), done.stdout)


def _found(search: Search) -> Plan:
    """The plan after a search and plays, or after Ctrl-C the best so far. Progress goes to a terminal."""
    said_s = time.monotonic()
    try:
        for _ in search.run():
            if time.monotonic() - said_s > SAYS_EVERY_S:
                said_s = time.monotonic()
                _say(f"planning: {search.spent} of {search.effort} placements")
        _say("playing the best plans")
    except KeyboardInterrupt:
        if not search.found:
            raise
    return plan_of(search, plays=search.is_done)


def _with_advice(pool: PeerPool, spec: JobSpec, chosen: Plan) -> Plan:
    """The plan with what islands would bring."""
    _say("comparing with islands")
    first, *others = chosen.reasons
    try:
        told = islands.beside(pool, spec, chosen)
    except KeyboardInterrupt:
        return replace(chosen, reasons=(*chosen.reasons, "stopped: before islands were compared"))
    return replace(chosen, reasons=(first, f"islands: {told}", *others)) if told else chosen


def _say(text: str) -> None:
    """Progress, in the place of what was said before; only a terminal shows it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _check_writable(path: Path) -> None:
    """Before a long search; what is there stays as it is."""
    is_new = not os.path.lexists(path)
    _write(path, "", "a")
    if is_new:
        path.unlink()


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error.strerror}", hint="choose another --picture") from None


def _warn_of_age(pool: PeerPool) -> None:
    """Of links; InvalidConfig if they are still to be measured, by more than a time zone."""
    if not pool.measured:
        return
    days = (datetime.now(UTC).date() - date.fromisoformat(pool.measured)).days
    if days < -1:
        raise InvalidConfig(f"measured = {pool.measured} is in the future", hint="write the day of the measurement")
    if days > MEASURED_DAYS_MAX:
        print(f"warning: the links were measured {counted(days, 'day')} ago", file=sys.stderr)


def _plan_to_compare(path: Path | None, pool: PeerPool, spec: JobSpec) -> Plan | None:
    """The plan in a file with the facts of now; InvalidConfig unless it is of this job and the pool has its peers."""
    if path is None:
        return None
    before = read_plan(path, spec)
    if gone := sorted(before.peers - {peer.name for peer in pool.peers}):
        print(f"warning: the pool lacks {', '.join(gone[:8])} of {path}", file=sys.stderr)
    try:
        return islands.again(pool, spec, before) if spec.has_outer_steps else planner.again(pool, spec, before)
    except SwarmError as error:
        error.message = f"{path}: {error.message}"
        raise


def _compared(pool: PeerPool, spec: JobSpec, path: Path | None, before: Plan, chosen: Plan) -> Plan:
    """The plan with how much better it is than the one before."""
    assert chosen.predicted is not None
    play = islands.played if spec.has_outer_steps else planner.played
    stopped = replace(chosen, reasons=(*chosen.reasons, f"stopped: before {path} was compared"))
    if chosen.is_stopped:
        return stopped
    _say(f"playing {path}")
    try:
        then = play(pool, spec, before) if chosen.predicted.by == "played" else before
    except KeyboardInterrupt:
        return stopped
    assert then.predicted is not None
    moved = sum(
        name not in chosen.places[stage] if stage < len(chosen.places) else True
        for stage, place in enumerate(before.places)
        for name in place
    )
    more = 100.0 * (chosen.predicted.tokens_per_s / then.predicted.tokens_per_s - 1.0)
    told = (
        f"compared: {path}: {counted(len(then.places), 'stage')}, {then.predicted.tokens_per_s:,.0f} tokens/s; "
        f"this plan {more:+.0f} %, with {counted(moved, 'peer')} elsewhere"
    )
    return replace(chosen, reasons=(*chosen.reasons, told))


if __name__ == "__main__":
    lifecycle.run_cli(cli, "swarm plan")
