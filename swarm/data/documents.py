"""Where texts come from."""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import InvalidData

READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One text, read in pieces so that a large file needs little memory."""

    path: Path
    size_bytes: int

    def pieces(self) -> Iterator[str]:
        """The text in order; InvalidData names the first byte that is no UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = 0
        try:
            with self.path.open("rb") as file:
                while block := file.read(READ_BYTES):
                    held_back = len(decoder.getstate()[0])
                    yield decoder.decode(block)
                    position += len(block)
                held_back = len(decoder.getstate()[0])
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise InvalidData(
                f"{self.path} is not UTF-8: byte {position - held_back + error.start}",
                hint="convert the file to UTF-8, or choose data.source so that it is left out",
            ) from None
        except OSError as error:
            raise InvalidData(f"{self.path} cannot be read: {error.strerror or error}") from error


def read_documents(source: str, format: str = "auto") -> list[Document]:
    """The documents that `source` names: one per file, in order of path, empty files left out.

    `source` is a glob, or several between commas; "**" descends into folders. Both formats of this version, "auto" and
    "text", take a whole file as one text. InvalidData if nothing matches or a file cannot be looked at.
    """
    assert format in ("auto", "text"), format
    if source.startswith("hf:"):
        raise InvalidData(
            f'data.source = "{source}": hub data sets are not supported', hint='name files: "corpus/*.txt"'
        )
    patterns = [part.strip() for part in source.split(",") if part.strip()]
    paths = sorted({path for pattern in patterns for path in glob.glob(os.path.expanduser(pattern), recursive=True)})
    try:
        files = [(Path(path), os.stat(path).st_size) for path in paths if os.path.isfile(path)]
    except OSError as error:
        raise InvalidData(f"{error.filename} cannot be read: {error.strerror}") from error
    if not files:
        hint = "a folder needs a pattern: DIR/**/*.txt" if paths else "check the path; it is relative to where you are"
        raise InvalidData(f'data.source = "{source}" matches no file', hint=hint)
    return [Document(path, size_bytes) for path, size_bytes in files if size_bytes > 0]
