"""Log lines are one JSON object each, and what belongs to a job is forwarded."""

from __future__ import annotations

import io
import json
import logging

import pytest

from swarm.errors import UsageError
from swarm.process import logs


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_a_json_object_that_begins_with_time_level_logger_and_event() -> None:
    out = io.StringIO()
    logs.configure("info", stream=out)
    logs.get_logger("scheduler").info("peer attached", peer="p1", stage=2)
    assert list(_lines(out)[0]) == ["ts", "level", "logger", "event", "peer", "stage"]
    assert _lines(out)[0]["logger"] == "scheduler"
    assert str(_lines(out)[0]["ts"]).endswith("Z")


def test_a_terminal_gets_text() -> None:
    out = _Terminal()
    logs.configure("info", stream=out)
    logs.get_logger("scheduler").info("peer attached", peer="p1")
    assert "peer attached" in out.getvalue()
    assert not out.getvalue().startswith("{")


def test_every_line_has_the_facts_of_its_process_unless_it_says_otherwise_and_they_are_not_forwarded() -> None:
    """What a stage server logged about a job did not say which stage server it was."""
    out, heard = io.StringIO(), []
    logs.configure("info", forward=lambda at_s, level, text: heard.append(text), facts={"peer": "p1"}, stream=out)
    logs.get_logger("a").info("stage loaded", job_id="j1")
    logs.get_logger("a").info("neighbour not reached", peer="p2")
    logging.getLogger("library").warning("odd")
    assert [(line["event"], line["peer"]) for line in _lines(out)] == [
        ("stage loaded", "p1"),
        ("neighbour not reached", "p2"),
        ("odd", "p1"),
    ]
    assert heard == ["stage loaded"]
    assert list(_lines(out)[0])[:4] == ["ts", "level", "logger", "event"]


def test_lines_below_the_level_are_left_out() -> None:
    out = io.StringIO()
    logs.configure("warning", stream=out)
    log = logs.get_logger("a")
    log.info("quiet")
    log.warning("loud")
    assert [line["event"] for line in _lines(out)] == ["loud"]


def test_lines_bound_with_a_job_are_forwarded_whatever_the_level() -> None:
    out, heard = io.StringIO(), []
    logs.configure("error", forward=lambda time_s, level, text: heard.append((level, text)), stream=out)
    log = logs.get_logger("a")
    log.info("of no job")
    log = log.bind(job_id="j1")
    log.debug("too fine")
    log.info("stage loaded", stage=1, loss=0.123456789, why="two words")
    log.warning("round failed")
    assert heard == [("info", 'stage loaded stage=1 loss=0.123457 why="two words"'), ("warning", "round failed")]
    assert out.getvalue() == ""


def test_a_forwarded_error_names_its_cause() -> None:
    out, heard = io.StringIO(), []
    logs.configure("info", forward=lambda time_s, level, text: heard.append(text), stream=out)
    try:
        raise ValueError("the cause")
    except ValueError:
        logs.get_logger("a").exception("it broke", job_id="j1")
    assert heard == ["it broke: ValueError: the cause"]
    assert "Traceback" in str(_lines(out)[0]["exception"])


def test_a_logger_made_before_follows_a_later_configuration() -> None:
    log = logs.get_logger("early")
    out = io.StringIO()
    logs.configure("info", stream=out)
    log.info("late")
    assert _lines(out)[0]["event"] == "late"


def test_warnings_of_libraries_arrive_and_their_chatter_does_not() -> None:
    out = io.StringIO()
    logs.configure("info", stream=out)
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("disk %s", "full")
    assert [(line["logger"], line["event"]) for line in _lines(out)] == [("some.library", "disk full")]


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(UsageError, match="loud"):
        logs.configure("loud")


def test_a_closed_stream_ends_no_process() -> None:
    out = io.StringIO()
    logs.configure("info", stream=out)
    out.close()
    logs.get_logger("a").info("into the void")


@pytest.mark.parametrize("out", [io.StringIO(), _Terminal()])
def test_no_line_shows_a_password_of_a_url(out: io.StringIO) -> None:
    forwarded: list[str] = []
    logs.configure("info", forward=lambda at_s, level, text: forwarded.append(text), stream=out)
    where = "mqtt://me:SECRET@host:1883"
    try:
        raise ConnectionError(f"no answer from {where}")
    except ConnectionError as error:
        logs.get_logger("x").warning(f"no broker at {where}", job_id="j", broker=where, exc_info=error)
    assert "host:1883" in out.getvalue()
    assert forwarded
    assert "SECRET" not in "".join(forwarded)
    shown = out.getvalue().partition("─")  # where a terminal has the source lines of a traceback
    assert "SECRET" not in shown[0]


@pytest.mark.parametrize("out", [_Terminal(), io.StringIO()])
def test_a_traceback_shows_no_variable_and_moves_no_cursor(out: io.StringIO) -> None:
    logs.configure("info", stream=out)
    try:
        _fail("hunter" + "2")
    except ValueError as error:
        logs.get_logger("scheduler").error("call failed", exc_info=error)
    assert "in _fail" in out.getvalue()
    assert "hunter2" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def _fail(password: str) -> None:
    raise ValueError(f"\x1b[2J{len(password)} characters")
