"""benchmarks.learning.outer_options: who is late when, and what a row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning.outer_options import late_log, options, rows
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
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


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_an_island_is_late_in_each_so_manyth_exchange_but_the_closing_ones(mode: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, mode, 2)
    batches = Tokens.make(tmp_path / "tokens", spec).batches(spec)
    log = late_log(spec, 2)
    assert log[0].late == (0,)
    assert all(record.after_step < STEPS for record in log)
    found = train_local(spec, batches, log=log)
    assert found.evaluations[-1].loss != train_local(spec, batches).evaluations[-1].loss
    assert found.evaluations[-1].loss < 6.0
    assert [record.late for record in late_log(spec.having("training", steps=30), 7)][:2] == [(0,), (1,)]


def test_a_row_says_what_an_option_costs_beside_the_way_without_it() -> None:
    compared = options(50)
    losses = {option.name: [2.0, 4.0] for option in compared} | {"diloco, half of a step late": [2.1, 4.0]}
    *_, last = rows(losses, compared)
    assert last[2:] == ["diloco", "+1.7 %", "+5.0 +0.0"]
