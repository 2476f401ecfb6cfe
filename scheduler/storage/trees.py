"""Removes a folder with all that is in it, and nothing elsewhere: no link is followed, even a late one."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarm.errors import StorageError


def tree_bytes(parent: Path, name: str) -> int:
    """The bytes in a folder; 0 if there is none. StorageError."""
    with _opened(parent) as descriptor:
        return 0 if descriptor is None else _bytes(name, descriptor)


def remove_tree(parent: Path, name: str) -> int:
    """Remove the folder and give its bytes; StorageError if it is a link, lies behind one, or cannot go whole."""
    with _opened(parent) as descriptor:
        if descriptor is None:
            return 0
        try:
            mode = os.lstat(name, dir_fd=descriptor).st_mode
        except FileNotFoundError:
            return 0
        if not stat.S_ISDIR(mode):
            raise StorageError(f"{parent / name} is no folder", hint="only real folders are removed; look what it is")
        freed = _bytes(name, descriptor)
        shutil.rmtree(name, dir_fd=descriptor)
        return freed


@contextmanager
def _opened(parent: Path) -> Iterator[int | None]:
    """The folder itself, not what a link in its place leads to; None if there is none."""
    assert shutil.rmtree.avoids_symlink_attacks, "Linux and macOS: everywhere that a scheduler runs"
    descriptor = None
    try:
        with suppress(FileNotFoundError):
            descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        yield descriptor
    except OSError as error:
        raise StorageError(
            f"{parent}: {error.strerror or error}", hint="check that the folder is a real one and writable"
        ) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _bytes(name: str, parent: int) -> int:
    """The bytes in an open folder; 0 if it is no folder."""
    found = 0
    with suppress(FileNotFoundError):
        for _, _, files, folder in os.fwalk(name, dir_fd=parent):
            for file in files:
                with suppress(FileNotFoundError):
                    found += os.lstat(file, dir_fd=folder).st_size
    return found
