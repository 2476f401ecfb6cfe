"""Jobs over sources of texts, and what is read from them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from swarm.data.documents import TextPiece, find_sources, read_texts
from swarm.job.spec import DataSection, JobSpec, parse_job


def section(source: object, **values: Any) -> DataSection:
    return DataSection.model_validate({"source": str(source), **values})


def job(source: object, *, tokenizer: str = "", vocabulary: int | None = None, **data: Any) -> JobSpec:
    """A job on this source, with samples of 8 tokens."""
    size = {} if vocabulary is None else {"vocab_size": vocabulary}
    model = {"config": {"num_hidden_layers": 1, **size}, "tokenizer": tokenizer}
    return parse_job({"name": "t", "model": model, "data": {"source": str(source), "sequence_length": 8, **data}})


def pieces_of(source: object, **values: Any) -> list[TextPiece]:
    """The pieces of all sources, which never say that more was read than there is."""
    chosen, pieces = section(source, **values), []
    for found in find_sources(chosen):
        for piece in read_texts(found, chosen):
            assert 0 <= piece.done_bytes <= (found.size_bytes or piece.done_bytes)
            pieces.append(piece)
    return pieces


def texts_of(source: object, **values: Any) -> list[str]:
    """Whole texts, put together from their pieces; rows that are left out are none."""
    texts, held = [], ""
    for piece in pieces_of(source, **values):
        held += piece.text
        if piece.ends:
            texts += [] if piece.skipped else [held]
            held = ""
    assert not held
    return texts


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("blob"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def a_pointer(path: Path) -> None:
    """Of Git LFS, in the place of the file."""
    path.write_bytes(POINTER)


Plant = Callable[[Path], None]
