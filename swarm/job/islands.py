"""The sections [islands] and [outer] of a job file: the part of the job that one island trains, and when islands
exchange.

An island is a complete pipeline that trains by itself. Every island makes `training.steps` inner steps, each on its own
share of the global batch, so a job has as many tokens with one island as with several.
"""

from __future__ import annotations

from swarm.errors import InvalidConfig
from swarm.job.course import PLAIN, TIMELINES_MAX, Course, IslandCourse, OuterCourse, job_timeline_of
from swarm.job.leases import Leases
from swarm.job.outer import OuterPlan, OuterUpdate, Rhythm
from swarm.job.spec import JobSpec, TrustSection
from swarm.limits import ISLANDS_IN_SWARM_MAX
from swarm.text import counted


def outer_text(spec: JobSpec) -> str:
    """How the islands of a resolved job exchange, in one line for people; empty if it has no outer steps."""
    if not spec.has_outer_steps:
        return ""
    outer = spec.outer
    assert outer.fragments != "auto", "resolve the spec first"
    is_filtered = isinstance(outer.threshold, float) and outer.threshold > 0.0
    moved = f" what has moved by {100 * outer.threshold:g} %" if is_filtered else ""
    what = f"{counted(outer.fragments, 'part')} of the model in turn, each " if outer.fragments != 1 else ""
    return (
        f"{counted(spec.island_count, 'island')}, {spec.averaging.mode}: {what}every {outer.every_steps} steps{moved}, "
        f"outer learning rate {outer.learning_rate:g}, momentum {outer.momentum:g}"
    )


def outer_remarks(spec: JobSpec) -> tuple[str, ...]:
    """A line for each thing about the periods of a resolved job with outer steps that may surprise its author."""
    every, steps, saved = spec.outer.every_steps, spec.training.steps, spec.checkpoint.every_steps
    if not spec.has_outer_steps or every == "auto":
        return ()
    found = []
    if every > steps:
        what = "the model" if spec.outer.fragments == 1 else "a part of the model"
        found.append(
            f"outer.every_steps = {every} is more than training.steps = {steps}: {what} is exchanged at the end only"
        )
    elif 0 < saved <= every and spec.outer.patience != "none":
        found.append(
            f"checkpoint.every_steps = {saved} saves the job behind every exchange, each {every} steps, and then all "
            "islands are waited for: raise it if outer.patience is to help"
        )
    return tuple(found)


def island_spec(spec: JobSpec) -> JobSpec:
    """The job as one of its islands trains it: with its share of the global batch. One island's share is all of it.

    Where shares follow speed, the most that it may be: all.
    """
    batch = spec.training.global_batch_sequences // (1 if spec.islands.shares == "speed" else spec.island_count)
    return spec.having("training", global_batch_sequences=batch).having("islands", count=1)


def most_islands(spec: JobSpec, islands: int) -> int:
    """The largest number of islands up to this one that divides the job's batch into whole microbatches."""
    batch, size = spec.training.global_batch_sequences, spec.training.microbatch_sequences
    able = (n for n in range(islands, 1, -1) if batch % n == 0 and (size == "auto" or batch // n % size == 0))
    return next(able, 1)


def leases_of(spec: JobSpec) -> Leases | None:
    """The leases of a resolved spec's islands at the start, where they follow speed."""
    if spec.islands.shares != "speed":
        return None
    return Leases(spec.island_count, spec.training.microbatches, spec.training.steps, _period(spec))


def courses(spec: JobSpec, leases: Leases | None = None) -> list[IslandCourse]:
    """The course of each island of a resolved spec. Islands lease the portions of one outer period at a time.

    Without `leases`, where they follow speed, the number of microbatches of a step is not known.
    """
    count = spec.island_count
    return [IslandCourse(spec.training.steps, _period(spec), count, island, leases) for island in range(count)]


def _period(spec: JobSpec) -> int:
    return spec.outer.every_steps if spec.outer.every_steps != "auto" else spec.training.steps


def outer_plan(spec: JobSpec) -> OuterPlan:
    """When the islands of a resolved spec with outer steps capture and merge."""
    outer, filters = spec.outer.model_dump(), spec.averaging.mode == "gaia"
    outer["threshold"] = outer["threshold"] if filters else None  # a job may be older than the key
    del outer["patience"]  # the scheduler's alone, and a job may be older than the key
    assert "auto" not in outer.values(), "resolve the spec first"
    rhythm = Rhythm(spec.training.steps, outer["every_steps"], outer["fragments"], outer["overlap_steps"])
    update = OuterUpdate(outer["learning_rate"], outer["momentum"])
    return OuterPlan(rhythm, outer["mixing"], update, outer["threshold"])


def outer_courses(spec: JobSpec, leases: Leases | None = None) -> list[OuterCourse]:
    """All steps of each island of a resolved spec with outer steps."""
    plan, rhythm, is_plain = outer_plan(spec), outer_plan(spec).rhythm, spec.averaging.mode == "diloco"
    streams = not is_plain or rhythm.fragments > 1 or rhythm.overlap_steps + plan.mixing > 0
    return [OuterCourse(inner, rhythm.fragments, rhythm.overlap_steps, streams) for inner in courses(spec, leases)]


def course_of(spec: JobSpec, timeline: int) -> Course:
    """The course of the island on `timeline`, from a resolved spec."""
    if not spec.has_outer_steps:
        return PLAIN
    return outer_courses(spec)[island_of(spec, timeline)]


def island_timeline(spec: JobSpec, timeline: int, island: int, life: int = 0) -> int:
    """The timeline of an island, on `timeline` of its job: each island has its own, so that nothing of one island,
    or of its past, is taken for another's. A job with one island and its island have the same.

    `life` counts how often the island began anew on this timeline of the job, as a copy of another.
    """
    return (life * TIMELINES_MAX + timeline) * spec.island_count + island


def island_of(spec: JobSpec, timeline: int) -> int:
    """The island that lives on a timeline; the inverse of `island_timeline`."""
    return timeline % spec.island_count


def job_timeline(spec: JobSpec, timeline: int) -> int:
    """The timeline of the job to which an island's timeline belongs."""
    return job_timeline_of(timeline, spec.island_count)


def check_for_swarm(spec: JobSpec, stored: JobSpec | None = None) -> None:
    """InvalidConfig, with a way out, if a scheduler cannot train a job with outer steps as it is.

    `stored`: as which it was submitted, perhaps before there was the rule about limits; those may stay as they are.
    """
    if not spec.has_outer_steps:
        return
    round_s, still_s = limits = spec.averaging.timeout_s, spec.limits.no_progress_s
    is_kept = stored is not None and (stored.averaging.timeout_s, stored.limits.no_progress_s) == limits
    if round_s >= still_s and not is_kept:  # not in JobSpec: a scheduler reads jobs that are older than this rule
        raise InvalidConfig(
            f"averaging.timeout_s = {round_s:g} is not less than limits.no_progress_s = {still_s:g}: an exchange "
            "between islands would be given up before it is known who does not reach whom",
            hint="lower averaging.timeout_s or raise limits.no_progress_s, preferably to five times as long",
        )
    most, plain = ISLANDS_IN_SWARM_MAX, TrustSection().model_dump()
    refused = {
        "islands.count": (spec.island_count > most, f"set it to {most} at most, since each gets what all others send"),
        **{f"trust.{key}": (value != plain[key], "remove it") for key, value in spec.trust.model_dump().items()},
    }
    for key, (is_set, what) in refused.items():
        if is_set:
            raise InvalidConfig(
                f'{key} does not work in a swarm with averaging.mode = "{spec.averaging.mode}"',
                hint=f"{what}; or run: swarm train-local FILE",
            )


def check_speeds(spec: JobSpec, speeds: int, *, repeats: bool) -> None:
    """InvalidConfig, with a way out, if one process has no use for the speeds of so many islands (0: none given).

    `repeats`: it repeats an outer log.
    """
    if speeds and (spec.islands.shares == "equal" or repeats):
        told = "beside an outer log" if repeats else "with equal shares"
        raise InvalidConfig(f"--speeds does nothing {told}", hint="leave it out")
    if speeds not in (0, spec.island_count):
        raise InvalidConfig(
            f"--speeds has {counted(speeds, 'number')}, and the job {counted(spec.island_count, 'island')}",
            hint="give a number for each island, such as 1,0.5",
        )
