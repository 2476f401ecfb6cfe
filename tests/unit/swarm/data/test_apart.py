"""Tokenizers and files that could take all time or all memory take neither from whoever submits a job."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swarm.data import apart
from swarm.data.apart import FarTokenizer, ReaderProcess
from swarm.data.corpus import Corpus, open_corpus, tokenise
from swarm.data.documents import find_sources
from swarm.data.shards import TokenManifest, write_shards
from swarm.data.tokenizer import ByteTokenizer, load_tokenizer
from swarm.errors import InvalidConfig, InvalidData, SwarmError
from swarm.job.spec import JobSpec, parse_job
from tests.support.tokenizer import write_tokenizer

TEXTS = ["the quick brown fox\n", "", "jumps <|end|> over 🙂\n", *(f"line {n}\n" for n in range(300))]


def job(source: Path, tokenizer: str = "byte", **data: Any) -> JobSpec:
    values = {"source": str(source), "sequence_length": 8} | data
    model = {"config": {"num_hidden_layers": 1}, "tokenizer": tokenizer}
    return parse_job({"name": "t", "model": model, "data": values})


def here(spec: JobSpec, out_dir: Path) -> TokenManifest:
    """The shards that this process writes."""
    sources = find_sources(spec.data)
    return write_shards(spec, out_dir, sources, load_tokenizer(spec), lambda done, total: None)


def write_sources(folder: Path) -> list[Path]:
    (folder / "a.txt").write_text("".join(TEXTS))
    pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return [folder / "a.txt", folder / "a.parquet", folder / "a.jsonl.gz"]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The processes that were started."""
    started: list[Any] = []
    start = ReaderProcess._start

    def noted(reader: ReaderProcess) -> Any:
        started.append(start(reader))
        return started[-1]

    monkeypatch.setattr(ReaderProcess, "_start", noted)
    yield started
    for child in started:
        child.kill()
        child.wait()


@pytest.mark.parametrize("named", ["byte", "own"])
def test_the_shards_are_those_that_one_process_would_write(tmp_path: Path, named: str, children: list[Any]) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", begin=True)) if named == "own" else "byte"
    seen: list[tuple[int, int]] = []
    for source in write_sources(tmp_path):
        spec = job(source, tokenizer)
        corpus = open_corpus(spec)
        assert (corpus.reader is None) == (named == "byte" and source.suffix == ".txt")
        ours = load_tokenizer(spec)
        assert corpus.tokenizer.tokenizer_files() == ours.tokenizer_files()
        assert corpus.resolve(spec) == Corpus(corpus.sources, ours).resolve(spec)
        made = tokenise(spec, tmp_path / "apart", lambda done, total: seen.append((done, total)), corpus)
        expected = here(spec, tmp_path / "here")
        assert seen[-1] == (corpus.size_bytes, corpus.size_bytes)
        assert len(made.shards) == 1
        moved = [replace(shard, path=tmp_path / "here" / shard.path.name) for shard in made.shards]
        assert replace(made, shards=tuple(moved)) == expected
        assert [one.path.read_bytes() for one in made.shards] == [one.path.read_bytes() for one in expected.shards]
        if isinstance(corpus.tokenizer, FarTokenizer):
            (ids,), (own,) = corpus.tokenizer.encode_batch(["a fox"]), ours.encode_batch(["a fox"])
            assert (ids.tolist(), ids.dtype) == (own.tolist(), own.dtype)
        corpus.reader and corpus.reader.close()
    assert len(children) == (2 if named == "byte" else 3)
    assert all(child.poll() is not None for child in children)


def rules(folder: Path, **changed: Any) -> str:
    """A tokenizer with other rules."""
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return str(folder)


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def test_rules_that_never_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Any]) -> None:
    """Four million ways to read the next letters, at each of a hundred thousand letters: it takes hours."""
    tokenizer = rules(tmp_path / "endless", pre_tokenizer=split(r"(?:a|a){22}\d"))
    source = tmp_path / "a.txt"
    source.write_text("a" * 100_000)
    spec = job(source, tokenizer)
    corpus = open_corpus(spec)
    reader, ready = corpus.reader, apart._is_readable
    assert reader is not None
    waits_s: list[float | None] = []

    def impatient(stream: Any, wait_s: float | None) -> bool:
        """Nothing can come any more once the rules are at work, so no time needs to pass."""
        waits_s.append(wait_s)
        return ready(stream, 0.0 if (reader._doing, reader._at) == ("rules", str(source)) else None)

    monkeypatch.setattr(apart, "_is_readable", impatient)
    with pytest.raises(InvalidConfig, match=rf"endless.*not done with a part of {source} within 120 s") as caught:
        tokenise(spec, tmp_path / "out", None, corpus)
    assert "regular expression" in caught.value.hint
    assert all(wait_s is not None and wait_s <= apart.PIECE_S_MAX for wait_s in waits_s)
    assert children[0].poll() == -signal.SIGKILL


def test_a_file_of_which_no_text_comes_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(b"\n" * (64 << 20)))
    monkeypatch.setattr(apart, "_is_readable", _until_it_reads(apart._is_readable))
    with pytest.raises(InvalidData, match=rf"{source}: no text came out of it within 120 s") as caught:
        tokenise(job(source), tmp_path / "out")
    assert "unpack" in caught.value.hint


def _until_it_reads(ready: Callable[[Any, float | None], bool]) -> Callable[[Any, float | None], bool]:
    """As if the first piece of the source never came."""
    lines: list[bool] = []

    def asked(stream: Any, wait_s: float | None) -> bool:
        lines.append(not lines and ready(stream, None))
        return lines[-1]

    return asked


def test_a_download_may_take_as_long_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ReaderProcess(job(tmp_path / "a.txt"))
    waits_s: list[float | None] = []

    def ready(stream: Any, wait_s: float | None) -> bool:
        waits_s.append(wait_s)
        reader._unread = b""
        return False

    monkeypatch.setattr(apart, "_is_readable", ready)
    for doing, is_bounded in (("load", False), ("read", True), ("rules", True)):
        reader._doing = doing
        with pytest.raises(SwarmError):
            reader.encode(["a"])
        assert (waits_s[-1] is not None) == is_bounded


def test_a_file_that_unpacks_to_far_more_than_it_says_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Any]
) -> None:
    """Eighty rows of 8 MiB that all are one entry of a dictionary: row groups say that they have 8 MiB."""
    monkeypatch.setattr(apart, "MEMORY_BYTES_MAX", 512 << 20)
    row = pa.DictionaryArray.from_arrays(pa.array([0] * 80, pa.int32()), pa.array(["x" * (8 << 20)]))
    source = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": row}), source, store_schema=False)
    assert source.stat().st_size < 1 << 20
    with pytest.raises(InvalidData, match=rf"{source} takes more than 512\.0 MiB of memory") as caught:
        tokenise(job(source), tmp_path / "out")
    assert "unpacks" in caught.value.hint
    assert children[0].poll() is not None


def test_rules_that_make_far_more_of_a_letter_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "MEMORY_BYTES_MAX", 512 << 20)
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    tokenizer = rules(tmp_path / "bomb", normalizer={"type": "Sequence", "normalizers": [grow] * 12})
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(InvalidConfig, match=r'bomb" takes more than 512\.0 MiB of memory') as caught:
        open_corpus(job(tmp_path / "a.txt", tokenizer))
    assert "tokenizer.json" in caught.value.hint


def test_rules_that_break_off_are_an_error(tmp_path: Path) -> None:
    """The library's panic is no Exception in Python: it ended commands with a traceback."""
    tokenizer = rules(tmp_path / "broken", pre_tokenizer=split(r"^(a|a)*[^a]$"))
    (tmp_path / "a.txt").write_text("a" * 40 + "bb")
    with pytest.raises(InvalidConfig, match=r"broken.*the rules of its tokenizer.json break off: .*retry-limit"):
        tokenise(job(tmp_path / "a.txt", tokenizer), tmp_path / "out")


def test_errors_of_the_data_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no table")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{"))
    for spec in (job(tmp_path / "a.parquet"), job(tmp_path / "a.jsonl.gz")):
        told = []
        for made in (tokenise, here):
            with pytest.raises(InvalidData) as caught:
                made(spec, tmp_path / "out")
            told.append((type(caught.value), caught.value.message, caught.value.hint))
        assert told[0] == told[1]


def test_ctrl_c_ends_the_process(tmp_path: Path, children: list[Any]) -> None:
    def interrupt(done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    spec = job(write_sources(tmp_path)[1])
    corpus = open_corpus(spec)
    with pytest.raises(KeyboardInterrupt):
        tokenise(spec, tmp_path / "out", interrupt, corpus)
    assert children[0].poll() == -signal.SIGKILL, "although the corpus is still there"
    del corpus


def test_a_process_that_is_killed_is_an_error(tmp_path: Path, children: list[Any]) -> None:
    def kill(done_bytes: int, total_bytes: int) -> None:
        os.kill(children[0].pid, signal.SIGKILL)

    source = write_sources(tmp_path)[1]
    spec = job(source)
    corpus = Corpus(tuple(find_sources(spec.data)) * 2, ByteTokenizer(), ReaderProcess(spec))
    with pytest.raises(InvalidData, match=rf"{source} takes more than .* or ends the process .*-9"):
        tokenise(spec, tmp_path / "out", kill, corpus)


def test_the_reader_runs_under_a_lower_limit_of_the_machine() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))

    command = [sys.executable, "-m", "swarm.data.reader", str(6 << 30)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, preexec_fn=limit, timeout=60, check=False).returncode == 0
