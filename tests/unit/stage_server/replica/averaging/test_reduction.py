"""How an owner makes one mean: as the job file says, from what the scheduler says of each part."""

from __future__ import annotations

import torch

from stage_server.replica.averaging.reduction import Reduction
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Average, Member


def average(*microbatches: int) -> Average:
    members = tuple(
        Member(PeerId(f"peer-{at}"), 1, "", 0, 0, "", stage=1, microbatches=count)
        for at, count in enumerate(microbatches)
    )
    return Average(0, 0, UnitName("stage-1"), Round(1, 1), members, 8, 3.0)


def test_parts_are_added_unless_the_job_wants_them_clipped() -> None:
    parts = [torch.ones(64), torch.full((64,), 1.5), torch.ones(64) * 1.25, torch.full((64,), 1e9)]
    assert Reduction(None).reduce(parts, average(1, 1, 1, 1))[0] > 1e8
    assert Reduction(None, clips=True).reduce(parts, average(1, 1, 1, 1))[0] < 2.0


def test_how_many_microbatches_a_part_is_of_the_scheduler_says() -> None:
    """Each of these is a sum of gradients of 1: nothing strays."""
    parts = [torch.full((64,), float(count)) for count in (1, 100, 2)]
    assert torch.equal(Reduction(None, clips=True).reduce(parts, average(1, 100, 2)), torch.full((64,), 103 / 8))
