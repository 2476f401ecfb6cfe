"""`python -m scheduler.planning.simulate`, also `swarm simulate`: hours of a job in a pool whose peers die."""

from __future__ import annotations

from swarm.process.startup import quiet_start

with quiet_start():
    import json
    import math
    import re
    import sys
    import time
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping
    from dataclasses import dataclass, replace
    from pathlib import Path
    from typing import Annotated, Any, Literal

    import typer

    from scheduler.planning.bound import CutBound
    from scheduler.planning.plan import Plan, read_plan, rounded
    from scheduler.planning.play import Play, Workload, workload
    from scheduler.planning.pool import PeerPool, read_pool
    from scheduler.planning.search import basis_of
    from scheduler.planning.stages import cut_of
    from scheduler.planning.table import cut
    from scheduler.planning.trace import Churn, TraceEvent, read_trace, spans
    from swarm.errors import INTERRUPTED, InvalidConfig, UsageError
    from swarm.hf.pretrained import ground
    from swarm.job.islands import check_for_swarm, island_spec
    from swarm.job.spec import JobSpec, load_job
    from swarm.process import lifecycle
    from swarm.text import counted

SCHEMA = "swarm.simulation/1"
REASONS_SHOWN = 10
COUNTED = ("deaths", "joins", "moves", "islands_lost", "stalls", "recuts", "steps_done_again")
FORMATS = {"of_possible": "{:.1%}", "price": "{:,.6g} in the currency of the pool"}
SAYS_EVERY_S = 0.5

cli = lifecycle.program()


@dataclass(frozen=True, slots=True)
class Simulation:
    """A job that is resolved for a pool, where it begins, and what happens to the peers."""

    pool: PeerPool
    load: Workload
    plan: Plan
    placed: str  # by whom
    trace: Iterable[TraceEvent]
    seed: int

    def run(self, hours: float, progress: Callable[[float], None]) -> dict[str, Any]:
        """The figures of so many hours; of fewer after a KeyboardInterrupt."""
        load, end_s = self.load, 3600.0 * hours
        if load.islands is not None:  # it shall not come to its end
            training, speed = load.islands.training, sum(peer.speed for peer in self.pool.peers)
            steps = math.ceil(end_s * speed / sum(load.work) / training.microbatches) + training.steps
            load = replace(load, job=load.islands.having("training", steps=steps))
        play = Play(self.pool, self.plan, load, seed=self.seed)
        try:
            play.follow(self.trace)
            play.run_until(end_s, progress)
        except KeyboardInterrupt:
            end_s = max(1.0, play.now_s)
        possible, price = 0.0, 0.0
        for seconds, peers in spans(self.pool, self.trace, end_s):
            possible += seconds * sum(peer.speed for peer in peers) * load.tokens / sum(load.work)
            price += seconds / 3600.0 * sum(peer.price_per_hour or 0.0 for peer in peers)
        is_priced = all(peer.price_per_hour is not None for peer in self.pool.peers)
        done, by_hour = 0, Counter[int]()
        for at_s, tokens in play.made.values():
            done, by_hour[int(at_s // 3600.0)] = done + tokens, by_hour[int(at_s // 3600.0)] + tokens
        hours_s = [min(3600.0, end_s - begin_s) for begin_s in range(0, math.ceil(end_s), 3600)]
        kinds, firsts = Counter[str](), dict[str, str]()
        for reason, times in play.reasons.items():  # of one kind, whatever names and numbers are in it
            words = re.split(r"([\w.-]+)", reason)
            kind = "".join(word for word in words if word not in self.pool and not re.search(r"\d", word))
            kinds[kind] += times
            firsts.setdefault(kind, reason)
        return {
            "hours": rounded(end_s / 3600.0),
            "tokens_per_s": rounded(done / end_s),
            "of_possible": rounded(done / possible) if possible else 0.0,
            "steps": len(play.committed_s),
            **{what: play.counts[what] for what in COUNTED},
            "price": rounded(price) if is_priced else None,
            "tokens_per_s_by_hour": [rounded(by_hour[hour] / lasts_s) for hour, lasts_s in enumerate(hours_s)],
            "cut": f"{cut(self.plan)}, placed {self.placed}",
            "reasons": [[times, firsts[kind]] for kind, times in kinds.most_common(REASONS_SHOWN)],
        }


def simulation(
    pool: PeerPool, spec: JobSpec, trace: Iterable[TraceEvent], seed: int, planned: Plan | None = None
) -> Simulation:
    """The job as a scheduler resolves it, placed by a plan of that cut or by itself; InvalidConfig if it cannot be."""
    resolved, _ = cut_of(spec, pool, basis_of(pool, spec))
    split, sequences = resolved.split, resolved.training.microbatch_sequences
    assert sequences != "auto", "it was resolved"
    check_for_swarm(resolved)
    load = workload(CutBound(pool, island_spec(resolved)), resolved)
    least, placed = resolved.limits.min_replicas, "by the plan"
    count = len(split) * resolved.island_count
    places: tuple[tuple[str, ...], ...] = ()
    if planned is not None and planned.split == split and len(planned.places) == count:
        places = tuple(tuple(name for name in names if name in pool) for names in planned.places)
    if min(map(len, places), default=0) < least:
        found, placed = load.placed(pool.peers), "by the scheduler"
        if found.plan is None:
            hint = "add peers to the pool, or lower pipeline.stages"
            raise InvalidConfig(f"the job cannot begin: {found.reason}", hint=hint)
        places = tuple(tuple(name for name, at in found.plan.items() if at == number) for number in range(count))
    plan = Plan(split, places, sequences, resolved.overlap, bool(resolved.model.recompute))
    return Simulation(pool, load, plan, placed, trace, seed)


@cli.command()
def simulate(
    file: lifecycle.JobFile,
    pool: Annotated[Path, typer.Option("--pool", metavar="FILE", help="The machines (TOML), as for swarm plan.")],
    hours: Annotated[float, typer.Option(min=0.01, max=8784.0, help="How many hours to play.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="When peers come, leave and die (swarm.trace/1).")
    ] = None,
    churn: Annotated[
        float,
        typer.Option("--churn", min=0.0, max=60.0, help="How often a peer dies in an hour, on average; it comes back."),
    ] = 0.0,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="Begin as this plan says.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other deaths and computing times.")] = 0,
    overrides: lifecycle.JobChanges = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="KEY=VALUE", help="Simulate the job also with this value changed."),
    ] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="json: the figures.")] = "table",
) -> None:
    """Predict how a job does for some hours while machines fail, by a trace or by chance. It creates nothing.

    The scheduler's own decisions are played, microbatch by microbatch, with modelled stage servers.
    """
    if trace is not None and churn:
        raise UsageError("--trace and --churn: deaths come from one of them", hint="leave one out")
    for change, times in Counter(also := also or []).items():
        key, equals, _ = change.partition("=")
        if not equals or not all(key.strip().split(".")):
            hint = "for example: --also pipeline.overlap=0"
            raise UsageError(f'--also needs KEY=VALUE, got "{change}"', hint=hint)
        if times > 1:
            raise UsageError(f"--also {change} is given {counted(times, 'time')}", hint="give it once")
    machines = read_pool(pool)
    events = Churn(machines, churn, seed) if trace is None else read_trace(trace, machines)
    changes = [[], *([change] for change in also)]
    planned, cut_as = None, dict[str, object]()
    if plan is not None:
        planned = read_plan(plan, ground(load_job(file, overrides or ())))
        cut_as = {"pipeline.stages": len(planned.split), "pipeline.split": planned.split}
        cut_as |= {"pipeline.overlap": planned.overlap}
        cut_as |= {"training.microbatch_sequences": planned.microbatch_sequences, "model.recompute": planned.recompute}
    shared = [*(f"{key}={json.dumps(value)}" for key, value in cut_as.items()), *(overrides or ())]
    specs = [ground(load_job(file, [*shared, *change])) for change in changes]
    ways = [simulation(machines, spec, events, seed, planned) for spec in specs]
    runs: dict[str, dict[str, Any]] = {}
    for name, way in zip((file.name, *also), ways, strict=True):
        runs[name] = way.run(hours, _progress(hours))
        if runs[name]["hours"] < rounded(hours):
            break  # Ctrl-C: what is known so far
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if output == "json":
        print(json.dumps({"schema": SCHEMA, "job": specs[0].name, "runs": runs}, indent=2))
    else:
        print(*_table(runs), sep="\n")
    if len(runs) < len(ways) or runs[name]["hours"] < rounded(hours):
        raise typer.Exit(INTERRUPTED)


def _progress(hours: float) -> Callable[[float], None]:
    """Says on a terminal how far a simulation is."""
    said_s = time.monotonic()

    def say(now_s: float) -> None:
        nonlocal said_s
        if sys.stderr.isatty() and time.monotonic() - said_s > SAYS_EVERY_S:
            said_s = time.monotonic()
            print(f"\rsimulated {now_s / 3600.0:.1f} of {hours:g} h", end="", file=sys.stderr, flush=True)

    return say


def _table(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The figures side by side, then the hours and reasons of the first."""
    first = next(iter(runs.values()))
    rows = [["", *runs]]
    for key in list(first)[:-3]:
        shape = FORMATS.get(key, "{:,.6g}")
        rows.append([key, *("not known" if run[key] is None else shape.format(run[key]) for run in runs.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    by_hour = " ".join(f"{rate:,.0f}" for rate in first["tokens_per_s_by_hour"])
    if not first["steps"]:
        lines.append(f"In these {first['hours']:g} hours no step was finished.")
    lines += [f"by hour  {by_hour}", *(f"cut      {name}: {run['cut']}" for name, run in runs.items())]
    return [
        *lines,
        "decisions, each kind with its first:",
        *(f"{times:>6} x {text}" for times, text in first["reasons"]),
    ]


if __name__ == "__main__":
    lifecycle.run_cli(cli, "swarm simulate")
