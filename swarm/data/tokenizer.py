"""Text to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ByteTokenizer:
    """UTF-8 bytes as tokens: ids 0 to 255 are the bytes, 256 is the end of a text. Needs no files."""

    END_OF_TEXT = 256
    vocabulary_size = 257

    def encode(self, text: str) -> NDArray[np.uint16]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, the end-of-text token is left out."""
        return bytes(token for token in tokens if token < self.END_OF_TEXT).decode(errors="replace")

    def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json and tokenizer_config.json: the same ids from transformers.AutoTokenizer.

        A byte-level BPE without merges. The library writes a byte as a printable character; the vocabulary maps it
        back to the byte. "<|endoftext|>" inside a text stays text.
        """
        end = "<|endoftext|>"
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        tokenizer: dict[str, object] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": self.END_OF_TEXT,
                    "content": end,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {character: byte for byte, character in enumerate(_byte_characters())}
                | {end: self.END_OF_TEXT},
                "merges": [],
            },
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
        }
        return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE vocabularies (GPT-2's convention).

    Printable Latin-1 stands for itself, the other bytes follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()
