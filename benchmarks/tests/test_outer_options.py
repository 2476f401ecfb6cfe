"""benchmarks.learning.outer_options: proposals that are lost wait for the next exchange, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.learning.outer_options import by_dice, options, rows, train_losing
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.islands import courses, island_spec
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.reference.islands import ReferenceOuterSteps
from swarm.reference.trainer import build_stages, evaluate, train_local, train_step
from tests.support.simulated import Tokens, small_spec, write_text

STEPS = 6


def spec_of(folder: Path, mode: str, every: int) -> JobSpec:
    write_text(folder)
    spec = small_spec(
        folder / "text.txt",
        training__steps=STEPS,
        training__global_batch_sequences=4,
        training__eval_every_steps=STEPS,
        data__validation_ratio=0.05,
        pipeline__stages=1,
        pipeline__overlap=0,
        averaging__mode=mode,
        islands__count=2,
        outer__every_steps=every,
    )
    return resolve(spec, Basis(ByteTokenizer.vocabulary_size))


def all_(step: int, fragment: int, islands: Sequence[int]) -> Sequence[int]:
    return islands


def nobody(step: int, fragment: int, islands: Sequence[int]) -> Sequence[int]:
    return ()


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_it_trains_as_ever_if_nothing_is_lost(mode: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, mode, 2)
    batches = Tokens.make(tmp_path / "tokens", spec).batches(spec)
    assert train_losing(spec, batches, all_) == train_local(spec, batches).evaluations[-1].loss


def test_what_is_lost_again_and_again_comes_with_the_closing_exchange(tmp_path: Path) -> None:
    """So it is as if there were no exchange before, with the same data."""
    often, once = spec_of(tmp_path, "diloco", 2), spec_of(tmp_path, "diloco", STEPS)
    batches = Tokens.make(tmp_path / "tokens", often).batches(often)
    share = island_spec(once)
    islands = [build_stages(share, torch.device("cpu")) for _ in range(2)]
    outer = ReferenceOuterSteps(once, islands)
    for step in range(STEPS):
        for island, course in zip(islands, courses(often), strict=True):
            train_step(island, share, batches, course.at(step))
        outer.after(step, {0: 1, 1: 1})
    assert train_losing(often, batches, nobody) == evaluate(islands[0], share, batches, STEPS).loss


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_an_island_that_is_not_heard_trains_on(mode: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, mode, 2)
    batches = Tokens.make(tmp_path / "tokens", spec).batches(spec)
    found = train_losing(spec, batches, lambda step, fragment, islands: islands[:1])
    assert found != train_local(spec, batches).evaluations[-1].loss
    assert found < 6.0


def test_dice_lose_their_share_and_are_the_same_again() -> None:
    heard = [one for step in range(500) for one in by_dice(0, 0.5, step, 0, (0, 1))]
    assert 450 < len(heard) < 550
    assert heard == [one for step in range(500) for one in by_dice(0, 0.5, step, 0, (0, 1))]


def test_a_row_says_what_an_option_costs_beside_the_way_without_it() -> None:
    compared = options(50)
    losses = {option.name: [2.0, 4.0] for option in compared} | {"diloco, half lost": [2.1, 4.0]}
    *_, last = rows(losses, compared)
    assert last[2:] == ["diloco", "+1.7 %", "+5.0 +0.0"]
