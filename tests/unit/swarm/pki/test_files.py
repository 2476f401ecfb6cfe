"""Keys on disk are for their owner alone, and whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.errors import InvalidConfig
from swarm.pki.files import read_private, write_private


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_and_its_folder_are_for_their_owner_alone_whatever_was_there(tmp_path: Path) -> None:
    new, old = tmp_path / "pki" / "key.pem", tmp_path / "key.pem"
    old.write_bytes(b"old")
    assert mode(old) == 0o666
    (tmp_path / f".key.pem.{os.getpid()}").write_bytes(b"half")  # an earlier process with our number left it
    for path in (new, old):
        write_private(path, b"secret")
        assert (mode(path), read_private(path)) == (0o600, b"secret")
    assert mode(new.parent) == 0o700
    assert set(tmp_path.iterdir()) == {new.parent, old}


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key.pem"
    write_private(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swarm.pki.files.os.fsync", full)
    with pytest.raises(InvalidConfig, match="No space left on device"):
        write_private(path, b"new")
    assert read_private(path) == b"old"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_reach_is_not_read(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "key.pem"
    write_private(path, b"secret")
    path.chmod(bits)
    with pytest.raises(InvalidConfig, match="others can read the key") as caught:
        read_private(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_what_cannot_be_read_or_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"missing.pem cannot be read: No such file"):
        read_private(tmp_path / "missing.pem")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"key.pem cannot be written"):
        write_private(tmp_path / "file" / "key.pem", b"")
