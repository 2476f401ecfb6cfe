"""What compression leaves out of gradients: it comes at a later step, once, whatever becomes of the rounds between."""

from __future__ import annotations

import pytest
import torch

from stage_server.replica.averaging.error_feedback import ErrorFeedback, coded, together
from swarm.model.codec import SLICE_CODECS
from swarm.types import UnitName

UNIT, OTHER = UnitName("stage-0"), UnitName("stage-1")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("codec_name", SLICE_CODECS)
def test_what_is_rounded_away_at_one_step_comes_at_a_later_one(codec_name: str) -> None:
    """A gradient that is small beside its neighbours is rounded to zero each time; alone it would never count."""
    gradient = torch.full((256,), 1e-3)
    gradient[0] = 1.0
    leftovers, arrived, alone = ErrorFeedback(codec_name), torch.zeros(256), torch.zeros(256)
    for step in range(64):
        part = together(gradient, leftovers.lend(UNIT, step))
        received = coded(part, codec_name).received
        leftovers.committed(step, {UNIT: part - received})
        arrived += received
        alone += coded(gradient, codec_name).received
    true = 64 * gradient
    assert torch.allclose(arrived, true, atol=1 / 127)
    assert codec_name != "int8" or alone[1] == 0.0


def test_without_compression_nothing_is_left_and_the_tensor_itself_is_sent() -> None:
    values = tensor(0.1, 0.2)
    made = coded(values, "none")
    assert made.received is values
    assert bytes(made.payload) == values.numpy().tobytes()


def test_a_step_that_is_averaged_again_begins_with_the_same_leftovers() -> None:
    leftovers = ErrorFeedback("int8")
    leftovers.committed(0, {UNIT: tensor(1.0)})
    assert leftovers.lend(UNIT, 1) == leftovers.lend(UNIT, 1) == (tensor(1.0),)
    leftovers.committed(1, {UNIT: tensor(2.0)})
    assert leftovers.lend(UNIT, 2) == (tensor(2.0),)


def test_two_open_steps_do_not_share_them() -> None:
    leftovers = ErrorFeedback("int8")
    leftovers.committed(0, {UNIT: tensor(1.0), OTHER: tensor(5.0)})
    assert leftovers.lend(UNIT, 1) == (tensor(1.0),)
    assert leftovers.lend(UNIT, 2) == ()
    leftovers.committed(1, {UNIT: tensor(2.0)})
    leftovers.committed(2, {UNIT: tensor(3.0)})
    assert together(tensor(0.0), leftovers.lend(UNIT, 3)) == tensor(5.0), "neither is lost"
    assert leftovers.lend(OTHER, 3) == (tensor(5.0),)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_however_many_steps_are_open_each_leftover_is_used_once(ahead: int) -> None:
    """Each step begins `ahead` steps before the one that it follows is committed."""
    leftovers, used, steps = ErrorFeedback("int8"), 0.0, 50
    for step in range(steps + ahead):
        if step < steps:
            used += float(together(tensor(0.0), leftovers.lend(UNIT, step)))
        if step >= ahead:
            leftovers.committed(step - ahead, {UNIT: tensor(2.0 ** -(step - ahead))})
    held = float(together(tensor(0.0), leftovers.lend(UNIT, steps)))
    assert used + held == sum(2.0**-step for step in range(steps))


def test_a_step_that_is_skipped_or_averaged_without_this_replica_leaves_them_alone() -> None:
    leftovers = ErrorFeedback("int8")
    leftovers.committed(0, {UNIT: tensor(1.0)})
    assert leftovers.lend(UNIT, 1) == (tensor(1.0),)
    leftovers.committed(1, {})
    assert leftovers.lend(UNIT, 2) == (tensor(1.0),)


def test_the_sums_are_not_written_to() -> None:
    part = tensor(1.0)
    assert together(part, (tensor(2.0),)) == tensor(3.0)
    assert part == tensor(1.0)
