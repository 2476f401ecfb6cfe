"""How often the host waits for its device: counted on a far device, which no number of parameter tensors may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stage_server.replica.packing import pack
from swarm.model import codec
from swarm.model.digests import digest_of
from swarm.model.exact_sums import mean_of_parts
from swarm.model.probe import probe_digest
from swarm.model.stage import Stage
from swarm.types import Microbatch
from tests.support.far_device import Far, far_device
from tests.unit.swarm.model.test_optimizers import training
from tests.unit.swarm.model.test_stage import CPU, spec_of, text

MICROBATCH = Microbatch(0, 0, 0)


@pytest.fixture
def far() -> Iterator[Far]:
    far_device()
    with Far() as mode:
        yield mode


def stage_of(stage: int = 0, layers: int = 3, stages: int = 2, **values: Any) -> Stage:
    config = {"num_hidden_layers": layers} | values.pop("config", {})
    return Stage(spec_of(stages, config=config, **values), stage, far_device())


def boundary_of(stage: Stage, seed: int) -> Tensor:
    return torch.randn(stage.boundary_shape(), generator=torch.Generator().manual_seed(seed))


def there_and_back(stage: Stage, codec_name: str = "none") -> bool:
    """One microbatch as a replica computes it; gives whether its gradient was finite."""
    tokens, targets = text(0)
    y, _ = stage.forward(MICROBATCH, 0, x=boundary_of(stage, 1), tokens=tokens, targets=targets)
    if y is not None:
        pack(y, codec_name)
    g = None if y is None else boundary_of(stage, 2)
    _, finite = stage.backward(MICROBATCH, g, encode=lambda dx: codec.encode_there(dx, codec_name))
    return finite


def step(stage: Stage) -> str:
    means = {unit: mean_of_parts([stage.part(0, unit)], 64, 30) for unit in stage.units}
    for unit, mean in means.items():
        stage.squared_norms(unit, mean)
    return stage.apply(0, means, learning_rate=1e-2, scale=0.9, skip=False)


def test_the_far_device_counts_reads_and_copies_and_refuses_to_mix(far: Far) -> None:
    there = torch.ones(3).to(far_device())
    assert far.taken() == ["_to_copy"]
    assert (float(there.sum()), far.taken()) == (3.0, ["_local_scalar_dense"])
    assert (there.cpu().tolist(), far.taken()) == ([1.0, 1.0, 1.0], ["_to_copy"])
    torch.zeros(3).copy_(there)
    assert far.taken() == ["copy_"]
    with pytest.raises(AssertionError, match="mixes far and near"):
        there.add(torch.ones(3))


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
def test_the_host_waits_once_for_a_forward_and_once_for_a_backward(far: Far, stage: int, name: str) -> None:
    made = stage_of(stage, stages=3)
    far.taken()
    assert there_and_back(made, name)
    assert len(far.taken()) == 2


def test_recomputation_and_dropout_add_no_wait(far: Far) -> None:
    made = stage_of(recompute=True, config={"attention_dropout": 0.1})
    far.taken()
    assert there_and_back(made)
    assert len(far.taken()) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "adamw", "lookahead": 0.0},
        {"optimizer": "adamw", "lookahead": 0.3},
        {"optimizer": "nadamw"},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "lamb"},
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_a_step_waits_at_most_four_times_whatever_the_number_of_tensors(far: Far, values: dict[str, Any]) -> None:
    counts = []
    for layers in (2, 6):
        made = stage_of(stages=2, layers=layers, training=values, config={"tie_word_embeddings": True})
        assert there_and_back(made)
        far.taken()
        step(made)
        counts.append(len(far.taken()))
    assert counts[0] == counts[1] <= 4


def test_a_gradient_that_does_not_fit_is_noticed_on_the_device_and_nothing_is_added(far: Far) -> None:
    made = stage_of()
    tokens, _ = text(0)
    made.forward(MICROBATCH, 0, tokens=tokens)
    far.taken()
    assert made.backward(MICROBATCH, torch.full(made.boundary_shape(), torch.inf)) == (None, False)
    assert len(far.taken()) == 1
    assert not any(bool(made.part(0, unit).any()) for unit in made.units)


def test_state_is_handed_to_a_joiner_with_one_wait(far: Far) -> None:
    made = stage_of()
    names = [name for name, _ in made.parameter_sizes()]
    far.taken()
    assert len(made.snapshot(names)) == made.state_bytes(names)
    assert len(far.taken()) == 1


def test_digest_and_probe_are_those_of_the_cpu_and_wait_once(far: Far) -> None:
    near = {"a": torch.randn(70_000), "b": torch.randn(3, 5), "number": torch.tensor(3.0)}
    there = {name: tensor.to(far_device()) for name, tensor in near.items()}
    far.taken()
    assert digest_of(there.items()) == digest_of(near.items())
    assert len(far.taken()) == 1
    assert probe_digest(training("adamw"), far_device()) == probe_digest(training("adamw"), CPU)
