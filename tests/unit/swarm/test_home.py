"""swarm.home: a user without a home folder meets one error, and only where a home folder is needed."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.cli import run
from client.completion import jobs
from client.shell import Shell, find_profile
from client.up.up import _show_profiles
from swarm.errors import InvalidConfig, InvalidData, NoHome
from swarm.home import check_writable, data_folder, known_config_folder, library_cache
from swarm.pki.profiles import find_profile as find_identity
from swarm.pki.profiles import profile_folder

ROOT = Path(__file__).parents[3]
VARIABLES = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "SWARM_PROFILES", "SWARM_CONFIG", "SWARM_DATA_DIR")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry, as containers have, and no HOME."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("asked", [data_folder, known_config_folder, lambda: profile_folder("a:1")])
def test_a_user_without_a_home_folder_is_told_what_to_set(asked: Callable[[], Path]) -> None:
    with pytest.raises(NoHome, match="no home folder") as error:
        asked()
    assert error.value.hint == "set HOME, or SWARM_PROFILES and --data-dir"


@pytest.mark.usefixtures("homeless")
def test_what_is_named_needs_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_profile("", "default", is_named=False) == {}
    with pytest.raises(NoHome):
        find_profile("", "lab", is_named=True)
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path))
    assert profile_folder("a:1") == tmp_path / "a-1"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert tmp_path in data_folder().parents
    assert jobs({"scheduler": "127.0.0.1:1"}, "") == []


def test_a_home_folder_that_cannot_be_made_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME=/nonexistent, as users of services have it; as root may write everywhere, a file is in the way."""
    (tmp_path / "home").write_bytes(b"")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(NoHome, match=f"is below {tmp_path}/home"):
        data_folder()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(NoHome, match="can be written"):
        check_writable(tmp_path / "new" / "folder")


@pytest.mark.usefixtures("homeless")
def test_swarm_up_keeps_the_identity_below_its_data_dir_only_if_the_user_has_no_place_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler only logged that it could not show the admin's identity; swarm up --job then said: join first."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _show_profiles(Shell(quiet=True), tmp_path)
    assert profile_folder("127.0.0.1:7950") == tmp_path / "profiles" / "127.0.0.1-7950"
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "file" / "profiles"))
    with pytest.raises(InvalidConfig, match=f"SWARM_PROFILES = {tmp_path}/file/profiles cannot be written"):
        _show_profiles(Shell(quiet=True), tmp_path)
    monkeypatch.delenv("SWARM_PROFILES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    _show_profiles(Shell(quiet=True), tmp_path / "data")
    assert "SWARM_PROFILES" not in os.environ, "other terminals find it"


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of another user: as root may look everywhere, the system is made to refuse."""
    home = tmp_path / "home"
    home.mkdir()
    own = os.stat

    def refused(path: Any, *flags: Any, **more: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(f"{home}/"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return own(path, *flags, **more)

    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith(f"{home}/"))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(home)))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_the_home_of_another_user_is_none_and_what_needs_it_says_so(locked: Path) -> None:
    """After `sudo -u swarm`, which may keep HOME, each command ended at the config file, and called it no TOML."""
    assert find_profile("", "default", is_named=False) == {}
    with pytest.raises(NoHome, match=f"is below {locked} "):
        data_folder()
    with pytest.raises(
        InvalidConfig, match=f"^{locked}/.config/swarm/profiles/a-1 cannot be looked into: Perm"
    ) as told:
        find_identity("a:1")
    assert "HOME may be another user's" in told.value.hint
    assert jobs({"scheduler": "127.0.0.1:1"}, "") == []


def test_the_demo_asks_for_room_for_its_model_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert run(["up", "--demo"]) == InvalidConfig.exit_code
    assert f"the demo leaves its model in {tmp_path}, which cannot be written" in capsys.readouterr().err


@pytest.mark.usefixtures("homeless")
def test_what_libraries_fetch_is_kept_only_where_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They made a folder ~ where the person was, and then found no file in it."""
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for home in (None, "here"):
        if home is not None:
            monkeypatch.setenv("HOME", home)
        with (
            pytest.raises(NoHome, match="for what the Hugging Face libraries fetch") as error,
            library_cache(InvalidData),
        ):
            raise AssertionError("nothing is fetched")
        assert "HF_HOME" in error.value.hint
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
        with library_cache(InvalidData):
            pass


FULL, DENIED = OSError(errno.ENOSPC, "No space left"), PermissionError(errno.EACCES, "Permission denied", "/cache/hub")
BEHIND = ValueError("cannot build the data set")
BEHIND.__cause__ = PermissionError(errno.EACCES, "Permission denied", "/cache")


@pytest.mark.parametrize(
    ("error", "words", "hint"),
    [
        (DENIED, "in /cache cannot be written: Permission denied: /cache/hub", "name another folder: HF_HOME"),
        (BEHIND, "in /cache cannot be written: Permission denied: /cache", "name another folder: HF_HOME"),
        (FULL, "in /cache cannot be written: No space left on device", "free some space there, or name another folder"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "", ""),
        (ValueError("no"), "", ""),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "", ""),
    ],
)
def test_a_cache_that_cannot_be_written_is_told_as_that_and_other_errors_are_left_as_they_are(
    error: Exception, words: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint was to check the name, the network and the token of the hub."""
    monkeypatch.setenv("HF_HOME", "/cache")
    with pytest.raises(Exception) as told, library_cache(InvalidData):  # noqa: PT011  # it is looked at
        raise error
    if not words:
        assert told.value is error
        return
    assert isinstance(told.value, InvalidData)
    assert words in told.value.message
    assert hint in told.value.hint


STARTS = [
    ["scheduler", "--listen", "nowhere"],
    ["stage-server", "--scheduler", "nowhere"],
    ["relay", "--listen", "nowhere"],
    ["audit"],
    ["up"],
    ["ls", "--scheduler", "127.0.0.1:1"],
    ["train-local", "none.toml"],
]
_NO_HOME = """
import pwd, runpy, sys
def unknown(number): raise KeyError(number)
pwd.getpwuid = unknown
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""
_MODULES = {
    "scheduler": "scheduler",
    "stage-server": "stage_server",
    "relay": "swarm.relay",
    "train-local": "swarm.reference",
}


@pytest.mark.parametrize("words", STARTS, ids=[words[0] for words in STARTS])
def test_no_program_fails_without_words_where_there_is_no_home_folder(words: list[str], tmp_path: Path) -> None:
    module = [_MODULES[words[0]], *words[1:]] if words[0] in _MODULES else ["client", *words]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _NO_HOME, *module],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    needs_none = words[0] == "train-local"
    assert ("error[E0304]: no home folder" in done.stderr) != needs_none, done.stderr
    assert ("hint: set HOME, or SWARM_PROFILES and --data-dir" in done.stderr) != needs_none
    assert "E0000" not in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
