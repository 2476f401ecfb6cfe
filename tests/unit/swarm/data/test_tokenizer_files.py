"""Tokenizer files are known by their names, and only where a model's folder has them."""

from __future__ import annotations

import pytest

from swarm.data.tokenizer_files import TOKENIZER_FILES, tokenizer_file_name


def test_each_tokenizer_file_of_a_checkpoint_is_known() -> None:
    assert [tokenizer_file_name(f"model/{name}") for name in TOKENIZER_FILES] == list(TOKENIZER_FILES)


@pytest.mark.parametrize(
    "path",
    [
        "tokenizer.json",
        "model/model-00001-of-00002.safetensors",
        "model/config.json",
        "model/model/tokenizer.json",
        "model/../tokenizer.json",
        "optimizer/tokenizer.json",
        "model/",
        "",
    ],
)
def test_another_file_is_none(path: str) -> None:
    assert tokenizer_file_name(path) is None
