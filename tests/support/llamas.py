"""Llamas from 1.5 to 405 billion parameters, as jobs whose memory is estimated; nothing of them is built."""

from __future__ import annotations

from typing import Any

from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job

# Of each: layers, width, width of the MLP, attention heads, heads of keys and values, vocabulary.
SHAPES = {
    "1.5 B": (16, 2048, 8192, 32, 8, 128_256),
    "8 B": (32, 4096, 14_336, 32, 8, 128_256),
    "13 B": (40, 5120, 13_824, 40, 40, 32_000),
    "70 B": (80, 8192, 28_672, 64, 8, 128_256),
    "405 B": (126, 16_384, 53_248, 128, 8, 128_256),
}


def llama(name: str) -> dict[str, Any]:
    """A job file that names only the model and the data; the vocabulary is the model's."""
    layers, width, inner, heads, pairs, vocabulary = SHAPES[name]
    config = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }
    return {"name": "x", "model": {"family": "llama", "config": config}, "data": {"source": "x"}}


def job_of(name: str, **sections: dict[str, Any]) -> JobSpec:
    """The job with these values, by section."""
    values = llama(name)
    for section, more in sections.items():
        values[section] = values.get(section, {}) | more
    return parse_job(values)


def resolved(name: str, **sections: dict[str, Any]) -> JobSpec:
    """The job with these values, and every "auto" resolved for one stage."""
    return resolve(job_of(name, **sections), Basis(SHAPES[name][5]))
