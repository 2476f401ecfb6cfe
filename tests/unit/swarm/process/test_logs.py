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


Heard = list[tuple[str, str]]


def configured(level: str = "info", out: io.StringIO | None = None, **facts: str) -> tuple[io.StringIO, Heard]:
    """Logs are written into the one and forwarded into the other, as level and text."""
    out, heard = out or io.StringIO(), Heard()
    logs.configure(level, forward=lambda at_s, level, text: heard.append((level, text)), facts=facts, stream=out)
    return out, heard


def _lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_a_json_object_that_begins_with_time_level_logger_and_event_and_text_on_a_terminal() -> None:
    early = logs.get_logger("early")  # it follows what is configured later
    out, _ = configured()
    early.info("peer attached", peer="p1", stage=2)
    (line,) = _lines(out)
    assert list(line) == ["ts", "level", "logger", "event", "peer", "stage"]
    assert line["logger"] == "early"
    assert str(line["ts"]).endswith("Z")
    terminal, _ = configured(out=_Terminal())
    early.info("peer attached", peer="p1")
    assert "peer attached" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    out, _ = configured()
    out.close()
    early.info("into the void")


def test_every_line_has_the_facts_of_its_process_unless_it_says_otherwise_and_they_are_not_forwarded() -> None:
    """What a stage server logged about a job did not say which stage server it was."""
    out, heard = configured(peer="p1")
    logs.get_logger("a").info("stage loaded", job_id="j1")
    logs.get_logger("a").info("neighbour not reached", peer="p2")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("disk %s", "full")
    assert [(line["logger"], line["event"], line["peer"]) for line in _lines(out)] == [
        ("a", "stage loaded", "p1"),
        ("a", "neighbour not reached", "p2"),
        ("some.library", "disk full", "p1"),
    ]
    assert heard == [("info", "stage loaded")]
    assert list(_lines(out)[0])[:4] == ["ts", "level", "logger", "event"]


def test_lines_below_the_level_are_left_out_and_those_of_a_job_are_forwarded_all_the_same() -> None:
    out, heard = configured("warning")
    log = logs.get_logger("a")
    log.info("of no job")
    log.warning("loud")
    log = log.bind(job_id="j1")
    log.debug("too fine")
    log.info("stage loaded", stage=1, loss=0.123456789, why="two words")
    log.warning("round failed")
    assert heard == [("info", 'stage loaded stage=1 loss=0.123457 why="two words"'), ("warning", "round failed")]
    assert [line["event"] for line in _lines(out)] == ["loud", "round failed"]
    try:
        raise ValueError("the cause")
    except ValueError:
        log.exception("it broke")
    assert heard[-1] == ("error", "it broke: ValueError: the cause")
    assert "Traceback" in str(_lines(out)[-1]["exception"])
    with pytest.raises(UsageError, match="loud"):
        logs.configure("loud")


@pytest.mark.parametrize("out", [io.StringIO(), _Terminal()])
def test_no_line_shows_a_password_of_a_url(out: io.StringIO) -> None:
    _, forwarded = configured(out=out)
    where = "mqtt://me:SECRET@host:1883"
    try:
        raise ConnectionError(f"no answer from {where}")
    except ConnectionError as error:
        logs.get_logger("x").warning(f"no broker at {where}", job_id="j", broker=where, exc_info=error)
    assert "host:1883" in out.getvalue()
    assert forwarded
    assert "SECRET" not in str(forwarded)
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
