"""Where a checkpoint keeps the state of each island's optimizer.

    model/, outer/                           what all islands share
    optimizer/, weights/                     of island 0, where a job with one island has its own
    islands/01/optimizer/, .../weights/      of island 1, and so on

Each island loads its own state. In a job with more islands the new ones take the optimizer's states of the others, in
turn, but no weights of theirs: what one of them has trained and not merged must not count twice, so they begin with the
outer weights. In a job with fewer islands the rest is left out. Decision: docs/decisions/069.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

OPTIMIZER_FOLDER = "optimizer"
OUTER_FOLDER = "outer"
WEIGHTS_FOLDER = "weights"  # of an island, where they are not the outer weights
_OF_ISLAND = re.compile(rf"^islands/([0-9]{{2}})/(?=(?:{OPTIMIZER_FOLDER}|{WEIGHTS_FOLDER})/)")


class Named(Protocol):
    """A file of a checkpoint."""

    @property
    def path(self) -> str: ...


File = TypeVar("File", bound=Named)


def island_folder(island: int, folder: str) -> str:
    """The folder with an island's own state: OPTIMIZER_FOLDER or WEIGHTS_FOLDER."""
    return folder if not island else f"islands/{island:02d}/{folder}"


def without_island(path: str) -> str:
    """The path that a file of an island would have in a checkpoint of that island alone."""
    return _OF_ISLAND.sub("", path)


def files_for(files: Sequence[File], island: int) -> tuple[File, ...]:
    """The files of a checkpoint that an island loads."""
    saved = 1 + max((int(match[1]) for file in files if (match := _OF_ISLAND.match(file.path))), default=0)
    own = {island_folder(island % saved, OPTIMIZER_FOLDER), island_folder(island, WEIGHTS_FOLDER)}
    return tuple(
        file
        for file in files
        if not {OPTIMIZER_FOLDER, WEIGHTS_FOLDER}.intersection(file.path.split("/")[:-1])
        or file.path.rpartition("/")[0] in own
    )
