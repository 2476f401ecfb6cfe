"""What is told of a process that ended."""

from __future__ import annotations

from pathlib import Path

from client.up.fleet import TAIL_LINES, last_lines
from tests.support.peak import peak_bytes


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (256 << 20) + b"\n" + b"".join(b"line %d\n" % number for number in range(100)))
    assert last_lines(log) == [f"line {number}" for number in range(100 - TAIL_LINES, 100)]
    assert peak_bytes(lambda: last_lines(log)) < 64 << 20
    log.write_text("one\n")
    assert last_lines(log) == ["one"]
