"""One stage of the model: forward, backward, exact sums, optimizer.

The life of a microbatch and of a step here:

    forward ──▶ graph kept ──▶ backward ──▶ gradients checked ──▶ added to the step's sums, once
                                  │                 ▲                   │
                                  └─ keep ──▶ weigh ┘                   │
    part(step, unit) ◀── sums of a sealed step ─────────────────────────┤
    apply(step, means) ──▶ optimizer per parameter ──▶ version step + 1     └─ consumed
    merge(step, deltas) ──▶ outer weights ──▶ version step + 1              a step without microbatches

This module only knows how to compute; when is decided elsewhere. The same class serves a stage server and the
one-process reference, and the result must not depend on the number of stages. Therefore:

- every tensor that a layer sees has the same shape, dtype and contiguity in every cut;
- autocast keeps no cache of cast weights, which would live as long as the stage's forward;
- gradients are summed, and the optimizer runs, per parameter tensor; flat buffers are only storage;
- the two uses of a tied embedding are two parameters with two sums, even if one stage holds both.

`swarm/model/weights.py` holds the weights, one module per version that may still be computed with (staleness + 1).

Legend: B sequences, T tokens, D width, V vocabulary.

Decisions: docs/decisions/035, 044.

Units: parameters of a stage that are averaged together, and their places in flat sums and means.

A stage's own parameters are one unit. The embedding and the head of a model that ties them are another, whose members
are the replicas of the first and the last stage; a stage that holds both uses the weight in two places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from swarm.errors import NotFound
from swarm.job.families import FAMILIES, HEAD
from swarm.job.spec import LOWERED, JobSpec
from swarm.model import exact_sums
from swarm.model.digests import digest_of
from swarm.model.families import Draw, StageModule, stored_name
from swarm.model.islands.outer import Merge, OuterWeights
from swarm.model.islands.proposals import Proposals
from swarm.model.later import Notes, Products
from swarm.model.optimizers import Optimizer
from swarm.model.runtime import (
    SentAhead,
    SentBack,
    await_copy,
    copy_into,
    is_gpu,
    pinned,
    received,
    send_ahead,
    send_back,
    step_device,
    sum_device,
    to_device,
    to_host,
)
from swarm.model.state import InitialState, raw_bytes
from swarm.model.weights import Weights
from swarm.types import TIED_UNIT, Microbatch, UnitName
from swarm.wire.messages import ParameterNorm

STAGED_BYTES = 1 << 28  # of parameters that are on the host at once, where the optimizer runs there


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


Sums: TypeAlias = dict[UnitUse, Tensor]  # gradients that are added up


@dataclass(slots=True)
class _Graph:
    """A microbatch between forward and backward. `output` is absent if backward recomputes it."""

    version: int
    draw: Draw | None  # None: evaluation, without dropout
    source: Tensor  # tokens [B, T], or the boundary tensor [B, T, D] as a leaf
    targets: Tensor | None
    tokens: Tensor | None = None  # of a later stage with places by token
    output: Tensor | None = None  # boundary tensor, or the loss
    notes: Notes | None = None  # of its linear layers


@dataclass(slots=True)
class _Owed:
    """A microbatch between `backward(keep=True)` and `weigh`."""

    version: int
    gradients: dict[str, Tensor]  # of norms, biases, embeddings and head
    products: Products


class Stage:
    """Stage `stage` of the job's model on one device. Not thread-safe: one compute thread calls it.

    `spec` must be resolved; the cut is `spec.pipeline.split`. Without `initial` it starts at version 0 with weights
    drawn from training.seed. With `step_on` "cpu" the optimizer runs and keeps its state on the CPU, with the bits of a
    replica that lives there. Raises InvalidConfig if the model's config is impossible, InvalidModel if `initial` does
    not fit it.
    """

    def __init__(
        self,
        spec: JobSpec,
        stage: int,
        device: torch.device,
        initial: InitialState | None = None,
        *,
        step_on: str = "device",
    ) -> None:
        split = spec.pipeline.split
        assert split != "auto", "resolve the spec first"
        self.stage = stage
        self.stages = len(split)
        self.device = device
        self._spec = spec
        self._first = stage == 0
        self._last = stage == self.stages - 1
        self._bits = spec.training.fixed_point_bits if spec.training.reproducible else None
        self._lowered = spec.model.dtype == LOWERED
        self._sum_device, self._step_device = sum_device(device), step_device(device, step_on)
        self.weights = Weights(spec, stage, device, initial, self._step_device)
        newest = self.weights.newest()
        self.places = Places(places_of(newest, UnitName(f"stage-{stage}"), tied_name(spec)))
        self.units = self.places.units
        self._graphs: dict[Microbatch, _Graph] = {}
        self._owed: dict[Microbatch, _Owed] = {}
        self._sums: dict[int, Sums] = {}
        self._leaving: dict[int, SentBack] = {}  # what a GPU may still copy, by the `id` of sums
        self._ahead: dict[UnitName, tuple[Tensor, SentAhead]] = {}  # means for the next `apply`
        self._optimizer = Optimizer(
            spec.training, ((name, each.to(self._step_device)) for name, each in newest.items())
        )
        self._outer = OuterWeights(newest) if spec.has_outer_steps else None
        self.proposals = None if self._outer is None else Proposals(spec, self.weights, self._outer)
        if initial is not None and (initial.optimizer or initial.momentum):
            for name in newest:
                kept = stored_name(spec, name)
                self._optimizer.restore(name, initial.optimizer.get(kept, {}))
                if self._outer is not None and kept in initial.momentum:
                    self._outer.restore(name, initial.momentum[kept])
        if initial is not None and initial.trained:
            self._take_weights({name: initial.trained[stored_name(spec, name)] for name in newest})

    @property
    def version(self) -> int:
        """The newest weights: how many commits were applied."""
        return self.weights.version

    @property
    def module(self) -> StageModule:
        return self.weights.of(self.version)

    def boundary_shape(self) -> tuple[int, int, int]:
        """Shape (B, T, D) of every tensor that crosses a stage boundary."""
        size = self._spec.training.microbatch_sequences
        assert size != "auto", "resolve the spec first"
        return size, self._spec.data.sequence_length, self._spec.boundary_width

    # Microbatches ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: Microbatch,
        version: int,
        *,
        portion: int,
        x: Tensor | None = None,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor | None, float]:
        """Compute, and keep the graph for backward: (y [B, T, D], 0.0), or on the last stage (None, loss).

        `version` names the weights; StaleMessage if they are not held. `portion` comes from the step's course: with the
        microbatch's index it seeds dropout. The first stage takes `tokens` [B, T], the others `x` [B, T, D] float32,
        which this stage then owns, and `tokens` too where places are by token; the last one takes `targets` [B, T]
        (-100 = does not count) and gives the sum of the token losses in nats. A second forward of a microbatch replaces
        the first.
        """
        self.weights.of(version)
        if self._first:
            assert tokens is not None, "the first stage computes from tokens"
            source = to_device(tokens, self.device).long()
        else:
            assert x is not None, "a later stage computes from a boundary tensor"
            source = to_device(x.detach(), self.device).requires_grad_()
        draw = Draw(self._spec.training.seed, portion, microbatch.index)
        graph = _Graph(version, draw, source, self._ids(targets), self._place_tokens(tokens))
        output = self._output(graph)
        if self._spec.model.recompute:
            graph.notes = None
        else:
            graph.output = output
        self._graphs[microbatch] = graph
        return (None, float(output.detach())) if self._last else (output.detach(), 0.0)

    def backward(
        self,
        microbatch: Microbatch,
        g: Tensor | None = None,
        *,
        accumulate: bool = True,
        keep: bool = False,
        encode: Callable[[Tensor], Tensor] | None = None,
        into: Sums | None = None,
    ) -> tuple[Tensor | None, bool]:
        """Use up the graph: (dx [B, T, D] or None on the first stage, whether the gradient was finite).

        `g` is the gradient [B, T, D] of y; the last stage starts from its loss. The parameters' gradients are added to
        the sums of the microbatch's step, all of them, or none if one value is not finite or out of the fixed-point
        range; with `accumulate=False` never, but to `into`, if that is given. With `keep` they are neither looked at
        nor added: what they need is kept for `weigh`. With `encode`, what that makes of dx is given instead of dx, on
        the CPU: the host waits once for both results. NotFound if there was no forward.
        """
        dx, owed = self._differentiate(microbatch, g, keep=keep)
        sent = None if dx is None or encode is None else send_back(encode(dx))  # beside the checks of the gradients
        if keep:
            self._owed[microbatch] = owed
            return dx if sent is None else to_host(sent)[0], True
        gradients = {name: gradient.to(self._sum_device) for name, gradient in owed.gradients.items()}
        acceptable = self._acceptable(gradients)
        if sent is not None:
            dx, acceptable = to_host(sent, acceptable)
        finite = bool(acceptable)
        if finite and (accumulate or into is not None):
            self._add(self._sums.setdefault(microbatch.step, {}) if into is None else into, gradients)
        return dx, finite

    def weigh(self, microbatch: Microbatch) -> bool:
        """Compute what `backward(keep=True)` has put off, and add the gradients as `backward` does; gives whether they
        were finite. NotFound if nothing is owed."""
        owed = self._owed.pop(microbatch, None)
        if owed is None:
            raise NotFound(f"stage {self.stage} owes no gradients of {microbatch}: backward comes first")
        parameters, gradients = self.weights.buffer(owed.version).parameters, owed.gradients
        while owed.products:  # what a product was made of is given back before the next one
            name, (left, right) = owed.products.popitem()
            gradients[name] = left.t().mm(right).to(parameters[name].dtype)
        gradients = {name: gradient.to(self._sum_device) for name, gradient in gradients.items()}
        finite = bool(self._acceptable(gradients))
        if finite:
            self._add(self._sums.setdefault(microbatch.step, {}), gradients)
        return finite

    def recompute(
        self,
        microbatch: Microbatch,
        version: int,
        *,
        portion: int,
        encode: Callable[[Tensor], Tensor],
        x: Tensor | None = None,
        g: Tensor | None = None,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        into: Sums | None = None,
    ) -> tuple[Tensor | None, float, Tensor | None, bool]:
        """`forward` and `backward` at once; nothing is kept but gradients in `into`: (y, loss, encoded dx, finite)."""
        held = self._graphs.pop(microbatch, None)
        try:
            y, loss = self.forward(microbatch, version, portion=portion, x=x, tokens=tokens, targets=targets)
            dx, finite = self.backward(microbatch, g, accumulate=False, encode=encode, into=into)
        finally:
            self._graphs.pop(microbatch, None)
            if held is not None:
                self._graphs[microbatch] = held
        return y, loss, dx, finite

    def evaluate(
        self, version: int, *, x: Tensor | None = None, tokens: Tensor | None = None, targets: Tensor | None = None
    ) -> tuple[Tensor | None, float]:
        """Compute forward for an evaluation: as `forward`, but without a graph, and nothing is kept."""
        source = tokens if self._first else x
        assert source is not None, "the first stage computes from tokens, a later one from a boundary tensor"
        there = to_device(source, self.device)
        wanted = there.long() if self._first else there
        output = self._output(
            _Graph(version, None, wanted, self._ids(targets), self._place_tokens(tokens)), graph=False
        )
        return (None, float(output)) if self._last else (output, 0.0)

    def drop(self, *microbatches: Microbatch) -> None:
        for microbatch in microbatches:
            self._graphs.pop(microbatch, None)
            self._owed.pop(microbatch, None)

    def void(self, step: int) -> None:
        """Forget the sums of a step: every microbatch of it must be accumulated again."""
        for total in self._sums.pop(step, {}).values():
            self._leaving.pop(id(total), None)

    # Steps -----------------------------------------------------------------------------------------------------------

    def part(self, step: int, unit: UnitName) -> Tensor | SentBack:
        """This replica's sums of a unit, 1-D on the CPU: float64 grid integers (reproducible mode) or float32.

        From a GPU they are on their way, so that the compute thread need not wait. Zeros if nothing was accumulated. It
        may share memory with the sums: read it only while the step is sealed, and never write to it. Where one stage
        holds both uses of the tied weight it is the sum of the two (in float32 this addition rounds, so without
        reproducible mode one stage and several agree on tied weights to rounding only).
        """
        sums = self._sums.get(step, {})
        part = self._part(sums, unit)
        if isinstance(part, SentBack):
            self._leaving |= {id(total): part for use, total in sums.items() if use.unit == unit}
        return part

    def part_of(self, sums: Sums, unit: UnitName) -> Tensor:
        """As `part`, of other sums; they are there."""
        return to_host(self._part(sums, unit))[0]

    def _part(self, sums: Sums, unit: UnitName) -> Tensor | SentBack:
        held = [sums[use] for use in self.places.uses if use.unit == unit and use in sums]
        if not held:
            return torch.zeros(self.units[unit].elements, dtype=exact_sums.sum_dtype(self._bits))
        sent = send_back(held[0] if len(held) == 1 else held[0] + held[1])
        return sent.tensor if sent.is_here else sent

    def expect(self, unit: UnitName, mean: Tensor) -> Tensor:
        """Begin to copy a mean to the GPU that will apply it, from any thread; gives the mean to use from now on."""
        mean = pinned(mean, self._step_device)
        if is_gpu(self._step_device):
            self._ahead[unit] = mean, send_ahead(mean, self._step_device)
        return mean

    def apply(
        self, step: int, means: Mapping[UnitName, Tensor], *, learning_rate: float, scale: float, skip: bool
    ) -> None:
        """Commit a step: update with the averaged gradients times `scale`, or not if `skip`.

        `means` has a 1-D float32 tensor for every unit of this stage (may be empty if `skip`). The step's sums are
        used up, graphs of it and of earlier steps are dropped, and `version` becomes step + 1. Weight decay covers all
        parameters, as in torch.optim.
        """
        assert step == self.version, f"step {step} is applied to version {self.version}"
        self.drop(*[microbatch for microbatch in (*self._graphs, *self._owed) if microbatch.step <= step])
        self.void(step)
        parameters = {name: self.weights.to_step(name, step) for name in self.weights.newest()}
        if not skip:
            self._step(parameters.items(), self._gradients(means), learning_rate, scale)
        self._ahead.clear()
        self.weights.changed(parameters, step + 1)
        self.weights.settle(step + 1)
        if self.proposals is not None:
            self.proposals.capture(parameters.items(), step + 1)

    def propose(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What the island proposes for these parameters, float32 on the CPU, as the other islands get it."""
        assert self.proposals is not None, "the job has no outer steps"
        return {name: self.proposals.decoded(name, self.proposals.coded(name)) for name in names}

    def begin_anew(self) -> str:
        """Go on from the outer weights, as an island that has trained nothing yet; gives the new digest."""
        assert self._outer is not None, "the job has no outer steps"
        self._take_weights({name: self._outer.anchor(name) for name in self.weights.newest()})
        return self.digest()

    def merge(self, step: int, merge: Merge) -> None:
        """Commit an outer step, one without microbatches: the parameters in `merge` take over new outer weights.

        All others stay as they are. `version` becomes step + 1.
        """
        assert step == self.version, f"step {step} is applied to version {self.version}"
        self.replay_merge(step, self.weights.newest(), merge)
        self.weights.settle(step + 1)

    def digest(self) -> str:
        """Digests: of the newest parameters, the optimizer's state and proposals; and of the outer state."""
        inner = digest_of(
            (f"{name}@{key}", tensor)
            for name, parameter in sorted(self.weights.newest().items())
            for key, tensor in (("", parameter), *self._optimizer.state_of(name).items())
        )
        if self._outer is None or self.proposals is None:
            return inner
        return f"{inner}{self.proposals.digest()}-{self._outer.digest()}"

    # Joining ---------------------------------------------------------------------------------------------------------

    def parameter_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and elements of every parameter, in an order that all replicas of the stage share."""
        return tuple((name, parameter.numel()) for name, parameter in self.weights.newest().items())

    def state_bytes(self, names: Sequence[str], version: int | None = None) -> int:
        """The length of `snapshot(names)` at a version; without one the most that it may be."""
        held = 0 if self.proposals is None else sum(self.proposals.held_bytes(name, version) for name in names)
        return held + sum(tensor.nbytes for name in names for tensor in self._lasting(name, self.version))

    def snapshot(self, names: Iterable[str]) -> bytes:
        """All that a commit changes of these parameters, as it is now: for each the newest weights, with staleness 1
        the weights before, then the optimizer's tensors and the outer state."""
        tensors = to_host(*(tensor for name in names for tensor in self._state_at(name, self.version)))
        return b"".join(map(raw_bytes, tensors))

    @torch.no_grad()
    def absorb(self, names: Iterable[str], version: int, snapshot: memoryview) -> None:
        """Take over what another replica's `snapshot(names)` gave at `version`.

        Call `settle` once all parameters are of one version; until then nothing may be computed.
        """
        position = 0
        for name in names:
            for tensor in self._state_at(name, version):
                raw = snapshot[position : position + tensor.nbytes]
                position += len(raw)
                tensor.copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).view(tensor.shape))
            self.weights.changed([name], version)
        if self._outer is not None:
            self._outer.changed()
        assert position == len(snapshot), "a snapshot of other parameters"

    @torch.no_grad()
    def replay(
        self,
        step: int,
        names: Iterable[str],
        gradients: Mapping[str, Tensor],
        *,
        learning_rate: float,
        scale: float,
        skip: bool,
    ) -> None:
        """Commit `step` for some parameters, all of version `step`; `gradients` are the averages.

        The same computation, tensor by tensor, as `apply` makes for all at once, so the result has the same bits.
        """
        for name in names:
            parameter = self.weights.to_step(name, step)
            if not skip:
                gradient = to_device(gradients[name].view(parameter.shape), self._step_device)
                self._step([(name, parameter)], {name: gradient}, learning_rate, scale)
            self.weights.changed([name], step + 1)
            if self.proposals is not None:
                self.proposals.capture([(name, parameter)], step + 1)

    @torch.no_grad()
    def replay_merge(self, step: int, names: Iterable[str], merge: Merge) -> None:
        """Commit an outer step for some parameters, all of version `step`: the same bits as `merge`."""
        assert self.proposals is not None, "the job has no outer steps"
        for name in names:
            parameter = self.weights.to_step(name, step)
            if name in merge.deltas:
                parameter.copy_(self.proposals.merge(name, parameter, step, merge))
            self.weights.changed([name], step + 1)

    def settle(self, version: int) -> str:
        """Record that all parameters are of `version` now; returns the digest of the state."""
        self.weights.settle(version)
        return self.digest()

    def places_at(self, step: int) -> Places:
        """The places of the parameters that a commit of `step` changes: all, or the fragment of an outer step."""
        if self.proposals is None or not self.proposals.course.is_outer(step):
            return self.places
        return self.places.only(self.proposals.merged_at(step))

    def _state_at(self, name: str, version: int) -> list[Tensor]:
        """The tensors of a parameter that is of `version` (others may not be yet); not copies."""
        held = [] if self.proposals is None else self.proposals.tensors(name, version)
        return self._lasting(name, version) + held

    def _lasting(self, name: str, version: int) -> list[Tensor]:
        """Those that every version has."""
        outer = [] if self._outer is None else self._outer.tensors(name)
        return [*self.weights.held(name, version), *self._optimizer.state_of(name).values(), *outer]

    # Files -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self, *, optimizer: bool) -> InitialState:
        """A copy on the CPU for a checkpoint: the newest weights, or the outer ones; with `optimizer` its state, the
        weights of one version before (staleness 1, but behind a merge), the momentum of outer steps, and the island's
        own weights.

        The tied weight is the first stage's only. Takes 4 bytes for each parameter, with `optimizer` as much again for
        each of the other tensors: 16 in all with AdamW and staleness 1.
        """
        newest, outer = self.weights.newest(), self._outer
        course = self.proposals.course if self.proposals is not None and optimizer else None
        is_apart = course is not None and course.streams and self.version < course.steps
        names = [name for name in sorted(newest) if not (self._spec.tied and name == HEAD)]
        is_behind_merge = course is not None and course.is_outer(self.version - 1)  # then none is late
        older = self.weights.older() if optimizer and not is_behind_merge else {}
        groups: list[Mapping[str, Tensor]] = [
            {name: newest[name] if outer is None else outer.anchor(name) for name in names},
            {name: older[name] for name in names if older},
            {name: outer.momentum(name) for name in names if optimizer} if outer is not None else {},
            {name: newest[name] for name in names if is_apart},
        ]
        states = {name: self._optimizer.state_of(name) for name in (names if optimizer else ())}
        weights, previous, momentum, trained, *held = _copies([*groups, *states.values()])
        optimizer_state = dict(zip(states, held, strict=True))
        return InitialState(
            version=self.version,
            weights=weights,
            previous=previous,
            optimizer=optimizer_state,
            momentum=momentum,
            trained=trained,
        )

    # Inside ----------------------------------------------------------------------------------------------------------

    def _differentiate(self, microbatch: Microbatch, g: Tensor | None, *, keep: bool) -> tuple[Tensor | None, _Owed]:
        """Use up the graph: dx and the gradients, with `keep` those of most weights as products."""
        graph = self._graphs.pop(microbatch, None)
        if graph is None:
            raise NotFound(f"stage {self.stage} holds no graph of {microbatch}: forward comes first")
        output = self._output(graph) if graph.output is None else graph.output
        buffer = self.weights.buffer(graph.version)
        later = buffer.module.later if keep else frozenset[str]()
        parameters = {name: parameter for name, parameter in buffer.parameters.items() if name not in later}
        wanted = [*(() if self._first else (graph.source,)), *parameters.values()]
        assert self._last or g is not None, "the gradient of a boundary tensor is needed"
        start = None if self._last or g is None else to_device(g, self.device)
        notes = graph.notes if keep and graph.notes is not None else Notes()
        graph.notes = None  # else its x would outlive the parts of the graph that were used up
        found = torch.autograd.grad(output, [*wanted, *notes.edges()], start)
        gradients, products = found[: len(wanted)], notes.products(found[len(wanted) :])
        dx, gradients = (None, gradients) if self._first else (gradients[0], gradients[1:])
        return dx, _Owed(graph.version, dict(zip(parameters, gradients, strict=True)), products)

    def _ids(self, ids: Tensor | None) -> Tensor | None:
        return None if ids is None else to_device(ids, self.device).long()

    def _place_tokens(self, tokens: Tensor | None) -> Tensor | None:
        return self._ids(tokens) if self._spec.model.narrow.by_token and not self._first else None

    def _output(self, work: _Graph, *, graph: bool = True) -> Tensor:
        """The boundary tensor, or on the last stage the sum of token losses; with its graph, or without."""
        module = self.weights.of(work.version)
        cast = torch.bfloat16 if self._spec.model.dtype == "bfloat16" else None
        autocast = torch.autocast(self.device.type, cast, enabled=cast is not None, cache_enabled=False)
        with torch.set_grad_enabled(graph):
            source = work.source if self._first or not self._lowered else work.source.to(torch.bfloat16)
            with autocast, module.put_off.during(cast) as work.notes:
                output: Tensor = module(source, work.draw, work.tokens)
            if not self._last:
                return output.float()
            assert work.targets is not None, "the last stage needs targets"
            logits_NV = output.float().flatten(0, 1)
            return nn.functional.cross_entropy(logits_NV, work.targets.flatten(), ignore_index=-100, reduction="sum")

    def _acceptable(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Whether all gradients may be added: a 0-dim bool tensor where they lie."""
        contributions = self._spec.training.microbatches
        found = [
            exact_sums.in_range(
                [gradients[name] for name, _, _ in module_names(use, layout)],
                self._bits,
                exact_sums.contribution_limit(contributions * (2 if use.unit == TIED_UNIT else 1)),
            )
            for use, layout in self.places.uses.items()
        ]
        return torch.stack(found).all()

    @torch.no_grad()
    def _take_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, one in weights.items():
            self.weights.held(name, self.version)[0].copy_(one)
        self.weights.changed(weights, self.version)

    def _add(self, sums: Sums, gradients: Mapping[str, Tensor]) -> None:
        for use, layout in self.places.uses.items():
            if use not in sums:
                sums[use] = torch.zeros(
                    layout.elements, dtype=exact_sums.sum_dtype(self._bits), device=self._sum_device
                )
            if (sent := self._leaving.get(id(sums[use]))) is not None:  # the step was sealed, and is not any more
                await_copy(sent)
            for name, offset, _ in module_names(use, layout):
                gradient = gradients[name]
                exact_sums.accumulate(sums[use][offset : offset + gradient.numel()], gradient, self._bits)

    @torch.no_grad()
    def _step(
        self, parameters: Iterable[tuple[str, Tensor]], gradients: Mapping[str, Tensor], rate: float, scale: float
    ) -> None:
        """Run the optimizer on its device; parameters that lie elsewhere visit it, as many as fit in STAGED_BYTES."""
        if self._step_device == self.device:
            self._optimizer.step(parameters, gradients, rate, scale)
            return
        for group in _staged(parameters):
            there = to_host(*(parameter.detach() for _, parameter in group))
            named = [(name, tensor) for (name, _), tensor in zip(group, there, strict=True)]
            self._optimizer.step(named, gradients, rate, scale)
            for (_, parameter), tensor in zip(group, there, strict=True):
                copy_into(parameter, tensor)

    def _gradients(self, means: Mapping[UnitName, Tensor]) -> dict[str, Tensor]:
        """The averaged gradient of every parameter, as views of `means`; both uses of a tied weight get the same."""
        return self.places.gradients_of({unit: self._there(unit, means[unit]) for unit in self.units})

    def _there(self, unit: UnitName, mean: Tensor) -> Tensor:
        expected, sent = self._ahead.get(unit, (None, None))
        return received(sent) if sent is not None and expected is mean else to_device(mean, self._step_device)


def _staged(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of parameters of at most STAGED_BYTES; a larger one is a group by itself."""
    group: list[tuple[str, Tensor]] = []
    for name, parameter in parameters:
        if group and sum(held.nbytes for _, held in group) + parameter.nbytes > STAGED_BYTES:
            yield group
            group = []
        group.append((name, parameter))
    if group:
        yield group


def _copies(groups: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Float32 copies on the CPU; the host waits once for all."""
    sent = [send_back(tensor.detach()) for group in groups for tensor in group.values()]
    there = iter(
        tensor.to(torch.float32, copy=one.is_here).contiguous()
        for tensor, one in zip(to_host(*sent), sent, strict=True)
    )
    return [{name: next(there) for name in group} for group in groups]
