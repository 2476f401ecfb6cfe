"""What a shell says."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.shell import DEFAULT_SCHEDULER, Shell
from swarm.errors import CorruptFrame


@pytest.mark.parametrize(("is_flag", "flag"), [(True, " --scheduler far:7950"), (False, "")])
def test_commands_that_are_suggested_need_no_flag_that_the_environment_gives(is_flag: bool, flag: str) -> None:
    assert Shell(scheduler="far:7950", scheduler_is_flag=is_flag).scheduler_flag == flag
    assert Shell(scheduler_is_flag=is_flag).scheduler_flag == ""


def test_what_a_scheduler_sends_is_told_in_json_or_as_its_fault() -> None:
    endless: list[object] = []
    endless.append(endless)
    for sent in (float("nan"), endless):
        with pytest.raises(CorruptFrame):
            Shell().data(sent)


def test_words_of_others_in_an_error_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Shell().error(CorruptFrame("first\x1b[2J\nsecond\u202e[red]", hint="\x07again"))
    assert capsys.readouterr().err == "error[E1202]: first [2J\nsecond [red]\nhint:  again\n"


@pytest.mark.parametrize(
    ("joined", "given", "used"),
    [
        (["10.77.0.1:7950"], {}, "10.77.0.1:7950"),
        (["10.77.0.1:7950", "10.77.0.2:7950"], {}, DEFAULT_SCHEDULER),
        ([], {}, DEFAULT_SCHEDULER),
        (["10.77.0.1:7950"], {"scheduler": "far:7950"}, "far:7950"),
        (["10.77.0.1:7950"], {"insecure": True}, DEFAULT_SCHEDULER),
        (["10.77.0.1:7950"], {"profile": "lab"}, "lab:7950"),
    ],
    ids=["the only one", "one of two", "none", "another is named", "plaintext", "the config file names one"],
)
def test_the_scheduler_of_whoever_joined_one_swarm_is_that_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, joined: list[str], given: dict[str, object], used: str
) -> None:
    """After `swarm login`, `swarm ls` said that no scheduler answers at 127.0.0.1:7950, and to start one."""
    monkeypatch.setattr("swarm.pki.profiles.memberships", lambda: joined)
    (tmp_path / "config.toml").write_text('[profile.lab]\nscheduler = "lab:7950"\n')
    shell = Shell(config=str(tmp_path / "config.toml"))
    shell.take(**given)
    shell.settle()
    assert shell.scheduler == used
