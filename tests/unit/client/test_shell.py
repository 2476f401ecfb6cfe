"""What a shell says."""

from __future__ import annotations

import pytest

from client.shell import Shell
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
