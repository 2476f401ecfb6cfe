"""swarm.data.growth: what the rules of a normalizer make of a text, found without following them to the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers

from swarm.data.corpus import tokenise
from swarm.data.growth import LETTERS_MAX, added, growth
from swarm.data.tokenizer import HuggingFaceTokenizer, read_tokenizer_files
from swarm.errors import InvalidConfig, InvalidData
from swarm.job.spec import parse_job
from tests.support.tokenizer import write_tokenizer


def replace(matched: str, put: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: matched}, "content": put}


def sequence(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


def prepend(put: str) -> dict[str, Any]:
    return {"type": "Prepend", "prepend": put}


def with_normalizer(folder: Path, normalizer: dict[str, Any]) -> Path:
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    return folder


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
    files = read_tokenizer_files(with_normalizer(tmp_path, BOUNDLESS[name]))
    began_s = time.process_time()
    with pytest.raises(
        InvalidConfig, match=r"here: the normalizer of its tokenizer.json (makes more than|has \d+ rules)"
    ):
        HuggingFaceTokenizer(files, "here", True)
    assert time.process_time() - began_s < 5


def test_a_text_is_looked_at_for_what_it_becomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter that becomes 900 takes 900 times the memory, which was counted once."""
    folder = with_normalizer(tmp_path / "t", replace("a", "ab" * 450))
    (tmp_path / "a.txt").write_text("a" * 1000)
    values = {
        "name": "t",
        "model": {"tokenizer": str(folder), "config": {"num_hidden_layers": 1}},
        "data": {"source": f"{tmp_path}/a.txt", "sequence_length": 16},
    }
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Free", (), {"available": 100 << 20}))
    with pytest.raises(InvalidData, match=r"a\.txt, byte 0 takes 128\.\d MiB of memory, and 100\.0 MiB are free"):
        tokenise(parse_job(values), tmp_path / "out")
    monkeypatch.undo()
    assert tokenise(parse_job(values), tmp_path / "out").tokens > 1000


def test_a_token_of_that_name_is_no_rule() -> None:
    vocabulary = {"normalizer": 5, '"normalizer": {': 6}
    assert growth(json.dumps({"normalizer": None, "model": {"vocab": vocabulary}}), "here", tokenizers) == {}
