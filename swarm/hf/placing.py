"""How a finished model folder comes to the place that a person named.

    nothing is there         the files are written into .NAME.part-PID beside it, which is renamed to NAME
    an empty folder          they are written into NAME/.NAME.part-PID and moved out, config.json last
    a folder to be replaced  the same; what was there waits in NAME/.NAME.old-PID until all is moved

A folder that is there may be a mounted volume, which no other folder can be renamed to, and whose parent may be
read-only or on another disk. So it is filled, and keeps its owner and mode. Programs that load a model look for
config.json first: without it there is no model yet.

Not chosen: to rename where that is possible and to fill a folder only after EBUSY, because then the rarer way would be
the one that is seldom run.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from swarm.errors import NotAllowed

LAST = "config.json"
ALWAYS_THERE = frozenset({"lost+found"})  # at the top of a new volume
_CANNOT_BE_RENAMED_TO = (errno.EBUSY, errno.EXDEV)  # a mounted volume, and a folder of another disk


def is_free(place: Path) -> bool:
    """Whether a folder can come to be there without a mix: nothing is there, or an empty folder; OSError."""
    return not _is_taken(place) or (place.is_dir() and not _content(place))


def begin(place: Path) -> Path:
    """A new folder into which the files are written before `put_in_place`; OSError if none can be made."""
    if place.is_dir():
        return _new(place, place.absolute().name)
    beside = place.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    return _new(beside, place.name)


def put_in_place(part: Path, place: Path, *, replace: bool = False) -> None:
    """Let the files in `part` be the folder `place`, and remove `part`.

    NotAllowed if there is something already, unless a folder may be replaced. After an OSError all is as it was, and
    `part` holds every file.
    """
    others = _content(place) if place.is_dir() else []
    if (_is_taken(place) and not place.is_dir()) or (others and not replace):
        raise NotAllowed(f"{place} exists already")
    if not place.is_dir():
        try:
            part.rename(place)
            return
        except OSError as error:
            if error.errno not in _CANNOT_BE_RENAMED_TO:
                raise
    if part.absolute().parent == place.absolute():
        _fill(place, part, others)
    else:
        _copy_into(part, place, others)


def rehearse(place: Path) -> None:
    """Do all that `begin` and `put_in_place` will do, with an empty file, and undo it; OSError or NotAllowed."""
    was_there = place.is_dir()
    part = begin(place)
    trial = part / f".swarm-{os.getpid()}"
    try:
        trial.write_bytes(b"{}")
        put_in_place(part, place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    (place / trial.name).unlink()
    if not was_there:
        place.rmdir()


def _copy_into(part: Path, place: Path, others: list[Path]) -> None:
    """Copy the files of a folder on another disk, then move them."""
    place.mkdir(exist_ok=True)
    inside = _new(place, place.absolute().name)
    try:
        for path in sorted(part.rglob("*")):
            target = inside / path.relative_to(part)
            if path.is_dir():
                target.mkdir()
            else:
                shutil.copyfile(path, target)
        _fill(place, inside, others)
    except BaseException:
        shutil.rmtree(inside, ignore_errors=True)
        raise
    shutil.rmtree(part, ignore_errors=True)


def _fill(place: Path, part: Path, others: list[Path]) -> None:
    old = _new(place, place.absolute().name, "old") if others else None
    moved: list[tuple[Path, Path]] = []
    try:
        for path in others:
            assert old is not None
            _move(path, old / path.name, moved)
        for path in sorted(part.iterdir(), key=lambda path: (path.name == LAST, path.name)):
            _move(path, place / path.name, moved)
    except BaseException:
        for source, target in reversed(moved):
            target.rename(source)
        if old is not None:
            old.rmdir()
        raise
    part.rmdir()
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _move(source: Path, target: Path, moved: list[tuple[Path, Path]]) -> None:
    source.rename(target)
    moved.append((source, target))


def _content(folder: Path) -> list[Path]:
    """What a person has there: parts that an interrupted process left are nothing."""
    ours = f".{folder.absolute().name}.part-"
    return sorted(
        path.absolute() for path in folder.iterdir() if path.name not in ALWAYS_THERE and not path.name.startswith(ours)
    )


def _is_taken(place: Path) -> bool:
    return place.exists() or place.is_symlink()


def _new(parent: Path, name: str, kind: str = "part") -> Path:
    """A new folder for this process; parts of earlier ones, whose numbers come again in containers, stay."""
    number = 0
    while True:
        folder = parent.absolute() / f".{name}.{kind}-{os.getpid()}{f'-{number}' if number else ''}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
