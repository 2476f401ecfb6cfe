"""When a scheduler answers whoever clears or overwrites its announcement: a table of times, and a board of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import NotAllowed
from swarm.mqtt import presence, topics
from swarm.mqtt.bus import Subscription, encode
from swarm.mqtt.discovery import Announcement
from swarm.mqtt.presence import Answers, Presence
from tests.support.sim import loop as sim

OURS = Announcement("10.0.0.5:1", 3, database="a")
OTHERS = Announcement("10.0.0.6:1", 1, database="b")


def answers_to(lost_s: list[float], until_s: float) -> list[float]:
    """When the announcement is made again if it is lost at these times."""
    answers, made, ahead = Answers(), list[float](), sorted(lost_s)
    while True:
        due_s = answers.due_s
        if ahead and (due_s is None or ahead[0] < due_s):
            answers.lost(ahead.pop(0))
        elif due_s is not None and due_s <= until_s:
            answers.answered(due_s)
            made.append(due_s)
        else:
            return made


@pytest.mark.parametrize(
    ("lost_s", "made_s"),
    [
        ([], []),
        ([5.0], [6.0]),
        ([5.0, 5.1, 5.9], [6.0]),  # several times before the answer
        ([0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0], [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]),  # at once
        ([0.0, 60.9], [1.0, 62.9]),  # before a minute is over
        ([0.0, 61.0], [1.0, 62.0]),  # left alone for a minute
        ([0.0, 1.0, 3.0, 7.0, 100.0], [1.0, 3.0, 7.0, 15.0, 101.0]),
        ([60.0 * turn for turn in range(10)], [1.0, 62.0, 124.0, 188.0, 256.0, 332.0, 420.0, 480.0, 540.0, 600.0]),
    ],
)
def test_the_first_answer_comes_after_a_second_and_each_next_one_later_until_it_is_left_alone(
    lost_s: list[float], made_s: list[float]
) -> None:
    assert answers_to(lost_s, 600.0) == pytest.approx(made_s)


def test_what_was_found_again_needs_no_answer_and_lengthens_no_pause() -> None:
    answers = Answers()
    for turn in range(20):
        answers.lost(float(turn))
        assert answers.due_s == turn + presence.AGAIN_S
        answers.found()
        assert answers.due_s is None


class Board:
    """What a broker keeps of one topic, for schedulers and strangers that hold the same board."""

    def __init__(self) -> None:
        self.endpoint = SimpleNamespace(shown="the board")
        self.said: list[tuple[float, Mapping[str, Any]]] = []  # by schedulers, and when
        self._retained: Mapping[str, Any] = {}
        self._readers: list[Subscription] = []

    def subscribe(self, topic: str) -> Subscription:
        reader = Subscription(topic, self._readers.remove)
        self._readers.append(reader)
        if self._retained:
            reader.offer(topic, dict(self._retained), encode(self._retained))
        return reader

    async def settled(self) -> None:
        pass

    def announce(self, topic: str, payload: Mapping[str, Any]) -> None:
        self.said.append((asyncio.get_running_loop().time(), payload))
        self.write(payload)

    def write(self, payload: Mapping[str, Any]) -> None:
        self._retained = payload
        for reader in self._readers:
            reader.offer(topics.scheduler(), dict(payload), encode(payload))


def on_board(act: Callable[[Board], Awaitable[None]]) -> Board:
    """What schedulers said while `act` ran beside one that holds the name."""
    board: Any = Board()

    async def main() -> None:
        holding = asyncio.create_task(Presence(board, "default", OURS).hold())
        await asyncio.sleep(0)
        await act(board)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    sim.run(main(), seed=1, limit_s=3600.0)
    assert isinstance(board, Board)
    return board


LATER = Announcement("10.0.0.7:2", 4, database="a")  # anybody who reads ours can write this


@pytest.mark.parametrize(
    "wrong",
    [{}, {"address": "x"}, OTHERS.payload(), LATER.payload()],
    ids=["cleared", "nonsense", "another's", "of a later start on our database"],
)
def test_a_lost_announcement_is_made_again_after_a_second(wrong: dict[str, Any]) -> None:
    async def act(board: Board) -> None:
        await asyncio.sleep(100.0)
        board.write(wrong)
        await asyncio.sleep(10.0)

    said = on_board(act).said
    assert [payload for _, payload in said] == [OURS.payload()] * 2
    assert said[1][0] == pytest.approx(101.0, abs=0.1)


@pytest.mark.parametrize("per_s", [1, 100])
def test_a_hundred_seconds_of_overwriting_bring_a_handful_of_messages_and_three_warnings(
    per_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger at the broker had a message and a line of the log each second, for as long as it overwrote."""
    warned: list[Any] = []
    monkeypatch.setattr(presence, "_log", SimpleNamespace(warning=lambda *_, **facts: warned.append(facts)))

    async def act(board: Board) -> None:
        for number in range(100 * per_s):
            board.write({"n": number})
            await asyncio.sleep(1.0 / per_s)

    board = on_board(act)
    assert 5 < len(board.said) < 10
    assert len(warned) == presence.WARNINGS_AT_ONCE
    assert warned[0]["times"] in (per_s, per_s + 1), "of the first second"


def test_an_hour_of_overwriting_brings_a_message_a_minute_and_the_next_answer_comes_after_a_second() -> None:
    quiet_from_s = 0.0

    async def act(board: Board) -> None:
        nonlocal quiet_from_s
        for number in range(1800):
            board.write({"n": number})
            await asyncio.sleep(1.0)
        await asyncio.sleep(2 * presence.AGAIN_S_MAX + presence.LEFT_ALONE_S)
        quiet_from_s = asyncio.get_running_loop().time()
        board.write({})
        await asyncio.sleep(10.0)

    said = on_board(act).said
    assert len(said) < 40
    assert said[-1][0] == pytest.approx(quiet_from_s + presence.AGAIN_S, abs=0.1)


def test_a_second_scheduler_that_is_started_again_and_again_never_takes_the_name() -> None:
    """Each of its starts clears the announcement to ask; the pause before the answer grows, and it waits for longer."""
    refused = 0

    async def act(board: Any) -> None:
        nonlocal refused
        for _ in range(12):
            with pytest.raises(NotAllowed, match=r"10\.0\.0\.5:1 is announced"):
                await Presence(board, "default", OTHERS).claim()
            refused += 1
            await asyncio.sleep(5.0)

    assert all(payload in ({}, OURS.payload()) for _, payload in on_board(act).said)
    assert refused == 12
