"""`python -m scheduler.brain.replay`: what it prints, and what its exit code says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.brain.replay import main
from swarm.errors import BadTranscript, UsageError
from tests.support.stories import recorded


def written(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_every_input_is_printed_with_what_is_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path / "one", recorded("one microbatch"))]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "1.000 s  RowDurable(step=0)" in printed
    assert "    Finish()" in printed
    assert printed[-1] == "13 inputs, all decided as recorded"


def test_a_decision_that_differs_from_the_recorded_one_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = list(recorded("one microbatch"))
    lines[-1] = json.dumps([*json.loads(lines[-1])[:3], "another"])
    assert main([written(tmp_path / "one", lines)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == ["    DIFFERS: recorded as another", "13 inputs, 1 decided otherwise"]


def test_the_story_of_a_microbatch_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "one", recorded("a replica dies"))
    assert main([path, "--story", "0:1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1.000 s fed: stage 0 to a, stage 1 to c"
    assert "2.000 s stage 0: a is void up to attempt 1: gone, its process ended" in printed
    assert main([path, "--story", "9:9"]) == 0
    assert capsys.readouterr().out == "nothing is known of it\n"
    with pytest.raises(UsageError, match="STEP:INDEX"):
        main([path, "--story", "all"])


def test_the_first_difference_of_two_transcripts_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = recorded("one microbatch")
    one, other = written(tmp_path / "one", lines), written(tmp_path / "other", lines[:-1])
    assert main([one, "--against", one]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main([one, "--against", other]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["input 13:", "- 2.000 s  CheckpointKept(version=1)"]
    assert printed[-1] == "+ (has ended)"


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(BadTranscript, match="No such file"):
        main([str(tmp_path / "none")])
    ran = subprocess.run(
        [sys.executable, "-m", "scheduler.brain.replay", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert ran.returncode == BadTranscript.exit_code
    assert ran.stderr.startswith("error E0303: ")
