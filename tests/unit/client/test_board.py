"""How a curve is drawn with letters."""

from __future__ import annotations

from math import nan

from rich.console import Console

from client.board import Board, board_view, sparkline
from client.records import Island, Job, Peer, Stage


def test_a_curve_ends_with_the_newest_value_and_fits_its_columns() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline(range(1000), 60)) == 60
    assert sparkline([1.0] * 59 + [2.0], 60)[-1] == "█"


def test_nothing_is_drawn_of_what_is_not_finite() -> None:
    assert sparkline([]) == ""
    assert sparkline([nan]) == ""
    assert sparkline([1.0, nan, 1.0]) == "▁▁"


def test_the_replicas_of_islands_stand_in_their_islands() -> None:
    stages = (Stage(0, 2, ("a", "b")), Stage(1, 2, ("c", "d")))
    islands = (Island(0, ("a", "c"), 3, 1, ""), Island(1, ("b",), 3, 1, ""))
    job = Job(id="j-1", stages=stages, islands=islands)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(board_view(Board("here", 0.0, [job], [], [Peer("a", "serving")], job)))
    lines = capture.get().splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:3] == ["ISLAND", "STAGE", "LAYERS"])
    rows = [line.split() for line in lines[at + 1 : at + 5]]
    assert [row[:6] for row in rows[:1]] == [["0", "0", "2", "layers", "a", "serving"]]
    assert rows[1][:4] == ["1", "2", "layers", "c"]
    assert rows[2][:5] == ["1", "0", "2", "layers", "b"]
    assert rows[3][:4] == ["1", "2", "layers", "-"], "nobody serves it"


def test_the_name_of_a_job_is_text_and_no_markup() -> None:
    job = Job(id="[/x]", state="running", stages=(Stage(0, 2, ("a",)),))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(board_view(Board("here", 0.0, [job], [], [Peer("a", "serving")], job)))
    assert "[/x]" in capture.get()
