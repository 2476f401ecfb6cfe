"""A process of its own for what could take all time or all memory: tokenizers, and files that unpack.

A regular expression of a tokenizer may look back for ever, a rule may make a gigabyte of a letter, and a row of a
Parquet file may be of any size, whatever the file says. No library bounds that. So the process that reads them
(swarm/data/reader.py) has a bounded memory, has to be done with each piece in time, and dies with this one. It is told
what to read in JSON, writes the token shards itself, and tells how far it is: the bytes of the data pass no pipe.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any

import numpy as np

from swarm.data.documents import Source
from swarm.data.reader import OUT_OF_MEMORY
from swarm.data.shards import ShardInfo, TokenisingProgress, TokenManifest
from swarm.data.tokenizer import FoundTokenizer, Ids
from swarm.errors import ERROR_BY_CODE, InvalidConfig, InvalidData, SwarmError
from swarm.job.spec import JobSpec
from swarm.process.children import dying_with_parent
from swarm.text import size

PIECE_S_MAX = 120.0  # for 2 Mi characters or 4,096 rows, and to read them
MEMORY_BYTES_MAX = 6 << 30  # a text of 8 MiB takes 1.2 GiB


class FarTokenizer:
    """A tokenizer whose rules run in the reader's process."""

    def __init__(self, reader: ReaderProcess, found: FoundTokenizer, vocabulary_size: int, end_of_text: int) -> None:
        self._reader = reader
        self._files = found.files
        self.vocabulary_size = vocabulary_size
        self.end_of_text = end_of_text

    @property
    def start(self) -> Ids:
        raise AssertionError("who writes shards is the reader's process")

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return self._reader.encode(texts)

    def tokenizer_files(self) -> dict[str, bytes]:
        return dict(self._files)


class ReaderProcess:
    """The process, once something is asked of it. It ends with an error, with this object, and with this process."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._where = ""  # what the tokenizer is called
        self._doing, self._at = "rules", ""

    def load(self, found: FoundTokenizer) -> FarTokenizer:
        """Read a tokenizer there; InvalidConfig."""
        self._where = found.where
        named = [(name, len(content)) for name, content in found.files.items()]
        request = {"do": "load", "where": found.where, "packing": self._spec.data.packing, "files": named}
        answer = self._ask(request, *found.files.values())
        return FarTokenizer(self, found, answer["vocabulary_size"], answer["end_of_text"])

    def tokenise(self, sources: Sequence[Source], out_dir: Path, progress: TokenisingProgress) -> TokenManifest:
        """Write the token shards of the sources there, as `write_shards`."""
        named = [(str(source.path), source.format, source.size_bytes) for source in sources]
        request = {"do": "tokenise", "spec": self._spec.model_dump_json(), "sources": named, "out_dir": str(out_dir)}
        answer = self._ask(request, heard=progress)
        shards = (ShardInfo(sha256, tokens, size, Path(path)) for sha256, tokens, size, path in answer.pop("shards"))
        return TokenManifest(tuple(shards), **answer)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of some short texts."""
        answer = self._ask({"do": "encode", "texts": list(texts)})
        return [np.array(ids, dtype=np.uint32) for ids in answer["ids"]]

    def close(self) -> None:
        """End the process, whatever it does."""
        child, self._child, self._unread = self._child, None, b""
        if child is not None:
            _end(child)

    def _ask(
        self, request: dict[str, Any], *contents: bytes, heard: TokenisingProgress = lambda done, total: None
    ) -> dict[str, Any]:
        try:
            child = self._child or self._start()
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: the reader of its answers says why
                child.stdin.write(json.dumps(request).encode() + b"\n")
                for content in contents:
                    child.stdin.write(content)
                child.stdin.flush()
            while True:
                told = json.loads(self._line(child))
                if "doing" in told:
                    self._doing, self._at = told["doing"], told["at"]
                elif "done" in told:
                    heard(told["done"], told["of"])
                elif told.get("code") == OUT_OF_MEMORY:
                    raise self._too_large("")
                elif "code" in told:
                    raise ERROR_BY_CODE.get(told["code"], InvalidData)(told["message"], hint=told["hint"])
                else:
                    return dict(told)
        except BaseException:  # Ctrl-C, too: the child has a session of its own
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "swarm.data.reader", str(MEMORY_BYTES_MAX)]
        root = str(Path(__file__).parents[2])  # also of a checkout that is not installed
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        child = self._child = subprocess.Popen(
            dying_with_parent(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._spec.data.source.startswith("hf:") else subprocess.DEVNULL,  # the bars of downloads
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
        )
        weakref.finalize(self, _end, child)
        return child

    def _line(self, child: subprocess.Popen[bytes]) -> bytes:
        """The next line that the child says; an error if it says nothing in time, or has ended."""
        assert child.stdout is not None
        due_s = monotonic() + PIECE_S_MAX
        while b"\n" not in self._unread:
            wait_s = None if self._doing == "load" else max(0.0, due_s - monotonic())
            if not _is_readable(child.stdout, wait_s):
                raise self._too_slow()
            said = os.read(child.stdout.fileno(), 1 << 20)
            if not said:
                ended = f"ends the process that reads it (exit status {child.wait()})"
                if not (self._at or self._where):
                    hint = "see whether python -m swarm.data.reader 1000000000 runs on this machine"
                    raise InvalidData(f"the data {ended} before it is read", hint=hint)
                raise self._too_large(f", or {ended}")
            self._unread += said
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _too_slow(self) -> SwarmError:
        if self._doing == "rules":
            part = f" with a part of {self._at}" if self._at else ""
            return InvalidConfig(
                f"{self._where}: its rules were not done{part} within {PIECE_S_MAX:g} s",
                hint="a regular expression of its tokenizer.json may never end: use another tokenizer, such as "
                '"byte", which needs no files; if this machine is very busy, try again',
            )
        return InvalidData(
            f"{self._at}: no text came out of it within {PIECE_S_MAX:g} s",
            hint="it may unpack to far more than it holds: choose data.source so that it is left out; if this machine "
            "is very busy, try again",
        )

    def _too_large(self, doubt: str) -> SwarmError:
        what, error = (self._at, InvalidData) if self._at else (self._where, InvalidConfig)
        return error(
            f"{what} takes more than {size(MEMORY_BYTES_MAX)} of memory{doubt}",
            hint="it unpacks to far more than it holds: write it anew with shorter texts, or choose data.source so "
            "that it is left out"
            if self._doing != "rules"
            else 'its tokenizer.json makes far more of a text than there is: use another tokenizer, such as "byte"',
        )


def _is_readable(stream: IO[bytes], wait_s: float | None) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(wait_s))


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):  # what was not written is not
                stream.close()
    child.wait()
