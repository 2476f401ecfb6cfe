"""swarm.data.shards: texts to token shards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from swarm.config import JobSpec, parse_job
from swarm.data import ByteTokenizer, TokenData, read_documents, tokenise
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
    monkeypatch.setattr("swarm.data.documents.READ_BYTES", 3)
    (tmp_path / "a.txt").write_text("a🙂é日bcdefgh")
    assert tokens_of(job(f"{tmp_path}/a.txt"), tmp_path / "o") == [*"a🙂é日bcdefgh".encode(), 256]


@pytest.mark.parametrize(("content", "position"), [(b"0123456\xff89", 7), (b"01234567\xf0\x9f", 8), (b"\xc3(", 0)])
def test_bad_utf8_names_the_file_and_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, position: int
) -> None:
    monkeypatch.setattr("swarm.data.documents.READ_BYTES", 3)
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
