"""What `swarm track` writes of a job that goes on, and goes back."""

from __future__ import annotations

from typing import Any

from client.records import Job, Step
from client.verbs.track import _Written


class Told:
    """A scheduler with so many steps, and a board that remembers them."""

    def __init__(self) -> None:
        self.steps = 0
        self.written: list[tuple[int, int]] = []

    def history(self, job: str, after: int) -> list[Step]:
        return [Step(step=step, tokens=10) for step in range(after + 1, self.steps + 1)]

    def write(self, step: Step, tokens: int) -> None:
        self.written.append((step.step, tokens))

    def flush(self) -> None: ...


def test_each_step_is_written_once_and_those_after_a_rollback_again() -> None:
    told: Any = Told()
    written = _Written(told, told)
    for steps in (2, 2, 3, 1, 2):
        told.steps = steps
        written.take(Job(step=steps))
    assert told.written == [(1, 10), (2, 20), (3, 30), (2, 20)]
    assert written.count == 4
