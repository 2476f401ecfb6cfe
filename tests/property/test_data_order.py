"""Data order: within a pass nothing is repeated and nothing skipped."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data.batches import IGNORED, Batches, TokenData, shuffled
from swarm.job.spec import TrainingSection


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**63 - 1), st.integers(0, 3))
def test_shuffling_is_a_bijection(size: int, seed: int, a_pass: int) -> None:
    assert sorted(shuffled(position, size, seed, a_pass) for position in range(size)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 5),
    st.lists(st.integers(1, 400), min_size=0, max_size=5),
)
def test_every_pass_uses_every_sample_once_whatever_the_batch_and_the_shards(
    samples: int, sequences: int, microbatches: int, shuffle: bool, seed: int, cuts: list[int]
) -> None:
    length = 8
    row = np.arange(samples * length + 1, dtype=np.uint16)
    data = TokenData(np.split(row, sorted(cut for cut in cuts if cut < row.size)))
    training = TrainingSection(
        steps=1,
        warmup_steps=0,
        global_batch_sequences=sequences * microbatches,
        microbatch_sequences=sequences,
        seed=seed,
    )
    batches = Batches(data, training, length, shuffle, seed)
    used: list[int] = []
    step = 0
    while len(used) < 2 * samples:
        for index in range(microbatches):
            tokens, targets = batches.microbatch(step, index)
            assert tokens.shape == targets.shape == (sequences, length)
            assert (targets == tokens + 1).all()
            assert (tokens[:, 0] % length == 0).all()
            used.extend(int(first) // length for first in tokens[:, 0])
        step += 1
    assert sorted(used[:samples]) == list(range(samples))
    assert sorted(used[samples : 2 * samples]) == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 9]), min_size=17, max_size=300),
    st.integers(1, 5),
    st.integers(1, 4),
    st.floats(0, 0.5),
    st.integers(0, 2**63 - 1),
)
def test_training_and_validation_share_no_target_and_leave_none_out(
    row: list[int], sequences: int, microbatches: int, ratio: float, seed: int
) -> None:
    """A target is known by its position; what a whole pass and the validation set count is all that counts."""
    length, end = 8, 9
    training = TrainingSection(
        steps=1,
        warmup_steps=0,
        global_batch_sequences=sequences * microbatches,
        microbatch_sequences=sequences,
        seed=seed,
    )
    data = TokenData([np.array(row, dtype=np.uint16)])
    batches = Batches(data, training, length, True, seed, end_of_text=end, validation_ratio=ratio)
    samples, held_out = batches.samples, batches.validation_samples
    assert samples + held_out == (len(row) - 1) // length
    assert (held_out > 0) == (ratio > 0)
    passed = []
    while len(passed) < samples:
        step, index = divmod(len(passed) // sequences, microbatches)
        passed += batches.sample_indexes(step, index)
    assert sorted(passed[:samples]) == list(range(samples))

    for step in range(3):
        counted = sum(int((batches.microbatch(step, m)[1] != IGNORED).sum()) for m in range(microbatches))
        assert batches.tokens_of(step) == max(1, counted)
    evaluated: list[int] = []
    for m in range(batches.evaluation_microbatches):
        tokens, targets = batches.evaluation(m)
        assert tokens.shape == targets.shape == (sequences, length)
        evaluated += targets.flatten().tolist()
    first, stop = samples * length, (samples + held_out) * length
    expected = [IGNORED if row[at] == end else row[at + 1] for at in range(first, stop)]
    assert evaluated[: len(expected)] == expected
    assert set(evaluated[len(expected) :]) <= {IGNORED}
    if held_out:
        assert batches.evaluation_tokens == max(1, sum(target != IGNORED for target in expected))
