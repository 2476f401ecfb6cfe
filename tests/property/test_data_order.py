"""Data order: within a pass nothing is repeated and nothing skipped."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import TrainingSection
from swarm.data import Batches, TokenData, shuffled


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
