"""Whether weights fit a model: the headers of their files against the names and shapes of its parameters.

The client asks before it sends a byte, `swarm train-local` before it trains, and a stage server when it loads. All ask
here, so all say the same words. A tensor of a file is one of

    a parameter     with and without the trunk's name, and under the name that files of the family have for the head
    a second head   of a tied model: not needed if its values are the embedding's, else kept and trained apart
    a known table   that older versions of the library wrote although it follows from the config
    left over       no parameter needs it, such as the value head of reinforcement learning: left out, and named

A tensor within a module that the model has (a bias that config.json denies) is not left out: a model without it
computes something else. Not chosen: to leave all of it out as Transformers does, because a warning among many is no
way to hear of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.errors import InvalidModel
from swarm.hf.own_files import open_own
from swarm.hf.safetensors_header import ITEM_BYTES, StoredTensor
from swarm.job.families import FAMILIES, HEAD
from swarm.job.spec import JobSpec

READABLE = ("F64", "F32", "F16", "BF16")  # all become float32
CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")
_MASKED_SCORE = re.compile(r"(^|\.)(attn|attention)\.masked_bias$")
_FREQUENCIES = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_NAMED = 3  # of tensors in a line

_MERGE = "merge the adapter into the model first (merge_and_unload), and save that"
OTHER_MODEL = "the weights are of another architecture than config.json describes, or the folder is incomplete"


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found: the tensor of each parameter, and what is worth a line."""

    tensors: Mapping[str, StoredTensor]
    remarks: tuple[str, ...]
    second_head: StoredTensor | None  # of a tied model; it must have the embedding's values


def fit(
    spec: JobSpec,
    stored: Iterable[StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    needed: Set[str] | None = None,
) -> Fit:
    """Find the parameters `needed` (None: all) among the tensors that the files hold; `shapes` are the whole model's.

    InvalidModel names file and tensor: one that is missing, there twice, of another shape or no float.
    """
    family = FAMILIES[spec.model.family]
    found: dict[str, StoredTensor] = {}
    over: list[StoredTensor] = []
    head: StoredTensor | None = None
    paths: dict[str, None] = {}
    for tensor in stored:
        paths.setdefault(tensor.path)
        name = _parameter(spec, tensor.name, shapes)
        if name in found:
            first = found[name]
            called = "" if first.name == tensor.name else f" (as {first.name} and {tensor.name})"
            raise InvalidModel(
                f"{first.path} and {tensor.path} both hold {name}{called}: which one counts?",
                hint="remove the file or the tensor that is not the model's",
            )
        if name:
            found[name] = tensor
        elif spec.tied and HEAD in (tensor.name, _head_name(spec, tensor.name)):
            head = tensor
        elif not is_known_table(tensor):
            over.append(tensor)
    if head is not None and family.embedding_name in shapes:
        # The library takes the one for the other, whichever is there.
        _check(spec, head, shapes[family.embedding_name])
        if found.setdefault(family.embedding_name, head) is head:
            head = None
    _check_layers(spec, [*found.values(), *over], whole=needed is None)
    wanted = {name: shape for name, shape in shapes.items() if needed is None or name in needed}
    for name in wanted:
        if name not in found:
            raise _missing(spec, name, over, list(paths), shapes)
    for name, shape in wanted.items():
        _check(spec, found[name], shape)
    for tensor in over:
        if module := _module_of(spec, tensor.name, shapes):
            raise InvalidModel(
                f"{tensor.path} holds tensor {tensor.name}, which the {module} of a {spec.model.family} model of this "
                "config.json has not",
                hint=_MERGE if _is_adapter(tensor.name) else OTHER_MODEL,
            )
    tensors = {name: found[name] for name in wanted}
    return Fit(tensors, tuple(_remarks(spec, over, list(tensors.values()))), head)


def is_known_table(stored: StoredTensor) -> bool:
    """Whether a tensor has name and shape of a table that older versions of the library wrote."""
    shape = stored.shape
    if CAUSAL_MASK.search(stored.name):
        return len(shape) in (2, 4) and shape[-1] == shape[-2] and all(size == 1 for size in shape[:-2])
    if _MASKED_SCORE.search(stored.name):
        return shape in ((), (1,))
    return bool(_FREQUENCIES.search(stored.name)) and len(shape) == 1


def _remarks(spec: JobSpec, over: Sequence[StoredTensor], used: Sequence[StoredTensor]) -> Iterable[str]:
    if over:
        names = _list([tensor.name for tensor in over])
        yield f"left out, as no parameter of a {spec.model.family} model needs it: {names}"
    if doubles := [tensor.name for tensor in used if tensor.dtype == "F64"]:
        yield f"F64 becomes float32, as in Transformers: {_list(doubles)}"


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_adapter(name: str) -> bool:
    return any(mark in name for mark in ("base_layer", "lora_", "modules_to_save"))


def _head_name(spec: JobSpec, name: str) -> str:
    return HEAD if name == FAMILIES[spec.model.family].head_in_files else name


def _parameter(spec: JobSpec, stored_name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The parameter that a file's tensor is; empty: none.

    Files of a model without its head leave the trunk's name out, as GPT-2's on the hub.
    """
    in_file = _head_name(spec, stored_name)
    names = (in_file, f"{FAMILIES[spec.model.family].trunk}.{in_file}")
    return next((name for name in names if name in shapes), "")


def _module_of(spec: JobSpec, stored_name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The module of the model that a tensor which is no parameter lies in; empty: none."""
    parts = stored_name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if f"{module}.weight" in (HEAD, FAMILIES[spec.model.family].head_in_files):  # tied or not
            return module
        if _parameter(spec, f"{module}.weight", shapes):
            return module
    return ""


def _check_layers(spec: JobSpec, stored: Sequence[StoredTensor], *, whole: bool) -> None:
    """InvalidModel if the files, all of the model's if `whole`, have another number of layers than config.json says."""
    family = FAMILIES[spec.model.family]
    number = re.compile(rf"^(?:{re.escape(family.trunk)}\.)?{re.escape(family.layers)}\.([0-9]{{1,6}})\.")
    layers = {1 + int(found[1]) for tensor in stored if (found := number.search(tensor.name))}
    held = max(layers, default=spec.layers)
    if held > spec.layers or (whole and held < spec.layers):
        beyond = (tensor for tensor in stored if (at := number.search(tensor.name)) and int(at[1]) >= spec.layers)
        example = next((f"{tensor.path} holds tensor {tensor.name}: " for tensor in beyond), "")
        raise InvalidModel(
            f"{example}config.json says num_hidden_layers = {spec.layers}, and its weights have {held}",
            hint="they are of different models: copy the whole folder again",
        )


def _missing(
    spec: JobSpec,
    name: str,
    over: Sequence[StoredTensor],
    paths: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> InvalidModel:
    where = ", ".join(paths[:_NAMED]) or "no file"
    told = f"the model lacks tensor {name} (looked in {where})"
    for tensor in over:
        if _is_adapter(tensor.name):
            return InvalidModel(f"{told}; {tensor.path} holds {tensor.name}", hint=_MERGE)
    for tensor in over:
        parts = tensor.name.split(".")
        for begin in range(1, len(parts)):
            if _parameter(spec, ".".join(parts[begin:]), shapes) == name:
                prefix = ".".join(parts[:begin]) + "."
                return InvalidModel(
                    f"{told}; {tensor.path} holds {tensor.name}",
                    hint=f"a wrapper put {prefix!r} before the names: save the model within it, or rename the tensors",
                )
    module = name.rpartition(".")[0]
    for tensor in over:
        in_trunk = f"{FAMILIES[spec.model.family].trunk}.{tensor.name}"
        if tensor.name.startswith(f"{module}.") or in_trunk.startswith(module):
            hint = f"{tensor.name} is there in its place: use weights that are not quantised or packed"
            return InvalidModel(told, hint=hint)
    if name == HEAD:
        return InvalidModel(told, hint=f"{OTHER_MODEL}; tie_word_embeddings = true in config.json needs no head")
    return InvalidModel(told, hint=OTHER_MODEL)


def _check(spec: JobSpec, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise InvalidModel(
            f"tensor {stored.name} of {stored.path} has shape {list(stored.shape)}, this model needs {list(shape)}",
            hint=_cause(spec, stored, shape),
        )
    if stored.dtype not in READABLE:
        packed = stored.dtype.startswith(("I", "U", "F8", "BOOL"))
        raise InvalidModel(
            f"tensor {stored.name} of {stored.path} is {stored.dtype}, readable are {', '.join(READABLE)}",
            hint="use weights that are not quantised" if packed else "save it again in one of these types",
        )


def _cause(spec: JobSpec, stored: StoredTensor, shape: tuple[int, ...]) -> str:
    """Why a tensor has another shape, as far as it can be known."""
    family, name = FAMILIES[spec.model.family], _head_name(spec, stored.name)
    known = {family.own_names.get(key, key): key for key in ("vocab_size", "hidden_size", "max_position_embeddings")}
    keys = {common: own for own, common in known.items()}
    if len(stored.shape) != len(shape) or len(shape) < 2:
        return OTHER_MODEL
    if name == HEAD or f".{name}".endswith(f".{family.embedding}.weight"):
        rows = keys["vocab_size"]
    elif family.learns_positions and f".{name}".endswith(f".{family.positions}.weight"):
        rows = keys["max_position_embeddings"]
    else:
        return OTHER_MODEL
    if stored.shape[1] != shape[1]:
        return f"config.json says {keys['hidden_size']} = {shape[1]}, and its weights have {stored.shape[1]}"
    return (
        f"config.json says {rows} = {shape[0]}, and the weights have {stored.shape[0]} rows: correct {rows} in "
        "config.json, or resize the model's tables to it"
    )


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
