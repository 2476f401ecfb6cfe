"""Run by ReaderProcess (swarm/data/apart.py): reads texts and runs the tokenizer, within bounds that the kernel keeps.

request    one line of JSON, then the bytes of the files that it names
answers    lines of JSON: {"doing": ..., "at": ...} before each piece of work, {"done": ..., "of": ...} after it, at
           last the result or {"code": ..., "message": ..., "hint": ...}
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from swarm.data.documents import Source
from swarm.data.shards import write_shards
from swarm.data.tokenizer import FoundTokenizer, Ids, Tokenizer, load_tokenizer
from swarm.errors import SwarmError
from swarm.job.spec import spec_from_json

OUT_OF_MEMORY = "memory"  # in the place of an error's code


def main(memory_bytes: int) -> None:
    """Answer requests until there are no more; everything else that a library prints goes to stderr."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most_bytes = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    reader = _Reader(sys.stdin.buffer, answers)
    while reader.answer():
        pass


class _Reader:
    def __init__(self, requests: BinaryIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers
        self._tokenizer: Tokenizer | None = None
        self._where = ""  # what the tokenizer is called
        self._at = ""  # the source that is read

    def answer(self) -> bool:
        """Answer one request; False if there is none any more."""
        line = self._requests.readline()
        if not line:
            return False
        try:
            self._tell(self._answer(json.loads(line)))
        except MemoryError:
            self._tell({"code": OUT_OF_MEMORY})
        except SwarmError as error:
            self._tell({"code": error.code, "message": error.message, "hint": error.hint})
        return True

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "load":
                files = {name: self._requests.read(size_bytes) for name, size_bytes in request["files"]}
                self._where = request["where"]
                self._doing("rules")
                tokenizer = self._tokenizer = FoundTokenizer(files, self._where).load(request["packing"])
                return {"vocabulary_size": tokenizer.vocabulary_size, "end_of_text": tokenizer.end_of_text}
            case "tokenise":
                return self._tokenise(request)
            case "encode":
                assert self._tokenizer is not None
                self._doing("rules")
                return {"ids": [ids.tolist() for ids in self._tokenizer.encode_batch(request["texts"])]}
            case other:
                raise AssertionError(other)

    def _tokenise(self, request: dict[str, Any]) -> dict[str, Any]:
        spec = spec_from_json(request["spec"])
        sources = [Source(Path(path), kind, size_bytes) for path, kind, size_bytes in request["sources"]]
        tokenizer = self._tokenizer or load_tokenizer(spec)

        def report(done_bytes: int, total_bytes: int) -> None:
            self._tell({"done": done_bytes, "of": total_bytes})

        def begins(source: Source) -> None:
            self._at = str(source.path)
            self._doing("load" if source.format == "hf" else "read")  # the hub takes as long as it takes

        told = _Told(tokenizer, self._doing)
        manifest = write_shards(spec, Path(request["out_dir"]), sources, told, report, begins)
        return {
            "shards": [[one.sha256, one.tokens, one.size_bytes, str(one.path)] for one in manifest.shards],
            "token_dtype": manifest.token_dtype,
            "vocabulary_size": manifest.vocabulary_size,
            "unigram_entropy": manifest.unigram_entropy,
            "end_of_text": manifest.end_of_text,
        }

    def _doing(self, what: str) -> None:
        self._tell({"doing": what, "at": self._at})

    def _tell(self, values: dict[str, Any]) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()


class _Told:
    """A tokenizer that says when its rules are at work and when a file is read."""

    def __init__(self, tokenizer: Tokenizer, doing: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._doing = doing
        self.vocabulary_size, self.end_of_text, self.start = (
            tokenizer.vocabulary_size,
            tokenizer.end_of_text,
            tokenizer.start,
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        self._doing("rules")
        encoded = self._tokenizer.encode_batch(texts)
        self._doing("read")
        return encoded

    def tokenizer_files(self) -> dict[str, bytes]:
        return self._tokenizer.tokenizer_files()


if __name__ == "__main__":
    main(int(sys.argv[1]))
