"""Where a program keeps what belongs to its user: below the home folder, unless XDG_DATA_HOME or XDG_CONFIG_HOME say
otherwise.

A user of a container or of a service may have no home folder, or one that nobody can write. So a program asks for it
at the moment when nothing else names a place, and never while it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs

from swarm.errors import NoHome


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
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise _no_home(f"no home folder that can be written: {folder} is below {there}")


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
