"""Counts how often the host waits for a far device, and prints it as JSON: `python -m tests.support.waits`.

In a process of its own, because torch takes in a device only before it first computes a gradient.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stage_server.replica.packing import encode, pack
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model import codec, exact_sums, optimizers
from swarm.model.digests import digest_of
from swarm.model.exact_sums import mean_of_parts
from swarm.model.optimizers import OPTIMIZERS
from swarm.model.probe import probe_digest
from swarm.model.runtime import received, send_ahead, send_back, to_device, to_host
from swarm.model.stage import Stage
from swarm.model.state import parameter_hashes
from swarm.types import Microbatch
from tests.support.far_streams import Far, far_device

CPU = torch.device("cpu")
CALLS = ("wait_event", "wait_stream", "record_stream", "synchronize")  # each is made for one copy or for both
MICROBATCH = Microbatch(0, 0, 0)
TOKENS = torch.arange(32, dtype=torch.int32).view(2, 16)
OPTIMIZERS_COUNTED: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in OPTIMIZERS} | {
    "adamw without lookahead": {"optimizer": "adamw", "lookahead": 0.0},
    "sgd with momentum": {"optimizer": "sgd", "momentum": 0.9},
    "float32 sums": {"optimizer": "adamw", "reproducible": False},
}


def main() -> None:
    far_device()
    with Far() as far:
        counted = {
            "the device itself": _device(far),
            "microbatches": {
                f"{place}, {name}": _microbatch(far, _stage(stage, 3), name)
                for stage, place in enumerate(("first", "middle", "last"))
                for name in codec.CODECS
            },
            "recomputation and dropout": _microbatch(far, _stage(recompute=True, config={"attention_dropout": 0.1})),
            "bfloat16 parameters": _microbatch(far, _stage(1, 3, dtype="bfloat16_parameters")),
            "steps": {
                name: [_step(far, layers, values) for layers in (2, 4)] for name, values in OPTIMIZERS_COUNTED.items()
            }
            | {"bfloat16 parameters": [_step(far, layers, {}, dtype="bfloat16_parameters") for layers in (2, 4)]},
            "decoded": {name: _decoded(far, name) for name in codec.CODECS},
            "groups": {name: _groups(far, values) for name, values in OPTIMIZERS_COUNTED.items()},
            "large tensors": [_large(far, blocks) for blocks in (2, 40)],
            "launches": {power: _launches(far, 1 << power) for power in (16, 20, 24)},
            "copies to the host": _copies(far),
            "a step on the host": _step_on_host(far),
            "unsealed": _unsealed(far),
            "not finite": _not_finite(far),
            "snapshot": _snapshot(far),
            "digests": _digests(far),
        }
    counted["races"] = far.races
    counted["planted"] = {call: [_planted(scene, call) for scene in (_ahead, _back)] for call in ("", *CALLS)}
    print(json.dumps(counted))


def _stage(stage: int = 0, stages: int = 2, **values: Any) -> Stage:
    return Stage(_spec(stages, **values), stage, far_device())


def _spec(
    stages: int = 2,
    *,
    layers: int = 3,
    training: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    recompute: bool = False,
    dtype: str = "float32",
) -> JobSpec:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": layers}
    batch = {"global_batch_sequences": 4, "microbatch_sequences": 2, "steps": 10, "warmup_steps": 0}
    values = {
        "name": "t",
        "model": {"dtype": dtype, "config": sizes | (config or {}), "recompute": recompute},
        "data": {"source": "x", "sequence_length": 16},
        "training": batch | {"reproducible": True} | (training or {}),
        "pipeline": {"stages": stages, "overlap": 0},
    }
    return resolve(parse_job(values), Basis(257))


def _boundary(stage: Stage, seed: int) -> Tensor:
    return torch.randn(stage.boundary_shape(), generator=torch.Generator().manual_seed(seed))


def _device(far: Far) -> list[list[str]]:
    """What reading a sum, fetching a tensor, copying one back and forth are counted as."""
    far.taken()
    there = torch.ones(3).to(far_device())
    taken = [far.taken()]
    float(there.sum())
    taken.append(far.taken())
    there.cpu()
    taken.append(far.taken())
    torch.zeros(3).copy_(there)
    taken.append(far.taken())
    there.to("cpu", non_blocking=True)
    taken.append(far.taken())
    try:
        there.add(torch.ones(3))
    except AssertionError as error:
        taken.append([str(error)])
    return taken


def _microbatch(far: Far, stage: Stage, codec_name: str = "none") -> list[str]:
    """The waits of one microbatch, computed and packed as a replica does it."""
    far.taken()
    x = _there(_boundary(stage, 1), codec_name)
    y, _ = stage.forward(MICROBATCH, 0, portion=0, x=x, tokens=TOKENS, targets=TOKENS)
    if y is not None:
        pack(y, codec_name)
    g = None if y is None else _there(_boundary(stage, 2), codec_name)
    _, finite = stage.backward(MICROBATCH, g, encode=lambda dx: encode(dx, codec_name))
    assert finite
    return far.taken()


def _there(tensor: Tensor, codec_name: str) -> Tensor:
    """The tensor as a replica receives it: its payload is copied to the device, and decoded there."""
    came = codec.arrived(*codec.encode(tensor, codec_name), codec_name, far_device())
    return codec.decode_there(to_device(came.payload, far_device()), came.shape, codec_name)


def _decoded(far: Far, codec_name: str) -> dict[str, Any]:
    """A tensor that the device decodes: has it the bits of the CPU, and what did it take?"""
    tensor = torch.randn(codec.INT8_TILE + 777, generator=torch.Generator().manual_seed(5))
    tensor[:256], tensor[300], tensor[700] = 0.0, 1e-40, torch.inf
    near = codec.round_trip(tensor, codec_name)
    far.taken()
    sent, divided = far.sent_bytes, far.divided_by_numbers
    here, there = codec.decode(*codec.encode(tensor, codec_name), codec_name), _there(tensor, codec_name)
    found = {
        "waits": far.taken(),
        "bytes of an element": (far.sent_bytes - sent) / tensor.numel(),
        "divided by numbers": far.divided_by_numbers - divided,
    }
    same = [torch.equal(tensor.view(torch.int32), near.view(torch.int32)) for tensor in (there.cpu(), here)]
    return found | {"same bits": all(same)}


def _step(far: Far, layers: int, values: dict[str, Any], dtype: str = "float32") -> list[str]:
    """The waits of averaging and committing a step of a stage with two units."""
    stage = _stage(layers=layers, training=values, config={"tie_word_embeddings": True}, dtype=dtype)
    _microbatch(far, stage)
    bits = 30 if values.get("reproducible", True) else None
    means = {unit: mean_of_parts([*to_host(stage.part(0, unit))], 64, bits) for unit in stage.units}
    for unit, mean in means.items():
        means[unit] = stage.expect(unit, mean)
        stage.places.squared_norms(unit, mean)
    stage.apply(0, means, learning_rate=1e-2, scale=0.9, skip=False)
    stage.digest()
    return far.taken()


def _copies(far: Far) -> dict[str, Any]:
    """The waits of the compute thread for a part, and for a checkpoint, which must stay as it was."""
    stage = _stage()
    _microbatch(far, stage)
    sent = [stage.part(0, unit) for unit in stage.units]
    found: dict[str, Any] = {"part": far.taken()}
    parts = to_host(*sent)
    far.taken()
    before = stage.capture(optimizer=True)
    found["capture"] = far.taken()
    means = {unit: mean_of_parts([part], 64, 30) for unit, part in zip(stage.units, parts, strict=True)}
    hashes = [parameter_hashes(before)]
    stage.apply(0, means, learning_rate=1e-2, scale=0.9, skip=False)
    hashes += [parameter_hashes(before), parameter_hashes(stage.capture(optimizer=True))]
    far.taken()
    return found | {"stays": hashes[0] == hashes[1] != hashes[2]}


def _step_on_host(far: Far) -> dict[str, Any]:
    """The waits of an optimizer's step on the host, and whether its bits are those of a stage that lives there."""
    states = []
    for device in (CPU, far_device()):
        stage = Stage(_spec(), 0, device, step_on="cpu")
        means = {unit: torch.linspace(-1.0, 1.0, layout.elements) for unit, layout in stage.units.items()}
        far.taken()
        stage.apply(0, means, learning_rate=1e-2, scale=0.9, skip=False)
        states.append((far.taken(), stage.digest()))
    far.taken()
    return {"waits": states[1][0], "same bits": states[0][1] == states[1][1]}


def _unsealed(far: Far) -> bool:
    """Whether a step that is not sealed any more keeps what its part was while it was copied."""
    stage = _stage()
    _microbatch(far, stage)
    sent = [stage.part(0, unit) for unit in stage.units]
    stage.void(1)  # of another step, as a commit does
    again = Microbatch(0, 0, 1)
    stage.forward(again, 0, portion=0, tokens=TOKENS)
    stage.backward(again, _boundary(stage, 3))
    to_host(*sent)
    far.taken()
    return not far.races


def _launches(far: Far, elements: int) -> dict[str, int]:
    """Launches for one tensor of so many elements."""
    there = torch.linspace(-1.0, 1.0, elements).to(far_device())
    sums = torch.zeros(elements, dtype=torch.float64).to(far_device())
    works: dict[str, Callable[[], object]] = {
        "accumulate": lambda: exact_sums.accumulate(sums, there, 30),
        "norms": lambda: exact_sums.squared_norms([there]),
        "digest": lambda: digest_of([("a", there)]),
    }
    for name, values in {
        "sgd": {"optimizer": "sgd", "momentum": 0.9},
        "adamw": {},
        "lookahead": {"lookahead": 0.5},
    }.items():
        made = optimizers.Optimizer(_spec(training=values).training, [("a", there)])
        works[name] = partial(made.step, [("a", there)], {"a": there.clone()}, 1e-3, 0.5)
    few = [(f"{place}", there[: 16 + place]) for place in range(200)]
    works["small digests"] = lambda: digest_of(few)
    found = {}
    for name, work in works.items():
        before = far.launches
        work()
        found[name] = far.launches - before
    far.taken()
    return found


def _planted(scene: Callable[[Far], None], call: str) -> list[str]:
    """The races of a scene in which a call is forgotten."""
    with Far(deaf=call) as far:
        scene(far)
    return far.races


def _ahead(far: Far) -> None:
    """A tensor is sent ahead, used, and freed, while the device still works."""
    received(send_ahead(torch.ones(3), far_device())).add(1)


def _back(far: Far) -> None:
    """A tensor is computed, sent back, and freed; then the host reads the copy."""
    sent = send_back(torch.ones(3, device=far_device()) + 1)
    to_host(sent)[0].add(1)


def _groups(far: Far, values: dict[str, Any]) -> dict[str, list[Any]]:
    """Operations and waits of a step of 5 and of 50 small parameters, one at a time and in groups; and probes."""
    found: dict[str, list[Any]] = {"operations": [], "waits": [], "probes": []}
    training = _spec(training=values | {"reproducible": False}).training
    before = optimizers.GROUPED_ON
    for kinds in (before, frozenset({"far", "cpu"})):
        optimizers.GROUPED_ON = kinds
        for count in (5, 50):
            parameters = {f"{place}": torch.ones(16 + place, device=far_device()) for place in range(count)}
            made = optimizers.Optimizer(training, parameters.items())
            far.taken()
            already = far.operations
            made.step(parameters.items(), parameters, 1e-3, 0.5)
            found["operations"].append(far.operations - already)
            found["waits"].append(len(far.taken()))
        found["probes"].append([probe_digest(training, device) for device in (CPU, far_device())])
    optimizers.GROUPED_ON = before
    return found


def _large(far: Far, blocks: int) -> dict[str, Any]:
    """What sums and norms of a tensor of so many blocks, and a bit more, take on the device."""
    near = torch.randn(blocks * exact_sums.NORM_BLOCK_ELEMENTS + 77, generator=torch.Generator().manual_seed(blocks))
    there, sums = near.to(far_device()), torch.zeros(near.numel(), dtype=torch.float64)
    sums_there = sums.to(far_device())
    far.operations = 0
    exact_sums.accumulate(sums_there, there, 30)
    to_add = far.operations
    norms_there = exact_sums.squared_norms([there])
    to_norm = far.operations - to_add
    exact_sums.accumulate(sums, near, 30)
    same = torch.equal(sums, sums_there.cpu()) and exact_sums.squared_norms([near]) == norms_there
    return {"operations": [to_add, to_norm], "same bits": same}


def _not_finite(far: Far) -> dict[str, Any]:
    """A gradient that is not finite: what backward says, how often it waits, and whether anything was added."""
    stage = _stage()
    stage.forward(MICROBATCH, 0, portion=0, tokens=TOKENS)
    far.taken()
    _, finite = stage.backward(MICROBATCH, torch.full(stage.boundary_shape(), torch.inf))
    waits = far.taken()
    return {
        "finite": finite,
        "waits": waits,
        "added": any(bool(to_host(stage.part(0, unit))[0].any()) for unit in stage.units),
    }


def _snapshot(far: Far) -> list[str]:
    """The waits of handing a stage's state to a joiner."""
    stage = _stage()
    names = [name for name, _ in stage.parameter_sizes()]
    far.taken()
    assert len(stage.snapshot(names)) == stage.state_bytes(names)
    return far.taken()


def _digests(far: Far) -> dict[str, Any]:
    """Digests on the CPU and on the far device, which works on other groups of rows."""
    near = {"a": torch.arange(70_000.0), "b": torch.ones(3, 5), "number": torch.tensor(3.0)}
    there = {name: tensor.to(far_device()) for name, tensor in near.items()}
    far.taken()
    digests = [digest_of(near.items()), digest_of(there.items())]
    waits = far.taken()
    probes = {}
    for name in OPTIMIZERS:
        training = _spec(training={"optimizer": name}).training
        probes[name] = [probe_digest(training, device) for device in (CPU, far_device())]
    return {"digests": digests, "waits": waits, "probes": probes}


if __name__ == "__main__":
    main()
