"""Units: parameters of a stage that are averaged together, and their places in flat sums and means.

A stage's own parameters are one unit. The embedding and the head of a model that ties them are another, whose members
are the replicas of the first and the last stage; a stage that holds both uses the weight in two places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.job.families import FAMILIES, HEAD
from swarm.job.spec import JobSpec
from swarm.types import TIED_UNIT, UnitName


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How the parameters of a unit lie in its flat sums and means: (name, offset, shape) each, without gaps."""

    elements: int
    parameters: tuple[tuple[str, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class UnitUse:
    """A place where parameters of a unit are used: the tied weight has two, all other parameters one."""

    unit: UnitName
    role: str  # "own", "embedding" or "head"


def tied_name(spec: JobSpec) -> str | None:
    """The name of the embedding if the head is tied to it."""
    return FAMILIES[spec.model.family].embedding_name if spec.tied else None


def places_of(parameters: Mapping[str, Tensor], own: UnitName, tied: str | None) -> dict[UnitUse, UnitLayout]:
    """The place of each of a stage's parameters in its unit."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    roles = {tied: "embedding", HEAD: "head"} if tied is not None else {}
    places = {UnitUse(own, "own"): _layout({name: shape for name, shape in shapes.items() if name not in roles})}
    for name, role in roles.items():
        if tied is not None and name in shapes:
            places[UnitUse(TIED_UNIT, role)] = _layout({tied: shapes[name]})
    return places


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> UnitLayout:
    parameters, offset = [], 0
    for name, shape in shapes.items():
        parameters.append((name, offset, shape))
        offset += torch.Size(shape).numel()
    return UnitLayout(offset, tuple(parameters))


def module_names(use: UnitUse, layout: UnitLayout) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """The layout under the names that the module uses: the tied head is called by the embedding's name outside."""
    if use.role != "head":
        return layout.parameters
    return tuple((HEAD, offset, shape) for _, offset, shape in layout.parameters)


def views(layout: UnitLayout, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of a flat tensor, by the parameters' names and in their shapes; they share its memory."""
    for name, offset, shape in layout.parameters:
        yield name, flat[offset : offset + torch.Size(shape).numel()].view(shape)
