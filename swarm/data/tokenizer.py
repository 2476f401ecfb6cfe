"""Text to token ids: bytes as they are, or a Hugging Face tokenizer's tokenizer.json.

The tokenizers library reads tokenizer.json without torch and without transformers; it is imported only for such a
tokenizer. The ids equal those of transformers.PreTrainedTokenizerFast on the same files, and of AutoTokenizer unless it
rebuilds the tokenizer by the model's family (client/transfer/auto_tokenizer.py).

Price: a tokenizer without a tokenizer.json must be converted first.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.data.batches import NO_END_OF_TEXT
from swarm.data.documents import load_extra
from swarm.errors import InvalidConfig, SwarmError
from swarm.hf.companions import TOKENIZER_FILE_BYTES_MAX, TOKENIZER_FILES
from swarm.hf.own_files import check_no_pointer, is_there, read_own
from swarm.hf.pretrained import CONFIG_BYTES_MAX
from swarm.home import library_cache
from swarm.job.spec import JobSpec
from swarm.text import first_line

Ids: TypeAlias = NDArray[np.unsignedinteger[Any]]

BYTE = "byte"
BYTES_PER_LETTER = 150  # that the library takes to encode a text


class Tokenizer(Protocol):
    """Turns texts into ids below `vocabulary_size`; `end_of_text` is the id that closes a text, -1 if there is none."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def texts_size(self) -> int:
        """One more than the largest id of a text that names no special token: the rows that a model must have."""

    @property
    def end_of_text(self) -> int: ...

    @property
    def start(self) -> Ids:
        """The ids that every text begins with."""

    def memory_bytes(self, texts: Sequence[str]) -> int:
        """About the memory that it takes to encode texts together."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files for the model's folder, by name."""


def load_tokenizer(spec: JobSpec, *, ids_given: bool = False) -> Tokenizer:
    """The tokenizer that `spec.model.tokenizer` names: "byte", a local folder or a hub id.

    If the name is empty it is the model's own; without `model.id` it is "byte". With `ids_given` the data are token ids
    already, so a tokenizer is needed only if the job names one. InvalidConfig if there is no such tokenizer, or if it
    has no end of text. The rules of a tokenizer may take for ever: call this inside `patience`.
    """
    model = spec.model
    name, where = model.tokenizer or model.id, f'model.tokenizer = "{model.tokenizer}"'
    if not name:
        return NoTokenizer(spec) if ids_given else ByteTokenizer()
    if model.tokenizer == BYTE:
        return ByteTokenizer()
    folder = Path(os.path.expanduser(name))
    if model.tokenizer:
        repository, _, revision = name.partition("@")
    else:
        where = f'the tokenizer of model.id = "{name}"'
        repository, revision = name, model.revision
    if folder.is_file():
        raise InvalidConfig(f"{where} is a file", hint="name the folder that holds tokenizer.json")
    if not folder.is_dir():
        folder = _from_hub(repository, revision or None, where)
    files = read_tokenizer_files(folder)
    if ids_given and not model.tokenizer and "tokenizer.json" not in files:
        return NoTokenizer(spec)
    return HuggingFaceTokenizer(files, where, spec.data.packing, _eos_token_id(spec, folder))


def _eos_token_id(spec: JobSpec, folder: Path) -> int:
    """The end of text by the config.json of the model whose tokenizer it is; -1 if there is none."""
    config: Mapping[str, Any] = spec.model.config
    if spec.model.tokenizer:
        try:
            raw = read_own(folder / "config.json", CONFIG_BYTES_MAX)
            config = _json_object({"config.json": raw}, "config.json", str(folder))
        except (OSError, InvalidConfig):  # it need not be there, and is no file of a tokenizer
            return -1
    found = config.get("eos_token_id")
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) and not isinstance(found, bool) else -1


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer in `folder`, by name; InvalidConfig if a file is not the folder's own, or too large."""
    files = {}
    for name in TOKENIZER_FILES:
        path = folder / name
        if is_there(path):
            try:
                files[name] = read_own(path, TOKENIZER_FILE_BYTES_MAX)
            except OSError as error:
                raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}") from error
            check_no_pointer(str(path), files[name])
    return files


class NoTokenizer:
    """Stands in for a tokenizer if the data are token ids and the job does not say which tokenizer made them."""

    end_of_text = NO_END_OF_TEXT

    def __init__(self, spec: JobSpec) -> None:
        size = spec.model.config.get("vocab_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidConfig(
                "token ids (.bin) do not say how many there are",
                hint="set vocab_size in model.config, or model.tokenizer",
            )
        self.vocabulary_size = self.texts_size = size
        self.start: Ids = np.empty(0, dtype=np.uint32)

    def memory_bytes(self, texts: Sequence[str]) -> int:
        return 0

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        raise AssertionError("token ids are not encoded")

    def tokenizer_files(self) -> dict[str, bytes]:
        return {}


class HuggingFaceTokenizer:
    """A tokenizer.json with the special tokens of its configuration files; truncation and padding are off.

    Every text begins with what the tokenizer's own template puts in front (Llama: <|begin_of_text|>) and is closed by
    the eos_token, or else the token that the model's config.json names (`eos_token_id`). Without either there must be a
    pad_token, and only `packing = false` works. Special tokens that are written out in a text become special tokens, as
    in transformers, unless `split_special_tokens` is set.
    """

    def __init__(self, files: Mapping[str, bytes], where: str, packing: bool, eos_token_id: int = -1) -> None:
        self._files = dict(files)
        self._where = where
        library = load_extra("tokenizers", where)
        if "tokenizer.json" not in files:
            raise InvalidConfig(
                f"{where} has no tokenizer.json",
                hint="write one: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), and name that folder in "
                "model.tokenizer",
            )
        try:
            with _ruled(where):
                text = files["tokenizer.json"].decode()
                self._grown = growth(text, where, library)  # first: added tokens are normalized while it is read
                self._tokenizer = library.Tokenizer.from_str(text)
        except SwarmError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise InvalidConfig(f"{where}: tokenizer.json cannot be used: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _json_object(files, "tokenizer_config.json", where)
        self._tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
        self.vocabulary_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.vocabulary_size:
            raise InvalidConfig(f"{where}: tokenizer.json has no tokens")
        special = _json_object(files, "special_tokens_map.json", where)
        special |= {key: value for key, value in config.items() if value is not None}
        self.end_of_text = self._id_of(special, "eos_token", where)
        if self.end_of_text < 0 and eos_token_id < self.vocabulary_size:
            self.end_of_text = eos_token_id
        if self.end_of_text < 0 and not packing:
            self.end_of_text = self._id_of(special, "pad_token", where)
        if self.end_of_text < 0:
            raise InvalidConfig(
                f"{where} names no eos_token, so nothing tells where a text ends",
                hint='set "eos_token" in its tokenizer_config.json',
            )
        self.start = self._start()
        special_ids = self._tokenizer.get_added_tokens_decoder().keys()
        plain = self._tokenizer.get_vocab(with_added_tokens=False).values() - special_ids
        self.texts_size = 1 + max([*plain, self.end_of_text, *self.start.tolist()])

    def memory_bytes(self, texts: Sequence[str]) -> int:
        letters = sum(map(len, texts)) + added(self._grown, texts)
        return BYTES_PER_LETTER * letters + self.start.nbytes * len(texts)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        with _ruled(self._where):
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(text.ids, dtype=np.uint32) for text in encoded]

    def tokenizer_files(self) -> dict[str, bytes]:
        return dict(self._files)

    def _id_of(self, special: Mapping[str, Any], key: str, where: str) -> int:
        """The id of a special token, -1 if none is named."""
        token = special.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None or token == "":
            return -1
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise InvalidConfig(
                f"{where}: its {key} {token!r} is not in tokenizer.json",
                hint=f'correct "{key}" in its tokenizer_config.json or special_tokens_map.json',
            )
        return int(found)

    def _start(self) -> Ids:
        """The ids that the template puts in front of a text; those behind a text are replaced by the end of text."""
        with _ruled(self._where):
            # A batch of one: only for batches does the library let other threads run, which listen for Ctrl-C.
            plain = self._tokenizer.encode_batch_fast(["a"], add_special_tokens=False)[0].ids
            whole = self._tokenizer.encode_batch_fast(["a"], add_special_tokens=True)[0].ids
        fits = (at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain)
        return np.array(whole[: next(fits, 0)], dtype=np.uint32)


@contextmanager
def _ruled(where: str) -> Iterator[None]:
    """InvalidConfig in the place of a panic of the library, such as over an expression that looks back too often."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it is no Exception, and has no other name
            raise
        raise InvalidConfig(
            f"{where}: the rules of its tokenizer.json break off: {first_line(error)[:300]}",
            hint='use another tokenizer; "byte" needs no files',
        ) from None


def _from_hub(repository: str, revision: str | None, where: str) -> Path:
    """The folder in the local cache with the tokenizer files of a repository."""
    hub = load_extra("huggingface_hub", where)
    answers = import_module("swarm.hf.hub").check_answers  # slow to import
    if repository.startswith((".", "/", "~")) or repository.count("/") > 1:
        hint = "it is relative to where you are" if not repository.startswith(("/", "~")) else ""
        raise InvalidConfig(f"{where}: there is no such folder", hint=hint)
    answers(repository, revision or "", "tokenizer.json", where)
    try:
        with library_cache(InvalidConfig):
            return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=list(TOKENIZER_FILES)))
    except SwarmError:
        raise
    except Exception as error:  # the errors of its HTTP client come through
        raise InvalidConfig(
            f"{where} is no local folder, and cannot be had from the hub: {first_line(error)}",
            hint='check the name, the network, HF_TOKEN and HF_HUB_OFFLINE; "byte" needs no files',
        ) from error


def _json_object(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{where}: {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidConfig(f"{where}: {name} is no JSON object")
    return value


def byte_text(spec: JobSpec, tokenizer: Tokenizer) -> str:
    """A warning if the job names no tokenizer and the model has another vocabulary than bytes."""
    wanted = spec.model.config.get("vocab_size")
    is_meant = spec.model.tokenizer or spec.model.id or not isinstance(tokenizer, ByteTokenizer)
    if is_meant or wanted in (None, tokenizer.vocabulary_size):
        return ""
    return (
        f"the data is read as bytes, {tokenizer.vocabulary_size} tokens, though model.config.vocab_size = {wanted}: "
        "name the tokenizer that belongs to it, with model.tokenizer"
    )


class ByteTokenizer:
    """UTF-8 bytes as tokens: ids 0 to 255 are the bytes, 256 is the end of a text. Needs no files."""

    END_OF_TEXT = 256
    end_of_text = END_OF_TEXT
    vocabulary_size = texts_size = 257
    start: Ids = np.empty(0, dtype=np.uint16)

    def memory_bytes(self, texts: Sequence[str]) -> int:
        return 8 * sum(map(len, texts))

    def encode(self, text: str) -> NDArray[np.uint16]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD, and the end-of-text token is left out."""
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
                    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                    "special": True,
                }
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
                **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
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


LETTERS_MAX = 1000  # that one match may become; the longest that tokenizers of today have is the name of an emoji
RULES_MAX = 1000
_NORMALIZER = re.compile(r'(?<!\\)"normalizer"\s*:\s*(?=\{)')
_PROBE = "aE 1\n\u00e9\u4e2d."


def growth(tokenizer_json: str, where: str, library: Any) -> dict[str, int]:
    """By how many letters each text that a rule of a tokenizer.json matches grows; InvalidConfig if too far.

    A normalizer may put a text in the place of each match, and rules that follow one another multiply: forty that
    double a letter make 10^12 of it. The library follows them without a bound, within one call, and ends the process
    when no memory is left. So they are followed here on what they match, a rule at a time and no further than
    LETTERS_MAX. Whatever grows counts when a text is looked at: it needs memory for what it becomes.

    Not chosen: a process of its own with bounded memory, as for the reading of data (swarm/data/patience.py). Nor the
    rules of the library itself, because those take what grows for one step.

    `library` is the module `tokenizers`, for regular expressions. What cannot be read is left to it.
    """
    normalizers = _normalizers(tokenizer_json, library)
    rules = [(_needed(rule), rule) for normalizer in normalizers for rule in _rules(normalizer)]
    if len(rules) > RULES_MAX:
        raise _refusal(where, f"has {len(rules)} rules, more than {RULES_MAX}")
    matched = list(dict.fromkeys(text for text, _ in rules if text))
    grown = {}
    for text in (*_PROBE, *matched):
        becomes = _followed(rules, text, where, library)
        if becomes > len(text):
            grown[text] = becomes - len(text)
    # Rules also match what others made beside it.
    for texts in (matched, matched[::-1]):
        _followed(rules, "".join(texts)[:LETTERS_MAX], where, library)
    for text in grown:
        _followed(rules, text * 3, where, library)
    return grown


def added(grown: Mapping[str, int], texts: Iterable[str]) -> int:
    """By how many letters texts grow; never fewer, and more where one match lies within another."""
    return sum(text.count(match) * letters for text in texts for match, letters in grown.items()) if grown else 0


def _normalizers(tokenizer_json: str, library: Any) -> Iterator[Mapping[str, Any]]:
    """The values of the key, read alone: the vocabulary beside it may have millions of entries.

    As the library reads them: what has no type that it knows it takes for the rule whose keys are there.
    """
    beside = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    for found in _NORMALIZER.finditer(tokenizer_json):
        try:
            value, _ = json.JSONDecoder().raw_decode(tokenizer_json, found.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            with suppress(Exception):  # the library raises nothing narrower, and says it when it reads the file
                text = json.dumps({**beside, "normalizer": value})
                value = json.loads(library.Tokenizer.from_str(text).to_str())["normalizer"]
            yield value


def _rules(normalizer: object) -> Iterator[Mapping[str, Any]]:
    """The rules in order, those within others too."""
    if not isinstance(normalizer, dict):
        return
    match normalizer.get("type"), normalizer.get("normalizers"):
        case "Sequence", list(several):
            for inner in several:
                yield from _rules(inner)
        case _:
            yield normalizer


def _needed(rule: Mapping[str, Any]) -> str:
    """The text without which a rule changes nothing; empty if there is none."""
    match rule:
        case {"type": "Replace", "pattern": {"String": str(matched)}}:
            return matched
        case _:
            return ""


def _followed(rules: Iterable[tuple[str, Mapping[str, Any]]], text: str, where: str, library: Any) -> int:
    """How many letters a text becomes; InvalidConfig beyond LETTERS_MAX for each of its own."""
    most = LETTERS_MAX * max(1, len(text))
    for needed, rule in rules:
        if needed not in text and len(text) <= most:  # true for most rules
            continue
        match rule:
            case {"type": "Prepend", "prepend": str(put)}:
                letters = len(text) + len(put)
            case {"type": "Replace", "pattern": {"String": str(matched)}, "content": str(put)}:
                letters = len(text) + text.count(matched) * (len(put) - len(matched))
            case {"type": "Replace", "pattern": {"Regex": str()}, "content": str(put)}:
                letters = len(text) + (len(text) + 1) * len(put)
            case _:
                text = _plain(rule, text)
                continue
        if letters > most:
            raise _refusal(where, f"makes more than {LETTERS_MAX} letters of one (a rule puts in {put[:20]!r})")
        match rule:
            case {"type": "Prepend"}:
                text = put + text if text else text
            case {"pattern": {"String": str(matched)}}:
                text = text.replace(matched, put)
            case {"pattern": {"Regex": str(matched)}}:
                try:
                    text = library.normalizers.Replace(library.Regex(matched), put).normalize_str(text)
                except Exception:  # the library raises nothing narrower, and says it when it reads the file
                    return len(text)
    return len(text)


def _plain(rule: Mapping[str, Any], text: str) -> str:
    """What a rule that puts nothing in makes of a text, as far as rules behind it may match that."""
    match rule:
        case {"type": "Lowercase"} | {"type": "BertNormalizer", "lowercase": True}:
            return text.lower()
        case {"type": ("NFC" | "NFD" | "NFKC" | "NFKD") as form}:
            return unicodedata.normalize(form, text)
        case _:
            return text


def _refusal(where: str, what: str) -> InvalidConfig:
    return InvalidConfig(
        f"{where}: the normalizer of its tokenizer.json {what}",
        hint='use another tokenizer; "byte" needs no files',
    )
