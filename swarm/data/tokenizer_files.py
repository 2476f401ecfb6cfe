"""The small files in a model's folder: the tokenizer's, and the model's companions. The scheduler asks this too."""

from __future__ import annotations

from swarm.hf.companions import is_companion

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_FILE_BYTES_MAX = 256 << 20
TOKENIZER_MESSAGE_BYTES_MAX = 3 << 20  # all files together, if they travel in one message; else they are uploaded
MODEL_FOLDER = "model/"


def small_file_name(path: str) -> str | None:
    """The file's name if `path` ("model/tokenizer.json") is one of these in a checkpoint, else None."""
    name = path.removeprefix(MODEL_FOLDER)
    return name if name != path and (name in TOKENIZER_FILES or is_companion(name)) else None
