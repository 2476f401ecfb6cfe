"""From placements to the plan with its reasons, and what another plan would do with the same facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean

from scheduler.planning.bound import Bound, CutBound
from scheduler.planning.plan import Plan, Predicted, facts_hash, rounded
from scheduler.planning.play import RULES, Play, workload
from scheduler.planning.pool import PeerPool, PoolPeer
from scheduler.planning.search import TIE, Placement, Search, basis_of
from swarm.errors import InvalidConfig
from swarm.job.partition import microbatch_tokens
from swarm.job.resolve import choose
from swarm.job.spec import JobSpec
from swarm.text import bandwidth, counted, spoken_duration

PLAYS_MIN, PLAYS_MAX = 2, 6  # plans that are played
SEEDS = 2
LARGE = 500  # peers: of more, the best plan alone is played
LONG_STEP_HOPS = 1500  # of a step: 11 steps with two seeds take longer than a person waits
LEFT_OUT_MAX = 32  # peers of which the reason is looked for
NEXT_MAX = 4
AVERAGING_GROWS = 1.1  # by a peer: then its line is the reason why it is left out


def plan_of(search: Search, *, plays: bool = True) -> Plan:
    """The plan of what a search found so far, which must be something.

    With `plays` the best are played, as long as the bound of the next one is above what was played.
    """
    found = search.found
    plans = [_plan(search.pool, search.spec, CutBound(search.pool, one.spec), one.places) for one in found]
    costs = [_cost(plan, by_price=search.by_price) for plan in plans]  # by the bound, the least first
    shown = costs
    if plays:
        shown = []
        for number, plan in enumerate(plans[: PLAYS_MAX if len(search.pool.peers) <= LARGE else 1]):
            if number >= PLAYS_MIN and costs[number] > min(shown):
                break  # a play is no better than its bound, so neither this nor a later one is
            plans[number] = played(search.pool, search.spec, plan)
            shown.append(_cost(plans[number], by_price=search.by_price))
    first = next(number for number, cost in enumerate(shown) if cost <= min(shown) * (1.0 + TIE))
    plans.insert(0, plans.pop(first))
    found.insert(0, found.pop(first))
    best, plan = found[0], plans[0]
    facts = CutBound(search.pool, best.spec)
    reasons = [f"limits: {best.bound.limits}, {best.bound.microbatches_per_s:.3g} microbatches/s at best"]
    if alone := [str(stage) for stage, place in enumerate(best.places) if not place[1:]]:
        where = f"stage {', '.join(alone)}" if len(alone) < len(best.places) else "each stage"
        reasons.append(f"alone: one replica at {where}; limits.min_replicas = 2 plans for a loss")
    reasons += (f"left out: {text}" for text in _left_out(search.pool, facts, best))
    others = [*_next_best(plans), *_refused(search)]
    reasons += [f"next best: {'; '.join(others)}"] if others else []
    reasons += (f"assumed: {text}" for text in search.pool.assumed)
    if not search.is_done:
        reasons.append(f"stopped: after {search.spent} of {counted(search.effort, 'evaluation')}")
    return replace(plan, reasons=tuple(reasons), seed=search.seed)


def cut_as(pool: PeerPool, spec: JobSpec, plan: Plan) -> JobSpec:
    """The job resolved with the cut of a plan; InvalidConfig if that is of another model."""
    if sum(plan.split) != spec.layers:
        raise InvalidConfig(
            f"the plan is of a model of {counted(sum(plan.split), 'layer')}, this job has {spec.layers}",
            hint="compare plans of one job",
        )
    shaped = spec.having("pipeline", split=plan.split, stages=len(plan.split), overlap=plan.overlap)
    shaped = shaped.having("training", microbatch_sequences=plan.microbatch_sequences)
    return choose(shaped.having("model", recompute=plan.recompute), basis_of(pool, spec))[0]


def again(pool: PeerPool, spec: JobSpec, before: Plan) -> Plan:
    """Another plan with the facts of now, without peers that are gone; InvalidConfig if a stage has too few left."""
    places = tuple(tuple(name for name in place if name in pool) for place in before.places)
    lacking = [str(stage) for stage, place in enumerate(places) if len(place) < spec.limits.min_replicas]
    if lacking:
        raise InvalidConfig(f"the pool lacks the plan's peers of stage {', '.join(lacking)}", hint="make a new plan")
    return _plan(pool, spec, CutBound(pool, cut_as(pool, spec, before)), places)


def played(pool: PeerPool, spec: JobSpec, plan: Plan) -> Plan:
    """The plan with what plays of it show, in the place of what the bound predicts.

    A play of long steps has fewer of them.
    """
    assert plan.predicted is not None
    facts = CutBound(pool, cut_as(pool, spec, plan))
    load = workload(facts)
    is_long = load.microbatches * len(plan.split) > LONG_STEP_HOPS
    rules = replace(RULES, warm_up=2, measured=2) if is_long else RULES
    shown = [Play(pool, plan, load, rules, seed).run() for seed in range(SEEDS)]
    rates = [one.tokens_per_s for one in shown]
    rate = mean(rates)
    spread = (max(rates) - min(rates)) / 2.0 / rate
    idle, price = mean(one.idle_ratio for one in shown), plan.predicted.price_per_hour
    step_s = facts.spec.training.microbatches * load.tokens / rate
    predicted = Predicted("played", rounded(rate), rounded(step_s), rounded(idle), price, rounded(spread))
    return replace(plan, predicted=predicted)


def _cost(plan: Plan, *, by_price: bool) -> float:
    """What a search makes small, of a plan as it is predicted."""
    assert plan.predicted is not None
    price = plan.predicted.price_per_hour if by_price else 1.0
    assert price is not None, "the search refuses a pool without prices"
    return price / plan.predicted.tokens_per_s


def numbers_of(pool: PeerPool, places: Sequence[Sequence[str]]) -> list[list[int]]:
    """The numbers of the peers of each stage in the pool."""
    number = {peer.name: at for at, peer in enumerate(pool.peers)}
    return [[number[name] for name in place] for place in places]


def _plan(pool: PeerPool, spec: JobSpec, facts: CutBound, places: tuple[tuple[str, ...], ...]) -> Plan:
    """The plan with what the bound predicts; `facts.spec` is `spec` resolved."""
    resolved, numbers = facts.spec, numbers_of(pool, places)
    size, microbatches = resolved.training.microbatch_sequences, resolved.training.microbatches
    assert size != "auto", "it is resolved"
    step_s, tokens = facts.of(numbers).step_s, microbatches * microbatch_tokens(resolved)
    used = [pool.peers[one] for members in numbers for one in members]
    busy = tokens * sum(facts.flops) / step_s / sum(peer.speed for peer in used)
    prices = [peer.price_per_hour for peer in used if peer.price_per_hour is not None]
    price = rounded(sum(prices)) if len(prices) == len(used) else None
    predicted = Predicted("bound", rounded(tokens / step_s), rounded(step_s), rounded(max(0.0, 1.0 - busy)), price)
    return Plan(
        *(resolved.split, places, size, resolved.overlap, bool(resolved.model.recompute)),
        predicted=predicted,
        facts_hash=facts_hash(pool, spec),
    )


# Reasons --------------------------------------------------------------------------------------------------------------


def _left_out(pool: PeerPool, facts: CutBound, best: Placement) -> Iterator[str]:
    """Why peers are not in the plan, those with one reason together."""
    used = {name for place in best.places for name in place}
    numbers, reasons = numbers_of(pool, best.places), dict[str, list[str]]()
    aside = [(number, peer) for number, peer in enumerate(pool.peers) if peer.name not in used]
    for number, peer in aside[:LEFT_OUT_MAX]:
        reasons.setdefault(_why_not(facts, numbers, number, peer, best.bound), []).append(peer.name)
    if aside[LEFT_OUT_MAX:]:
        yield f"{len(aside)} peers, of these:"
    for reason, names in reasons.items():
        yield f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"


def _why_not(facts: CutBound, numbers: Sequence[Sequence[int]], number: int, peer: PoolPeer, bound: Bound) -> str:
    able = [stage for stage in range(len(numbers)) if facts.holds[number, stage]]
    if not able:
        least = min(facts.needs, key=lambda need: need.total_bytes)
        return f"no stage fits, the smallest needs {least.beside(peer.offer)}, it offers {peer.offer}"
    with_it = ([[*members, number] if at == stage else members for at, members in enumerate(numbers)] for stage in able)
    after = min(map(facts.of, with_it), key=lambda one: one.step_s)
    if after.round_s > AVERAGING_GROWS * bound.round_s:
        line = bandwidth(min(peer.up_bits_per_s, peer.down_bits_per_s) / 8.0)
        return f"its line of {line} would make averaging {spoken_duration(after.round_s)}"
    gain = 1.0 - after.step_s / bound.step_s
    return f"a step would take {gain:.1%} less" if gain >= TIE else "a step would take no less"


def _next_best(plans: Sequence[Plan]) -> Iterator[str]:
    """What the next plans are predicted to do: played, or by the bound."""
    shown = [plan.predicted for plan in plans[: NEXT_MAX + 1] if plan.predicted is not None]
    for plan, predicted in zip(plans[1:], shown[1:], strict=False):
        how = "" if predicted.by == shown[0].by else " by the bound"
        yield f"{counted(len(plan.split), 'stage')} {predicted.tokens_per_s:,.0f} tokens/s{how}"


def _refused(search: Search) -> Iterator[str]:
    """The numbers of stages that cannot be, the fewest and the most."""
    refused = sorted(search.refused)
    for stages in dict.fromkeys((*refused[:1], *refused[-1:])):
        yield f"{counted(stages, 'stage')}: {search.refused[stages].message}"
