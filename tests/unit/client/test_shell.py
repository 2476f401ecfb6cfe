"""What a shell says."""

from __future__ import annotations

import pytest

from client.shell import Shell


@pytest.mark.parametrize(("is_flag", "flag"), [(True, " --scheduler far:7950"), (False, "")])
def test_commands_that_are_suggested_need_no_flag_that_the_environment_gives(is_flag: bool, flag: str) -> None:
    assert Shell(scheduler="far:7950", scheduler_is_flag=is_flag).scheduler_flag == flag
    assert Shell(scheduler_is_flag=is_flag).scheduler_flag == ""
