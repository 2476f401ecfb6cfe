"""What lies in the place of a large file of a repository that was cloned without Git LFS."""

from __future__ import annotations

from swarm.errors import InvalidModel

_BEGINNING = b"version https://git-lfs"
_LEAST = len(b"version ")


def check_no_pointer(where: str, beginning: bytes) -> None:
    """InvalidModel if the first bytes of a file, 8 at least, say that it only stands for another."""
    if len(beginning) >= _LEAST and beginning[: len(_BEGINNING)] == _BEGINNING[: len(beginning)]:
        raise InvalidModel(f"{where} is a pointer of Git LFS, which stands for a file", hint="fetch it: git lfs pull")
