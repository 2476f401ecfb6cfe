"""Small text files that a person names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from client.shell import read_profile
from swarm.errors import InvalidConfig, UsageError
from swarm.job.spec import read_job
from swarm.pki.tokens import read_line
from swarm.process.audit import lines_of
from swarm.text_file import BYTES_MAX, read_small


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _huge(folder: Path) -> Path:
    with (folder / "huge").open("wb") as file:
        file.truncate(10 << 30)
    return folder / "huge"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: Path("/dev/zero"), "it is no regular file"),
        (_pipe, "it is no regular file"),
        (_huge, "it holds more than 1 MiB"),
    ],
)
def test_what_might_not_end_is_refused_at_once(make: Callable[[Path], Path], told: str, tmp_path: Path) -> None:
    """swarm submit /dev/full took all memory of its machine, and a pipe without a writer was waited for in silence."""
    path = make(tmp_path)
    with pytest.raises(ValueError, match=told):
        read_small(path)
    with pytest.raises(InvalidConfig, match=told):
        read_job(path)
    with pytest.raises(InvalidConfig, match=told):
        read_profile(path, "default", is_named=False)
    with pytest.raises(UsageError, match=told):
        read_line("", path)


@pytest.mark.parametrize("make", [lambda folder: Path("/dev/zero"), _pipe])
def test_an_audit_log_is_a_regular_file(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is no regular file"):
        list(lines_of(make(tmp_path)))


def test_a_text_is_read_whole_and_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf" + "é".encode() + b"x" * (BYTES_MAX - 5))
    assert read_small(path) == "é" + "x" * (BYTES_MAX - 5)
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_small(path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_small(tmp_path)
