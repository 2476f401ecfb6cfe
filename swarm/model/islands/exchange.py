"""Proposals of islands for a unit, and the mean that all islands compute of them: the mathematics of `outer` on flat
tensors.

    at each envoy   anchor - w ──coded, parameter by parameter──▶ bytes ──▶ envoys of the other islands
                    bytes of all islands ──decoded──▶ P ──compose──▶ D, the same bits everywhere ──▶ merge

Codes begin with each parameter tensor, so no bit depends on how the model is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from swarm.errors import CorruptFrame
from swarm.job.islands import outer_plan
from swarm.job.outer import REPLACE
from swarm.job.spec import JobSpec
from swarm.model import codec
from swarm.model.islands.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.types import UnitName


def proposal_bytes(stage: Stage, unit: UnitName, codec_name: str) -> int:
    """The length of `proposed`."""
    return sum(_bytes(shape, codec_name) for _, _, shape in stage.parameters_of(unit))


def proposed(stage: Stage, unit: UnitName, codec_name: str) -> Tensor:
    """The proposal of the stage's island for a unit, coded: uint8, 1-D on the CPU, in memory of its own."""
    names = [name for name, _, _ in stage.parameters_of(unit)]
    behind = stage.behind(names)
    return torch.cat([codec.encode_there(behind[name], codec_name) for name in names])


def decoded(stage: Stage, unit: UnitName, sent: Tensor, codec_name: str) -> Tensor:
    """A proposal P in the unit's flat layout, float32; CorruptFrame if the bytes are not of its size."""
    if sent.numel() != proposal_bytes(stage, unit, codec_name):
        raise CorruptFrame(f"a proposal for unit {unit} does not have {sent.numel()} bytes")
    parts, position = [], 0
    for _, _, shape in stage.parameters_of(unit):
        size_bytes = _bytes(shape, codec_name)
        payload = codec.readable(sent[position : position + size_bytes])
        parts.append(codec.decode(payload, codec.dtype_of(codec_name), shape, codec_name).view(-1))
        position += size_bytes
    return torch.cat(parts)


def mean_proposal(proposals: Iterable[Tensor], tokens: Sequence[int]) -> Tensor:
    """The mean proposal D of a unit; islands count by their tokens, and come in their order."""
    total = sum(tokens)
    return compose(proposals, [one / total for one in tokens])


def merge_of(stage: Stage, spec: JobSpec, means: Mapping[UnitName, Tensor]) -> Merge:
    """The outer step that D of all units makes; without any the outer weights stay, and the weights go back to them."""
    names = [name for name, _ in stage.parameter_sizes()]
    return merge_of_deltas(stage, spec, names, stage.gradients_of(means) if means else {})


def merge_of_deltas(stage: Stage, spec: JobSpec, names: Iterable[str], deltas: Mapping[str, Tensor]) -> Merge:
    """The same for some parameters, whose mean proposals `deltas` has."""
    if not deltas:
        return Merge({name: torch.zeros(0) for name in names}, None, REPLACE)
    shapes = stage.weights.newest()
    return Merge({name: deltas[name].view(shapes[name].shape) for name in names}, outer_plan(spec).update, REPLACE)


def _bytes(shape: Sequence[int], codec_name: str) -> int:
    return codec.CODECS[codec_name].payload_bytes(prod(shape))
