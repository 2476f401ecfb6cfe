"""The optimizers: the state that each keeps for a parameter, and how parameters take one step.

One tensor at a time, never fused: a parameter's step must not depend on its neighbours, because they depend on the cut
into stages. AdamW, SGD and Muon are torch's own functional forms and give the bits of the classes in torch.optim; torch
has no LAMB. Without reproducible mode, small tensors on a CUDA GPU step in groups, to save launches (torch's foreach):
AdamW and SGD do. An element's step is the same in any group. Muon's products have other bits on other processors.

    optimizer   state of a parameter p
    adamw       first moment, second moment, updates
    lamb        first moment, second moment, updates
    muon        momentum, of the matrices of decoder layers; all other parameters step as with adamw
    sgd         momentum buffer; nothing if training.momentum is 0

The host never waits for the device: counters lie on the CPU. Only LAMB's norms are read, all at once.

Adding one means a rule in OPTIMIZERS, and its facts in swarm/job/optimizers.py. Decision: docs/decisions/200.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim._muon import muon
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from swarm.errors import InvalidModel
from swarm.job.spec import TrainingSection
from swarm.model.exact_sums import TILE_ELEMENTS, squared_norms

State: TypeAlias = dict[str, Tensor]
"""The optimizer's tensors for one parameter, by name, in a fixed order."""

# The defaults of torch.optim.Muon.
MUON_MOMENTUM = 0.95
MUON_COEFFICIENTS = (3.4445, -4.775, 2.0315)
MUON_ITERATIONS = 5
MUON_NORM_MIN = 1e-7

# Where steps are grouped, and how many elements are a group. A larger tensor keeps a GPU busy alone.
GROUPED_ON = frozenset({"cuda"})
GROUP_ELEMENTS = 1 << 22

_OF_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter with its gradient and its state."""

    parameter: Tensor
    gradient: Tensor
    state: State


@dataclass(frozen=True, slots=True)
class Rule:
    """One optimizer: `start` makes a parameter's state, `step` changes parameters and states in place.

    The last argument of `step` says whether it may group them.
    """

    start: Callable[[Tensor, TrainingSection], State]
    step: Callable[[Iterable[Held], TrainingSection, float, bool], None]


class Optimizer:
    """The state of `training.optimizer` for named parameters; steps whichever tensors carry those names."""

    def __init__(self, training: TrainingSection, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._training = training
        named = dict(parameters)
        self._rules = {name: rule_of(training.optimizer, name, parameter) for name, parameter in named.items()}
        self._state = {name: self._rules[name].start(parameter, training) for name, parameter in named.items()}
        on_gpu = any(parameter.device.type in GROUPED_ON for parameter in named.values())
        self._grouped = on_gpu and not training.reproducible

    def state_of(self, name: str) -> State:
        """The tensors kept for a parameter, in an order that never changes; they are not copies."""
        return self._state[name]

    @torch.no_grad()
    def restore(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Take over a parameter's state from a checkpoint; InvalidModel if it belongs to another optimizer."""
        held = self._state[name]
        # A resume may switch the momentum of SGD off, or on: then it begins at zero.
        if self._training.optimizer == "sgd" and state.keys() <= {"momentum"}:
            state = {key: state.get(key, torch.zeros_like(tensor)) for key, tensor in held.items()}
        if held.keys() != state.keys():
            raise InvalidModel(
                f"the optimizer state of {name} holds {', '.join(sorted(state)) or 'nothing'}; "
                f"{self._training.optimizer} keeps {', '.join(sorted(held)) or 'nothing'}",
                hint="use the training.optimizer that the checkpoint was written with",
            )
        for key, tensor in state.items():
            if held[key].shape != tensor.shape or held[key].dtype != tensor.dtype:
                raise InvalidModel(
                    f"{name}@{key} is {tensor.dtype} {list(tensor.shape)}, "
                    f"this job needs {held[key].dtype} {list(held[key].shape)}"
                )
            held[key].copy_(tensor)

    @torch.no_grad()
    def step(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        gradients: Mapping[str, Tensor],
        learning_rate: float,
        scale: float = 1.0,
    ) -> None:
        """Update the parameters and their state in place, each with `scale` times the gradient of its name.

        But for LAMB, what is scaled is only there while its parameter or group has its turn.
        """
        by_rule: dict[Rule, list[tuple[str, Tensor]]] = {}
        for name, parameter in parameters:
            by_rule.setdefault(self._rules[name], []).append((name, parameter))
        for rule, named in by_rule.items():
            held = (Held(parameter, gradients[name] * scale, self._state[name]) for name, parameter in named)
            rule.step(held, self._training, learning_rate, self._grouped)


# State -----------------------------------------------------------------------------------------------------------


def _moments(parameter: Tensor, _training: TrainingSection) -> State:
    # Counters stay on the CPU, as in torch: reading one must not wait for a device.
    return {
        "first_moment": torch.zeros_like(parameter, requires_grad=False),
        "second_moment": torch.zeros_like(parameter, requires_grad=False),
        "updates": torch.zeros(()),
    }


def _momentum(parameter: Tensor, training: TrainingSection) -> State:
    # Zeros and the first gradient make the buffer that torch.optim.SGD starts with: that gradient.
    return _buffer(parameter, training) if training.momentum else {}


def _buffer(parameter: Tensor, _training: TrainingSection) -> State:
    return {"momentum": torch.zeros_like(parameter, requires_grad=False)}


# Steps -----------------------------------------------------------------------------------------------------------

_Step: TypeAlias = Callable[[Iterable[Held], TrainingSection, float, bool], None]
_StepOne: TypeAlias = Callable[[Tensor, Tensor, State, TrainingSection, float], None]
_StepGroup: TypeAlias = Callable[[Sequence[Held], TrainingSection, float, bool], None]


def _each(step: _StepOne) -> _Step:
    def step_all(held: Iterable[Held], training: TrainingSection, learning_rate: float, _grouped: bool) -> None:
        for entry in held:
            step(entry.parameter, entry.gradient, entry.state, training, learning_rate)

    return step_all


def _groups(step: _StepGroup) -> _Step:
    def step_all(held: Iterable[Held], training: TrainingSection, learning_rate: float, grouped: bool) -> None:
        for group in _small_together(held, GROUP_ELEMENTS if grouped else 0):
            step(group, training, learning_rate, grouped)

    return step_all


def _small_together(held: Iterable[Held], elements_max: int) -> Iterator[list[Held]]:
    """Groups of up to this many elements; each larger tensor alone."""
    group: list[Held] = []
    elements = 0
    for entry in held:
        added = entry.parameter.numel()
        if added >= elements_max:
            yield [entry]
            continue
        if elements + added > elements_max:
            yield group
            group, elements = [], 0
        group.append(entry)
        elements += added
    if group:
        yield group


def _kept(group: Sequence[Held], name: str) -> list[Tensor]:
    return [entry.state[name] for entry in group]


def _adamw(group: Sequence[Held], training: TrainingSection, learning_rate: float, grouped: bool) -> None:
    """torch's own AdamW; with `training.lookahead` a part of its numerator is the gradient itself."""
    if training.lookahead and grouped:
        _quasi_hyperbolic_group(group, training, learning_rate)
        return
    if training.lookahead:
        for entry in group:
            _quasi_hyperbolic(entry.parameter, entry.gradient, entry.state, training, learning_rate)
        return
    options: dict[str, Any] = {
        "fused": False, "amsgrad": False, "maximize": False,
        "beta1": training.betas[0], "beta2": training.betas[1], "eps": training.eps,
        "lr": learning_rate, "weight_decay": training.weight_decay,
    }  # fmt: skip
    if grouped:
        first, second, updates = (_kept(group, key) for key in ("first_moment", "second_moment", "updates"))
        values, fresh = [entry.parameter for entry in group], [entry.gradient for entry in group]
        adamw(values, fresh, first, second, [], updates, foreach=True, **options)
        return
    for entry in group:  # torch makes two temporaries as large as what it steps
        for tile in _tiles(entry.parameter, entry.gradient, entry.state["first_moment"], entry.state["second_moment"]):
            values, fresh, first, second = ([part] for part in tile)
            adamw(values, fresh, first, second, [], [entry.state["updates"].clone()], foreach=False, **options)
        entry.state["updates"] += 1


def _quasi_hyperbolic(
    parameter: Tensor, gradient: Tensor, state: State, training: TrainingSection, learning_rate: float
) -> None:
    """AdamW whose numerator is (1 - c) times the first moment, its bias corrected, plus c times the gradient.

    c is `training.lookahead`. Momentum alone makes stale gradients unstable; the fresh part makes up for the delay.

    Source: QHAdam (arXiv 1810.06801) with nu1 = 1 - c, nu2 = 1; weight decay decoupled, as in torch.optim.AdamW.
    """
    beta1, beta2 = training.betas
    ahead = training.lookahead
    state["updates"] += 1
    updates = float(state["updates"])
    for values, fresh, first, second in _tiles(parameter, gradient, state["first_moment"], state["second_moment"]):
        values.mul_(1.0 - learning_rate * training.weight_decay)
        first.lerp_(fresh, 1.0 - beta1)
        second.mul_(beta2).addcmul_(fresh, fresh, value=1.0 - beta2)
        spread = (second / (1.0 - beta2**updates)).sqrt_().add_(training.eps)
        numerator = (first * ((1.0 - ahead) / (1.0 - beta1**updates))).add_(fresh, alpha=ahead)
        values.addcdiv_(numerator, spread, value=-learning_rate)


def _quasi_hyperbolic_group(group: Sequence[Held], training: TrainingSection, learning_rate: float) -> None:
    """The same for several parameters, operation by operation."""
    beta1, beta2 = training.betas
    ahead = training.lookahead
    values, fresh = [entry.parameter for entry in group], [entry.gradient for entry in group]
    first, second = _kept(group, "first_moment"), _kept(group, "second_moment")
    for entry in group:
        entry.state["updates"] += 1
    updates = [float(entry.state["updates"]) for entry in group]
    torch._foreach_mul_(values, 1.0 - learning_rate * training.weight_decay)
    torch._foreach_lerp_(first, fresh, 1.0 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, fresh, fresh, value=1.0 - beta2)
    spread = torch._foreach_div(second, [1.0 - beta2**each for each in updates])
    torch._foreach_sqrt_(spread)
    torch._foreach_add_(spread, training.eps)
    numerator = torch._foreach_mul(first, [(1.0 - ahead) / (1.0 - beta1**each) for each in updates])
    torch._foreach_add_(numerator, fresh, alpha=ahead)
    torch._foreach_addcdiv_(values, numerator, spread, value=-learning_rate)


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Equal parts of tensors of one shape, in turn: on a CPU a part stays in cache through all passes of a step.

    Each part but the last has a whole number of vectors, so every element is computed as in the whole tensor.
    """
    if not all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    flat = [tensor.detach().view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), TILE_ELEMENTS):
        yield tuple(tensor[start : start + TILE_ELEMENTS] for tensor in flat)


def _sgd(group: Sequence[Held], training: TrainingSection, learning_rate: float, grouped: bool) -> None:
    """Weight decay is added to the gradient and so enters the momentum, as in torch.optim.SGD."""
    sgd(
        [entry.parameter for entry in group],
        [entry.gradient for entry in group],
        [entry.state.get("momentum") for entry in group],
        foreach=grouped,
        fused=False,
        weight_decay=training.weight_decay,
        momentum=training.momentum,
        lr=learning_rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def _lamb(all_held: Iterable[Held], training: TrainingSection, learning_rate: float, _grouped: bool) -> None:
    """Adam's direction and decoupled decay, scaled so that the step is `learning_rate` times the parameter's own norm.

    With bias correction and without normalising the gradient first (the step's clip does that). The ratio is 1 where
    either norm is 0: a parameter that starts at zero could never leave it otherwise. The norms of all parameters are
    read at once; directions are made twice rather than kept for that long.

    Source: LAMB (arXiv 1904.00962), algorithm 2, identity scaling function.
    """
    beta1, beta2 = training.betas
    held = list(all_held)
    for entry in held:
        entry.state["updates"] += 1
        entry.state["first_moment"].lerp_(entry.gradient, 1.0 - beta1)
        entry.state["second_moment"].mul_(beta2).addcmul_(entry.gradient, entry.gradient, value=1.0 - beta2)
    # The library's norm depends on the number of threads; ours does not.
    norms = squared_norms(tensor for entry in held for tensor in (entry.parameter, _lamb_direction(entry, training)))
    for one, size, wanted in zip(held, map(math.sqrt, norms[::2]), map(math.sqrt, norms[1::2]), strict=True):
        ratio = size / wanted if size > 0.0 and wanted > 0.0 else 1.0
        one.parameter.add_(_lamb_direction(one, training), alpha=-learning_rate * ratio)


def _lamb_direction(one: Held, training: TrainingSection) -> Tensor:
    beta1, beta2 = training.betas
    updates = float(one.state["updates"])
    spread = (one.state["second_moment"] / (1.0 - beta2**updates)).sqrt_().add_(training.eps)
    direction: Tensor = (one.state["first_moment"] / (1.0 - beta1**updates)).div_(spread)
    direction.add_(one.parameter, alpha=training.weight_decay)
    return direction


def _muon(parameter: Tensor, gradient: Tensor, state: State, training: TrainingSection, learning_rate: float) -> None:
    """The momentum of a matrix, made orthogonal and scaled like an AdamW step, so one learning rate fits all."""
    muon(
        [parameter],
        [gradient],
        [state["momentum"]],
        foreach=False,
        lr=learning_rate,
        weight_decay=training.weight_decay,
        momentum=MUON_MOMENTUM,
        nesterov=True,
        ns_coefficients=MUON_COEFFICIENTS,
        ns_steps=MUON_ITERATIONS,
        eps=MUON_NORM_MIN,
        adjust_lr_fn="match_rms_adamw",
        has_complex=False,
    )


def rule_of(optimizer: str, name: str, parameter: Tensor) -> Rule:
    """The rule for a parameter: Muon steps only matrices of decoder layers, which have a number in their names.

    A table by token is none, like the embedding.
    """
    of_a_layer = parameter.ndim == 2 and _OF_A_LAYER.search(name) and not name.endswith(".table.weight")
    if optimizer == "muon" and not of_a_layer:
        return OPTIMIZERS["adamw"]
    return OPTIMIZERS[optimizer]


OPTIMIZERS: dict[str, Rule] = {
    "adamw": Rule(_moments, _groups(_adamw)),
    "sgd": Rule(_momentum, _groups(_sgd)),
    "lamb": Rule(_moments, _lamb),
    "muon": Rule(_buffer, _each(_muon)),
}
