"""Where a job's model comes from: a local folder or the hub. No torch: the client uses this too.

model.id ── local folder ── config.json ─▶ ground ─▶ spec with family, config
    │                       *.safetensors ─▶ weight_files ─▶ uploaded, read by stage servers from the scheduler
    └────── hub id ──────── config.json ─▶ ground ─▶ the same, and the revision pinned to a commit
                            *.safetensors: read from the hub by each stage server itself
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import InvalidConfig, InvalidModel, NotCached, NotFound
from swarm.hf.model_folder import INDEX_NAME
from swarm.hf.safetensors_header import CONVERT, read_header
from swarm.job.families import FAMILIES
from swarm.job.model_config import check_overrides, common_name
from swarm.job.spec import JobSpec

CONFIG_BYTES_MAX = 256 << 10  # it travels within the job
INDEX_BYTES_MAX = 8 << 20
SINGLE_NAME = "model.safetensors"
MODEL_FOLDER = "model"  # of a starting state, as in a checkpoint
# What config.json says of files and of other programs, not of the architecture.
_NOT_ARCHITECTURE = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
)
_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$")
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
    folder = local_folder(spec)
    if folder is None:
        revision, raw = _hub_config(spec)
    else:
        revision, raw = model.revision, _read(folder / "config.json", CONFIG_BYTES_MAX)
    where = f'the config.json of model.id = "{model.id}"'
    published = _object(raw, where)
    family = _family(spec, published, where)
    if published.get("quantization_config"):
        raise InvalidModel(
            f"{where} describes quantised weights, which cannot be trained", hint="use the original model"
        )
    architecture = {key: value for key, value in published.items() if key not in _NOT_ARCHITECTURE}
    check_overrides(family, model.config, architecture)
    changes = {"family": family, "config": {**architecture, **model.config}, "revision": revision}
    return spec.model_copy(update={"model": model.model_copy(update=changes)})


def weight_files(spec: JobSpec) -> tuple[WeightFile, ...]:
    """The weights of a local model, with each header checked; none if the job does not start from a local folder.

    The files are those that Transformers would read: model.safetensors, else the index's. InvalidModel names the file.
    """
    if not spec.model.id or spec.model.init != "pretrained":
        return ()
    folder = local_folder(spec)
    if folder is None:
        return ()
    names = [SINGLE_NAME] if (folder / SINGLE_NAME).is_file() else _indexed(folder)
    if not names:
        raise _no_weights(f"{folder}", [path.name for path in folder.iterdir()])
    files = []
    for name in names:
        location = folder / name
        if not location.is_file():
            raise InvalidModel(
                f"{folder} lacks {name}, which its {INDEX_NAME} names", hint="copy the whole folder again"
            )
        read_header(location, str(location))
        files.append(WeightFile(f"{MODEL_FOLDER}/{name}", location, location.stat().st_size))
    return tuple(files)


def check_weights(spec: JobSpec) -> None:
    """InvalidModel if the weights of a local model are plainly not those of its config.json: other layers or widths.

    Stage servers compare every tensor when they load; this finds the fault before anything is sent.
    """
    files = weight_files(spec)
    if not files:
        return
    family = FAMILIES[spec.model.family]
    said = {common_name(spec.model.family, key): value for key, value in spec.model.config.items()}
    shapes = {name: one.shape for file in files for name, one in read_header(file.location, file.path).items()}
    number = re.compile(rf"(?:^|\.){family.layers}\.([0-9]{{1,6}})\.")
    layers = {1 + int(found[1]) for name in shapes if (found := number.search(name))}
    table = f".{family.embedding}.weight"
    held = {
        "num_hidden_layers": {max(layers)} if layers else set(),
        "hidden_size": {shape[-1] for name, shape in shapes.items() if shape and f".{name}".endswith(table)},
    }
    for key, found_in_files in held.items():
        value = said.get(key)
        if type(value) is int and found_in_files and value not in found_in_files:
            raise InvalidModel(
                f"the config.json of {files[0].location.parent} says {key} = {value}, and its weights have "
                f"{', '.join(map(str, sorted(found_in_files)))}",
                hint="they are of different models: copy the whole folder again",
            )


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
    return InvalidModel(
        f"{where} holds neither {SINGLE_NAME} nor {INDEX_NAME}",
        hint='a model that save_pretrained wrote has one; model.init = "random" needs none',
    )


def _family(spec: JobSpec, published: dict[str, Any], where: str) -> str:
    named = published.get("model_type")
    if named not in FAMILIES:
        raise InvalidModel(
            f"{where} says model_type = {named!r}, which this version cannot train",
            hint=f"it can train {', '.join(FAMILIES)}",
        )
    if spec.model.family not in ("auto", named):
        raise InvalidConfig(
            f'model.family = "{spec.model.family}", but {where} says "{named}"', hint="leave model.family out"
        )
    return str(named)


def _indexed(folder: Path) -> list[str]:
    """The files that a folder's index names; none if it has no index."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return []
    return sorted(set(_weight_map(_read(path, INDEX_BYTES_MAX), str(path)).values()))


def _weight_map(raw: bytes, where: str) -> dict[str, str]:
    weight_map = _object(raw, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel(f"{where} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not _FILE_NAME.match(name) or not name.endswith(".safetensors"):
            hint = CONVERT if str(name).endswith(_PICKLES) else ""
            raise InvalidModel(f"{where} names {name!r}, which is no safetensors file beside it", hint=hint)
    return weight_map


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # text and numbers that can be sent on
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{where} is no JSON") from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{where} is no JSON object")
    return value


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except FileNotFoundError:
        raise InvalidModel(f"{path} does not exist", hint="name a folder that save_pretrained wrote") from None
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > bytes_max:
        raise InvalidModel(f"{path} has more than {bytes_max} bytes")
    return raw
