"""Plans of jobs with islands, and what islands would bring to a job without.

    T   what islands train in a step: an island's part of it / λ, and what takes as long for any part (bound.py). Where
        leases follow speed, all islands end together; else all wait for the slowest
    X   an exchange: all proposals over the busiest line or link, and a commit

    step = T + exchanges in a step · max(0, X - overlap_steps · T)

Only the number of stages is sought: islands are at sites as a scheduler places them, which moves no stage server of an
island. The best by this bound are played. Of a long period a shorter one is played; what it takes beyond its steps is
what its exchanges cost. Where even the shortest has many hops, one plan is played once. A plan whose exchange takes
longer than any job may wait is not played.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
from statistics import mean

from scheduler.planning import planner
from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan, Predicted, facts_hash, predicted_by_bound, rounded, spoken_s
from scheduler.planning.planner import cut_as, numbers_of
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool
from scheduler.planning.search import basis_of
from swarm.errors import InvalidConfig, OutOfMemory, SwarmError
from swarm.job.islands import check_for_swarm, island_spec
from swarm.job.partition import unit_names
from swarm.job.resolve import PROPOSAL_BYTES, choose
from swarm.job.spec import JobSpec
from swarm.text import counted

STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # that are tried
PLAYED_MAX, SEEDS, NEXT_MAX = 3, 2, 4  # plans that are played; how often each; others that are named
HOPS = 3000  # of a play, about
PERIODS = 3  # of a play; in the first leases begin to follow speed, and it is not measured
SHORTEST = 4  # steps of a period that is played
TIMEOUT_S_MAX = 3600.0  # of averaging.timeout_s
PATIENCE = 5.0  # times averaging.timeout_s: limits.no_progress_s
WORTH = 1.3  # times as fast: then what islands cost in loss may be worth it


def best(pool: PeerPool, spec: JobSpec, *, plays: bool = True, say: Callable[[str], None] = lambda text: None) -> Plan:
    """The plan of a job with islands; InvalidConfig, or what a scheduler would refuse it with.

    Without `plays` it is the best by the bound. `say` hears what is played. After a KeyboardInterrupt it is the best of
    those that were played, if any was.
    """
    plans, stopped = _bounded(pool, spec), tuple[str, ...]()
    try:
        for number, plan in enumerate(plans[: PLAYED_MAX if plays else 0]):
            if number and (_cost(plan) > min(map(_cost, plans[:number])) or _is_long(pool, spec, plan)):
                break  # neither this nor a later one is better by the bound, or it takes too long to know
            say(f"playing {plan.islands} islands of {counted(len(plan.split), 'stage')}")
            plans[number] = played(pool, spec, plan)
    except KeyboardInterrupt:
        stopped = (f"stopped: before the plan of {counted(len(plan.split), 'stage')} was played",)
    chosen, *others = sorted(plans, key=lambda plan: (_is_by_bound(plan), _cost(plan)))
    told = [f"{counted(len(plan.split), 'stage')} {_told(plan)}" for plan in others[:NEXT_MAX]]
    return replace(chosen, reasons=(*chosen.reasons, *([f"next best: {'; '.join(told)}"] if told else []),
                                    *(f"assumed: {text}" for text in pool.assumed), *stopped))  # fmt: skip


def beside(pool: PeerPool, spec: JobSpec, chosen: Plan) -> str:
    """What islands would bring to a job that averages every step; empty if no two sites can serve it alone."""
    try:
        asked = spec.having("averaging", mode="diloco")
        first = _bounded(pool, asked)[0]
    except (InvalidConfig, OutOfMemory):
        return ""
    if first.islands == 1:
        return ""
    if not _is_by_bound(chosen) and not _is_long(pool, asked, first):
        first = played(pool, asked, first)
    against = chosen if _is_by_bound(chosen) == _is_by_bound(first) else planner.again(pool, spec, chosen)
    times = _cost(against) / _cost(first)
    costs = "docs/islands.md says what they cost in loss" if times >= WORTH else "not worth what they cost in loss"
    job = cut_as(pool, asked, first)
    short = _too_short(job, _exchange_s(pool, job, first.places))
    told = f'{first.islands} with averaging.mode = "diloco": {_told(first)}, {times:.2f} times this plan'
    return f"{told}{'' if against is chosen else ' by the bound'}; {costs}{short and f'; {short}'}"


def again(pool: PeerPool, spec: JobSpec, before: Plan) -> Plan:
    """Another plan with the facts of now; InvalidConfig if it is of other islands."""
    job = cut_as(pool, spec, before)
    if job.island_count != before.islands or not before.peers <= {peer.name for peer in pool.peers}:
        raise InvalidConfig("the plan is of other islands, or the pool lacks its peers", hint="make a new plan")
    return _plan(pool, spec, job, before.places)


def played(pool: PeerPool, spec: JobSpec, plan: Plan) -> Plan:
    """The plan with what plays of it show, in the place of what the bound predicts, as if no exchange took too long."""
    job = cut_as(pool, spec, plan)
    if _exchange_s(pool, job, plan.places) > TIMEOUT_S_MAX:
        return plan
    every, (period, is_long) = int(job.outer.every_steps), _period(job)
    short = job.having("outer", every_steps=period).having("averaging", timeout_s=TIMEOUT_S_MAX)
    short = short.having("training", steps=job.training.steps + (PERIODS + 1) * period)
    load = workload(CutBound(pool, island_spec(short)), short)
    rules, steps_s, idle = PlayRules(warm_up=period, measured=(PERIODS - 1) * period), list[float](), list[float]()
    for seed in range(1 if is_long else SEEDS):
        play = Play(pool, plan, load, rules, seed)
        idle.append(max(0.0, play.run().idle_ratio))
        ends_s = play.committed_s[period - 1 : PERIODS * period]
        train_s = min(later_s - earlier_s for earlier_s, later_s in pairwise(ends_s))  # others wait for an exchange
        for begin_s, end_s in pairwise(ends_s[::period]):
            steps_s.append(train_s + ((end_s - begin_s) / period - train_s) * period / every)
    step_s, price = mean(steps_s), plan.predicted.price_per_hour if plan.predicted else None
    spread = (max(steps_s) - min(steps_s)) / 2.0 / step_s
    rate = load.step_tokens / step_s
    predicted = Predicted("played", rounded(rate), rounded(step_s), rounded(mean(idle)), price, rounded(spread))
    return replace(plan, predicted=predicted)


def _period(job: JobSpec) -> tuple[int, bool]:
    """The steps of a period as it is played, and whether even the fewest make a long play."""
    hops, every = job.training.microbatches * len(job.split), int(job.outer.every_steps)
    shortest = min(every, max(SHORTEST, int(job.outer.fragments) * int(job.outer.overlap_steps) + 1))
    return min(every, max(shortest, HOPS // (PERIODS * hops))), PERIODS * shortest * hops > HOPS


def _is_long(pool: PeerPool, spec: JobSpec, plan: Plan) -> bool:
    return _period(cut_as(pool, spec, plan))[1]


def _bounded(pool: PeerPool, spec: JobSpec) -> list[Plan]:
    """A plan for each number of stages that can be, as the bound predicts it, the fastest first."""
    is_open = spec.pipeline.stages == spec.pipeline.split == "auto"
    basis, plans, refused = basis_of(pool, spec), list[Plan](), list[SwarmError]()
    sizes = Counter(peer.site for peer in pool.peers)
    most = min(spec.stages_max, len(pool.peers) if "" in sizes else max(sizes.values()))
    for stages in [stages for stages in STAGES if stages <= most] if is_open else [0]:
        try:
            job = choose(spec.having("pipeline", stages=stages) if stages else spec, basis)[0]
            check_for_swarm(job)
        except SwarmError as error:
            refused.append(error)
            continue
        placed = workload(CutBound(pool, island_spec(job)), job).placed(pool.peers)
        if placed.plan is None:
            refused.append(InvalidConfig(f"the job cannot begin: {placed.reason}", hint="add peers to the pool"))
            continue
        count = len(job.split) * job.island_count
        places = tuple(tuple(name for name, at in placed.plan.items() if at == number) for number in range(count))
        plans.append(_plan(pool, spec, job, places))
    if not plans:
        raise refused[0]
    return sorted(plans, key=_cost)


def _plan(pool: PeerPool, spec: JobSpec, job: JobSpec, places: tuple[tuple[str, ...], ...]) -> Plan:
    """The plan with what the bound predicts, and why."""
    outer, size, stages = job.outer, job.training.microbatch_sequences, len(job.split)
    assert size != "auto", "it is resolved"
    facts = CutBound(pool, island_spec(job.having("islands", shares="equal")))
    train_s, parts = _train(job, facts, numbers_of(pool, places))
    exchange_s = _exchange_s(pool, job, places)
    waits_s, times = max(0.0, exchange_s - int(outer.overlap_steps) * train_s), int(outer.fragments)
    step_s = train_s + waits_s * times / int(outer.every_steps)
    used = [pool.peer(name) for place in places for name in place]
    tokens = job.training.global_batch_sequences * job.data.sequence_length
    sites = [pool.peer(place[0]).site or f"island {at}" for at, place in enumerate(places[::stages])]
    leased = ", ".join(f"{site} {part:.0%}" for site, part in zip(sites, parts, strict=True))
    often = "once" if times == 1 else f"{times} times"
    reasons = [
        f"leases: of a step of {spoken_s(train_s)} {leased}",
        f"exchange: {spoken_s(exchange_s)} by the bound, {often} in {outer.every_steps} steps; "
        f"islands wait {spoken_s(waits_s)} for each",
    ] if sites[1:] else []  # fmt: skip
    if short := _too_short(job, exchange_s):
        reasons.append(f"too short: {short}")
    return Plan(
        *(job.split, places, size, job.overlap, bool(job.model.recompute)),
        predicted=predicted_by_bound(used, tokens, sum(facts.flops), step_s),
        reasons=tuple(reasons),
        facts_hash=facts_hash(pool, spec),
    )


def _train(job: JobSpec, facts: CutBound, numbers: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Seconds of a step without exchanges, and the part of it that each island trains."""
    stages, whole, own = len(job.split), job.training.microbatches, facts.spec.training.microbatches
    bounds = [facts.of(numbers[first : first + stages]) for first in range(0, len(numbers), stages)]
    if job.islands.shares != "speed":
        return max(bound.step_s for bound in bounds), [1.0 / len(bounds)] * len(bounds)
    fixed_s = [bound.step_s - own / bound.microbatches_per_s for bound in bounds]
    rates = [bound.microbatches_per_s for bound in bounds]
    train_s = (whole + sum(rate * for_s for rate, for_s in zip(rates, fixed_s, strict=True))) / sum(rates)
    parts = [max(1.0, rate * (train_s - for_s)) / whole for rate, for_s in zip(rates, fixed_s, strict=True)]
    return train_s, [part / sum(parts) for part in parts]


def _exchange_s(pool: PeerPool, job: JobSpec, places: Sequence[Sequence[str]]) -> float:
    """Seconds of an exchange between one envoy of each stage of each island: the busiest line or link, and the ways.

    One of the stages that hold a tied embedding sends it to both of the others.
    """
    stages, count, facts = len(job.split), job.island_count, CutBound(pool, island_spec(job))
    width = 8.0 * PROPOSAL_BYTES[job.outer.compression] / int(job.outer.fragments)
    carried, delay_s = defaultdict[tuple[str, str], float](float), 0.0
    held = zip(unit_names(stages, facts.spec.tied).values(), facts.unit_parameters, strict=False)
    sent = [(*ways, parameters) for at, parameters in held for ways in product(at[:1], at)]
    for island, other in permutations(range(count), 2):
        for stage, to, parameters in sent:
            a, b = pool.peer(places[island * stages + stage][0]), pool.peer(places[other * stages + to][0])
            link, bits, ends = pool.link(a, b), width * parameters, (pool.end_of(a), pool.end_of(b))
            carried[a.name, "up"] += bits / a.up_bits_per_s
            carried[b.name, "down"] += bits / b.down_bits_per_s
            carried[ends if ends[0] != ends[1] else (a.name, b.name)] += bits / link.bits_per_s
            delay_s = max(delay_s, link.delay_s)
    return max(carried.values(), default=0.0) + 3.0 * delay_s + facts.commit_s


def _too_short(job: JobSpec, exchange_s: float) -> str:
    """What time limits end an exchange, and what to set; empty if none does."""
    if exchange_s <= (limit_s := job.averaging.timeout_s):
        return ""
    told = f"averaging.timeout_s = {limit_s:g}: an exchange of {spoken_s(exchange_s)} would not come to its end"
    if exchange_s > TIMEOUT_S_MAX:
        return f"{told}, and {TIMEOUT_S_MAX:g} is the most"
    longer_s = min(TIMEOUT_S_MAX, math.ceil(2.0 * exchange_s))
    no_progress_s = max(job.limits.no_progress_s, PATIENCE * longer_s)
    return f"{told}; set it to {longer_s:g}, and limits.no_progress_s to {no_progress_s:g}"


def _is_by_bound(plan: Plan) -> bool:
    assert plan.predicted is not None
    return plan.predicted.by == "bound"


def _told(plan: Plan) -> str:
    return f"{1.0 / _cost(plan):,.0f} tokens/s {'by the bound' if _is_by_bound(plan) else '(played)'}"


def _cost(plan: Plan) -> float:
    """Seconds for a token."""
    assert plan.predicted is not None
    return 1.0 / plan.predicted.tokens_per_s
