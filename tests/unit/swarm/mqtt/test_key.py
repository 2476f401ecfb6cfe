"""The key to a broker is for the login that runs it, as long as it runs."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.mqtt.endpoint import parse_url
from swarm.mqtt.key import FOLDERS, key_of, new_key
from swarm.process.temporary import temporary_folder
from tests.support.neighbours import NOBODY

URL = "mqtt://127.0.0.1:4711"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def folder() -> Iterator[Path]:
    with temporary_folder(FOLDERS) as folder:
        yield folder


def test_a_key_is_found_by_the_port_while_its_folder_is_in_use(folder: Path) -> None:
    key = new_key(folder, 4711)
    assert len(key) == 64
    assert stat.S_IMODE((folder / "4711").stat().st_mode) == 0o600
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert key_of(parse_url(f"mqtt://{host}:4711")) == key
    assert key_of(parse_url("mqtt://127.0.0.1:4712")) is None
    other = new_key(folder, 4711)
    assert other != key
    assert key_of(parse_url(URL)) == other


def test_a_broker_that_a_person_named_with_a_user_or_elsewhere_is_as_it_was(folder: Path) -> None:
    for port in (1883, 8883):
        new_key(folder, port)
    for url in ("mqtt://ann:secret@127.0.0.1:1883", "mqtt://ann@127.0.0.1", "mqtt://192.0.2.1", "mqtts://127.0.0.1"):
        assert key_of(parse_url(url)) is None, url


def test_what_a_killed_process_left_is_no_key(tmp_path: Path) -> None:
    left = tmp_path / f"{FOLDERS}left"
    left.mkdir(mode=0o700)
    new_key(left, 4711)
    assert key_of(parse_url(URL)) is None


def test_a_folder_that_others_can_write_or_own_gives_no_key(folder: Path, tmp_path: Path) -> None:
    """Another login could have us say its own word to its own broker, or lead us to a file."""
    new_key(folder, 4711)
    folder.chmod(0o755)
    assert key_of(parse_url(URL)) is None
    folder.chmod(0o700)
    assert key_of(parse_url(URL)) is not None
    os.chown(folder, NOBODY, NOBODY)
    assert key_of(parse_url(URL)) is None
    os.chown(folder, os.geteuid(), os.getegid())
    (tmp_path / f"{FOLDERS}link").symlink_to(folder)
    (folder / "4711").rename(tmp_path / "elsewhere")
    (folder / "4711").symlink_to(tmp_path / "elsewhere")
    assert key_of(parse_url(URL)) is None
