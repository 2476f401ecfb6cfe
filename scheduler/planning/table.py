"""The plan as a person reads it: a line, a row for each stage, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan, spoken_s
from scheduler.planning.planner import numbers_of
from scheduler.planning.pool import PeerPool
from swarm.job.islands import island_spec
from swarm.job.spec import JobSpec
from swarm.text import counted, size

NAMES_MAX = 3  # peers of a stage that are named; of more, it is said how many are at which site
HEAD = ("stage", "layers", "peers", "memory", "capacity", "limits", "averaging", "sends per step")


def lines(pool: PeerPool, spec: JobSpec, plan: Plan) -> Iterator[str]:
    """The lines to print; `spec` is the job as the plan cuts it."""
    yield headline(pool, plan)
    facts = CutBound(pool, island_spec(spec.having("islands", shares="equal")))
    rows = [HEAD, *(_row(pool, facts, plan.islands > 1, *place) for place in enumerate(numbers_of(pool, plan.places)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    before = ""
    for reason in (*plan.reasons, *([f"measured: links on {pool.measured}"] if pool.measured else ())):
        title, _, text = reason.partition(": ")
        yield f"{title if title != before else '':<11}{text}"
        before = title


def headline(pool: PeerPool, plan: Plan) -> str:
    """The plan in one line."""
    predicted = plan.predicted
    assert predicted is not None
    idle, how = "", "its first steps played"
    if predicted.idle_ratio is not None:
        idle = f", idle {100 * predicted.idle_ratio:.0f} %"
        how = "by the bound" if predicted.by == "bound" else f"played, ±{max(1.0, 100 * predicted.spread):.0f} %"
    price = "" if predicted.price_per_hour is None else f", {predicted.price_per_hour:,.2f} per hour"
    return (
        f"{cut(plan)}, "
        f"{len(plan.peers)} of {counted(len(pool.peers), 'peer')}: {predicted.tokens_per_s:,.0f} tokens/s ({how}), "
        f"step {spoken_s(predicted.step_s)}{idle}{price}"
    )


def cut(plan: Plan) -> str:
    """How a plan cuts the job."""
    runs = [(layers, len(list(run))) for layers, run in groupby(plan.split)]
    split = " + ".join(
        f"{count} x {layers}" if count > 2 else " + ".join([str(layers)] * count) for layers, count in runs
    )
    late = f" ({plan.overlap} of a step late)" if plan.overlap else ""
    islands = f"{counted(plan.islands, 'island')} of " if plan.islands > 1 else ""
    return (
        f"{islands}{counted(len(plan.split), 'stage')} of {split} layers, "
        f"microbatches of {counted(plan.microbatch_sequences, 'sequence')}{late}"
        f"{', forward computed again for backward' if plan.recompute else ''}"
    )


def _row(pool: PeerPool, facts: CutBound, several: bool, place: int, members: Sequence[int]) -> tuple[str, ...]:
    island, stage = divmod(place, len(facts.split))
    peers = [pool.peers[member] for member in members]
    names = [peer.name for peer in peers]
    if names[NAMES_MAX:]:
        names = [f"{site or 'peers'} {count}" for site, count in sorted(Counter(peer.site for peer in peers).items())]
    figures, least = facts.figures(stage, members), min(peer.offer for peer in peers)
    computes = sum(1.0 / facts.compute_s[member, stage] for member in members)
    return (
        f"{stage} of island {island}" if several else str(stage),
        str(facts.split[stage]),
        ", ".join(names),
        f"{size(facts.needs[stage].total_bytes)} of {size(least.total_bytes) if least.total_bytes else '?'}",
        f"{figures.rate:.3g} microbatches/s",
        "compute" if figures.rate > 0.99 * computes else "lines",
        spoken_s(figures.unit_s),
        size(facts.sent_bytes(stage, len(members))),
    )
