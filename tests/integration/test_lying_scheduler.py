"""Whatever a scheduler answers, a command ends with its data or with an error that has a code of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.cli import VERBS, run
from swarm.errors import SwarmError
from tests.support.lying_scheduler import Lie, LyingScheduler, lying_scheduler

LIES = {
    "not a number": Lie(math.nan, 0, "x"),
    "endless": Lie(math.inf, 2**64),
    "below everything": Lie(-math.inf, -(2**64), "succeeded"),
    "large": Lie(1e308, 2**64, "queued"),
    "negative": Lie(-1e308, -1, "gone"),
    "tiny": Lie(5e-324, 1, "serving", {"island": "9" * 5000}),
    "no numbers": Lie(0.5, 7, "../../x\x1b[2J"),
    "a job file of numbers": Lie(1e18, 1, "paused", {"spec_json": '{"pipeline": 1, "training": 2, "checkpoint": 3}'}),
    "a job file without a section": Lie(0.0, 0, "paused", {"spec_json": '{"model": {}}'}),
    "a job file of lists": Lie(0.0, 0, "", {"spec_json": "[1]"}),
}
COMMANDS = (
    *(
        "ls -a",
        "peers pool",
        "status x",
        "status -w x",
        "islands x",
        "history x",
        "history x --csv",
        "wait x",
        "logs x",
        "explain x",
    ),
    *("explain x --microbatch 1:1", "peers", "peers --links", "peers drain x", "peers undrain x", "top", "top x"),
    *("checkpoints x", "checkpoints x --verify", "pause x", "resume x", "resume x --set training.steps=5"),
    *("resume x --set pipeline.stages=2", "cancel x -y", "rm x -y", "gc --dry-run", "gc -y"),
    *("token ls", "token create --role viewer", "token revoke x", "identity ls", "identity revoke x -y"),
    *("identity release x", "ca show", "version"),
    *("pull x OUT/model --force", "track x OUT/runs", "trace x --out OUT/trace.json"),
)
# Of these nothing that a scheduler answers is read here: they speak HTTPS, read files, or send a job first.
OTHERS = {"up", "submit", "login", "audit"}
DOCTORS = ("endless", "tiny")


@pytest.fixture(scope="module")
def liar() -> Iterator[tuple[LyingScheduler, str]]:
    with lying_scheduler() as made:
        yield made


def test_every_command_that_asks_a_scheduler_is_tried() -> None:
    programs = {name for name, entry in VERBS.items() if entry.program}
    assert {command.split()[0] for command in COMMANDS} == VERBS.keys() - programs - OTHERS - {"doctor"}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_scheduler_causes_no_internal_error(
    lie: str,
    liar: tuple[LyingScheduler, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`swarm peers -o json` said that "x" is no literal for int()."""
    monkeypatch.setattr("client.doctor.probes._torch", str)  # the scheduler plays no part in it, and it takes seconds
    scheduler, address = liar
    scheduler.lie = LIES[lie]
    for command in (*COMMANDS, *(["doctor"] if lie in DOCTORS else [])):
        for form in ("table", "json"):
            words = command.replace("OUT", str(tmp_path)).split()
            run([*words, "--scheduler", address, "--insecure", "--timeout", "1", "-o", form])
            said = "".join(capfd.readouterr())
            assert SwarmError.code not in said, f"{command}: {said}"
