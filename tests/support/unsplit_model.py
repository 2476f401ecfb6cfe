"""The claim that a cut changes nothing, as one check: stages against the library's unsplit model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm.data.batches import Batches
from swarm.model.stage import Stage
from swarm.types import Microbatch


def assert_equals_unsplit(stages: Sequence[Stage], batches: Batches, twin: Any, tied_name: str | None) -> None:
    """Logits, loss and gradients of the stages are bit for bit those of `twin`, which has the same weights.

    `tied_name` is the parameter with two uses, if there is one: autograd adds the two in its own order.
    """
    tokens, targets = (torch.from_numpy(array) for array in batches.microbatch(0, 0))
    logits = twin(input_ids=tokens.long()).logits
    with torch.no_grad():
        hidden: Tensor = tokens.long()
        for stage in stages:
            hidden = stage.module(hidden, tokens=tokens.long())
        assert torch.equal(hidden, logits)

    expected = loss_of(logits, targets)
    expected.backward()
    microbatch, x, g, loss = Microbatch(0, 0, 0), None, None, 0.0
    for stage in stages:
        x, loss = stage.forward(microbatch, 0, portion=0, x=x, tokens=tokens, targets=targets)
    for stage in reversed(stages):
        g, _ = stage.backward(microbatch, g)
    assert loss == float(expected.detach())

    sums: dict[str, Tensor] = {}
    for stage in stages:
        for unit, layout in stage.units.items():
            part = stage.part(0, unit)
            for name, offset, shape in layout.parameters:
                gradient = part[offset : offset + torch.Size(shape).numel()].view(shape)
                sums[name] = sums[name] + gradient if name in sums else gradient
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    assert gradients.keys() == sums.keys()
    for name, gradient in gradients.items():
        assert gradient is not None
        if name == tied_name:
            torch.testing.assert_close(sums[name], gradient)
        else:
            assert torch.equal(sums[name], gradient), name


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the token losses."""
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.long().flatten(), ignore_index=-100, reduction="sum"
    )
