"""What is recorded of a job under faults replays to the same decisions, word for word."""

from __future__ import annotations

from pathlib import Path

from scheduler.brain.replay import replay
from scheduler.brain.transcript import Transcript
from swarm.types import JobState
from tests.support.scenes import Run, SavingTask, Task, train


def test_a_recorded_job_is_replayed_to_the_same_decisions(tmp_path: Path) -> None:
    task: Task = SavingTask.make(tmp_path)

    async def breaking(run: Run) -> None:
        await run.until_step(2)
        run.rig.kill(run.spare()[0])
        await run.until_step(4)
        await run.restart_scheduler()

    run = train(task, 5, 3, breaking, record=True)
    assert run.job.record.state is JobState.SUCCEEDED
    paths = sorted((tmp_path / "jobs").glob("*/brain-*.jsonl"))
    assert len(paths) == 2, "one of each scheduler start"
    for path in paths:
        transcript = Transcript(path.read_text().splitlines())
        steps = list(replay(transcript, transcript.brain()))
        assert len(steps) > 50
        assert all(step.is_same for step in steps)
