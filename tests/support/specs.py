"""Jobs that train for two steps on tokens that were drawn, and on no file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swarm.data.batches import Batches, TokenData
from swarm.job.spec import JobSpec
from tests.support.simulated import small_spec


def quick_spec(**changes: object) -> JobSpec:
    """Changes are "section__key" values; what the job file leaves open is open."""
    training = {"training__steps": 2, "training__warmup_steps": 0, "training__global_batch_sequences": 4}
    return small_spec(Path("x"), **(training | changes))


def batches_of(spec: JobSpec) -> Batches:
    length = spec.data.sequence_length
    text = np.random.default_rng(0).integers(0, 257, size=40 * length + 1).astype(np.uint16)
    return Batches(TokenData([text]), spec.training, length, spec.data.shuffle, spec.training.seed)
