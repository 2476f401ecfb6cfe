"""A small byte-level BPE tokenizer, as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = "def f(x):\n    return x * x  # naïve 🙂\n\n\nthe quick brown fox <|end|> jumps"


def write_tokenizer(folder: Path, *, begin: bool = False, **config: Any) -> Path:
    """A small byte-level BPE in `folder`; `begin`: its template puts <|begin|> in front."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|begin|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog", TEXT] * 3, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_id=tokenizer.token_to_id("<|pad|>"), pad_token="<|pad|>")
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"} | config
    written = {key: value for key, value in written.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder
