"""A job that waits is told which jobs come before it, and which have the stage servers."""

from __future__ import annotations

from scheduler.brain.explain.queue import SHOWN, Holder, JobQueue
from swarm.types import JobId

A, B, C = JobId("a-1"), JobId("b-2"), JobId("c-3")


def told(queue: JobQueue, job: JobId) -> dict[str, str]:
    return {fact.topic: fact.text for fact in queue.facts(job)}


def test_a_job_alone_is_told_nothing_of_a_queue() -> None:
    """`placing: stage 0 needs 1 replica more` did not say that another job had all four stage servers."""
    assert JobQueue((A,), ()).text(A) == ""
    assert told(JobQueue((A,), ()), A) == {"queue": "number 1 of 1 that wait"}


def test_its_place_and_the_holder_are_in_the_reason() -> None:
    queue = JobQueue((A, B), (Holder(C, 4, 50, 200, 185.0),))
    assert queue.text(B) == "number 2 of 2 that wait; c-3 has 4 stage servers"
    assert JobQueue((B,), (Holder(C, 4), Holder(A, 1))).text(B) == "c-3 and 1 more have 5 stage servers"
    assert told(queue, B) == {
        "queue": "number 2 of 2 that wait: a-1 before it",
        "in use": "c-3 has 4 stage servers, step 50 of 200, about 3 min 05 s left at this speed",
    }
    assert queue.facts(B)[1].numbers == {"stage_servers": 4.0, "left_s": 185.0}


def test_of_a_job_that_is_not_the_readers_only_its_size_is_told() -> None:
    assert told(JobQueue((B,), (Holder(C, 1),)), B)["in use"] == "c-3 has 1 stage server"


def test_a_large_pool_is_told_in_few_lines() -> None:
    holders = tuple(Holder(JobId(f"j-{number}"), 2) for number in range(SHOWN + 3))
    facts = JobQueue((B,), holders).facts(B)
    assert [fact.topic for fact in facts] == ["queue"] + ["in use"] * (SHOWN + 1)
    assert facts[-1].text == "by 3 jobs more"


def test_priorities_are_told_where_those_that_wait_differ_in_them() -> None:
    alike = JobQueue((A, B), (), {A: 3, B: 3})
    assert alike.text(B) == "number 2 of 2 that wait"
    unequal = JobQueue((C, A, B), (), {C: 7, A: 0, B: 0})
    assert unequal.text(B) == "number 3 of 3 that wait, priority 0"
    assert told(unequal, B)["queue"] == "number 3 of 3 that wait, priority 0: c-3 (priority 7), a-1 before it"
