"""Files of a folder that may come from the net: a link in it could name any file of this machine.

    FOLDER/tokenizer.json                                    a regular file, or a link to one below FOLDER
    models--ORG--NAME/snapshots/COMMIT/tokenizer.json        also a link into models--ORG--NAME/blobs: the hub's cache

What a person names (the folder, the files of data.source) may be a link. Anything else is `NotOwn`, which says what it
is: a link that leads out, a pipe, a device, a file that changes while it is read.

Not chosen: to compare the place of the file and to open it then. A link could take a folder's place in between, so the
file is opened folder by folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from swarm.errors import InvalidModel

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
_ONLY_FOLDERS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_AT_ONCE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # otherwise the open of a pipe waits for its writer


class NotOwn(OSError):
    """A file is there, and none that its folder may have sent on."""


def open_own(path: Path) -> BinaryIO:
    """The regular file `path` for reading, if it belongs to its folder; NotOwn, or OSError if it cannot be opened."""
    try:
        real = Path(os.path.realpath(path, strict=True))
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        raise NotOwn(errno.ENOENT, f"it is a link to {path.readlink()}, which is not there", path) from None
    room = next((room for room in _rooms(Path(os.path.realpath(path.parent))) if room in real.parents), None)
    if room is None:
        raise NotOwn(errno.EPERM, f"it is a link to {real}, which is not in its folder: copy that file there", path)
    *folders, name = real.relative_to(room).parts
    at = os.open(room, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            above, at = at, os.open(folder, _ONLY_FOLDERS, dir_fd=at)
            os.close(above)
        file = os.fdopen(os.open(name, _AT_ONCE, dir_fd=at), "rb")
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotOwn(errno.EINVAL, "it is no regular file", path)
    return file


def read_own(path: Path, bytes_max: int) -> bytes:
    """The content of `path`, as `open_own` opens it; NotOwn also if it is longer, or another than its size says."""
    with open_own(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > bytes_max:
            raise NotOwn(errno.EFBIG, f"it has more than {bytes_max} bytes", path)
        content = file.read(size_bytes + 1)
    if len(content) != size_bytes:
        raise NotOwn(errno.EIO, f"it has {size_bytes} bytes and gives others: it changes, or is no file", path)
    return content


def is_there(path: Path) -> bool:
    """Whether something has this name, also a dangling link: its reader says what is wrong with it.

    True in a folder that may not be looked into.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _rooms(folder: Path) -> Iterator[Path]:
    """Where the files of a folder may lie."""
    yield folder
    for place in (folder, *folder.parents):
        if place.name == _SNAPSHOTS:
            yield place.parent / _BLOBS


_BEGINNING = b"version https://git-lfs"
_LEAST = len(b"version ")


def check_no_pointer(where: str, beginning: bytes) -> None:
    """InvalidModel if the first bytes of a file, 8 at least, say that it only stands for another."""
    if len(beginning) >= _LEAST and beginning[: len(_BEGINNING)] == _BEGINNING[: len(beginning)]:
        raise InvalidModel(f"{where} is a pointer of Git LFS, which stands for a file", hint="fetch it: git lfs pull")
