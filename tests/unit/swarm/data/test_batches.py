"""swarm.data.batches: masks, counts, validation. Order is in tests/property/test_data_order.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swarm.data.batches import IGNORED, Batches, TokenData, shuffled, split_samples
from swarm.errors import InvalidData
from swarm.job.spec import TrainingSection

END = 99


def make(row: list[int], *, length: int = 4, sequences: int = 2, microbatches: int = 2, ratio: float = 0.0) -> Batches:
    """Unshuffled batches over these tokens."""
    training = TrainingSection(
        steps=1, warmup_steps=0, global_batch_sequences=sequences * microbatches, microbatch_sequences=sequences
    )
    data = TokenData([np.array(row, dtype=np.uint16)])
    return Batches(data, training, length, False, 0, end_of_text=END, validation_ratio=ratio)


def test_broken_shards_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    with pytest.raises(InvalidData, match="cannot be read"):
        TokenData.open([path], "uint16")
    for content in (b"", b"123"):
        path.write_bytes(content)
        with pytest.raises(InvalidData, match="no whole number"):
            TokenData.open([path], "uint16")
    path.write_bytes(np.array([1, 300], dtype="<u2").tobytes())
    with pytest.raises(InvalidData, match="unknown"):
        TokenData.open([path], "int8")
    assert TokenData.open([path], "uint16").read(0, 2).tolist() == [1, 300]
    with pytest.raises(InvalidData, match="id 300"):
        TokenData.open([path], "uint16", vocabulary_size=257).read(0, 2)


def test_order_is_drawn_by_the_seed_and_the_pass_and_nothing_else() -> None:
    orders = {
        (seed, a_pass): tuple(shuffled(position, 500, seed, a_pass) for position in range(500))
        for seed in (0, 1)
        for a_pass in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert tuple(range(500)) not in orders.values()
    # Written down once: another order would break the resume of every job that is running.
    assert orders[0, 0][:6] == (427, 41, 49, 103, 255, 486)


def test_order_looks_random() -> None:
    size = 4096
    order = np.array([shuffled(position, size, 7, 0) for position in range(size)])
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() - size / 3) < size / 30
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.06


def test_the_first_token_of_a_text_is_not_predicted_from_the_end_of_the_one_before() -> None:
    batches = make([1, 2, END, 3, 4, 5, 6, END, 7, END, END, 8, 9, 10, 11, 12, 13])
    tokens, targets = batches.microbatch(0, 0)
    assert tokens.tolist() == [[1, 2, END, 3], [4, 5, 6, END]]
    assert targets.tolist() == [[2, END, IGNORED, 4], [5, 6, END, IGNORED]]
    assert batches.microbatch(0, 1)[1].tolist() == [[END, IGNORED, IGNORED, 9], [10, 11, 12, 13]]
    assert batches.tokens_of(0) == 16 - 4
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert targets.flags.c_contiguous


def test_without_an_end_of_text_every_target_counts() -> None:
    training = TrainingSection(steps=2, warmup_steps=0, global_batch_sequences=6, microbatch_sequences=2)
    batches = Batches(TokenData([np.arange(100, dtype=np.uint16)]), training, 10, True, 0, validation_ratio=0.3)
    assert (batches.samples, batches.validation_samples) == (6, 3)
    assert batches.tokens_of(1) == sum((batches.microbatch(1, m)[1] != IGNORED).sum() for m in range(3)) == 60
    assert batches.evaluation_tokens == 30


def test_a_step_without_a_target_divides_by_one() -> None:
    batches = make([END] * 33, ratio=0.5)
    assert (batches.microbatch(0, 0)[1] == IGNORED).all()
    assert batches.tokens_of(0) == batches.evaluation_tokens == 1


def test_counts_are_remembered_for_recent_portions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.data.batches.COUNTED_PORTIONS_MAX", 3)
    batches = make([*range(16), END])
    first = [batches.tokens_of(step) for step in range(8)]
    assert len(batches._counted) == 3
    assert [batches.tokens_of(step) for step in range(8)] == first == [16] * 8


def test_the_last_samples_are_for_validation_and_the_last_microbatch_is_filled_up() -> None:
    batches = make([*range(28), END, 50, 51, 52, 53], ratio=0.4, sequences=2, microbatches=1)
    assert (batches.samples, batches.validation_samples, batches.evaluation_microbatches) == (5, 3, 2)
    used = {index for step in range(10) for index in batches.sample_indexes(step, 0)}
    assert used == set(range(5))
    tokens, targets = batches.evaluation(0)
    assert tokens.tolist() == [[20, 21, 22, 23], [24, 25, 26, 27]]
    assert targets.tolist() == [[21, 22, 23, 24], [25, 26, 27, END]]
    tokens, targets = batches.evaluation(1)
    assert tokens.tolist() == [[END, 50, 51, 52], [0] * 4]
    assert targets.tolist() == [[IGNORED, 51, 52, 53], [IGNORED] * 4]
    assert tokens.dtype == targets.dtype == np.int32
    assert batches.evaluation_tokens == 11


def test_without_validation_there_is_nothing_to_evaluate() -> None:
    assert make([*range(17)]).evaluation_microbatches == 0


@pytest.mark.parametrize(
    ("tokens", "ratio", "expected"),
    [
        (81, 0.0, (10, 0)),
        (81, 0.1, (9, 1)),
        (81, 0.01, (9, 1)),
        (81, 0.5, (5, 5)),
        (25, 0.5, (1, 2)),
        (17, 0.5, (1, 1)),
    ],
)
def test_both_parts_get_at_least_one_sample(tokens: int, ratio: float, expected: tuple[int, int]) -> None:
    assert split_samples(tokens, 8, ratio) == expected


def test_one_sample_cannot_be_divided() -> None:
    with pytest.raises(InvalidData, match="16 tokens, 1 sample of 8: nothing is left"):
        split_samples(16, 8, 0.1)


def test_a_step_that_was_read_is_counted_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler stood still before each commit of a large batch, as it looked through all texts of it again."""
    row = [1, 2, END, 4, 5, END, END, 8, 9, 10, 11, 12, 13, END, 15, 16, 17]
    expected = make(row).tokens_of(0)
    half, whole = make(row), make(row)
    half.microbatch(0, 1)
    assert half.tokens_of(0) == half.tokens_of(0) == expected == 12
    monkeypatch.setattr(TokenData, "occurrences", None)
    for index in range(2):
        whole.microbatch(0, index)
    assert whole.tokens_of(0) == expected
