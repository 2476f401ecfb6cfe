"""Who may go on with a job after a broken session or a restart, who may join it, and what becomes of what it holds."""

from __future__ import annotations

import pytest

from tests.support.brain import Player
from tests.support.situations import Situation, beside


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_the_brain_decides_what_the_text_says(situation: Situation) -> None:
    situation.check(Player().play)
