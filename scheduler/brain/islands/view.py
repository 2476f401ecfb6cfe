"""A job with islands as people see it, put together from the brains of the islands at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from scheduler.brain.checkpoint.schedule import OpenCheckpoint
from scheduler.brain.explain.facts import IslandStanding, Situation
from scheduler.brain.explain.reasons import Team
from scheduler.brain.islands.outer_steps import OuterSteps
from scheduler.brain.islands.roster import Roster
from scheduler.brain.islands.rows import numbers
from scheduler.brain.islands.waits import states
from scheduler.brain.job import JobBrain
from swarm.job.course import OuterCourse
from swarm.types import IslandState

REJOINS = "begins anew behind an exchange, once its site has a stage server for each stage, or another island has two"


def situation(roster: Roster, outer: OuterSteps, waiting_for: str, now_s: float) -> Situation:
    """The islands at work as one situation, and why others are lost."""
    islands, courses, state = roster.at_work(), roster.courses, states(roster)
    of = {number: one.situation(now_s) for number, one in islands.items()}
    standings = [
        IslandStanding(
            number,
            courses[number].inner_steps(one.agreed),
            one.agreed - courses[number].inner_steps(one.agreed),
            one.peers,
            "waits for the exchange" if state[number] is IslandState.EXCHANGING else island_waits_for(one),
            of[number],
            numbers(of[number].steps, courses[number]),
            _share(courses[number], one.agreed),
            state[number],
            outer.waits.of(number, now_s),
        )
        for number, one in islands.items()
    ]
    standings += [
        IslandStanding(
            *(number, 0, 0, (), f"lost: {why}; {REJOINS}"),
            state=IslandState.LOST,
            waited_s=outer.waits.of(number, now_s),
        )
        for number, why in roster.lost.items()
    ]
    return replace(
        next(iter(of.values())),
        is_running=all(one.is_running for one in of.values()),
        agreed=min(one.agreed for one in of.values()),
        waiting_for=waiting_for,
        replicas=tuple(replica for one in of.values() for replica in one.replicas),
        joiners=tuple(joiner for one in of.values() for joiner in one.joiners),
        links={pair: until_s for one in of.values() for pair, until_s in one.links.items()},
        checkpoint=_checkpoint([one.checkpoint for one in of.values() if one.checkpoint is not None], courses[0]),
        islands=tuple(sorted(standings, key=lambda one: one.number)),
        outer_rounds=dict(outer.outcomes),
    )


def team(islands: Mapping[int, JobBrain]) -> Team:
    """All replicas of the islands at work."""
    of = [one.team() for one in islands.values()]
    return Team(*(sum(getattr(one, each.name) for one in of) for each in fields(Team)))


def waiting_for(islands: Mapping[int, JobBrain], lost: Mapping[int, str]) -> str:
    """The reason why each island waits."""
    told = [f"island {number} {island_waits_for(one)}" for number, one in islands.items()]
    return "; ".join([*told, *(f"island {number} is lost" for number in sorted(lost))])


def island_waits_for(island: JobBrain) -> str:
    return "waits for the other islands" if island.outer_step is not None else island.waiting_for()


def story(islands: Sequence[JobBrain], courses: Sequence[OuterCourse], step: int, index: int) -> list[str]:
    """The story of a microbatch of an inner step, at every island."""
    found = []
    for number, (one, course) in enumerate(zip(islands, courses, strict=True)):
        lines = one.story(course.version_after(step), index)
        found += [f"island {number}: {line}" for line in lines]
    return found


def _share(course: OuterCourse, version: int) -> tuple[int, int] | None:
    """The island's share of the step after a version, where shares follow speed."""
    shares, island = course.inner.shares, course.inner.island
    return None if shares is None else (shares.at(course.inner_steps(version))[island], shares.microbatches)


def _checkpoint(parts: Sequence[OpenCheckpoint], course: OuterCourse) -> OpenCheckpoint | None:
    """The parts of a checkpoint as one, for people."""
    if not parts:
        return None
    savers = {peer: stage for one in parts for peer, stage in one.savers.items()}
    is_writing = all(one.is_writing for one in parts)
    return OpenCheckpoint(course.inner_steps(parts[0].version), parts[0].since_s, savers, is_writing=is_writing)
