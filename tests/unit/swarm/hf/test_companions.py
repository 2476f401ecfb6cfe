"""The small files of a model are known by their names, and only where a model's folder has them."""

from __future__ import annotations

import pytest

from swarm.hf.companions import TOKENIZER_FILES, small_file_name


def test_tokenizer_files_and_what_else_goes_with_a_model_are_known() -> None:
    others = (
        "generation_config.json",
        "LICENSE",
        "LICENSE.txt",
        "LICENCE-MIT.md",
        "notice",
        "preprocessor_config.json",
    )
    for name in (*TOKENIZER_FILES, *others):
        assert small_file_name(f"model/{name}") == name


@pytest.mark.parametrize(
    "path",
    [
        "tokenizer.json",
        "model/model-00001-of-00002.safetensors",
        "model/config.json",
        "model/adapter_config.json",
        "model/model.safetensors.index.json",
        "model/LICENSE.py",
        "model/LICENSE\n",
        "model/tokenizer.json\n",
        "model/modeling.py",
        "model/.json",
        "model/" + "a" * 200 + ".json",
        "model/model/tokenizer.json",
        "model/../tokenizer.json",
        "optimizer/tokenizer.json",
        "model/",
        "",
    ],
)
def test_another_file_is_none(path: str) -> None:
    assert small_file_name(path) is None
