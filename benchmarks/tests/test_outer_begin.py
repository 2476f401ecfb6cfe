"""benchmarks.learning.outer_begin: what begins as one island goes on with its weights and moments.

benchmarks.learning.outer_long: the pairs that it compares are those that jobs have.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning.outer import Way, job
from benchmarks.learning.outer_begin import begin, beginnings
from benchmarks.learning.outer_long import PAIRS, TEXT, ways
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.islands import outer_plan
from swarm.job.outer import OuterUpdate, nesterov
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from tests.support.simulated import Tokens, small_spec, write_text

STEPS = 6


def spec_of(folder: Path, **job: object) -> JobSpec:
    write_text(folder)
    one = {"training__steps": STEPS, "training__global_batch_sequences": 4, "pipeline__stages": 1}
    spec = small_spec(folder / "text.txt", **one, pipeline__overlap=0, **job)
    return resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)


def test_islands_go_on_from_the_step_at_which_one_island_ends(tmp_path: Path) -> None:
    together = spec_of(tmp_path, averaging__mode="allreduce")
    apart = spec_of(tmp_path, averaging__mode="diloco", islands__count=2, outer__every_steps=2)
    batches = Tokens.make(tmp_path / "tokens", together).batches(together)
    start = begin(together, batches, steps=2, folder=tmp_path / "kept")
    whole = train_local(together, batches)
    again = train_local(together, batches, start=start)
    assert (again.sha256, again.losses) == (whole.sha256, whole.losses[2:])
    islands = train_local(apart, Tokens.make(tmp_path / "others", apart).batches(apart), start=start)
    assert len(islands.losses) == STEPS - 2
    assert islands.sha256 != whole.sha256


def test_the_last_row_has_as_many_more_steps_as_islands_make_while_one_trains_alone() -> None:
    rows = beginnings(50, (50, 100))
    assert [(row.after, row.more) for row in rows] == [(0, 0), (0, 0), (50, 0), (100, 0), (0, 100)]
    assert len({row.name for row in rows}) == len(rows)


def update(way: Way) -> OuterUpdate:
    return outer_plan(job(way, 0, 4e-3, 40, TEXT)).update


def test_long_runs_have_either_pair_and_auto_is_the_first() -> None:
    _, *islands = ways(10)
    assert [update(row.way) for row in islands] == [nesterov(*pair) for pair in PAIRS]
    auto, given = Way("diloco", 2, (("every_steps", 10),)), Way("diloco", 2, (("momentum", PAIRS[1][1]),))
    assert [update(auto), update(given)] == [nesterov(*pair) for pair in PAIRS]
