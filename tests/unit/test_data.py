"""swarm.data: text to shards to microbatches. Order is in tests/property/test_data_order.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from swarm.config import JobSpec, TrainingSection, parse_job
from swarm.data import Batches, ByteTokenizer, TokenData, read_documents, shuffled, tokenise
from swarm.errors import InvalidData


def job(source: str, **data: Any) -> JobSpec:
    return parse_job(
        {
            "name": "t",
            "model": {"config": {"num_hidden_layers": 1}},
            "data": {"source": source, "sequence_length": 8, **data},
        }
    )


def tokens_of(spec: JobSpec, out: Path) -> list[int]:
    manifest = tokenise(spec, out)
    data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
    assert data.tokens == manifest.tokens
    return data.read(0, data.tokens).tolist()


def test_bytes_are_tokens_and_come_back_as_text() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve 🙂\n\t\0"
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text).tolist(), 256]) == text
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize(
    "text", ["", "def f():\n    return 1\n", "naïve 🙂 日本", " a  b", "x<|endoftext|>y", "\0\x7f\x80ÿ\r\n"]
)
def test_tokenizer_file_gives_the_same_ids(text: str) -> None:
    files = ByteTokenizer().tokenizer_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.encode_special_tokens = json.loads(files["tokenizer_config.json"])["split_special_tokens"]
    ids = tokenizer.encode(text).ids
    assert ids == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(ids) == text


def test_documents_follow_in_order_of_path_each_closed_by_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("zweite")
    (tmp_path / "a.txt").write_text("erste")
    (tmp_path / "c.txt").write_text("")
    got = tokens_of(job(f"{tmp_path}/*.txt"), tmp_path / "out")
    assert got == [*b"erste", 256, *b"zweite", 256]


def test_several_globs_name_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.py").write_text("x")
    (tmp_path / "y.txt").write_text("y")
    paths = [document.path.name for document in read_documents(f"{tmp_path}/**/*.py, {tmp_path}/*.txt, {tmp_path}/y*")]
    assert paths == ["x.py", "y.txt"]


def test_shards_are_bounded_named_by_their_hash_and_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab" * 600_000)
    spec = job(f"{tmp_path}/a.txt", upload_shard_bytes=1 << 20)
    seen: list[tuple[int, int]] = []
    first = tokenise(spec, tmp_path / "one", lambda done, total: seen.append((done, total)))
    second = tokenise(spec, tmp_path / "two")
    assert [shard.size_bytes for shard in first.shards] == [1 << 20, 1 << 20, 2 * (1_200_001 - (1 << 20))]
    assert [shard.sha256 for shard in first.shards] == [shard.sha256 for shard in second.shards]
    assert first.shards[0].sha256 == first.shards[1].sha256
    assert {path.stem for path in (tmp_path / "one").iterdir()} == {shard.sha256 for shard in first.shards}
    assert seen[-1] == (1_200_000, 1_200_000)
    data = TokenData.open([shard.path for shard in first.shards], first.token_dtype)
    assert data.read((1 << 19) - 1, 3).tolist() == [*b"bab"]
    assert data.read(data.tokens - 2, 2).tolist() == [*b"b", 256]


def test_unigram_entropy_is_that_of_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaabbbb")
    assert tokenise(job(f"{tmp_path}/a.txt"), tmp_path / "o").unigram_entropy == pytest.approx(
        8 / 9 * math.log(9 / 4) + 1 / 9 * math.log(9)
    )


def test_a_character_across_two_reads_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.data.READ_BYTES", 3)
    (tmp_path / "a.txt").write_text("a🙂é日bcdefgh")
    assert tokens_of(job(f"{tmp_path}/a.txt"), tmp_path / "o") == [*"a🙂é日bcdefgh".encode(), 256]


@pytest.mark.parametrize(("content", "position"), [(b"0123456\xff89", 7), (b"01234567\xf0\x9f", 8), (b"\xc3(", 0)])
def test_bad_utf8_names_the_file_and_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, position: int
) -> None:
    monkeypatch.setattr("swarm.data.READ_BYTES", 3)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(InvalidData, match=rf"a\.txt is not UTF-8: byte {position} "):
        tokenise(job(f"{tmp_path}/a.txt"), tmp_path / "o")
    assert not list((tmp_path / "o").iterdir())


def test_missing_and_short_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("1234567")
    with pytest.raises(InvalidData, match="matches no file"):
        tokenise(job(f"{tmp_path}/none/*.txt"), tmp_path / "o")
    with pytest.raises(InvalidData, match="matches no file") as caught:
        tokenise(job(f"{tmp_path}"), tmp_path / "o")
    assert "pattern" in caught.value.hint
    with pytest.raises(InvalidData, match="8 tokens, one sample needs 9"):
        tokenise(job(f"{tmp_path}/short.txt"), tmp_path / "o")
    with pytest.raises(InvalidData, match="hub data sets"):
        tokenise(job("hf:a/b"), tmp_path / "o")
    (tmp_path / "short.txt").write_text("12345678")
    assert tokenise(job(f"{tmp_path}/short.txt"), tmp_path / "o").tokens == 9


def test_broken_shards_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    with pytest.raises(InvalidData, match="cannot be read"):
        TokenData.open([path], "uint16")
    for content in (b"", b"123"):
        path.write_bytes(content)
        with pytest.raises(InvalidData, match="no whole number"):
            TokenData.open([path], "uint16")
    path.write_bytes(np.array([1, 300], dtype="<u2").tobytes())
    with pytest.raises(InvalidData, match="unknown"):
        TokenData.open([path], "int8")
    assert TokenData.open([path], "uint16").read(0, 2).tolist() == [1, 300]
    with pytest.raises(InvalidData, match="id 300"):
        TokenData.open([path], "uint16", vocabulary_size=257).read(0, 2)


def test_order_is_drawn_by_the_seed_and_the_pass_and_nothing_else() -> None:
    orders = {
        (seed, a_pass): tuple(shuffled(position, 500, seed, a_pass) for position in range(500))
        for seed in (0, 1)
        for a_pass in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert tuple(range(500)) not in orders.values()
    # Written down once: another order would break the resume of every job that is running.
    assert orders[0, 0][:6] == (427, 41, 49, 103, 255, 486)


def test_order_looks_random() -> None:
    size = 4096
    order = np.array([shuffled(position, size, 7, 0) for position in range(size)])
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() - size / 3) < size / 30
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.06


def test_tokens_of_a_step_are_its_targets() -> None:
    training = TrainingSection(steps=2, warmup_steps=0, global_batch_sequences=6, microbatch_sequences=2, seed=0)
    batches = Batches(TokenData([np.arange(100, dtype=np.uint16)]), training, 10, True, 0)
    assert batches.samples == 9
    counted = sum(batches.microbatch(1, index)[1].size for index in range(3))
    assert batches.tokens_of(1) == counted == 60
    tokens, targets = batches.microbatch(1, 2)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert targets.flags.c_contiguous
