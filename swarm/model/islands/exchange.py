"""Proposals of islands for a unit, and the mean that all islands compute of them: the mathematics of `outer` on flat
tensors.

    at each envoy   anchor - w ──coded, parameter by parameter──▶ bytes ──▶ envoys of the other islands
                    bytes of all islands ──decoded──▶ P ──compose──▶ D, the same bits everywhere ──▶ merge

Codes begin with each parameter tensor, so no bit depends on how the model is cut.

With gaia many numbers of a proposal are 0. It travels as a bit for each number and then the codes that are not 0, if
that is shorter: its length says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.errors import CorruptFrame
from swarm.job.islands import outer_plan
from swarm.job.outer import REBASE, REPLACE
from swarm.job.spec import JobSpec
from swarm.model import codec
from swarm.model.islands.outer import Merge, compose
from swarm.model.islands.proposals import Proposals
from swarm.model.stage import Stage
from swarm.types import UnitName


def proposal_bytes(stage: Stage, unit: UnitName, step: int) -> int:
    """The length of `proposed`; 0 if the outer step merges nothing of the unit."""
    return sum(_proposals(stage).size_bytes(name) for name in _names(stage, unit, step))


def proposed(stage: Stage, unit: UnitName, step: int) -> Tensor:
    """The proposal of the stage's island for a unit in an outer step, coded: uint8, 1-D on the CPU, not shared."""
    parts = [_proposals(stage).coded(name) for name in _names(stage, unit, step)]
    return torch.cat([torch.zeros(0, dtype=torch.uint8), *parts])


def proposal_sizes(stage: Stage, unit: UnitName, step: int) -> range:
    """The lengths that a proposal may have on its way: of `proposed`, and with gaia of `shortened` too."""
    whole, proposals = proposal_bytes(stage, unit, step), _proposals(stage)
    return range(_bits(whole // _code(stage).itemsize) if proposals.are_filtered else whole, whole + 1)


def shortened(stage: Stage, coded: Tensor) -> Tensor:
    """A coded proposal as it travels with gaia: not longer than it is."""
    codes = coded.numpy().view(_code(stage))
    there = codes != 0
    short = np.concatenate([np.packbits(there), codes[there].view(np.uint8)])
    return torch.from_numpy(short) if short.size < coded.numel() else coded


def restored(stage: Stage, unit: UnitName, step: int, sent: Tensor) -> Tensor:
    """The inverse of `shortened`; CorruptFrame if no proposal for the unit travels as these bytes."""
    sizes, code = proposal_sizes(stage, unit, step), _code(stage)
    codes = np.zeros(sizes[-1] // code.itemsize, code)
    bits, listed = np.split(sent.numpy(), [_bits(codes.size)])
    there = np.unpackbits(bits)
    if sent.numel() not in sizes or there[codes.size :].any() or there.sum() * code.itemsize != listed.size:
        raise CorruptFrame(f"a proposal for unit {unit} does not list the codes that its bits announce")
    codes[there[: codes.size].astype(bool)] = listed.view(code)
    return torch.from_numpy(codes.view(np.uint8))


def decoded(stage: Stage, unit: UnitName, step: int, sent: Tensor) -> Tensor:
    """A proposal P in the unit's flat layout, float32; CorruptFrame if the bytes are not of its size."""
    if sent.numel() != proposal_bytes(stage, unit, step):
        raise CorruptFrame(f"a proposal for unit {unit} does not have {sent.numel()} bytes")
    proposals, parts, position = _proposals(stage), [torch.zeros(0)], 0
    for name in _names(stage, unit, step):
        size_bytes = proposals.size_bytes(name)
        parts.append(proposals.decoded(name, sent[position : position + size_bytes]).view(-1))
        position += size_bytes
    return torch.cat(parts)


def mean_proposal(proposals: Iterable[Tensor], tokens: Sequence[int]) -> Tensor:
    """The mean proposal D of a unit; islands count by their tokens, and come in their order."""
    total = sum(tokens)
    return compose(proposals, [count / total for count in tokens])


def merge_of(
    stage: Stage, spec: JobSpec, step: int, means: Mapping[UnitName, Tensor] | None, *, rebases: bool = False
) -> Merge:
    """The outer step that D of all units makes; without any the outer weights stay, and the weights go back to them.

    `rebases`: at an island that was late, which keeps what it has made.
    """
    deltas = None if means is None else stage.places_at(step).gradients_of(means)
    return merge_of_deltas(stage, spec, step, _proposals(stage).merged_at(step), deltas, rebases=rebases)


def merge_of_deltas(
    stage: Stage,
    spec: JobSpec,
    step: int,
    names: Iterable[str],
    deltas: Mapping[str, Tensor] | None,
    *,
    rebases: bool = False,
) -> Merge:
    """The same for some parameters, with their mean proposals `deltas`; parameters outside the step stay."""
    proposals, shapes = _proposals(stage), stage.weights.newest()
    merged = sorted(proposals.merged_at(step).intersection(names))
    if deltas is None:
        return Merge({name: torch.zeros(0) for name in merged}, None, REBASE if rebases else REPLACE)
    plan = outer_plan(spec)
    rule = REBASE if rebases else plan.rule(proposals.course.inner_steps(step) - 1)
    return Merge({name: deltas[name].view(shapes[name].shape) for name in merged}, plan.update, rule)


def _code(stage: Stage) -> np.dtype[np.unsignedinteger[Any]]:
    """The code of a number, as an integer of its size; a scale of int8 is four of them."""
    return np.dtype(f"u{codec.DTYPES[codec.dtype_of(_proposals(stage).code)].itemsize}")


def _bits(codes: int) -> int:
    """The bytes that hold a bit for each code."""
    return -(-codes // 8)


def _names(stage: Stage, unit: UnitName, step: int) -> list[str]:
    """The parameters of a unit that an outer step merges."""
    return [name for name, _, _ in stage.places_at(step).parameters_of(unit)]


def _proposals(stage: Stage) -> Proposals:
    assert stage.proposals is not None, "the job has no outer steps"
    return stage.proposals
