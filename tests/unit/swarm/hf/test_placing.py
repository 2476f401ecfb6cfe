"""swarm.hf.placing: how a finished model folder comes to its place, a mounted volume too."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.errors import InvalidConfig, NotAllowed
from swarm.hf.model_folder import check_out_dir
from swarm.hf.placing import begin, is_free, put_in_place

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "sub/merges.txt": b"a b"}


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the kernel treats as a mount point: nothing is renamed to it, nor it to anything."""
    mounted = tmp_path / "volume"
    mounted.mkdir()
    (mounted / "lost+found").mkdir()
    rename = os.rename

    def refuse(source: str | Path, target: str | Path, **options: int) -> None:
        if mounted in (Path(source).absolute(), Path(target).absolute()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    return mounted


def _write(part: Path) -> None:
    for name, content in FILES.items():
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_bytes(content)


def _read(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_a_model_comes_into_a_mounted_volume(volume: Path) -> None:
    """All steps were trained, then the rename to the volume met EBUSY, and the model was removed."""
    check_out_dir(volume)
    assert [one.name for one in volume.iterdir()] == ["lost+found"]
    part = begin(volume)
    _write(part)
    put_in_place(part, volume)
    assert _read(volume) == FILES
    assert not part.exists()


def test_config_json_is_the_last_file_that_comes(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = begin(volume)
    _write(part)
    came: list[str] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, target: (came.append(path.name), rename(path, target))[1])
    put_in_place(part, volume)
    assert came == ["model.safetensors", "sub", "config.json"]


def test_a_folder_that_is_filled_keeps_its_owner_and_mode(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    place.chmod(0o2775)
    before = place.stat()
    check_out_dir(place)
    part = begin(place)
    _write(part)
    put_in_place(part, place)
    after = place.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_a_volume_that_holds_a_model_takes_another_in_its_place(volume: Path) -> None:
    (volume / "config.json").write_bytes(b"old")
    (volume / "old").mkdir()
    assert not is_free(volume)
    part = begin(volume)
    _write(part)
    with pytest.raises(NotAllowed, match="exists already"):
        put_in_place(part, volume)
    put_in_place(part, volume, replace=True)
    assert _read(volume) == FILES
    assert sorted(one.name for one in volume.iterdir()) == sorted(
        ["lost+found", "sub", "config.json", "model.safetensors"]
    )


@pytest.mark.parametrize("number", range(5))
def test_after_an_error_all_is_as_it_was(number: int, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (volume / "a").write_bytes(b"old")
    (volume / "config.json").write_bytes(b"old")
    part = begin(volume)
    _write(part)
    rename, calls = Path.rename, 0

    def fail_once(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        put_in_place(part, volume, replace=True)
    assert _read(part) == FILES
    assert {name: content for name, content in _read(volume).items() if "part-" not in name} == {
        "a": b"old",
        "config.json": b"old",
    }


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EXDEV])
def test_a_folder_that_cannot_be_renamed_is_copied(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = begin(tmp_path / "out")
    _write(part)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == part:
            raise OSError(code, os.strerror(code))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    put_in_place(part, tmp_path / "out")
    assert _read(tmp_path / "out") == FILES
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_model_that_was_written_elsewhere_comes_into_a_volume(volume: Path, tmp_path: Path) -> None:
    part = begin(tmp_path / "spare" / "out")
    _write(part)
    put_in_place(part, volume)
    assert _read(volume) == FILES
    assert not part.exists()


def _unwritable_parent(folder: Path) -> None:
    """As root may write everywhere, the folder's parent is a file."""
    folder.parent.rmdir()
    folder.parent.write_bytes(b"")


def _foreign_file(folder: Path) -> None:
    folder.write_bytes(b"")


def _dangling_link(folder: Path) -> None:
    folder.symlink_to("nothing")


def _full(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_bytes(b"mine")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_unwritable_parent, InvalidConfig),
        (_foreign_file, NotAllowed),
        (_dangling_link, NotAllowed),
        (_full, NotAllowed),
    ],
)
def test_a_place_that_takes_no_model_is_refused_before_training(
    spoil: Callable[[Path], None], error: type[Exception], tmp_path: Path
) -> None:
    folder = tmp_path / "parent" / "out"
    folder.parent.mkdir()
    spoil(folder)
    with pytest.raises(error):
        check_out_dir(folder)


def test_what_a_killed_process_left_is_nothing_and_stays(tmp_path: Path) -> None:
    """In a container each process has the same number, so the part of an earlier one has the name of ours."""
    (tmp_path / "out").mkdir()
    first = begin(tmp_path / "out")
    _write(first)
    check_out_dir(tmp_path / "out")
    second = begin(tmp_path / "out")
    assert second != first
    _write(second)
    put_in_place(second, tmp_path / "out")
    assert _read(first) == FILES


def test_the_present_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_out_dir(Path())
    part = begin(Path())
    _write(part)
    put_in_place(part, Path())
    assert _read(tmp_path) == FILES
