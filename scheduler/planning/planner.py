"""From placements to the plan with its reasons, and what another plan would do with the same facts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean

from scheduler.planning.bound import Bound, CutBound
from scheduler.planning.plan import Plan, Predicted, facts_hash, predicted_by_bound, rounded, spoken_s
from scheduler.planning.play import RULES, Play, Played, workload
from scheduler.planning.pool import PeerPool, PoolPeer
from scheduler.planning.search import FREE, TIE, Placement, Search, basis_of
from swarm.errors import InvalidConfig, OutOfMemory
from swarm.job.partition import microbatch_tokens
from swarm.job.resolve import choose
from swarm.job.spec import JobSpec, NarrowSection
from swarm.text import bandwidth, counted

PLAYS_MIN, PLAYS_MAX = 2, 6  # plans that are played
SEEDS = 2
LARGE = 500  # peers: of more, the best plan alone is played
LONG_STEP_HOPS = 1500  # of a step: 11 steps with two seeds take longer than a person waits
LEFT_OUT_MAX = 32  # peers of which the reason is looked for
NEXT_MAX = 4
ABOVE_BOUND = 0.05  # by so much a play may be faster
PATIENCE = 100  # times the step of a plan: so long the scheduler's own placement is played at most
NARROW = NarrowSection(kind="maxout", factor=4)  # that advice is about
NARROW_GAINS = 1.25  # of the speed with int8 alone, by the bound: for less nothing is said
NARROW_COSTS = "a small model had 3 to 7 % more loss after as many tokens"  # docs/convergence.md
AVERAGING_GROWS = 1.1  # by a peer: then its line is the reason why it is left out


def plan_of(search: Search, *, plays: bool = True) -> Plan:
    """The plan of what a search found so far, which must be something.

    With `plays` the best are played. After a KeyboardInterrupt it is the best of those that were played, if any was.
    """
    found = search.found
    plans = [
        _plan(search.pool, search.spec, CutBound(search.pool, placement.spec), placement.places) for placement in found
    ]
    costs = [_cost(plan, by_price=search.by_price) for plan in plans]  # by the bound, the least first
    shown, placed, advice, stopped = list[float](), "", "", ""
    try:
        if plays:
            _play_best(search, found, plans, costs, shown)
            stopped = "before the scheduler's own placement was played"
            first = _first(shown)
            facts = CutBound(search.pool, found[first].spec)
            placed = _as_placed(search.pool, facts, plans[first])
            stopped = "before narrow places were played"
            advice = _narrow(search.pool, facts, plans[first])
            stopped = ""
    except KeyboardInterrupt:
        stopped = stopped or ("amid the plays of the best plans" if shown else "before the best plans were played")
    if not search.is_done:
        stopped = f"after {search.spent} of {counted(search.effort, 'placement')}"
    shown = shown or costs
    first = _first(shown)
    above_bound = shown[first] / costs[first]
    best, plan = found[first], plans.pop(first)
    facts = CutBound(search.pool, best.spec)
    reasons = [f"limits: {_limits(best, plan)}"]
    if search.by_price:
        reasons.append(f"price: {_per_money(plan)}")
    if alone := [str(stage) for stage, place in enumerate(best.places) if not place[1:]]:
        where = f"stage {', '.join(alone)}" if len(alone) < len(best.places) else "each stage"
        reasons.append(f"alone: one replica at {where}; limits.min_replicas = 2 plans for a loss")
    reasons += [f"as placed: {placed}"] if placed else []
    reasons += (f"left out: {text}" for text in _left_out(search.pool, facts, best))
    plans.sort(key=lambda other: _cost(other, by_price=search.by_price)
               * (above_bound if other.predicted is not None and other.predicted.by == "bound" else 1.0))  # fmt: skip
    others = [*(_told(other, plan, by_price=search.by_price) for other in plans[:NEXT_MAX]), *_refused(search)]
    reasons += [f"next best: {'; '.join(others)}"] if others else []
    reasons += [f"narrow: {advice}"] if advice else []
    reasons += (f"assumed: {text}" for text in search.pool.assumed)
    reasons += [f"stopped: {stopped}"] if stopped else []
    return replace(plan, reasons=tuple(reasons), seed=search.seed)


def _play_best(
    search: Search, found: Sequence[Placement], plans: list[Plan], costs: Sequence[float], shown: list[float]
) -> None:
    """Play the best plans, as long as the next could be faster by its bound's least: a few steps each, or fewer once it
    must be slower, and then on, whichever is the best so far, until the best has been played with all seeds.

    What a play shows stands in `plans` at once, and its cost in `shown`.
    """
    looks = list[Iterator[Plan]]()
    for number, plan in enumerate(plans[: PLAYS_MAX if len(search.pool.peers) <= LARGE else 1]):
        least = costs[number] * found[number].bound.least_s / found[number].bound.step_s
        if number >= PLAYS_MIN and least > min(shown) * (1.0 + ABOVE_BOUND):
            break  # it cannot be better, and a later one is less likely to be
        slower = min(shown, default=math.inf) / costs[number] * (1.0 + ABOVE_BOUND)
        looks.append(_looks(search.pool, search.spec, plan, slower))
        plans[number] = next(looks[number])
        is_slower = plans[number].predicted.by == "below"  # type: ignore[union-attr]
        shown.append(math.inf if is_slower else _cost(plans[number], by_price=search.by_price))
    first = _first(shown)
    while (plan := next(looks[first], plans[first])) is not plans[first]:
        plans[first], shown[first] = plan, _cost(plan, by_price=search.by_price)
        first = _first(shown)


def cut_as(pool: PeerPool, spec: JobSpec, plan: Plan) -> JobSpec:
    """The job resolved with the cut of a plan."""
    shaped = spec.having("pipeline", split=plan.split, stages=len(plan.split), overlap=plan.overlap)
    shaped = shaped.having("training", microbatch_sequences=plan.microbatch_sequences)
    return choose(shaped.having("model", recompute=plan.recompute), basis_of(pool, spec))[0]


def again(pool: PeerPool, spec: JobSpec, before: Plan) -> Plan:
    """Another plan with the facts of now, without peers that are gone; InvalidConfig if a stage has too few left, or if
    the plan has islands.
    """
    cut = cut_as(pool, spec, before)
    if before.islands != 1:
        raise InvalidConfig(f"the plan has {before.islands} islands, this job has none", hint="make a new plan")
    places = tuple(tuple(name for name in place if name in pool) for place in before.places)
    lacking = [str(stage) for stage, place in enumerate(places) if len(place) < spec.limits.min_replicas]
    if lacking:
        raise InvalidConfig(f"the pool lacks the plan's peers of stage {', '.join(lacking)}", hint="make a new plan")
    return _plan(pool, spec, CutBound(pool, cut), places)


def played(pool: PeerPool, spec: JobSpec, plan: Plan) -> Plan:
    """The plan with what plays of it show, in the place of what the bound predicts."""
    *_, last = _looks(pool, spec, plan)
    return last


def _looks(pool: PeerPool, spec: JobSpec, plan: Plan, slower: float = math.inf) -> Iterator[Plan]:
    """The plan as it is played: by the first steps of a play, by one play, and by plays of all seeds.

    A play of long steps has fewer of them. Its spread is half of what the halves of all plays differ by. It ends early
    where a step takes so many times as long as by the bound: later steps hide no more of the first than what their late
    microbatches take.
    """
    assert plan.predicted is not None
    facts = CutBound(pool, cut_as(pool, spec, plan))
    load = workload(facts)
    is_long = load.microbatches * len(plan.split) > LONG_STEP_HOPS
    rules = replace(RULES, warm_up=2, measured=2) if is_long else RULES
    step_tokens, half = load.microbatches * load.tokens, rules.measured // 2
    rates, shown, out_s = list[float](), list[Played](), slower * plan.predicted.step_s
    for seed in range(SEEDS):
        play = Play(pool, plan, load, rules, seed)
        if not shown:
            on_time = 1.0 - plan.overlap / load.microbatches
            play.until(1, out_s / on_time if on_time else math.inf)
            if play.committed_s:
                play.until(rules.warm_up, play.committed_s[0] + out_s * (rules.warm_up - 1))
            if len(play.committed_s) < rules.warm_up:
                yield replace(plan, predicted=replace(plan.predicted, by="below", tokens_per_s=step_tokens / out_s))
                return
            step_s = (play.committed_s[-1] - play.committed_s[0]) / (rules.warm_up - 1)
            yield _shown(plan, step_tokens, step_tokens / step_s)
        shown.append(play.run())
        ends = play.committed_s[rules.warm_up - 1 :: half][:3]
        rates += (half * step_tokens / (end_s - begin_s) for begin_s, end_s in pairwise(ends))
        rate, idle = mean(run.tokens_per_s for run in shown), mean(run.idle_ratio for run in shown)
        yield _shown(plan, step_tokens, rate, max(0.0, idle), (max(rates) - min(rates)) / 2.0 / rate)
        rules = replace(rules, warm_up=1) if is_long else rules


def _shown(plan: Plan, step_tokens: int, rate: float, idle: float | None = None, spread: float = 0.0) -> Plan:
    assert plan.predicted is not None
    step_s, price = rounded(step_tokens / rate), plan.predicted.price_per_hour
    idle = None if idle is None else rounded(idle)
    return replace(plan, predicted=Predicted("played", rounded(rate), step_s, idle, price, rounded(spread)))


def _first(costs: Sequence[float]) -> int:
    """The number of the least cost, of equal ones the first."""
    return next(number for number, cost in enumerate(costs) if cost <= min(costs) * (1.0 + TIE))


def _cost(plan: Plan, *, by_price: bool) -> float:
    """What a search makes small, of a plan as it is predicted."""
    assert plan.predicted is not None
    price = plan.predicted.price_per_hour if by_price else 0.0
    assert price is not None, "the search refuses a pool without prices"
    return (price + FREE if by_price else 1.0) / plan.predicted.tokens_per_s


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
    used = [pool.peers[peer] for members in numbers for peer in members]
    return Plan(
        *(resolved.split, places, size, resolved.overlap, bool(resolved.model.recompute)),
        predicted=predicted_by_bound(used, tokens, sum(facts.flops), step_s),
        facts_hash=facts_hash(pool, spec),
    )


# Reasons --------------------------------------------------------------------------------------------------------------


def _left_out(pool: PeerPool, facts: CutBound, best: Placement) -> Iterator[str]:
    """Why peers are not in the plan, those with one reason together."""
    used = {name for place in best.places for name in place}
    numbers, reasons = numbers_of(pool, best.places), dict[str, list[str]]()
    aside = [(number, peer) for number, peer in enumerate(pool.peers) if peer.name not in used]
    for number, peer in aside[:LEFT_OUT_MAX]:
        reasons.setdefault(_why_not(pool, facts, numbers, number, best.bound), []).append(peer.name)
    if aside[LEFT_OUT_MAX:]:
        yield f"{len(aside)} peers, of these:"
    for reason, names in reasons.items():
        yield f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"


def _why_not(pool: PeerPool, facts: CutBound, numbers: Sequence[Sequence[int]], number: int, bound: Bound) -> str:
    able, peer = [stage for stage in range(len(numbers)) if facts.holds[number, stage]], pool.peers[number]
    if not able:
        least = min(facts.needs, key=lambda need: need.total_bytes)
        return f"no stage fits, the smallest needs {least.beside(peer.offer)}, it offers {peer.offer}"
    replicas_max = facts.spec.limits.max_replicas
    if sum(map(len, numbers)) == replicas_max * len(numbers):
        return f"limits.max_replicas = {replicas_max} allows no more"
    with_it = {
        stage: facts.of([[*members, number] if at == stage else members for at, members in enumerate(numbers)])
        for stage in able
    }
    stage = min(able, key=lambda at: with_it[at].step_s)
    after = with_it[stage]
    averaging, longer = spoken_s(bound.round_s), spoken_s(after.round_s)
    if after.round_s > AVERAGING_GROWS * bound.round_s and averaging != longer:
        way = _slowest_way(pool, peer, [pool.peers[member] for member in numbers[stage]])
        return f"{way} would lengthen averaging from {averaging} to {longer}"
    gain = 1.0 - after.step_s / bound.step_s
    return f"a step would take {gain:.1%} less" if gain >= TIE else "a step would take no less"


def _slowest_way(pool: PeerPool, peer: PoolPeer, others: Sequence[PoolPeer]) -> str:
    """The slowest of a peer's line and its links to others."""
    ways = [(min(peer.up_bits_per_s, peer.down_bits_per_s), "its line")]
    for other in others:
        if (end := pool.end_of(other)) != pool.end_of(peer):
            bits_per_s = min(pool.link(peer, other).bits_per_s, pool.link(other, peer).bits_per_s)
            ways.append((bits_per_s, f"its link with {end or other.name}"))
    bits_per_s, name = min(ways)
    return f"{name} of {bandwidth(bits_per_s / 8.0)}"


def _limits(best: Placement, plan: Plan) -> str:
    """What limits a plan by the bound, and how much of that a play reaches."""
    bound, predicted = best.bound, plan.predicted
    text = f"{bound.limits}, {bound.microbatches_per_s:.3g} microbatches/s by the bound"
    if predicted is None or predicted.by == "bound":
        return text
    share = predicted.tokens_per_s / microbatch_tokens(best.spec) / bound.microbatches_per_s
    return f"{text}; played: {100 * share:.0f} % of that, a round of averaging takes {spoken_s(bound.round_s)}"


def _as_placed(pool: PeerPool, facts: CutBound, plan: Plan) -> str:
    """What a play shows where the scheduler places all peers, by what they measured of themselves."""
    stages, load = len(plan.split), workload(facts)
    placed = load.placed(pool.peers)
    assert plan.predicted is not None
    if placed.plan is None:
        return f"the scheduler could not begin: {placed.reason}"
    places = tuple(tuple(name for name, at in placed.plan.items() if at == stage) for stage in range(stages))
    play = Play(pool, replace(plan, places=places), load)
    play.watch()
    is_long = load.microbatches * stages > LONG_STEP_HOPS
    steps, until_s = 3 if is_long else 4, PATIENCE * plan.predicted.step_s
    while len(play.committed_s) < steps and play.now_s < until_s:
        play.turn()
    ends, tokens = play.committed_s, load.microbatches * load.tokens
    is_played = len(ends) == steps
    rate = rounded(2 * tokens / (ends[-1] - ends[-3]) if is_played else steps * tokens / until_s)
    told = f"{rate:,.0f} tokens/s (played)" if is_played else f"below {rate:,.0f} tokens/s (played)"
    text = f"the scheduler itself would use {counted(len(placed.plan), 'peer')}: {told}"
    return text if len(plan.peers) == len(pool.peers) else f"{text}; the prediction is without those left out"


def _narrow(pool: PeerPool, facts: CutBound, plan: Plan) -> str:
    """What narrow places would bring, and cost, where the bytes of int8 are the limit; empty where they are not.

    Weights that were trained without places cannot have any.
    """
    spec, numbers = facts.spec, numbers_of(pool, plan.places)
    is_trained = bool(spec.checkpoint.resume_from or (spec.model.id and spec.model.init == "pretrained"))
    if len(plan.split) == 1 or spec.model.narrow.kind != "none" or is_trained:
        return ""
    int8 = spec.having("pipeline", compression="int8")
    try:
        placed, _ = choose(int8.having("pipeline", split="auto").having("model", narrow=NARROW), basis_of(pool, spec))
    except (InvalidConfig, OutOfMemory):
        return ""  # the width or the layers cannot be divided so, or memory holds no such stage
    alone, narrow = CutBound(pool, int8), CutBound(pool, placed)
    fits = all(narrow.holds[peer, stage] for stage, members in enumerate(numbers) for peer in members)
    if not fits or alone.of(numbers).step_s < NARROW_GAINS * narrow.of(numbers).step_s:
        return ""
    shown = [played(pool, cut.spec, replace(plan, split=cut.split)).predicted for cut in (alone, narrow)]
    was, then, now = (predicted.tokens_per_s for predicted in (plan.predicted, *shown) if predicted is not None)
    return (
        f'model.narrow.kind = "{NARROW.kind}" and pipeline.compression = "int8" would make {now:,.0f} tokens/s of '
        f"{was:,.0f}, int8 alone {then:,.0f}; {NARROW_COSTS}"
    )


def _told(plan: Plan, best: Plan, *, by_price: bool) -> str:
    """What another plan is predicted to do: played, or by the bound."""
    assert plan.predicted is not None
    assert best.predicted is not None
    price = f" at {plan.predicted.price_per_hour:,.2f} per hour, {_per_money(plan)}" if by_price else ""
    below = "below " if plan.predicted.by == "below" else ""
    how = "" if below or plan.predicted.by == best.predicted.by else " by the bound"
    return (
        f"{counted(len(plan.split), 'stage')} {below}{rounded(plan.predicted.tokens_per_s):,.0f} tokens/s{price}{how}"
    )


def _per_money(plan: Plan) -> str:
    if plan.predicted is not None and not plan.predicted.price_per_hour:
        return "free"
    return f"{rounded(3600.0 / _cost(plan, by_price=True)):,.0f} tokens for 1.00"


def _refused(search: Search) -> Iterator[str]:
    """The numbers of stages that cannot be, the fewest and the most."""
    refused = sorted(search.refused.keys() - {0, *(len(placement.places) for placement in search.found)})
    for stages in dict.fromkeys((*refused[:1], *refused[-1:])):
        yield f"{counted(stages, 'stage')}: {search.refused[stages].message}"
