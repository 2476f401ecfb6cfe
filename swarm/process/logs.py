"""Structured logs: one event per line on stderr, facts as fields.

On a terminal a line is coloured text, elsewhere it is one JSON object: `ts level logger event`, then the fields. Lines
bound with a `job_id` are also forwarded, so that `swarm logs` shows what every process said about a job.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO, TypeAlias

import structlog
from structlog.typing import EventDict, ExcInfo, FilteringBoundLogger, Processor

from swarm.errors import UsageError
from swarm.text import printable, without_passwords

Logger: TypeAlias = FilteringBoundLogger
LogFormat: TypeAlias = Literal["auto", "json", "text"]
# (seconds since the epoch, level, text)
Forward: TypeAlias = Callable[[float, str, str], None]

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
LOG_LEVELS = tuple(LEVELS)[:-1]  # of lines that are kept: ours are never critical
FORWARDED_CHARACTERS_MAX = 4096
_NOT_FACTS = frozenset({"ts", "level", "logger", "event", "job_id", "exception"})


def configure(
    level: str = "info",
    format: LogFormat = "auto",
    forward: Forward | None = None,
    *,
    facts: Mapping[str, str] = MappingProxyType({}),
    stream: TextIO | None = None,
) -> None:
    """Set up logging of the whole process, standard library loggers included.

    `forward` receives every line of INFO and above that is bound with `job_id`, whatever `level` is, on the thread that
    logged; it must not wait and must not log. `facts` stand in every line that does not say otherwise, but are not
    forwarded, as the receiver knows them. Raises UsageError if `level` is unknown.
    """
    if level not in LEVELS:
        raise UsageError(f'log level "{level}" is unknown', hint=f"one of: {', '.join(LEVELS)}")
    out = sys.stderr if stream is None else stream
    coloured = format == "text" or (format == "auto" and out.isatty())
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _add_name_and_time,
        structlog.processors.StackInfoRenderer(),
    ]
    if not coloured:
        processors.append(structlog.processors.format_exc_info)
    if forward is not None:
        processors.append(_forwarder(forward))
    processors.append(_level_filter(LEVELS[level]))
    if facts:
        processors.append(lambda logger, method, event: {**facts, **event})
    processors.extend(_console(out) if coloured else [_to_json])
    filtered_at = LEVELS[level] if forward is None else min(LEVELS[level], logging.INFO)
    lock = threading.Lock()
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(filtered_at),
        logger_factory=lambda *name: _LineWriter(str(name[0]) if name else "", out, lock),
        cache_logger_on_first_use=False,
    )
    _adopt_standard_logging()


def get_logger(name: str) -> Logger:
    """A logger that follows `configure`, also when it is called later."""
    logger: Logger = structlog.get_logger(name)
    return logger


class _LineWriter:
    """Writes whole lines, so that threads do not mix theirs."""

    def __init__(self, name: str, out: TextIO, lock: threading.Lock) -> None:
        self.name = name
        self._out = out
        self._lock = lock

    def msg(self, message: str) -> None:
        message = without_passwords(message)  # whatever it speaks of, a library's own words included
        with self._lock:
            try:
                self._out.write(message + "\n")
                self._out.flush()
            except (OSError, ValueError):
                pass  # stderr is closed or full: a log line must not end the process

    debug = info = warning = error = critical = msg


def _add_name_and_time(logger: Any, method: str, event: EventDict) -> EventDict:
    event.setdefault("logger", getattr(logger, "name", ""))
    now = datetime.now(UTC)
    event["_time"] = now
    event["ts"] = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _level_filter(level: int) -> Processor:
    def keep(logger: Any, method: str, event: EventDict) -> EventDict:
        if LEVELS[event["level"]] < level:
            raise structlog.DropEvent
        return event

    return keep


def _forwarder(forward: Forward) -> Processor:
    def tell(logger: Any, method: str, event: EventDict) -> EventDict:
        if "job_id" in event and LEVELS[event["level"]] >= logging.INFO:
            forward(event["_time"].timestamp(), event["level"], line_of(event))
        return event

    return tell


def line_of(event: Mapping[str, Any]) -> str:
    """One readable line of an event and its facts, without time, level and job."""
    facts = " ".join(
        f"{key}={_plain(value)}" for key, value in event.items() if key not in _NOT_FACTS and not key.startswith("_")
    )
    text = f"{event.get('event', '')} {facts}".strip()
    if error := event.get("exception"):
        text += f": {str(error).strip().splitlines()[-1]}"
    return without_passwords(text)[:FORWARDED_CHARACTERS_MAX]


def _plain(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if not text or any(character.isspace() for character in text) else text


def _to_json(logger: Any, method: str, event: EventDict) -> str:
    event.pop("_time", None)
    first = {key: event.pop(key) for key in ("ts", "level", "logger", "event") if key in event}
    return json.dumps({**first, **event}, default=str, ensure_ascii=False)


def _console(out: TextIO) -> list[Processor]:
    def short_time(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        moment = event.pop("_time")
        event.pop("ts")
        facts = {name: printable(fact) if isinstance(fact, str) else fact for name, fact in event.items()}
        return {"timestamp": moment.astimezone().strftime("%H:%M:%S"), **facts}

    console = structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=28, exception_formatter=_write_traceback)
    return [short_time, console]


def _write_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    """As Python writes it: without the values of variables, among which are passwords and other people's tensors."""
    for line in "".join(traceback.format_exception(*exc_info)).splitlines():
        out.write(f"\n{printable(line)}")


class _ToStructlog(logging.Handler):
    """Takes what libraries log through the standard library."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            logger = structlog.get_logger(record.name)
            level = max(logging.DEBUG, min(record.levelno, logging.CRITICAL)) // 10 * 10
            logger.log(level, record.getMessage(), exc_info=record.exc_info or None)
        except Exception:
            self.handleError(record)


def _adopt_standard_logging() -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())
    root.setLevel(logging.WARNING)
