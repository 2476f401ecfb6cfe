"""The weights of a stage: one module per version that may still be computed with, and the weights that the optimizer
steps.

    model.dtype             a module holds      the optimizer steps
    float32, bfloat16       float32             the module of the oldest version, after the newest was copied there
    bfloat16_parameters     bfloat16 copies     float32 masters where the optimizer runs, of the newest version only;
                                                copies are made anew

Either way no graph sees its weights move. Files, digests and the optimizer know float32 only; every bfloat16 value is
a float32 value, so an older copy that is saved as float32 comes back with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm.errors import StaleMessage
from swarm.job.spec import LOWERED, JobSpec
from swarm.model.families import StageModule, build
from swarm.model.state import InitialState


@dataclass(slots=True)
class Buffer:
    """The module of one version, and its parameters by name: listing a module's takes a twentieth of a microbatch."""

    version: int
    module: StageModule
    parameters: dict[str, nn.Parameter]
    values: dict[str, Tensor]  # without gradients; they share the parameters' memory

    @classmethod
    def of(cls, version: int, module: StageModule) -> Buffer:
        named = dict(module.named_parameters())
        return cls(version, module, named, {name: parameter.detach() for name, parameter in named.items()})


class Weights:
    """The weights of stage `stage`; without `initial` drawn from training.seed, at version 0.

    Buffers of equal version hold equal weights; the first of them is used.
    """

    def __init__(
        self,
        spec: JobSpec,
        stage: int,
        device: torch.device,
        initial: InitialState | None,
        step_device: torch.device | None = None,
    ) -> None:
        self._stage = stage
        self._masters: dict[str, Tensor] = {}
        self.buffers: list[Buffer] = []
        for version, weights in _starts(initial)[: 1 + spec.pipeline.staleness]:
            module = build(spec, stage, device, weights)
            if spec.model.dtype == LOWERED:
                whole = _lower(module)
                self._masters = self._masters or {name: one.to(step_device or device) for name, one in whole.items()}
            self.buffers.append(Buffer.of(version, module))

    @property
    def version(self) -> int:
        """The newest."""
        return max(buffer.version for buffer in self.buffers)

    def of(self, version: int) -> StageModule:
        """The module to compute with; StaleMessage if the version is not held."""
        return self.buffer(version).module

    def buffer(self, version: int) -> Buffer:
        """The same with its parameters."""
        for buffer in self.buffers:
            if buffer.version == version:
                return buffer
        held = ", ".join(str(buffer.version) for buffer in self.buffers)
        raise StaleMessage(f"stage {self._stage} is asked for weights {version}, it holds {held}")

    def newest(self) -> dict[str, Tensor]:
        """The newest version of every parameter, float32, in an order that all replicas of the stage share."""
        return self._masters or self.buffer(self.version).values

    def older(self) -> dict[str, Tensor]:
        """The parameters of the version before, as they are held; empty if there is none."""
        for buffer in self.buffers:
            if buffer.version < self.version:
                return buffer.values
        return {}

    def held(self, name: str, version: int) -> list[Tensor]:
        """The tensors that make up a parameter that is of `version` (others may not be yet): its float32 values, then
        the values before as they are held. Not copies; `changed` must follow a change."""
        newest = self._buffer_of(version)
        others = [buffer for buffer in self.buffers if buffer is not newest]
        return [self._masters.get(name, newest.values[name]), *(other.values[name] for other in others)]

    @torch.no_grad()
    def to_step(self, name: str, version: int) -> Tensor:
        """A parameter's float32 values at `version`, where a step in place makes the next one; `changed` follows."""
        if name in self._masters:
            return self._masters[name]
        old, new = (self._buffer_of(held).values[name] for held in (version, version + 1))
        if new is not old:
            new.copy_(old)
        return new

    @torch.no_grad()
    def changed(self, names: Iterable[str], version: int) -> None:
        """Make the copies of parameters whose masters are of `version` now."""
        for name in names if self._masters else ():
            self._buffer_of(version).values[name].copy_(self._masters[name])

    def settle(self, version: int) -> None:
        """Record that all parameters are of `version`."""
        held = {older: self._buffer_of(version - older) for older in range(len(self.buffers))}
        for older, buffer in held.items():
            buffer.version = max(0, version - older)

    def _buffer_of(self, version: int) -> Buffer:
        """The buffer that holds, or would hold, the weights of a version: versions take turns."""
        versions = [buffer.version for buffer in self.buffers]
        newest = versions.index(max(versions))
        return self.buffers[(newest + version - self.version) % len(self.buffers)]


def _starts(initial: InitialState | None) -> tuple[tuple[int, Mapping[str, Tensor] | None], ...]:
    """Version and weights of the buffers, newest first."""
    if initial is None:
        return (0, None), (0, None)
    previous = initial.previous or initial.weights
    return (initial.version, initial.weights), (max(0, initial.version - 1), previous)


def _lower(module: StageModule) -> dict[str, Tensor]:
    """Turn the parameters into bfloat16; gives the float32 ones. Buffers, such as rotary tables, stay float32."""
    # Not `detach`, which would count changes of the masters as changes of what graphs have seen.
    whole = {name: parameter.data for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return whole
