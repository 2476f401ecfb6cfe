"""The model folder without the model: names, hashes and the small files beside the weights.

A folder holds config.json, generation_config.json, the tokenizer's files and one safetensors file per stage; it loads
with Transformers' `from_pretrained`. Standard library only, so that the scheduler can assemble one without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from swarm.errors import CorruptFrame, InvalidConfig, NotAllowed, ReplicaDiverged
from swarm.hf.placing import is_free, rehearse
from swarm.hf.safetensors_header import StoredTensor
from swarm.job.families import FAMILIES
from swarm.job.model_config import hugging_face_config
from swarm.job.spec import JobSpec
from swarm.wire.messages import ParameterHash

NARROW_TYPE = "swarm_narrow_"  # before a family's name: the model_type of its models with narrow places
NARROW_CODE = "modeling_swarm_narrow.py"
INDEX_NAME = "model.safetensors.index.json"
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # in safetensors headers
READ_BYTES = 4 << 20
FILES_MAX = 10_000  # of a model
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def weights_sha256(parameters: Iterable[ParameterHash]) -> str:
    """One sha256 over all parameters of a model, the same for every cut and every set of files.

    It covers a line "name dtype shape sha256" per parameter, in order of name. A parameter that is named twice (tied
    weights in two stages) counts once; ReplicaDiverged if the two differ.
    """
    lines: dict[str, str] = {}
    for parameter in parameters:
        shape = "x".join(str(size) for size in parameter.shape)
        line = f"{parameter.name} {parameter.dtype} {shape} {parameter.sha256}\n"
        if lines.setdefault(parameter.name, line) != line:
            raise ReplicaDiverged(
                f"two stages hold different weights under the name {parameter.name}",
                hint="the tied copies must be equal after every commit: report this as a bug",
            )
    text = "".join(line for _, line in sorted(lines.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_hashes(file: BinaryIO, tensors: Iterable[StoredTensor]) -> Iterator[ParameterHash]:
    """The sha256 of each tensor's bytes in an open file; CorruptFrame if it ends early or a tensor is no weight."""
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise CorruptFrame(f"tensor {tensor.name} of {tensor.path} is of type {tensor.dtype}, which no weight has")
        digest = hashlib.sha256()
        file.seek(tensor.start)
        left = tensor.stop - tensor.start
        while left and (piece := file.read(min(READ_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
        if left:
            raise CorruptFrame(f"{tensor.path} ends within tensor {tensor.name}")
        yield ParameterHash(tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, digest.hexdigest())


def shard_name(stage: int, stages: int) -> str:
    """The file name of one stage's weights in a model folder."""
    return "model.safetensors" if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def safetensors_index(files: Mapping[str, Sequence[ParameterHash]]) -> bytes:
    """The index that tells which file holds which parameter; needed (as INDEX_NAME) with more than one file."""
    size_bytes = sum(
        ITEM_BYTES[parameter.dtype] * math.prod(parameter.shape)
        for parameters in files.values()
        for parameter in parameters
    )
    weight_map = {parameter.name: file for file, parameters in files.items() for parameter in parameters}
    return _json({"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def model_folder_files(spec: JobSpec) -> dict[str, bytes]:
    """config.json and generation_config.json of a resolved spec, by file name, and the code of its narrow places.

    A model with narrow places has a type of its own: under its family's name it would load, without them.

    A model that has a generation_config.json of its own keeps it (swarm/hf/companions.py): this one stands in for it.
    """
    family = FAMILIES[spec.model.family]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": spec.model.family,
        "dtype": "float32",
        "use_cache": True,
        **hugging_face_config(spec),
    }
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    files = {"generation_config.json": _json(ends)}
    if spec.places:
        module = NARROW_CODE.removesuffix(".py")
        config |= {
            "architectures": ["SwarmNarrowForCausalLM"],
            "model_type": NARROW_TYPE + spec.model.family,
            "narrow": spec.model.narrow.model_dump(),
            "auto_map": {
                "AutoConfig": f"{module}.SwarmNarrowConfig",
                "AutoModelForCausalLM": f"{module}.SwarmNarrowForCausalLM",
            },
        }
        files[NARROW_CODE] = _narrow_code(spec.model.family)
    return files | {"config.json": _json(config)}


def _narrow_code(family: str) -> bytes:
    """The module of a model with narrow places, for a family."""
    code = (Path(__file__).parents[1] / "model" / "narrow.py").read_text(encoding="utf-8")
    names = {
        "models.llama.configuration_llama": f"models.{family}.configuration_{family}",
        "models.llama.modeling_llama": f"models.{family}.modeling_{family}",
        "LlamaConfig": f"{FAMILIES[family].library}Config",
        "LlamaForCausalLM": FAMILIES[family].architecture,
        f"{NARROW_TYPE}llama": f"{NARROW_TYPE}{family}",
    }
    for llama, name in names.items():
        code = code.replace(llama, name)
    return code.encode()


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def check_out_dir(out_dir: Path) -> None:
    """Try to put a folder at `out_dir`, as will be done once the model is there, and take it away again.

    NotAllowed if a model would mix with other files there, InvalidConfig if it cannot be written.
    """
    try:
        if not is_free(out_dir):
            raise NotAllowed(f"{out_dir} exists already", hint="choose another --out, or remove it")
        rehearse(out_dir)
    except OSError as error:
        raise cannot_write(out_dir, error) from None


def cannot_write(out_dir: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(f"{out_dir} cannot be written: {error.strerror or error}", hint="choose another --out")
