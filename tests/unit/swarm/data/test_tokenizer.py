"""swarm.data.tokenizer: the same ids as transformers on the same files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from swarm.data.corpus import tokenise
from swarm.data.tokenizer import (
    LETTERS_MAX,
    ByteTokenizer,
    HuggingFaceTokenizer,
    added,
    growth,
    load_tokenizer,
    read_tokenizer_files,
)
from swarm.errors import InvalidConfig, InvalidData
from swarm.job.spec import JobSpec
from tests.support.texts import Plant, a_link_to_nothing, a_pipe, a_pointer, job
from tests.support.tokenizer import TEXT, write_tokenizer


def spec(tokenizer: object, **data: Any) -> JobSpec:
    return job("x", tokenizer=str(tokenizer), **data)


def test_bytes_are_tokens_and_come_back_as_text() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve 🙂\n\t\0"
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text).tolist(), 256]) == text
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize(
    "text", ["", "def f():\n    return 1\n", "naïve 🙂 日本", " a  b", "x<|endoftext|>y", "\0\x7f\x80ÿ\r\n"]
)
def test_the_byte_tokenizers_file_gives_the_same_ids(text: str) -> None:
    files = ByteTokenizer().tokenizer_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.encode_special_tokens = json.loads(files["tokenizer_config.json"])["split_special_tokens"]
    ids = tokenizer.encode(text).ids
    assert ids == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(ids) == text
    (encoded,) = HuggingFaceTokenizer(files, "here", True).encode_batch([text])
    assert encoded.tolist() == ids


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_ids_are_those_of_transformers(tmp_path: Path, begin: bool, split_special_tokens: bool) -> None:
    """Truncation and padding that a tokenizer.json was saved with do not apply."""
    folder = write_tokenizer(tmp_path, begin=begin, split_special_tokens=split_special_tokens)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(spec(folder))
    texts = [TEXT, "x", " ", TEXT * 20]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert [*ours.start.tolist(), *ids.tolist()] == theirs(text)["input_ids"]
    assert ours.end_of_text == theirs.eos_token_id
    assert ours.vocabulary_size == len(theirs)
    assert ours.start.tolist() == ([theirs.convert_tokens_to_ids("<|begin|>")] if begin else [])


def test_nothing_named_means_bytes_unless_the_data_are_ids() -> None:
    assert isinstance(load_tokenizer(spec("")), ByteTokenizer)
    assert isinstance(load_tokenizer(spec("byte"), ids_given=True), ByteTokenizer)
    with pytest.raises(InvalidConfig, match="do not say how many") as caught:
        load_tokenizer(spec(""), ids_given=True)
    assert "vocab_size" in caught.value.hint


def test_nothing_named_beside_a_model_means_its_own(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    of_model = spec("").model_copy(update={"model": spec("").model.model_copy(update={"id": str(folder)})})
    assert load_tokenizer(of_model).vocabulary_size == 321
    assert load_tokenizer(of_model, ids_given=True).end_of_text == 0
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidConfig, match=r"the tokenizer of model\.id = .* has no tokenizer.json"):
        load_tokenizer(of_model)
    config = of_model.model.model_copy(update={"config": {"vocab_size": 999}})
    ids_only = load_tokenizer(of_model.model_copy(update={"model": config}), ids_given=True)
    assert (ids_only.vocabulary_size, ids_only.end_of_text) == (999, -1)


END, BEGIN, PAD = "<|end|>", "<|begin|>", "<|pad|>"


@pytest.mark.parametrize(
    ("said", "beside", "model", "packing", "eos"),
    [
        ({"eos_token": {"content": END, "lstrip": False}}, None, None, True, END),
        ({"eos_token": {"content": END, "__type": "AddedToken"}}, None, 1, True, END),
        ({}, {"eos_token": BEGIN}, None, True, BEGIN),
        ({"eos_token": None}, {"eos_token": BEGIN}, None, True, BEGIN),
        *[({"eos_token": nothing}, None, [1], True, BEGIN) for nothing in (None, "", {}, {"content": None})],
        *[({}, None, said, True, PAD) for said in (2, [2, 0])],
        ({}, None, 10**6, True, None),
        ({"pad_token": PAD}, None, None, True, None),
        ({"pad_token": PAD}, None, None, False, PAD),
    ],
)
def test_the_end_of_text_is_named_by_either_file_or_the_models_config_or_without_packing_by_padding(
    said: dict[str, Any], beside: dict[str, Any] | None, model: object, packing: bool, eos: str | None, tmp_path: Path
) -> None:
    """An eos_token of null in tokenizer_config.json hid the name that special_tokens_map.json had for it."""
    folder = write_tokenizer(tmp_path)
    files = {"tokenizer_config.json": said, "special_tokens_map.json": beside}
    for name, content in (files | {"config.json": model and {"eos_token_id": model}}).items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if eos is None:
        with pytest.raises(InvalidConfig, match="names no eos_token"):
            load_tokenizer(spec(folder, packing=packing))
        return
    found = load_tokenizer(spec(folder, packing=packing))
    assert found.end_of_text == Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(eos)
    names = {"tokenizer.json", *(name for name, content in files.items() if content is not None)}
    assert set(found.tokenizer_files()) == names


def with_content(content: bytes) -> Plant:
    return lambda path: (path.write_bytes(content), None)[1]


@pytest.mark.parametrize(
    ("name", "plant", "message"),
    [
        ("tokenizer.json", with_content(b"{}"), "tokenizer.json cannot be used"),
        ("tokenizer.json", with_content(b"\xff\xfe"), "tokenizer.json cannot be used"),
        ("tokenizer.json", lambda path: None, "has no tokenizer.json"),
        ("tokenizer.json", a_pointer, r"/tokenizer\.json is a pointer of Git LFS"),
        ("tokenizer.json", a_link_to_nothing, r"/tokenizer\.json .*is a link to .*blob, which is not there"),
        ("tokenizer.json", a_pipe, r"/tokenizer\.json .*is no regular file"),
        ("tokenizer_config.json", with_content(b"["), "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", with_content(b"[]"), "tokenizer_config.json is no JSON object"),
        ("tokenizer_config.json", with_content(b'{"eos_token": "<|nowhere|>"}'), "is not in tokenizer.json"),
        ("tokenizer_config.json", with_content(b'{"eos_token": 7}'), "is not in tokenizer.json"),
    ],
)
def test_broken_tokenizers_are_refused(tmp_path: Path, name: str, plant: Plant, message: str) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / name).unlink()
    plant(folder / name)
    with pytest.raises(InvalidConfig, match=message):
        load_tokenizer(spec(folder))


def test_a_tokenizer_that_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    for named, words in (
        (f"{tmp_path}/none", "there is no such folder"),
        ("nobody/nothing", "cannot be had from the hub"),
        (file, "is a file .name the folder"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            load_tokenizer(spec(named))


def test_only_files_of_the_tokenizer_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert set(read_tokenizer_files(folder)) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    monkeypatch.setattr("swarm.data.tokenizer.TOKENIZER_FILE_BYTES_MAX", 100)
    with pytest.raises(InvalidConfig, match="more than 100 bytes"):
        read_tokenizer_files(folder)


def test_a_missing_library_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InvalidConfig, match="needs the Python package tokenizers") as caught:
        load_tokenizer(spec(folder))
    assert "pip install 'swarm-stages[data]'" in caught.value.hint


def ruled(folder: Path, **rules: Any) -> Path:
    """A tokenizer whose tokenizer.json has these rules."""
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))
    return folder


def test_rules_that_break_off_are_an_error(tmp_path: Path) -> None:
    """The library's panic is no Exception in Python: it ended commands with a traceback."""
    split = {"type": "Split", "pattern": {"Regex": r"^(a|a)*[^a]$"}, "behavior": "Isolated", "invert": False}
    files = read_tokenizer_files(ruled(tmp_path / "broken", pre_tokenizer=split))
    tokenizer = HuggingFaceTokenizer(files, "broken", packing=True)
    with pytest.raises(InvalidConfig, match=r"broken: the rules of its tokenizer.json break off: .*retry-limit"):
        tokenizer.encode_batch(["a" * 40 + "bb"])


def test_a_tokenizer_without_tokens_for_text_is_refused_where_it_is_used(tmp_path: Path) -> None:
    """It was a bug of swarm: the largest of no numbers."""
    folder = ruled(tmp_path / "t", model={"type": "BPE", "vocab": {}, "merges": []})
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InvalidData, match=r"no token comes of the text in data\.source"):
        tokenise(job(tmp_path / "a.txt", tokenizer=str(folder)), tmp_path / "out")


def replace(matched: str, put: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: matched}, "content": put}


def sequence(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


def prepend(put: str) -> dict[str, Any]:
    return {"type": "Prepend", "prepend": put}


def nested(rule: dict[str, Any], depth: int) -> dict[str, Any]:
    return sequence(nested(rule, depth - 1)) if depth else rule


NFKC, LOWER = {"type": "NFKC"}, {"type": "Lowercase"}
BOUNDED: dict[str, dict[str, Any]] = {
    "none": {"type": "NFC"},
    "sentencepiece": sequence(NFKC, prepend("\u2581"), replace(" ", "\u2581")),
    "spaces": replace(" {2,}", "\u2581", "Regex"),
    "quotes": sequence(replace("``", '"'), replace("''", '"'), replace("\u2026", "...")),
    "names of pictures": sequence(*(replace(chr(0x1F600 + n), f":smiling_face_number_{n}:") for n in range(60))),
    "many rules that never meet": sequence(*(replace(chr(0x4E00 + n), chr(0x3041 + n % 80) * 2) for n in range(900))),
    "an own key": {"type": "Replace", "pattern": "x", "content": "y"},
    "shrinks": sequence(*[replace("aa", "a")] * 50),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_rules_as_tokenizers_have_them_are_taken_and_what_grows_is_known(name: str) -> None:
    rules = {"normalizer": BOUNDED[name]}
    grown = growth(json.dumps(rules), "here", tokenizers)
    text = "an  a\u2026 ``\U0001f600'' \u4e00\u4e01 x"
    if name != "an own key":
        normalizer = tokenizers.Tokenizer.from_str(json.dumps(TOKENIZER | rules)).normalizer
        assert len(normalizer.normalize_str(text)) <= len(text) + added(grown, [text])


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    **dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder")),
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}
BOUNDLESS: dict[str, dict[str, Any]] = {
    "one": replace("a", "a" * (LETTERS_MAX + 1)),
    "one of a million": replace("a", "b" * 10**6),
    "doubles": sequence(*[replace("a", "aa")] * 40),
    "doubles what no text may hold": sequence(*[replace("\u3042", "\u3042\u3042")] * 40),
    "doubles, one in another": sequence(*[sequence(*[replace("o", "oo")] * 6)] * 6),
    "deep within others": nested(sequence(*[replace("o", "oo")] * 40), 100),
    "in turn": sequence(*[replace("e", "oo"), replace("o", "ee")] * 20),
    "by case": sequence(*[replace("a", "AA"), LOWER] * 40),
    "by form": sequence(*[replace("a", "\uff41\uff41"), NFKC] * 40),
    "by form, before an absent match": sequence(replace("q", ""), replace("a", "\ufdfa" * 900), NFKC, replace("q", "")),
    "without types": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 12},
    "of no such type": sequence(*[replace("a", "aa") | {"type": "Other"}] * 12),
    "neighbours": sequence(*[replace("a", "ba"), replace("ab", "aaab")] * 40),
    "all letters": sequence(*[replace(".", "xyz", "Regex")] * 30),
    "nothing": sequence(*[replace("", "x")] * 30),
    "behind a letter": sequence(*[replace("(?<=[a-z])", "b", "Regex")] * 30),
    "in front": prepend("x" * (LETTERS_MAX + 1)),
    "in front, often": sequence(*[prepend("x" * 100)] * 900),
    "too many": sequence(*[prepend("x")] * 3000),
}


@pytest.mark.parametrize("name", BOUNDLESS)
def test_rules_that_multiply_letters_without_bound_are_refused_at_once(tmp_path: Path, name: str) -> None:
    """Forty rules that double a letter ended the process for want of memory, after minutes and without a word."""
    files = read_tokenizer_files(ruled(tmp_path, normalizer=BOUNDLESS[name]))
    began_s = time.process_time()
    with pytest.raises(
        InvalidConfig, match=r"here: the normalizer of its tokenizer.json (makes more than|has \d+ rules)"
    ):
        HuggingFaceTokenizer(files, "here", True)
    assert time.process_time() - began_s < 5


def test_a_text_is_looked_at_for_what_it_becomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter that becomes 900 takes 900 times the memory, which was counted once."""
    folder = ruled(tmp_path / "t", normalizer=replace("a", "ab" * 450))
    (tmp_path / "a.txt").write_text("a" * 1000)
    grows = job(tmp_path / "a.txt", tokenizer=str(folder))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Free", (), {"available": 100 << 20}))
    with pytest.raises(InvalidData, match=r"a\.txt, byte 0 takes 128\.\d MiB of memory, and 100\.0 MiB are free"):
        tokenise(grows, tmp_path / "out")
    monkeypatch.undo()
    assert tokenise(grows, tmp_path / "out").tokens > 1000


def test_a_token_of_that_name_is_no_rule() -> None:
    vocabulary = {"normalizer": 5, '"normalizer": {': 6}
    assert growth(json.dumps({"normalizer": None, "model": {"vocab": vocabulary}}), "here", tokenizers) == {}
