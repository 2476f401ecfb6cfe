"""Jobs that train for two steps on tokens that were drawn, or only have a shape; on no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from swarm.data.batches import Batches, TokenData
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from tests.support.simulated import small_spec


def quick_spec(**changes: object) -> JobSpec:
    """Changes are "section__key" values; what the job file leaves open is open."""
    training = {"training__steps": 2, "training__warmup_steps": 0, "training__global_batch_sequences": 4}
    return small_spec(Path("x"), **(training | changes))


def tiny_spec(stages: int = 1, **sections: dict[str, Any]) -> JobSpec:
    """Two layers of width 24, all resolved; `sections` say more than that."""
    config = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    values: dict[str, dict[str, Any]] = {
        "model": {"config": config, "dtype": "float32"},
        "data": {"source": "x", "sequence_length": 16},
        "training": {"global_batch_sequences": 4, "microbatch_sequences": 2},
        "pipeline": {"stages": stages},
    }
    more = {name: values.get(name, {}) | section for name, section in sections.items()}
    return resolve(parse_job({"name": "t"} | values | more), Basis(257, stages=stages))


def batches_of(spec: JobSpec) -> Batches:
    length = spec.data.sequence_length
    text = np.random.default_rng(0).integers(0, 257, size=40 * length + 1).astype(np.uint16)
    return Batches(TokenData([text]), spec.training, length, spec.data.shuffle, spec.training.seed)
