"""Units: parameters of a stage that are averaged together, and their places in flat sums and means.

A stage's own parameters are one unit. The embedding and the head of a model that ties them are another, whose members
are the replicas of the first and the last stage; a stage that holds both uses the weight in two places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.job.families import FAMILIES, HEAD
from swarm.job.spec import JobSpec
from swarm.model import exact_sums
from swarm.types import TIED_UNIT, UnitName
from swarm.wire.messages import ParameterNorm


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How the parameters of a unit lie in its flat sums and means: (name, offset, shape) each, without gaps."""

    elements: int
    parameters: tuple[tuple[str, int, tuple[int, ...]], ...]

    def only(self, inside: Sequence[str], names: Collection[str]) -> UnitLayout:
        """The layout of those parameters that the module calls by these names; `inside` has its name of each."""
        both = zip(inside, self.parameters, strict=True)
        return _layout({outside: shape for name, (outside, _, shape) in both if name in names})


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


class Places:
    """Where parameters lie in the flat sums and means of their units."""

    def __init__(self, uses: Mapping[UnitUse, UnitLayout]) -> None:
        self.uses = uses
        self.units = {use.unit: layout for use, layout in uses.items()}

    @property
    def names(self) -> frozenset[str]:
        """The parameters, as the module calls them."""
        return frozenset(name for use, layout in self.uses.items() for name in _inside(use, layout))

    def only(self, names: Collection[str]) -> Places:
        """The places of these parameters alone, without gaps; units of which none is left have no elements."""
        return Places({use: layout.only(_inside(use, layout), names) for use, layout in self.uses.items()})

    def parameters_of(self, unit: UnitName) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """(name, offset, shape) of the parameters in a unit's flat layout; of a tied weight one of its two uses."""
        use = next(use for use in self.uses if use.unit == unit)
        return module_names(use, self.uses[use])

    def gradients_of(self, means: Mapping[UnitName, Tensor]) -> dict[str, Tensor]:
        """The averaged gradient of every parameter, shaped as it is; the tensors share the memory of `means`."""
        return {
            name: view
            for use, layout in self.uses.items()
            for (name, _, _), (_, view) in zip(module_names(use, layout), views(layout, means[use.unit]), strict=True)
        }

    def means_of(self, gradients: Mapping[str, Tensor]) -> dict[UnitName, Tensor]:
        """The inverse of `gradients_of`."""
        means = {unit: torch.zeros(layout.elements) for unit, layout in self.units.items()}
        for name, view in self.gradients_of(means).items():
            view.copy_(gradients[name].view(view.shape))
        return means

    def squared_norms(self, unit: UnitName, mean: Tensor) -> tuple[ParameterNorm, ...]:
        """The squared norm of each parameter of a unit's mean, under the unit's name for it."""
        held = list(views(self.units[unit], mean))
        norms = exact_sums.squared_norms([part for _, part in held])
        return tuple(ParameterNorm(name, norm) for (name, _), norm in zip(held, norms, strict=True))


def _inside(use: UnitUse, layout: UnitLayout) -> tuple[str, ...]:
    return tuple(name for name, _, _ in module_names(use, layout))


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
