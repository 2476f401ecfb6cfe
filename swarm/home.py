"""Where a program keeps what belongs to its user: below the home folder, unless XDG_DATA_HOME or XDG_CONFIG_HOME say
otherwise.

The Hugging Face libraries keep what they fetch below HF_HOME, else in the user's cache folder.

A user of a container or of a service may have no home folder, or a read-only one. So a program asks for it at the
moment when nothing else names a place, and never while it is imported.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from swarm.errors import InvalidConfig, NoHome

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITTEN = (*_NO_ROOM, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def data_folder() -> Path:
    """For data that is written; NoHome."""
    folder = _folder(platformdirs.user_data_path)
    check_writable(folder)
    return folder


def known_data_folder() -> Path:
    """The same, to be read: it need not be writable; NoHome."""
    return _folder(platformdirs.user_data_path)


def known_config_folder() -> Path:
    """For settings and identities, to be read; NoHome."""
    return _folder(platformdirs.user_config_path)


def check_writable(folder: Path) -> None:
    """NoHome if a folder below the user's home can neither be written nor be made."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # False where nobody may look
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise _no_home(f"no home folder that can be written: {folder} is below {there}")


@contextmanager
def library_cache(kind: type[InvalidConfig]) -> Iterator[None]:
    """Around what the Hugging Face libraries fetch: NoHome if no folder is named for it, and `kind` where its folder
    cannot be written, whatever the libraries make of that. All their other errors pass."""
    roots = _cache_folders()
    try:
        yield
    except Exception as error:
        if (fault := _cache_fault(error, roots)) is None:
            raise
        where = f": {fault.filename}" if fault.filename else ""
        hint = "free some space there, or name another" if fault.errno in _NO_ROOM else "name another"
        raise kind(
            f"the cache of the Hugging Face libraries in {roots[0]} cannot be written: "
            f"{os.strerror(fault.errno or 0)}{where}",
            hint=f"{hint} folder: HF_HOME",
        ) from error


def _cache_folders() -> list[Path]:
    """Where the libraries keep what they fetch, the usual folder first; NoHome."""
    named = [os.environ[name] for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE") if os.environ.get(name)]
    own = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.path.expanduser(own))
    if own == "~/.cache" and not root.is_absolute():
        # They would make a folder ~ where the person is, or say that there is no such file.
        raise NoHome("no home folder for what the Hugging Face libraries fetch", hint="set HOME or HF_HOME")
    return [root, *map(Path, named)]


def _cache_fault(error: BaseException, roots: list[Path]) -> OSError | None:
    """What the machine says of these folders, as the error or a cause of it."""
    cause: BaseException | None = error
    seen = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in _NOT_WRITTEN:
            at = Path(os.fsdecode(cause.filename)).absolute() if isinstance(cause.filename, str | bytes) else None
            inside = [root.absolute() for root in roots]
            if at is None or any(at == root or at in root.parents or root in at.parents for root in inside):
                return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _folder(of_user: Callable[[str], Path]) -> Path:
    try:
        folder = of_user("swarm")
    except RuntimeError:  # no HOME, and no entry for the user
        folder = Path("~")
    if not folder.is_absolute():
        raise _no_home("no home folder")
    return folder


def _no_home(message: str) -> NoHome:
    return NoHome(message, hint="set HOME, or SWARM_PROFILES and --data-dir")
