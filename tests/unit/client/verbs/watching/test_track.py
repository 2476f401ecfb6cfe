"""What `swarm track` writes of a job that goes on, and goes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from client.records import Job, Step
from client.shell import Shell
from client.verbs.watching import track as verb
from client.verbs.watching.track import _Written
from swarm.errors import CorruptFrame, InvalidConfig
from swarm.types import JobState


class Told:
    """A scheduler with so many steps, and a board that remembers them."""

    def __init__(self) -> None:
        self.steps = 0
        self.written: list[tuple[int, int]] = []
        self.anew_unix_s: dict[int, float] = {}  # when steps were made that were undone before

    def history(self, job: str, after: int) -> Iterator[Step]:
        for step in range(after + 1, self.steps + 1):
            yield Step(step=step, tokens=10, committed_unix_s=self.anew_unix_s.get(step, float(step)))

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


@pytest.mark.parametrize(("state", "steps"), [("running", 5), ("running", 4), ("succeeded", 3)])
def test_steps_that_were_made_anew_between_two_looks_are_written_again(state: str, steps: int) -> None:
    """A rollback was noticed only if somebody looked before the job had as many steps as before."""
    told: Any = Told()
    written = _Written(told, told)
    told.steps = 3
    written.take(Job(step=3, state="running"))
    told.steps, told.anew_unix_s = steps, {2: 12.0, 3: 13.0}
    for _ in range(2):
        written.take(Job(step=steps, state=state))
    assert told.written == [(1, 10), (2, 20), (3, 30)] + [(step, 10 * step) for step in range(2, steps + 1)]


def test_a_job_with_the_name_of_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar:
        def get(self, job: str) -> Job:
            return Job(id="../elsewhere")

    monkeypatch.setattr(verb, "dial", lambda shell: nullcontext(Liar()))
    context: Any = type("Context", (), {"obj": Shell()})
    with pytest.raises(CorruptFrame):
        verb.track(context, "tiny", tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


class Followed(Told):
    """A job with one step per view; after the last one comes `then`, if it is an error."""

    def __init__(self, states: list[str], then: BaseException | None = None) -> None:
        super().__init__()
        self.views = [Job(id="job", step=number, state=state) for number, state in enumerate(states, 1)]
        self.then = then
        self.closed: list[JobState | None] = []
        self.place = "a board"

    def get(self, job: str) -> Job:
        self.steps = 1
        return self.views[0]

    def follow(self, job: str, say: object) -> Iterator[Job]:
        for view in self.views:
            self.steps = view.step
            yield view
        if self.then is not None:
            raise self.then

    def close(self, ended: JobState | None = None) -> None:
        self.closed.append(ended)


def run_track(followed: Followed, monkeypatch: pytest.MonkeyPatch, *, follow: bool) -> None:
    monkeypatch.setattr(verb, "dial", lambda shell: nullcontext(followed))
    monkeypatch.setattr(verb, "TRACKERS", {"mlflow": lambda job, folder: followed})
    context: Any = type("Context", (), {"obj": Shell()})
    verb.track(context, "job", Path("runs"), "mlflow", follow=follow)


@pytest.mark.parametrize(
    ("states", "follow", "ended"),
    [
        (["running", "succeeded"], True, JobState.SUCCEEDED),
        (["running", "failed"], True, JobState.FAILED),
        (["running", "cancelled"], True, JobState.CANCELLED),
        (["failed"], False, JobState.FAILED),
        (["running"], False, None),
        (["running", "one of a later version"], True, None),
    ],
)
def test_a_run_ends_as_its_job_did(
    states: list[str], follow: bool, ended: JobState | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed and cancelled jobs, and those still at work, had finished runs."""
    followed = Followed(states)
    run_track(followed, monkeypatch, follow=follow)
    assert followed.closed == [ended]
    assert [step for step, _ in followed.written] == list(range(1, len(states) + 1))


def test_who_follows_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C made the run of a healthy job a failed one."""
    followed = Followed(["running", "running"], KeyboardInterrupt())
    run_track(followed, monkeypatch, follow=True)
    assert followed.closed == [None]


def test_an_outage_says_nothing_about_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(["running", "running"], InvalidConfig("no answer"))
    with pytest.raises(InvalidConfig, match="no answer"):
        run_track(followed, monkeypatch, follow=True)
    assert followed.closed == [None]
