"""Where a checkpoint keeps the state of each island's optimizer.

    model/, outer/              what all islands share
    optimizer/                  of island 0, where a job with one island has its own
    islands/01/optimizer/       of island 1, and so on

Each island loads its own state. In a job with more islands the new ones take the states of the others, in turn. In a
job with fewer islands the rest is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

OPTIMIZER_FOLDER = "optimizer"
OUTER_FOLDER = "outer"
_OF_ISLAND = re.compile(rf"^islands/([0-9]{{2}})/(?={OPTIMIZER_FOLDER}/)")


class Named(Protocol):
    """A file of a checkpoint."""

    @property
    def path(self) -> str: ...


File = TypeVar("File", bound=Named)


def optimizer_folder(island: int) -> str:
    """The folder with the optimizer's state of an island."""
    return OPTIMIZER_FOLDER if not island else f"islands/{island:02d}/{OPTIMIZER_FOLDER}"


def without_island(path: str) -> str:
    """The path that a file of an island would have in a checkpoint of that island alone."""
    return _OF_ISLAND.sub("", path)


def files_for(files: Sequence[File], island: int) -> tuple[File, ...]:
    """The files of a checkpoint that an island loads."""
    saved = 1 + max((int(match[1]) for file in files if (match := _OF_ISLAND.match(file.path))), default=0)
    own = optimizer_folder(island % saved)
    return tuple(
        file for file in files if OPTIMIZER_FOLDER not in file.path.split("/")[:-1] or file.path.startswith(f"{own}/")
    )
