"""The content of the page as JSON: everything once, then the changes.

An unknown value is left out, so a change can remove it with null (RFC 7396).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, TypeAlias

from scheduler.brain.explain.facts import Fact, IslandStanding, ReplicaStanding, Situation
from scheduler.brain.explain.step_times import StepTimes
from scheduler.storage.job_log import LogLine
from swarm.text import bandwidth
from swarm.types import JobState, Memory
from swarm.wire import jobs_pb2 as pb

Json: TypeAlias = dict[str, Any]

JOBS_MAX, PEERS_MAX, TEXT_MAX = 50, 200, 400

_NEVER: Any = object()


def patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json:
    """The JSON merge patch from `before` to `after`; empty if they are alike."""
    changes: Json = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name, _NEVER)
        if isinstance(value, dict) and isinstance(old, dict):
            if value is not old and (inner := patch(old, value)):
                changes[name] = inner
        elif old is _NEVER or old != value:
            changes[name] = value
    return changes


def jobs_values(views: Iterable[pb.JobView], waiting: Sequence[str]) -> Json:
    """Jobs by id; `waiting` are the ids of waiting jobs, in the order of the queue."""
    found = {view.id: _job(view) for view in views}
    for place, job in enumerate(waiting, start=1):
        if job in found:
            found[job]["place"] = place
    return found


def _job(view: pb.JobView) -> Json:
    texts = {name: getattr(view, name)[:TEXT_MAX] for name in ("name", "state", "reason", "hint", "owner")}
    names = ["step", "steps", "since_unix_s", "created_unix_s"]
    names += [name for name in ("priority", "checkpoint_step", "lost_steps") if getattr(view, name)]
    names += ["loss"] if view.step else []
    names += ["tokens_per_s", "eta_s"] if view.step and view.state == JobState.RUNNING else []
    numbers = {name: getattr(view, name) for name in names}
    if view.checkpoint_step:
        numbers["checkpoint_unix_s"] = round(view.checkpoint_unix_s)
    if view.evaluation_step:
        numbers |= {"validation_loss": view.evaluation_loss, "validation_step": view.evaluation_step}
    return {name: text for name, text in texts.items() if text} | _known(numbers)


def job_values(
    view: pb.JobView, situation: Situation | None, facts: Iterable[Fact], peers: Mapping[str, pb.PeerView]
) -> Json:
    """One job in full, but for curves and news: its stages, why it is as it is, its newest steps."""
    counted = {
        "committed": view.microbatches_committed,
        "in_flight": view.microbatches_in_flight,
        "replayed": view.microbatches_replayed,
    }
    values: Json = {
        "id": view.id,
        "ledger": counted,
        "facts": [{"topic": fact.topic, "text": fact.text[:TEXT_MAX]} for fact in facts],
    }
    if situation is not None and situation.islands:
        return values | {"islands": {str(island.number): _island(view, island, peers) for island in situation.islands}}
    return values | {
        "stages": {str(stage.stage): _stage(stage, situation, peers) for stage in view.stages},
        "timeline": {} if situation is None else {str(step.step): _times(step) for step in situation.steps},
    }


def _island(view: pb.JobView, island: IslandStanding, peers: Mapping[str, pb.PeerView]) -> Json:
    """As a job of its own; the times of a step end with its number, or with 0 for an outer step, which is averaging."""
    steps = () if island.own is None else island.own.steps
    made: Json = {} if island.is_lost else {"step": island.steps, "exchanges": island.exchanges}
    return made | {
        "waits_for": island.waiting_for[:TEXT_MAX],
        "stages": {
            str(stage.stage): _stage(stage, island.own, peers) if island.own is not None else _nobody(stage)
            for stage in view.stages
        },
        "timeline": {
            str(one.step): [*_times(one if number else replace(one, averaged_s=one.agreed_s)), number]
            for one, number in zip(steps, island.numbers, strict=True)
        },
    }


def _nobody(stage: pb.StageView) -> Json:
    """A stage of an island that is lost."""
    return {"layers": stage.layers, "replicas": {}}


def _stage(stage: pb.StageView, situation: Situation | None, peers: Mapping[str, pb.PeerView]) -> Json:
    values: Json = {"layers": stage.layers, "replicas": {}}
    if situation is None:
        values["replicas"] = {peer: _replica(peer, peers, None) for peer in stage.peers}
        return values
    if (capacity := situation.capacity(stage.stage)) is not None:
        values["microbatches_per_s"] = _rounded(capacity)
    if situation.limiting() == stage.stage:
        values["limits"] = True
    standings = situation.of_stage(stage.stage)
    values["replicas"] = {standing.peer: _replica(standing.peer, peers, standing) for standing in standings}
    joiners = [joiner.peer for joiner in situation.joiners if joiner.stage == stage.stage]
    values["replicas"] |= {peer: _replica(peer, peers, None) | {"health": "joining"} for peer in joiners}
    return values


def _replica(peer: str, peers: Mapping[str, pb.PeerView], standing: ReplicaStanding | None) -> Json:
    view = peers.get(peer)
    values: Json = {"health": "gone" if view is None else view.state}
    if view is not None:
        values |= {"device": view.device, "why": view.reason[:TEXT_MAX]}
    if standing is not None:
        values |= {"load": standing.outstanding, "done": standing.contributions}
        if standing.pace_s:
            values["pace_s"] = _rounded(standing.pace_s)
        if standing.suspect:
            values["health"] = "suspect"
        elif standing.leave is not None:
            moves = standing.leave.target is not None
            values |= {"health": "moving" if moves else "leaving", "why": standing.leave.reason[:TEXT_MAX]}
    return values


def _times(one: StepTimes) -> list[float | None]:
    """When it began, was full, averaged and agreed, by the job's clock (null: not yet); how often it was reopened."""
    times = (one.began_s, one.full_s, one.averaged_s, one.agreed_s)
    return [*(round(time_s, 3) if isfinite(time_s) else None for time_s in times), float(one.repeats)]


def peers_values(views: Iterable[pb.PeerView], owner: Callable[[str], str] = lambda peer: "") -> Json:
    """The pool, relays included, by id; `owner` says who invited a stage server."""
    found: Json = {}
    for view in views:
        texts = {
            "state": view.state,
            "job": view.job,
            "device": view.device,
            "site": view.site,
            "owner": owner(view.id),
            "memory": str(Memory(view.memory_bytes, view.host_bytes)) if view.memory_bytes else "",
            "address": view.address,
            "version": view.product,
            "why": view.reason[:TEXT_MAX],
        }
        numbers: dict[str, float] = {"since_unix_s": round(view.since_unix_s)}
        if view.job and view.stage >= 0:
            numbers["stage"] = view.stage
            numbers |= {"island": int(view.island)} if view.island else {}
        if view.job:
            numbers["load"] = view.outstanding
            if view.pace_s:
                numbers["pace_s"] = _rounded(view.pace_s)
        if view.links:
            slowest = min(view.links, key=lambda link: link.bytes_per_s)
            texts["link"] = f"{bandwidth(slowest.bytes_per_s)}, {1000 * slowest.receipt_s:.3g} ms\nto {slowest.to}"
        found[view.id] = {name: text for name, text in texts.items() if text} | numbers
        if len(found) == PEERS_MAX:
            break
    return found


def news_values(lines: Iterable[tuple[int, LogLine]]) -> Json:
    """The newest events, by number."""
    return {
        str(number): {"at_unix_s": round(line.time_unix_s, 1), "level": line.level, "text": line.message[:TEXT_MAX]}
        for number, line in lines
    }


def reroutes_values(counts: Mapping[tuple[int, str], int]) -> Json:
    """Hops that were given to another replica, by reason."""
    found: dict[str, int] = {}
    for (_, reason), count in counts.items():
        found[reason] = found.get(reason, 0) + count
    return dict(found)


def _known(numbers: Mapping[str, float]) -> Json:
    return {name: _rounded(value) for name, value in numbers.items() if isfinite(value)}


def _rounded(value: float) -> float:
    """A measurement with the digits that a person reads; whole numbers stay as they are."""
    return value if isinstance(value, int) or value > 1e6 else float(f"{value:.4g}")
