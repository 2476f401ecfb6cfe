"""Where a job's model comes from: a local folder or the hub. No torch: the client uses this too.

model.id ── local folder ── config.json ─▶ ground ─▶ spec with family, config
    │                       *.safetensors ─▶ weight_files ─▶ uploaded, read by stage servers from the scheduler
    └────── hub id ──────── config.json ─▶ ground ─▶ the same, and the revision pinned to a commit
                            *.safetensors: read from the hub by each stage server itself

Decision: docs/decisions/018.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm.errors import InvalidConfig, InvalidModel, NotCached, NotFound
from swarm.hf.fit import CAUSAL_MASK, equal_values, fit, is_causal_mask, is_known_table
from swarm.hf.model_folder import INDEX_NAME, NARROW_TYPE
from swarm.hf.own_files import check_no_pointer, is_there, read_own
from swarm.hf.safetensors_header import CONVERT, LENGTH_BYTES, StoredTensor, header_bytes, parse_header, read_header
from swarm.job.families import FAMILIES, HEAD, Family
from swarm.job.model_config import with_overrides
from swarm.job.positions import position_remarks
from swarm.job.shapes import parameter_table
from swarm.job.spec import JobSpec, NarrowSection, check_lengths
from swarm.long_json import read_long
from swarm.text import first_line

CONFIG_BYTES_MAX = 256 << 10  # it travels within the job
INDEX_BYTES_MAX = 8 << 20
OPENING_BYTES = 64 << 10  # of a file on the hub, read first: most headers are shorter
HEADERS_AT_ONCE = 8
SINGLE_NAME = "model.safetensors"
MODEL_FOLDER = "model"  # of a starting state, as in a checkpoint
# What config.json says of files and of other programs, not of the architecture.
_NOT_ARCHITECTURE = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "narrow", "torch_dtype"),
    "transformers_version",
)
_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$")
_JSON_HINT = "correct it, or copy the whole folder again"
_OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".npz", ".onnx")
_ADAPTER = "adapter_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file of a local model: its path in a starting state, and where it lies."""

    path: str
    location: Path
    size_bytes: int


def local_folder(spec: JobSpec) -> Path | None:
    """The folder that model.id names, None if it is a hub id; InvalidModel if it looks like a folder but is none."""
    path = Path(os.path.expanduser(spec.model.id))
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidModel(f'model.id = "{spec.model.id}" is a file', hint="name the folder that holds config.json")
    if spec.model.id.startswith((".", "/", "~", "\\")) or spec.model.id.count("/") > 1:
        raise InvalidModel(
            f'model.id = "{spec.model.id}": there is no such folder',
            hint="check the path" + ("" if path.is_absolute() else "; it is relative to where you are"),
        )
    return None


def ground(spec: JobSpec) -> JobSpec:
    """The spec with family and config filled from model.id, and for the hub with the commit as revision.

    A spec without an id, or one already grounded, is returned unchanged. InvalidModel or InvalidConfig.
    """
    model = spec.model
    if not model.id:
        if model.init == "pretrained" and "init" in model.model_fields_set:
            raise InvalidConfig(
                'model.init = "pretrained" needs a model to start from', hint="set model.id, or leave model.init out"
            )
        return spec
    revision, published = _published_at(spec)
    where = f'the config.json of model.id = "{model.id}"'
    family = _family(spec, published, where)
    narrow = _narrow(spec, published, where)
    if published.get("quantization_config"):
        raise InvalidModel(
            f"{where} describes quantised weights, which cannot be trained", hint="use the original model"
        )
    architecture = {key: value for key, value in published.items() if key not in _NOT_ARCHITECTURE}
    check_lengths({"model": {"config": architecture}}, where)
    pinned = spec.model_copy(
        update={"model": model.model_copy(update={"family": family, "revision": revision, "narrow": narrow})}
    )
    if model.init == "pretrained" and _says_tied(FAMILIES[family], published):
        located = _located(pinned)
        if located is not None and _own_head(pinned, FAMILIES[family], located) is not None:
            architecture["tie_word_embeddings"] = False
    config = with_overrides(family, model.config, architecture)
    return pinned.model_copy(update={"model": pinned.model.model_copy(update={"config": config})})


def weight_files(spec: JobSpec) -> tuple[WeightFile, ...]:
    """The weights of a local model, with each header checked; none if the job does not start from a local folder.

    They are the files that Transformers would read: model.safetensors, else the index's. InvalidModel names the file.
    """
    if not spec.model.id or spec.model.init != "pretrained":
        return ()
    folder = local_folder(spec)
    if folder is None:
        return ()
    names = [SINGLE_NAME] if is_there(folder / SINGLE_NAME) else _indexed(folder)
    if not names:
        raise _no_weights(f"{folder}", [path.name for path in folder.iterdir()])
    files = []
    for name in names:
        location = folder / name
        if not is_there(location):
            raise InvalidModel(
                f"{folder} lacks {name}, which its {INDEX_NAME} names", hint="copy the whole folder again"
            )
        read_header(location, str(location))
        files.append(WeightFile(f"{MODEL_FOLDER}/{name}", location, location.stat().st_size))
    return tuple(files)


def look_at_model(spec: JobSpec) -> tuple[str, ...]:
    """All that headers and config tell of a resolved spec's model, before a byte is sent or a step trained.

    InvalidModel if the weights do not fit, in the words of the stage server that would load them. Gives what is worth a
    line: tensors that are left out, float types, positions, a head that is not the embedding. For weights on the hub
    only the headers are fetched; without them the stage servers judge.
    """
    remarks = list(position_remarks(spec))
    if not spec.model.id or spec.model.init != "pretrained":
        return tuple(remarks)
    family = FAMILIES[spec.model.family]
    located = _located(spec)
    if located is None:
        hub_says = f'the headers of model.id = "{spec.model.id}" cannot be had now'
        return (*remarks, f"{hub_says}: stage servers check the weights when they load them")
    found = fit(spec, [stored for stored, _ in located], parameter_table(spec))
    remarks += found.remarks
    untied = _own_head(spec, family, located) if not spec.tied and _says_tied(family, _published(spec)) else None
    if untied is not None:
        remarks.append(
            f"{untied.name} of {untied.path} differs from {found.tensors[family.embedding_name].name}, to which "
            "config.json ties it: both are trained, with tie_word_embeddings = false, as in Transformers"
        )
    for stored, location in located:
        if location is None or not (CAUSAL_MASK.search(stored.name) and is_known_table(stored)):
            continue
        if not is_causal_mask(stored, location):
            remarks.append(
                f"left out: {stored.name} of {stored.path}, which is not the causal mask; Transformers has no use for "
                "it either"
            )
    return tuple(remarks)


def _located(spec: JobSpec) -> list[tuple[StoredTensor, Path | None]] | None:
    """Every tensor of the model's files, with the file where it is here; None if the headers cannot be had."""
    if local_folder(spec) is None:
        return _on_hub(spec)
    files = weight_files(spec)
    return [(stored, file.location) for file in files for stored in read_header(file.location, file.path).values()]


def _on_hub(spec: JobSpec) -> list[tuple[StoredTensor, Path | None]] | None:
    """As `_located`, of a hub model: files in the cache are read there, of others the headers alone are fetched."""
    from swarm.hf import hub  # noqa: PLC0415 - slow to import, and few commands need it

    where = (spec.model.id, spec.model.revision)

    def header(name: str) -> list[tuple[StoredTensor, Path | None]] | None:
        path, location = f"{MODEL_FOLDER}/{name}", hub.cached(*where, name)
        if location is not None:
            return [(stored, location) for stored in read_header(location, path).values()]
        begin = hub.read_part(*where, name, 0, OPENING_BYTES)
        if begin is None:
            return None
        opening, size_bytes = begin
        end = LENGTH_BYTES + header_bytes(path, size_bytes, opening[:LENGTH_BYTES])
        if end > len(opening):
            more = hub.read_part(*where, name, len(opening), end)
            if more is None:
                return None
            opening += more[0]
        return [(stored, None) for stored in parse_header(path, size_bytes, opening[LENGTH_BYTES:end]).values()]

    index = hub.cached(*where, INDEX_NAME)
    if index is None:
        try:
            return header(SINGLE_NAME)
        except NotFound:
            try:
                index = hub.fetch(*where, INDEX_NAME)
            except (InvalidModel, NotFound):
                return None
    elif hub.cached(*where, SINGLE_NAME) is not None:
        return header(SINGLE_NAME)
    raw = _read(index, INDEX_BYTES_MAX)
    names = sorted(set(_weight_map(raw, f'{INDEX_NAME} of model.id = "{spec.model.id}"').values()))
    with ThreadPoolExecutor(HEADERS_AT_ONCE) as threads:
        headers = list(threads.map(header, names))
    return None if None in headers else [stored for found in headers if found is not None for stored in found]


def _own_head(
    spec: JobSpec, family: Family, located: Iterable[tuple[StoredTensor, Path | None]]
) -> StoredTensor | None:
    """The head in the files if its values are not the embedding's; None if one of the two is not there.

    For files that are not here the first values are compared; a stage server that reads the rest refuses a file that
    differs.
    """
    head = embedding = None
    for stored, location in located:
        if stored.name in (HEAD, family.head_in_files):
            head = (stored, location)
        elif stored.name in (family.embedding_name, family.embedding_name.removeprefix(f"{family.trunk}.")):
            embedding = (stored, location)
    if head is None or embedding is None or head[0].shape != embedding[0].shape:
        return None  # of another shape it is refused
    if head[1] is None or embedding[1] is None:
        parts = [_beginning(spec, stored) for stored in (head[0], embedding[0])]
        differs = None not in parts and head[0].dtype == embedding[0].dtype and parts[0] != parts[1]
        return head[0] if differs else None
    return None if equal_values((head[0], head[1]), (embedding[0], embedding[1])) else head[0]


def _beginning(spec: JobSpec, stored: StoredTensor) -> bytes | None:
    """The first bytes of a tensor on the hub; None if they cannot be had."""
    from swarm.hf import hub  # noqa: PLC0415 - slow to import, and few commands need it

    name = stored.path.removeprefix(f"{MODEL_FOLDER}/")
    stop = min(stored.stop, stored.start + OPENING_BYTES)
    found = hub.read_part(spec.model.id, spec.model.revision, name, stored.start, stop)
    return None if found is None else found[0]


def _says_tied(family: Family, published: dict[str, Any]) -> bool:
    said = published.get("tie_word_embeddings")
    return bool(family.fields["tie_word_embeddings"][1] if said is None else said)


def hub_files(spec: JobSpec, wanted: frozenset[str], *, with_token: bool = True) -> tuple[WeightFile, ...]:
    """The hub's weights that hold one of the tensors `wanted`, downloaded if needed, which may take long.

    Without `with_token` the hub is asked anonymously: HF_TOKEN and logins of this machine are not used.
    """
    from swarm.hf import hub  # noqa: PLC0415 - slow to import, and few commands need it

    model = spec.model

    def fetch(name: str) -> Path:
        return hub.fetch(model.id, model.revision, name, with_token=with_token)

    try:
        paths = {SINGLE_NAME: fetch(SINGLE_NAME)}
    except (NotFound, NotCached):
        try:
            index = fetch(INDEX_NAME)
        except NotFound as error:
            raise _no_weights(f'model.id = "{model.id}"', []) from error
        weight_map = _weight_map(_read(index, INDEX_BYTES_MAX), f'{INDEX_NAME} of model.id = "{model.id}"')
        names = sorted({file for tensor, file in weight_map.items() if tensor in wanted})
        try:
            paths = {name: fetch(name) for name in names}
        except NotFound as error:
            raise InvalidModel(f"{error.message}, which its {INDEX_NAME} names") from error
    return tuple(
        WeightFile(f"{MODEL_FOLDER}/{name}", location, location.stat().st_size) for name, location in paths.items()
    )


def _published_at(spec: JobSpec) -> tuple[str, dict[str, Any]]:
    """Revision and config.json of the model, the revision of a hub model as a commit."""
    folder = local_folder(spec)
    if folder is None:
        revision, raw = _hub_config(spec)
    else:
        if not is_there(folder / "config.json") and is_there(folder / _ADAPTER):
            raise InvalidModel(
                f'model.id = "{spec.model.id}" is an adapter, which changes a model and is none',
                hint="merge it into its model (merge_and_unload), and name the folder to which that is saved",
            )
        revision, raw = spec.model.revision, _read(folder / "config.json", CONFIG_BYTES_MAX)
    return revision, _object(raw, f'the config.json of model.id = "{spec.model.id}"')


def _published(spec: JobSpec) -> dict[str, Any]:
    """The config.json of a grounded spec's model, which is here."""
    from swarm.hf import hub  # noqa: PLC0415 - slow to import, and few commands need it

    folder = local_folder(spec)
    path = folder / "config.json" if folder else hub.cached(spec.model.id, spec.model.revision, "config.json")
    return {} if path is None else _object(_read(path, CONFIG_BYTES_MAX), str(path))


def _hub_config(spec: JobSpec) -> tuple[str, bytes]:
    """Commit and config.json of a hub model; InvalidModel also if it has only pickled weights."""
    from swarm.hf import hub  # noqa: PLC0415 - slow to import, and few commands need it

    model = spec.model
    hub.check_answers(model.id, model.revision, "config.json", f'model.id = "{model.id}"')
    try:
        path = hub.fetch(model.id, model.revision, "config.json")
    except NotFound as error:
        raise InvalidModel(error.message, hint="is it a model for Transformers?") from error
    commit = hub.commit_of(path) or model.revision
    if model.init == "pretrained":
        names = hub.names(model.id, commit)
        if names is not None and not {SINGLE_NAME, INDEX_NAME} & set(names):
            raise _no_weights(f'model.id = "{model.id}"', names)
    return commit, _read(path, CONFIG_BYTES_MAX)


def _no_weights(where: str, names: list[str]) -> InvalidModel:
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return InvalidModel(
            f"{where} has no safetensors files, only {pickles[0]}: pickled weights can run code and are never loaded",
            hint=CONVERT,
        )
    others = sorted(name for name in names if name.endswith((".safetensors", *_OTHER_WEIGHTS)))
    held = f", but {', '.join(others[:3])}{' and others' if len(others) > 3 else ''}" if others else ""
    return InvalidModel(
        f"{where} holds neither {SINGLE_NAME} nor {INDEX_NAME}{held}",
        hint='a model that save_pretrained wrote has one; model.init = "random" needs none',
    )


def _family(spec: JobSpec, published: dict[str, Any], where: str) -> str:
    named = published.get("model_type")
    if isinstance(named, str) and "narrow" in published:
        named = named.removeprefix(NARROW_TYPE)
    if not isinstance(named, str) or named not in FAMILIES:
        raise InvalidModel(
            f"{where} says model_type = {named!r}, which this version cannot train",
            hint=f"it can train {', '.join(FAMILIES)}",
        )
    if spec.model.family not in ("auto", named):
        raise InvalidConfig(
            f'model.family = "{spec.model.family}", but {where} says "{named}"', hint="leave model.family out"
        )
    return str(named)


def _narrow(spec: JobSpec, published: dict[str, Any], where: str) -> NarrowSection:
    """The narrow places that the model has; InvalidConfig if the job names others, or some for weights without."""
    wanted = spec.model.narrow
    if "narrow" not in published:
        if wanted.kind != "none" and spec.model.init == "pretrained":
            raise InvalidConfig(
                f'model.narrow changes the model, and the weights of model.id = "{spec.model.id}" have no narrow '
                "places",
                hint='set model.init = "random", or leave model.narrow out',
            )
        return wanted
    try:
        found = NarrowSection.model_validate(published["narrow"])
    except ValidationError as error:
        raise InvalidModel(
            f"{where} names narrow places that no model has: {first_line(error)}", hint=_JSON_HINT
        ) from None
    if wanted.kind != "none" and any(getattr(wanted, key) not in ("auto", value) for key, value in found):
        raise InvalidConfig(
            f"model.narrow is not as {where} says: kind = {found.kind}, factor = {found.factor}, every = {found.every}",
            hint="leave model.narrow out",
        )
    return found


def _indexed(folder: Path) -> list[str]:
    """The files that a folder's index names; none if it has no index."""
    path = folder / INDEX_NAME
    if not is_there(path):
        return []
    return sorted(set(_weight_map(_read(path, INDEX_BYTES_MAX), str(path)).values()))


def _weight_map(raw: bytes, where: str) -> dict[str, str]:
    try:
        index = read_long(raw)
    except ValueError as error:
        raise InvalidModel(f"{where} is no JSON: {error}", hint=_JSON_HINT) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel(f"{where} has no weight_map", hint=CONVERT)
    for name in weight_map.values():
        if not isinstance(name, str) or not _FILE_NAME.match(name) or not name.endswith(".safetensors"):
            hint = CONVERT if str(name).endswith(_PICKLES) else f"put all files into one folder, or {CONVERT}"
            raise InvalidModel(f"{where} names {name!r}, which is no safetensors file beside it", hint=hint)
    return weight_map


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # text and numbers that can be sent on
    except (ValueError, RecursionError) as error:
        what = "it holds NaN or an infinite number" if "JSON compliant" in str(error) else error
        raise InvalidModel(f"{where} is no JSON: {what}", hint=_JSON_HINT) from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{where} is no JSON object", hint=_JSON_HINT)
    return value


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        raw = read_own(path, bytes_max)
    except FileNotFoundError:
        raise InvalidModel(f"{path} does not exist", hint="name a folder that save_pretrained wrote") from None
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    check_no_pointer(str(path), raw)
    return raw
