"""What the first bytes of a file say that it is, if it is neither text nor JSON lines."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """What a file is, and what to do about it."""

    name: str
    hint: str


_UNPACK = "unpack it, and name what is inside"
_CONVERT = "write its texts as UTF-8 or JSON lines, or choose data.source so that it is left out"
_KINDS = (
    (0, b"\x1f\x8b", Kind("compressed with gzip", "let its name end in .gz")),
    (0, b"\x28\xb5\x2f\xfd", Kind("compressed with zstd", "let its name end in .zst")),
    (0, b"\xfd7zXZ\0", Kind("compressed with xz", f"{_UNPACK}: xz -d")),
    (0, b"\x04\x22\x4d\x18", Kind("compressed with lz4", f"{_UNPACK}: lz4 -d")),
    (4, b"1AY&SY", Kind("compressed with bzip2", f"{_UNPACK}: bzip2 -d")),
    (0, b"PK\x03\x04", Kind("a zip archive", f"{_UNPACK}: unzip")),
    (0, b"PK\x05\x06", Kind("a zip archive", f"{_UNPACK}: unzip")),
    (0, b"7z\xbc\xaf\x27\x1c", Kind("a 7z archive", _UNPACK)),
    (0, b"Rar!\x1a\x07", Kind("a RAR archive", _UNPACK)),
    (257, b"ustar", Kind("a tar archive", f"{_UNPACK}: tar -xf")),
    (0, b"PAR1\x15", Kind("a Parquet file", 'set data.format = "parquet", or let its name end in .parquet')),
    (0, b"ARROW1\0\0", Kind("an Arrow file", "write it as Parquet")),
    (0, b"\xff\xff\xff\xff", Kind("a stream of Arrow", 'name its data set\'s folder with data.format = "hf"')),
    (0, b"Obj\x01", Kind("an Avro file", _CONVERT)),
    (0, b"\x89HDF\r\n\x1a\n", Kind("an HDF5 file", _CONVERT)),
    (0, b"SQLite format 3\0", Kind("an SQLite database", _CONVERT)),
    (0, b"%PDF-", Kind("a PDF", _CONVERT)),
    (0, b"\x93NUMPY", Kind("an array of NumPy", 'for token ids write array.astype("uint16").tofile("FILE.bin")')),
    (0, b"\x80\x04\x95", Kind("a pickle, which is never loaded", _CONVERT)),
    (0, b"\x7fELF", Kind("a program", _CONVERT)),
    (0, b"\x89PNG\r\n", Kind("a picture", _CONVERT)),
    (0, b"\xff\xd8\xff", Kind("a picture", _CONVERT)),
    (0, b"{\\rtf", Kind("a document in RTF", _CONVERT)),
    (0, b"version https://git-lfs", Kind("a pointer of Git LFS, which stands for a file", "fetch it: git lfs pull")),
    (0, b"\xff\xfe\0\0", Kind("UTF-32 text", "convert it to UTF-8: iconv -f UTF-32 -t UTF-8")),
    (0, b"\0\0\xfe\xff", Kind("UTF-32 text", "convert it to UTF-8: iconv -f UTF-32 -t UTF-8")),
    (0, b"\xff\xfe", Kind("UTF-16 text", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8")),
    (0, b"\xfe\xff", Kind("UTF-16 text", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8")),
)
_BINARY = Kind("binary (it holds bytes of 0)", f'{_CONVERT}; data.format = "text" takes it as it is if it is UTF-8')
_TEXT = Kind("text", 'set data.format = "text" or "jsonl", or let its name say so')
_PRINTED = frozenset(b"\t\n\r") | frozenset(range(0x20, 0x7F))
HEAD_BYTES = max(at + len(mark) for at, mark, _ in _KINDS)
_BEGINNINGS = {mark[0] for at, mark, _ in _KINDS if at == 0} | {ord("B")}


def kind_of(head: bytes) -> Kind | None:
    """What a file is that begins with these HEAD_BYTES, or more, or fewer if it is shorter; None: it may be text."""
    if b"\0" not in head and head and head[0] not in _BEGINNINGS:
        return None  # as nearly every text
    return _marked(head, 1) or (_unmarked(head) if b"\0" in head else None)


def kind_beside_ids(head: bytes) -> Kind | None:
    """What a file is that should hold token ids: by a mark that ids do not make by chance, or as it is all letters."""
    if len(head) >= HEAD_BYTES and all(byte in _PRINTED for byte in head):
        return _TEXT
    return None if head.startswith((b"\xff\xfe", b"\xff\xff")) else _marked(head, 4)


def _marked(head: bytes, least: int) -> Kind | None:
    known = (kind for at, mark, kind in _KINDS if len(mark) >= least and head[at : at + len(mark)] == mark)
    return next(known, None)


def _unmarked(head: bytes) -> Kind:
    """UTF-16 without a mark in front has a 0 in most of its pairs, and always on the same side."""
    for name, zeros, others in (("UTF-16LE", head[1::2], head[0::2]), ("UTF-16BE", head[0::2], head[1::2])):
        if 2 * zeros.count(0) > len(zeros) and not others.count(0):
            return Kind(f"{name} text", f"convert it to UTF-8: iconv -f {name} -t UTF-8")
    return _BINARY
