"""A stage's state as the files of a checkpoint: keyed by parameter, so that any number of stages loads them.

    model/model-00001-of-00003.safetensors      weights
    optimizer/embed.safetensors                 "<parameter>@<state>" of everything before the layers,
    optimizer/layer-0003.safetensors            of one decoder layer,
    optimizer/head.safetensors                  of the final norm and an untied head

With staleness 1 the optimizer's files hold "<parameter>@previous" too: the weights of one version before.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator

import torch
from safetensors.torch import save
from torch import Tensor

from swarm.checkpoint.reader import STATE_MARK
from swarm.hf.model_folder import shard_name
from swarm.job.spec import JobSpec
from swarm.messages import ParameterHash
from swarm.model.state import PREVIOUS, InitialState, optimizer_path


def files_of(spec: JobSpec, stage: int, state: InitialState, *, optimizer: bool) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of every file that this stage writes, one after the other: they are made when they are asked for.

    Files without a tensor (an optimizer without state, staleness 0) are left out.
    """
    assert spec.pipeline.split != "auto", "resolve the spec first"
    yield f"model/{shard_name(stage, len(spec.pipeline.split))}", weights_file(state)
    if not optimizer:
        return
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name in state.weights:
        kept = files[optimizer_path(spec, name)]
        kept |= {f"{name}{STATE_MARK}{key}": tensor for key, tensor in state.optimizer.get(name, {}).items()}
        if name in state.previous:
            kept[f"{name}{STATE_MARK}{PREVIOUS}"] = state.previous[name]
    for path, tensors in sorted(files.items()):
        if tensors:
            yield path, _file(tensors)


def parameter_hashes(state: InitialState) -> tuple[ParameterHash, ...]:
    """sha256 of each weight's bytes, in order of name."""
    return tuple(
        ParameterHash(name, "float32", tuple(tensor.shape), hashlib.sha256(_raw(tensor)).hexdigest())
        for name, tensor in sorted(state.weights.items())
    )


def weights_file(state: InitialState) -> bytes:
    """The weights as a safetensors file, float32, Hugging Face names."""
    return _file(dict(state.weights))


def _file(tensors: dict[str, Tensor]) -> bytes:
    return bytes(save(tensors, metadata={"format": "pt"}))


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
