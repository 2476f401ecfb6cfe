"""How many letters the rules of a tokenizer.json make of one, before the library follows them.

A normalizer may put a text in the place of each match, and rules that follow one another multiply: forty that double a
letter make 10^12 of it. The library follows them without a bound, within one call, and ends the process when no memory
is left. So they are followed here on what they match, a rule at a time and no further than LETTERS_MAX. Whatever grows
counts when a text is looked at: it needs memory for what it becomes.

Not chosen: a process of its own with bounded memory, as for the reading of data (swarm/data/patience.py). Nor the rules
of the library itself, because those take what grows for one step.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from swarm.errors import InvalidConfig

LETTERS_MAX = 1000  # that one match may become; the longest that tokenizers of today have is the name of an emoji
RULES_MAX = 1000
_NORMALIZER = re.compile(r'(?<!\\)"normalizer"\s*:\s*(?=\{)')
_PROBE = "aE 1\n\u00e9\u4e2d."


def growth(tokenizer_json: str, where: str, library: Any) -> dict[str, int]:
    """By how many letters each text that a rule matches grows, if it does; InvalidConfig if one becomes too much.

    `library` is the module `tokenizers`, for regular expressions. What cannot be read is left to it.
    """
    rules = [rule for normalizer in _normalizers(tokenizer_json) for rule in _rules(normalizer)]
    if len(rules) > RULES_MAX:
        raise _refusal(where, f"has {len(rules)} rules, more than {RULES_MAX}")
    strings = (rule["pattern"].get("String") for rule in rules if isinstance(rule.get("pattern"), dict))
    matched = list(dict.fromkeys(text for text in strings if isinstance(text, str) and text))
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


def _normalizers(tokenizer_json: str) -> Iterator[Mapping[str, Any]]:
    """The values of the key, read alone: the vocabulary beside it may have millions of entries."""
    for found in _NORMALIZER.finditer(tokenizer_json):
        try:
            value, _ = json.JSONDecoder().raw_decode(tokenizer_json, found.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _rules(normalizer: object) -> Iterator[Mapping[str, Any]]:
    """The rules in order, those within others too."""
    if not isinstance(normalizer, dict):
        return
    match normalizer.get("type"), normalizer.get("normalizers"):
        case "Sequence", list(several):
            for one in several:
                yield from _rules(one)
        case _:
            yield normalizer


def _followed(rules: Iterable[Mapping[str, Any]], text: str, where: str, library: Any) -> int:
    """How many letters a text becomes; InvalidConfig beyond LETTERS_MAX for each of its own."""
    most = LETTERS_MAX * max(1, len(text))
    for rule in rules:
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
