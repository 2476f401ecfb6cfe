"""The audit log: whole lines, bounded in bytes, on the disk soon, and no call waits for it."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from swarm.errors import InvalidConfig
from swarm.process import audit as module
from swarm.process.audit import LINE_BYTES_MAX, Audit, line_of, logs


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_caller_waits_for_a_disk_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call wrote its line on the event loop, which stood still with the disk."""
    go_on, real = threading.Event(), os.write
    log = Audit(tmp_path / "audit.jsonl", lambda: 1.0)

    def stuck(file: int, content: bytes) -> int:
        assert go_on.wait(60.0)
        return real(file, content)

    monkeypatch.setattr(module.os, "write", stuck)
    monkeypatch.setattr(module, "WAITING_MAX", 10)
    began_s = time.monotonic()
    for _ in range(1000):
        log.write("ann", "Cancel", "allowed")
    assert time.monotonic() - began_s < 10.0
    go_on.set()
    log.close()
    told = lines(tmp_path / "audit.jsonl")
    assert 10 <= len(told) <= 22
    assert any(str(line["result"]).endswith("lines left out") for line in told)


def test_a_line_is_synced_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = threading.Event(), os.fsync

    def sync(file: int) -> None:
        real(file)
        synced.set()

    monkeypatch.setattr(module.os, "fsync", sync)
    log = Audit(tmp_path / "audit.jsonl", lambda: 1.0)
    log.write("ann", "Cancel", "allowed")
    assert synced.wait(60.0)
    assert module.PAUSE_S < module.SYNC_S
    log.close()


@pytest.mark.parametrize("text", ["x" * 5000, "\u202e" * 5000, "\U0001f600" * 5000, '"\\\n' * 5000])
def test_a_line_has_at_most_so_many_bytes_and_keeps_who_did_what(text: str) -> None:
    """A bound of characters let JSON make twelve bytes of each."""
    content = line_of({"time_unix_s": 1.0, "actor": "ann", "action": "Cancel", "result": text, "target": text})
    assert len(content) <= LINE_BYTES_MAX
    line = json.loads(content)
    assert (line["actor"], line["action"]) == ("ann", "Cancel")
    assert line["result"].endswith("…")


def test_lines_are_there_after_an_end_and_a_later_start_goes_on_behind_a_half_line(tmp_path: Path) -> None:
    """A scheduler that was killed may have left one."""
    path = tmp_path / "audit.jsonl"
    path.write_text('{"actor": "an')
    for start in range(2):
        log = Audit(path, lambda: 1.25)
        log.write("ann", "Submit", "allowed", target=f"demo-{start}")
        log.close()
    half, *whole = path.read_text().splitlines()
    assert half == '{"actor": "an'
    assert [json.loads(line) for line in whole] == [
        {"time_unix_s": 1.25, "actor": "ann", "action": "Submit", "result": "allowed", "target": f"demo-{start}"}
        for start in range(2)
    ]
    path.unlink()
    Audit(path, lambda: 1.25).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_file_is_kept_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_MAX", 3)
    path = tmp_path / "audit.jsonl"
    log = Audit(path, lambda: 1.0, bytes_max=200)
    for number in range(20):
        log.write("ann", "Cancel", "allowed", target=f"demo-{number}")
        log.flush()
    log.close()
    files = logs(path)
    assert len(files) == 3
    told = [line["target"] for file in files for line in lines(file)]
    assert told == [f"demo-{number}" for number in range(20 - len(told), 20)]
    assert path.with_name("audit-000001.jsonl") not in files


def test_a_file_that_cannot_be_put_aside_gets_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, to: Path) -> None:
        raise PermissionError(13, "not allowed")

    monkeypatch.setattr(Path, "rename", fails)
    log = Audit(tmp_path / "audit.jsonl", lambda: 1.0, bytes_max=10)
    for _ in range(3):
        log.write("ann", "Cancel", "allowed")
        log.flush()
    log.close()
    assert len(lines(tmp_path / "audit.jsonl")) == 3


def test_a_line_for_which_the_disk_has_no_room_leaves_no_half_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_full = os.write, [True]
    log = Audit(tmp_path / "audit.jsonl", lambda: 1.0)
    monkeypatch.setattr(module.os, "write", lambda file, content: real(file, content[:5] if is_full[0] else content))
    log.write("ann", "Cancel", "allowed")
    log.flush()
    assert (tmp_path / "audit.jsonl").read_text() == ""
    is_full[0] = False
    log.write("ann", "Pause", "allowed")
    log.close()
    assert [line["action"] for line in lines(tmp_path / "audit.jsonl")] == ["Pause", "LeftOut"]


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(InvalidConfig, match="cannot be continued"):
        Audit(tmp_path / "audit.jsonl", lambda: 1.0)
