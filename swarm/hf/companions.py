"""What belongs to a model but neither to its weights nor to its tokenizer: how it generates, other JSON, its licence.

These files are read as bytes, never run or changed, and lie in the folder of the trained model as they did in the
model's own. Whatever else a folder holds (code, README.md, pickles) stays behind.
"""

from __future__ import annotations

import re
from pathlib import Path

from swarm.errors import InvalidModel, SwarmError
from swarm.hf.own_files import NotOwn, read_own
from swarm.hf.pretrained import local_folder
from swarm.job.spec import JobSpec

FILE_BYTES_MAX = 1 << 20
FILES_MAX = 32
_JSON = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.json")
_LICENCE = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)([_-][A-Za-z0-9_-]{1,40})?(\.(txt|md))?", re.IGNORECASE)
_OTHERS = ("config.json", "adapter_config.json")  # what is written anew, and what would make it another model


def is_companion(name: str) -> bool:
    """Whether a file of this name goes with a model; tokenizer files go with the tokenizer."""
    return bool(_LICENCE.fullmatch(name) or (_JSON.fullmatch(name) and name not in _OTHERS))


def companions(spec: JobSpec, left: tuple[str, ...]) -> dict[str, bytes]:
    """The companions of the model that a grounded spec names, by name, but for the names `left`; none without an id.

    Those that are too large, or lie elsewhere, are not carried. InvalidModel if one of a local folder cannot be read.
    """
    if not spec.model.id:
        return {}
    folder = local_folder(spec)
    if folder is None:
        paths = _from_hub(spec, left)
    else:
        paths = [path for path in sorted(folder.iterdir()) if is_companion(path.name) and path.name not in left]
    files: dict[str, bytes] = {}
    for path in paths:
        if len(files) == FILES_MAX:
            break
        try:
            files[path.name] = read_own(path, FILE_BYTES_MAX)
        except NotOwn:  # a link that leads elsewhere, a folder, or too large
            continue
        except OSError as error:
            raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    return files


def _from_hub(spec: JobSpec, left: tuple[str, ...]) -> list[Path]:
    """The companions of a hub model in the local cache; without a network, what the cache has."""
    from swarm.hf import hub  # noqa: PLC0415 - slow to import, and few commands need it

    where = (spec.model.id, spec.model.revision)
    known, config = hub.names(*where), hub.cached(*where, "config.json")
    there = {path.name for path in config.parent.iterdir()} if config is not None else set()
    names = [name for name in sorted(known or there) if is_companion(name) and name not in left]
    paths = []
    for name in names[:FILES_MAX]:
        try:
            paths.append(hub.fetch(*where, name))
        except SwarmError:  # a job needs none of them
            continue
    return paths


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
