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


def written(place: Path) -> Path:
    """A part of a model for this place, with all its files."""
    part = begin(place)
    for name, content in FILES.items():
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_bytes(content)
    return part


def _read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_into_a_mounted_volume(volume: Path) -> None:
    """All steps were trained, then the rename to the volume met EBUSY, and the model was removed."""
    check_out_dir(volume)
    assert [path.name for path in volume.iterdir()] == ["lost+found"]
    part = written(volume)
    put_in_place(part, volume)
    assert _read(volume) == FILES
    assert not part.exists()


def test_config_json_is_the_last_file_that_comes(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = written(volume)
    came: list[str] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, target: (came.append(path.name), rename(path, target))[1])
    put_in_place(part, volume)
    assert came == ["model.safetensors", "sub", "config.json"]


def test_a_folder_that_is_filled_keeps_its_owner_and_mode_also_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o2775)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (tmp_path / "out", Path()):
        before = place.stat()
        check_out_dir(place)
        put_in_place(written(place), place)
        assert _read(place) == FILES
        assert (place.stat().st_ino, place.stat().st_mode) == (before.st_ino, before.st_mode)


def test_a_volume_that_holds_a_model_takes_another_in_its_place(volume: Path) -> None:
    (volume / "config.json").write_bytes(b"old")
    (volume / "old").mkdir()
    assert not is_free(volume)
    part = written(volume)
    with pytest.raises(NotAllowed, match="exists already"):
        put_in_place(part, volume)
    put_in_place(part, volume, replace=True)
    assert _read(volume) == FILES
    assert sorted(path.name for path in volume.iterdir()) == sorted(
        ["lost+found", "sub", "config.json", "model.safetensors"]
    )


@pytest.mark.parametrize("number", range(5))
def test_after_an_error_all_is_as_it_was(number: int, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (volume / "a").write_bytes(b"old")
    (volume / "config.json").write_bytes(b"old")
    part = written(volume)
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
    part = written(tmp_path / "out")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == part:
            raise OSError(code, os.strerror(code))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    put_in_place(part, tmp_path / "out")
    assert _read(tmp_path / "out") == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_that_was_written_elsewhere_comes_into_a_volume(volume: Path, tmp_path: Path) -> None:
    part = written(tmp_path / "spare" / "out")
    put_in_place(part, volume)
    assert _read(volume) == FILES
    assert not part.exists()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        # As root may write everywhere, the folder's parent is a file.
        (lambda folder: (folder.parent.rmdir(), folder.parent.touch()), InvalidConfig),
        (lambda folder: folder.touch(), NotAllowed),
        (lambda folder: folder.symlink_to("nothing"), NotAllowed),
        (lambda folder: (folder.mkdir(), (folder / "notes.txt").touch()), NotAllowed),
    ],
    ids=["unwritable parent", "a file", "dangling link", "full"],
)
def test_a_place_that_takes_no_model_is_refused_before_training(
    spoil: Callable[[Path], object], error: type[Exception], tmp_path: Path
) -> None:
    folder = tmp_path / "parent" / "out"
    folder.parent.mkdir()
    spoil(folder)
    with pytest.raises(error):
        check_out_dir(folder)


def test_what_a_killed_process_left_is_nothing_and_stays(tmp_path: Path) -> None:
    """In a container each process has the same number, so the part of an earlier one has the name of ours."""
    (tmp_path / "out").mkdir()
    first = written(tmp_path / "out")
    check_out_dir(tmp_path / "out")
    second = written(tmp_path / "out")
    assert second != first
    put_in_place(second, tmp_path / "out")
    assert _read(first) == FILES
