"""swarm.data.corpus: who reads what people train on, and what is said if that fails as nobody foresaw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.data.corpus import Corpus, open_corpus, tokenise
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidData, SwarmError
from tests.support.texts import job

# All modules of the programs, one program after the other, and the readers that they load.
LOADED = """
import importlib, json, pkgutil, sys
from stage_server.lean_imports import lean_imports
readers = ("swarm.data.corpus", "swarm.data.documents", "swarm.data.shards", "swarm.data.tokenizer")
loaded = {}
with lean_imports():
    for program in ("scheduler", "stage_server"):
        package = importlib.import_module(program)
        for found in pkgutil.walk_packages(package.__path__, f"{program}."):
            if found.name.rpartition(".")[2] not in ("__main__", "env") and ".versions" not in found.name:
                importlib.import_module(found.name)
        loaded[program] = [name for name in readers if name in sys.modules]
print(json.dumps(loaded))
"""


def test_no_server_reads_texts_and_tokenizers() -> None:
    """They are read without bounds, on the machine of the person who chose them."""
    done = subprocess.run([sys.executable, "-c", LOADED], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == {"scheduler": [], "stage_server": []}


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (
            LookupError("what is this"),
            SwarmError,
            ": unexpected error: LookupError: what is this, at swarm.data.shards:",
        ),
        (MemoryError(), InvalidData, ": there is not enough memory for it"),
    ],
)
def test_what_nobody_foresaw_is_said_with_its_place_in_the_data_and_in_the_code(
    tmp_path: Path, fault: Exception, kind: type[SwarmError], words: str
) -> None:
    """Any fault of a library was told as a lack of memory, or as a traceback."""

    class Broken(ByteTokenizer):
        def encode_batch(self, texts: object) -> list[object]:  # type: ignore[override]  # it gives nothing
            raise fault

    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    spec = job(path, tokenizer="byte")
    with pytest.raises(SwarmError) as caught:
        tokenise(spec, tmp_path / "out", None, Corpus(open_corpus(spec).sources, Broken()))
    assert type(caught.value) is kind
    assert caught.value.message.startswith(f"{path}, line 1 to 2{words}")
    assert ("bug" in caught.value.hint) is (kind is SwarmError)
