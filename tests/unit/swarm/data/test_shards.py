"""swarm.data.shards: texts to token shards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from swarm.data.batches import IGNORED, Batches, TokenData
from swarm.data.corpus import open_corpus, tokenise
from swarm.data.shards import remarks
from swarm.errors import InvalidConfig, InvalidData
from swarm.job.spec import JobSpec
from tests.support.texts import job, write_lines
from tests.support.tokenizer import TEXT, write_tokenizer


def tokens_of(spec: JobSpec, out: Path) -> list[int]:
    manifest = tokenise(spec, out)
    data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
    assert data.tokens == manifest.tokens
    return data.read(0, data.tokens).tolist()


def test_documents_follow_in_order_of_path_each_closed_by_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("zweite")
    (tmp_path / "a.txt").write_text("erste")
    (tmp_path / "c.txt").write_text("")
    got = tokens_of(job(f"{tmp_path}/*.txt"), tmp_path / "out")
    assert got == [*b"erste", 256, *b"zweite", 256]


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


@pytest.mark.parametrize(
    ("name", "text", "values", "words"),
    [
        ("a.txt", "1234567", {}, "8 tokens, one sample needs 9"),
        ("a.txt", "0123456789", {"validation_ratio": 0.1}, "nothing is left to hold out"),
        ("a.jsonl", '{"text": ""}\n\n{"text": ""}\n', {"packing": True}, "has no text in it"),
        ("a.jsonl", '{"text": ""}\n\n{"text": ""}\n', {"packing": False}, "has no text in it"),
    ],
)
def test_short_and_empty_data_are_refused(
    tmp_path: Path, name: str, text: str, values: dict[str, Any], words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidData, match=words):
        tokenise(job(tmp_path / name, **values), tmp_path / "o")
    (tmp_path / name).write_text("12345678" if name == "a.txt" else '{"text": "12345678"}')
    assert tokenise(job(tmp_path / name), tmp_path / "o").tokens == 9


def test_texts_of_a_hugging_face_tokenizer_begin_and_end_as_it_says(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", begin=True)
    write_lines(tmp_path / "a.jsonl", ({"text": text} for text in (TEXT, "", "fox")))
    theirs = AutoTokenizer.from_pretrained(folder)
    spec = job(f"{tmp_path}/a.jsonl", tokenizer=str(folder))
    expected = [*theirs(TEXT)["input_ids"], 0, *theirs("fox")["input_ids"], 0]
    assert tokens_of(spec, tmp_path / "o") == expected
    manifest = tokenise(spec, tmp_path / "again")
    assert (manifest.end_of_text, manifest.vocabulary_size, manifest.token_dtype) == (0, len(theirs), "uint16")
    assert [path.name for path in (tmp_path / "again").iterdir()] == [path.name for path in (tmp_path / "o").iterdir()]


def test_how_texts_are_batched_and_cut_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", begin=True)
    lines = "".join(f"def f{n}(x):\n    return x * {n}\n\n\n" for n in range(40))
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(lines[number:])
    spec = job(f"{tmp_path}/*.txt", tokenizer=str(folder))
    whole = tokens_of(spec, tmp_path / "o")
    monkeypatch.setattr("swarm.data.documents.READ_BYTES", 100)
    monkeypatch.setattr("swarm.data.documents.CUT_BYTES", 150)
    monkeypatch.setattr("swarm.data.shards.BATCH_TEXTS", 3)
    assert tokens_of(spec, tmp_path / "p") == whole


def test_without_packing_every_text_begins_a_sample_and_only_itself_counts(tmp_path: Path) -> None:
    texts = ["a", "seven77", "eight888", "much longer than one sample", "z"]
    write_lines(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    spec = job(f"{tmp_path}/a.jsonl", packing=False)
    row = []
    for text in texts:
        row += [*text.encode(), 256]
        row += [256] * (-len(row) % 8)
    row.append(256)
    assert tokens_of(spec, tmp_path / "o") == row
    manifest = tokenise(spec, tmp_path / "o")
    counted = [*"".join(texts).encode(), *[256] * len(texts)]
    shares = np.bincount(counted)[np.bincount(counted) > 0] / len(counted)
    assert manifest.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())

    training = spec.training.model_copy(update={"global_batch_sequences": 9, "microbatch_sequences": 9})
    data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
    batches = Batches(data, training, 8, False, 0, end_of_text=256)
    assert batches.samples == len(row) // 8 == 9
    tokens, targets = batches.microbatch(0, 0)
    starts = [tokens[index].tolist() for index in (0, 1, 2, 4, 8)]
    assert [bytes(token for token in start if token < 256) for start in starts] == [
        b"a", b"seven77", b"eight888", b"much lon", b"z",
    ]  # fmt: skip
    kept = targets[targets != IGNORED].tolist()
    assert kept == [id_ for text in texts for id_ in (*text.encode()[1:], 256)]
    assert batches.tokens_of(0) == len(kept)


def test_token_ids_keep_their_order_and_their_end_of_text(tmp_path: Path) -> None:
    ids = [*range(200, 210), 0, 5, 0, 320, 7]
    np.array(ids[:6], dtype="<u4").tofile(tmp_path / "a.bin")
    np.array(ids[6:], dtype="<u4").tofile(tmp_path / "b.bin")
    folder = str(write_tokenizer(tmp_path / "tokenizer"))
    source = f"{tmp_path}/*.bin"
    spec = job(source, vocabulary=500, bin_dtype="uint32")
    assert tokens_of(spec, tmp_path / "o") == ids
    manifest = tokenise(spec, tmp_path / "o")
    assert (manifest.end_of_text, manifest.vocabulary_size, manifest.token_dtype) == (-1, 500, "uint16")
    named = job(source, tokenizer=folder, bin_dtype="uint32")
    manifest = tokenise(named, tmp_path / "o")
    assert (manifest.end_of_text, manifest.vocabulary_size) == (0, 321)
    assert set(open_corpus(named).tokenizer.tokenizer_files()) == {"tokenizer.json", "tokenizer_config.json"}
    assert open_corpus(spec).tokenizer.tokenizer_files() == {}
    with pytest.raises(InvalidData, match="holds id 320 at position"):
        tokenise(job(source, vocabulary=320, bin_dtype="uint32"), tmp_path / "p")
    with pytest.raises(InvalidConfig, match="packing = false needs texts"):
        tokenise(job(source, vocabulary=500, packing=False), tmp_path / "p")
    assert not list((tmp_path / "p").iterdir())


def test_a_large_vocabulary_is_written_in_four_bytes(tmp_path: Path) -> None:
    np.arange(70_000, dtype="<u4").tofile(tmp_path / "a.bin")
    manifest = tokenise(job(f"{tmp_path}/a.bin", vocabulary=70_000, bin_dtype="uint32"), tmp_path / "o")
    data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
    assert manifest.token_dtype == "uint32"
    assert data.read(0, 70_000).tolist() == list(range(70_000))


def test_interrupted_tokenising_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")

    def interrupt(done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenise(job(f"{tmp_path}/a.txt"), tmp_path / "o", interrupt)
    assert not list((tmp_path / "o").iterdir())


def test_rows_that_were_left_out_are_counted_and_change_no_token(tmp_path: Path) -> None:
    for name, texts in (("some", [None, "erste", None, "zweite"]), ("all", ["erste", "zweite"])):
        write_lines(tmp_path / f"{name}.jsonl", ({"text": text} for text in texts))
    some = tokenise(job(f"{tmp_path}/some.jsonl", on_null="skip"), tmp_path / "out")
    plain = tokenise(job(f"{tmp_path}/all.jsonl"), tmp_path / "out")
    assert [shard.sha256 for shard in some.shards] == [shard.sha256 for shard in plain.shards]
    assert (some.skipped_rows, plain.skipped_rows) == (2, 0)
    assert "2 rows without a text left out (data.on_null)" in list(remarks(job("x"), some))
    with pytest.raises(InvalidData, match="has no text in it: 4 rows left out, which hold no body"):
        tokenise(job(f"{tmp_path}/some.jsonl", on_null="skip", text_field="body"), tmp_path / "out")


def test_data_that_fill_no_batch_are_said(tmp_path: Path) -> None:
    """A step repeated the same few samples, and nothing said so."""
    (tmp_path / "a.txt").write_text("a" * 8 * 300)
    spec = job(f"{tmp_path}/a.txt")
    manifest = tokenise(spec, tmp_path / "out")
    assert list(remarks(spec, manifest)) == []
    (tmp_path / "a.txt").write_text("a" * 8 * 255)
    (said,) = remarks(spec, tokenise(spec, tmp_path / "out"))
    assert said.startswith(
        "the data holds 255 samples of 8 tokens, and a step trains on 256, so a step repeats samples"
    )
    half = job(f"{tmp_path}/a.txt", validation_ratio=0.5)
    assert "holds 150 samples" in next(iter(remarks(half, manifest)))


def test_a_token_without_a_row_in_the_model_is_refused_only_where_it_occurs(tmp_path: Path) -> None:
    """A padding token that occurs in no text refused the model to which it belongs."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": size, "content": "<new pad>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a.txt").write_text(TEXT)
    spec = job(f"{tmp_path}/a.txt", tokenizer=str(folder), vocabulary=size)
    corpus = open_corpus(spec)
    assert corpus.resolve(spec).model.config["vocab_size"] == size
    assert [f"vocab_size is {size}" in line for line in corpus.remarks(spec)] == [True]
    assert tokenise(spec, tmp_path / "out").vocabulary_size == size
    (tmp_path / "a.txt").write_text(f"{TEXT} <new pad> {TEXT}")
    with pytest.raises(InvalidData, match=rf"a\.txt holds token {size}, for which the model has no row"):
        tokenise(spec, tmp_path / "again")
