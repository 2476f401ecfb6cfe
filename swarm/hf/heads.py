"""Values of local weight files, as far as they decide what is trained: a second head, and a mask.

config.json may tie the head to the embedding while the file holds both. If they are equal the head is a copy; if not,
Transformers keeps both and trains them apart, and so does a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.errors import InvalidModel
from swarm.hf.own_files import open_own
from swarm.hf.safetensors_header import ITEM_BYTES, StoredTensor

VALUES_AT_ONCE = 1 << 20
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "i1", "BOOL": "?", "I32": "<i4", "I64": "<i8"}

Located = tuple[StoredTensor, Path]


def equal_values(one: Located, other: Located) -> bool:
    """Whether two tensors of files are equal in shape and, as float32, in every value; InvalidModel."""
    if one[0].shape != other[0].shape:
        return False
    pairs = zip(values_of(*one), values_of(*other), strict=True)
    return all(np.array_equal(mine.astype(np.float32), theirs.astype(np.float32)) for mine, theirs in pairs)


def is_causal_mask(stored: StoredTensor, location: Path) -> bool:
    """Whether a square table, [n, n] or [1, 1, n, n], holds 1 where a position may look and 0 elsewhere."""
    size = stored.shape[-1]
    position = 0
    for values in values_of(stored, location):
        row, column = np.divmod(np.arange(position, position + values.size), size)
        if not np.array_equal(values.astype(np.float32), (column <= row).astype(np.float32)):
            return False
        position += values.size
    return True


def values_of(stored: StoredTensor, location: Path) -> Iterator[NDArray[Any]]:
    """The values of a tensor, many at a time; values of an unknown type are bytes."""
    item = ITEM_BYTES[stored.dtype]
    try:
        with open_own(location) as file:
            file.seek(stored.start)
            for start in range(stored.start, stored.stop, VALUES_AT_ONCE * item):
                raw = file.read(min(VALUES_AT_ONCE * item, stored.stop - start))
                if stored.dtype == "BF16":
                    yield (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
                else:
                    yield np.frombuffer(raw, _TYPES.get(stored.dtype, "u1"))
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{location} cannot be read: {error}", hint="did it change meanwhile?") from error


def own_head_unknown(head: StoredTensor, embedding: StoredTensor) -> InvalidModel:
    """The refusal of a stage server that finds two where the job was cut as if there were one."""
    return InvalidModel(
        f"{head.name} of {head.path} differs from {embedding.name}, to which config.json ties it",
        hint="set tie_word_embeddings = false in config.json to train both, or remove the head from the files",
    )
