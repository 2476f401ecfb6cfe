"""swarm.model.optimizers: state and steps of one parameter tensor. Equality with torch.optim is in test_stage.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from swarm.errors import InvalidConfig, InvalidModel
from swarm.job.optimizers import FACTS, OptimizerName
from swarm.job.spec import TrainingSection, parse_job
from swarm.model import optimizers
from swarm.model.optimizers import OPTIMIZERS, Optimizer
from tests.support.peak import peak_bytes


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def training(optimizer: str, **values: Any) -> TrainingSection:
    job = {"name": "t", "model": {"config": {"num_hidden_layers": 1}}, "data": {"source": "x"}}
    return parse_job(job | {"training": {"optimizer": optimizer, **values}}).training


def tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("optimizer", "momentum", "names"),
    [
        ("adamw", 0.0, ["first_moment", "second_moment", "updates"]),
        ("lamb", 0.0, ["first_moment", "second_moment", "updates"]),
        ("sgd", 0.0, []),
        ("sgd", 0.9, ["momentum"]),
    ],
)
def test_state_is_named_by_parameter(optimizer: str, momentum: float, names: list[str]) -> None:
    parameters = {"a": tensor(3, 2, seed=0), "b": tensor(4, seed=1)}
    made = Optimizer(training(optimizer, momentum=momentum), parameters.items())
    for name, parameter in parameters.items():
        state = made.state_of(name)
        assert list(state) == names
        assert all(kept.shape in ((), parameter.shape) for kept in state.values())


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_sgd_goes_on_where_a_resume_switches_its_momentum_on_or_off(before: float, after: float) -> None:
    """The change was accepted, and then no replica could load."""
    parameters = {"a": tensor(3, 2, seed=0)}
    one, other = (Optimizer(training("sgd", momentum=momentum), parameters.items()) for momentum in (before, after))
    one.step(parameters.items(), {"a": tensor(3, 2, seed=1)}, 0.1)
    other.restore("a", one.state_of("a"))
    assert [kept.any().item() for kept in other.state_of("a").values()] == ([False] if after else [])
    with pytest.raises(InvalidModel, match="first_moment"):
        other.restore("a", Optimizer(training("adamw"), parameters.items()).state_of("a"))


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU groups steps as a CUDA GPU does."""
    monkeypatch.setattr(optimizers, "GROUPED_ON", frozenset({"cpu"}))


SHAPES = ((1,), (3,), (16,), (17,), (5, 7), (64, 33), (2, 3, 5), (4099,), (257, 63), (700, 300), (96, 96), (8,))


def stepped(settings: TrainingSection, *, together: bool = True) -> list[Tensor]:
    """Parameters of many shapes and their state after some steps, all at once or one by one as a joiner does it."""
    parameters = {f"layers.{at}.w": tensor(*shape, seed=at) * 10.0 ** (at % 5 - 3) for at, shape in enumerate(SHAPES)}
    made = Optimizer(settings, parameters.items())
    for step in range(3):
        gradients = {
            name: tensor(*one.shape, seed=100 * step + at) for at, (name, one) in enumerate(parameters.items())
        }
        for some in [list(parameters.items())] if together else [[parameter] for parameter in parameters.items()]:
            made.step(some, gradients, 1e-2 / (step + 1), 0.3)
    return [*parameters.values(), *(kept for name in parameters for kept in made.state_of(name).values())]


SAME_IN_GROUPS: dict[str, dict[str, Any]] = {
    "adamw": {"lookahead": 0.0},
    "adamw with lookahead": {"lookahead": 0.3},
    "sgd": {},
    "sgd with momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "lamb": {},
    "muon": {},
}


@pytest.mark.parametrize("name", SAME_IN_GROUPS)
@pytest.mark.parametrize("elements", [100, 9000, 1 << 22])
def test_a_step_in_groups_has_the_bits_of_one_tensor_at_a_time_on_a_cpu(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = training(name.split()[0], **SAME_IN_GROUPS[name])
    apart = stepped(settings)
    monkeypatch.setattr(optimizers, "GROUPED_ON", frozenset({"cpu"}))
    monkeypatch.setattr(optimizers, "GROUP_ELEMENTS", elements)
    groups = stepped(settings)
    assert all(map(torch.equal, apart, groups))
    assert all(map(torch.equal, groups, stepped(settings, together=False))), "a joiner steps one at a time"
    reproducible = training(name.split()[0], **SAME_IN_GROUPS[name], reproducible=True)
    assert all(map(torch.equal, apart, stepped(reproducible))), "reproducible mode does not group"


def test_small_tensors_are_grouped_and_large_ones_are_alone(monkeypatch: pytest.MonkeyPatch, grouping: None) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(
        optimizers, "sgd", lambda parameters, *_, **__: seen.append([parameter.numel() for parameter in parameters])
    )
    monkeypatch.setattr(optimizers, "GROUP_ELEMENTS", 100)
    parameters = {f"{at}": torch.ones(size) for at, size in enumerate((30, 100, 60, 400, 10, 1, 99))}
    for reproducible in (False, True):
        made = Optimizer(training("sgd", reproducible=reproducible), parameters.items())
        made.step(parameters.items(), parameters, 0.01)
    assert seen[:4] == [[100], [400], [30, 60, 10], [1, 99]]
    assert seen[4:] == [[30], [100], [60], [400], [10], [1], [99]]


def test_each_optimizer_has_its_facts_and_its_steps() -> None:
    assert set(OPTIMIZERS) == set(FACTS) == set(get_args(OptimizerName))


@pytest.mark.parametrize("optimizer", FACTS)
def test_an_optimizer_keeps_as_much_as_its_facts_say(optimizer: OptimizerName) -> None:
    parameter = torch.ones(64, 64)
    state = OPTIMIZERS["adamw" if optimizer == "muon" else optimizer].start(parameter, training(optimizer))
    kept = sum(tensor.nbytes for tensor in state.values() if tensor.ndim)
    assert kept == FACTS[optimizer].state_bytes * parameter.numel()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_does_not_feel_its_neighbours(optimizer: str) -> None:
    alone, together = tensor(5, 7, seed=0), tensor(5, 7, seed=0)
    other = tensor(9, seed=3)
    one = Optimizer(training(optimizer), [("a", alone)])
    two = Optimizer(training(optimizer), [("b", other), ("a", together)])
    for step in range(3):
        gradients = {"a": tensor(5, 7, seed=10 + step), "b": tensor(9, seed=20 + step)}
        one.step([("a", alone)], gradients, 0.01)
        two.step([("b", other), ("a", together)], gradients, 0.01)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scaled_step_is_the_step_of_scaled_gradients_and_leaves_the_gradients_alone(optimizer: str) -> None:
    names = ("layers.0.w", "w")
    one, two = ({name: tensor(5, 7, seed=0) for name in names} for _ in range(2))
    made, other = Optimizer(training(optimizer), one.items()), Optimizer(training(optimizer), two.items())
    for step in range(3):
        gradients = {name: tensor(5, 7, seed=step + 1) for name in names}
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        made.step(one.items(), gradients, 0.01, 0.3)
        other.step(two.items(), {name: gradient * 0.3 for name, gradient in gradients.items()}, 0.01)
        assert all(torch.equal(gradients[name], before[name]) for name in names)
    assert all(torch.equal(one[name], two[name]) for name in names)


@pytest.mark.parametrize(("optimizer", "many", "elements"), [("sgd", 32, 1 << 20), ("adamw", 1, 1 << 25)])
def test_a_step_takes_little_more_than_the_scaled_gradient_of_one_parameter(
    optimizer: str, many: int, elements: int
) -> None:
    """A scaled copy of all gradients was made first; of a large embedding AdamW made two temporaries beside it."""
    parameters = {f"w{number}": torch.ones(elements) for number in range(many)}
    gradients = {name: torch.ones(elements) for name in parameters}
    made = Optimizer(training(optimizer, lookahead=0.0), parameters.items())
    most = 4 * elements + (64 << 20)
    assert peak_bytes(lambda: made.step(parameters.items(), gradients, 0.01, 0.3)) < most


@pytest.mark.parametrize("shape", [(6, 5), (5, 6), (64, 8)])
def test_muon_is_torchs_bit_for_bit_for_the_matrices_of_layers_and_adamw_for_the_rest(shape: tuple[int, int]) -> None:
    """torch.optim.Muon for one, torch.optim.AdamW for the other, each on the same gradients."""
    names = ("model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight", "model.layers.3.norm.weight")
    shapes = (shape, (9, 4), (7,))
    ours = {name: tensor(*size, seed=place) for place, (name, size) in enumerate(zip(names, shapes, strict=True))}
    twins = {name: torch.nn.Parameter(parameter.clone()) for name, parameter in ours.items()}
    made = Optimizer(training("muon", lookahead=0.0, weight_decay=0.02), ours.items())
    muon = torch.optim.Muon([twins[names[0]]], lr=0.01, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    rest = [twins[name] for name in names[1:]]
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.02, foreach=False)
    for step in range(5):
        gradients = {name: tensor(*ours[name].shape, seed=10 * step + 7) for name in names}
        made.step(ours.items(), gradients, 0.01)
        for name in names:
            twins[name].grad = gradients[name].clone()
        muon.step()
        adamw.step()
    assert all(torch.equal(ours[name], twins[name]) for name in names)
    assert [list(made.state_of(name)) for name in names[:2]] == [
        ["momentum"],
        ["first_moment", "second_moment", "updates"],
    ]


@pytest.mark.parametrize("ahead", [0.1, 0.3, 0.9])
def test_adamw_with_lookahead_follows_its_formula(ahead: float) -> None:
    settings = training("adamw", betas=[0.9, 0.99], eps=1e-6, weight_decay=0.02, lookahead=ahead)
    parameter = tensor(6, 5, seed=0)
    expected = parameter.double()
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    made = Optimizer(settings, [("w", parameter)])
    for step in range(1, 6):
        gradient = tensor(6, 5, seed=step)
        made.step([("w", parameter)], {"w": gradient}, 0.05)
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.99 * second + 0.01 * gradient.double() ** 2
        numerator = (1 - ahead) * first / (1 - 0.9**step) + ahead * gradient.double()
        expected -= 0.05 * (numerator / ((second / (1 - 0.99**step)).sqrt() + 1e-6) + 0.02 * expected)
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tile", [16, 64, 4096])
def test_a_step_in_tiles_has_the_bits_of_one_of_the_whole_tensor(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = training("adamw", lookahead=0.3, weight_decay=0.02)
    whole, tiled = tensor(97, 103, seed=0), tensor(97, 103, seed=0)
    one, two = Optimizer(settings, [("w", whole)]), Optimizer(settings, [("w", tiled)])
    for step in range(3):
        gradient = {"w": tensor(97, 103, seed=step + 1)}
        monkeypatch.setattr(optimizers, "TILE_ELEMENTS", whole.numel())
        one.step([("w", whole)], gradient, 0.01)
        monkeypatch.setattr(optimizers, "TILE_ELEMENTS", tile)
        two.step([("w", tiled)], gradient, 0.01)
    assert torch.equal(whole, tiled)
    assert all(torch.equal(one.state_of("w")[key], two.state_of("w")[key]) for key in one.state_of("w"))


def test_a_lookahead_that_is_next_to_nothing_is_adamw() -> None:
    plain, nearly = tensor(20, 3, seed=0), tensor(20, 3, seed=0)
    one = Optimizer(training("adamw", lookahead=0.0), [("w", plain)])
    two = Optimizer(training("adamw", lookahead=1e-9), [("w", nearly)])
    for step in range(5):
        gradient = {"w": tensor(20, 3, seed=step + 1)}
        one.step([("w", plain)], gradient, 0.01)
        two.step([("w", nearly)], gradient, 0.01)
    torch.testing.assert_close(plain, nearly, rtol=1e-5, atol=1e-6)


def test_lamb_follows_its_formula() -> None:
    settings = training("lamb", betas=[0.9, 0.99], eps=1e-6, weight_decay=0.02)
    parameter = tensor(6, 5, seed=0)
    expected = parameter.double()
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    made = Optimizer(settings, [("w", parameter)])
    for step in range(1, 6):
        gradient = tensor(6, 5, seed=step)
        made.step([("w", parameter)], {"w": gradient}, 0.05)
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.99 * second + 0.01 * gradient.double() ** 2
        direction = first / (1 - 0.9**step) / ((second / (1 - 0.99**step)).sqrt() + 1e-6) + 0.02 * expected
        expected -= 0.05 * float(expected.norm() / direction.norm()) * direction
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_lamb_step_is_as_long_as_the_learning_rate_times_the_norm_of_the_parameter() -> None:
    before = tensor(40, 3, seed=0)
    after = before.clone()
    gradient = tensor(40, 3, seed=1) * 1e4
    Optimizer(training("lamb"), [("w", after)]).step([("w", after)], {"w": gradient}, 0.01)
    assert float((after - before).norm()) == pytest.approx(0.01 * float(before.norm()), rel=1e-4)


def test_lamb_moves_a_parameter_that_starts_at_zero_and_keeps_one_without_gradient_finite() -> None:
    parameter = torch.zeros(4)
    made = Optimizer(training("lamb", weight_decay=0.0), [("w", parameter)])
    made.step([("w", parameter)], {"w": torch.zeros(4)}, 0.01)
    assert torch.equal(parameter, torch.zeros(4))
    made.step([("w", parameter)], {"w": torch.ones(4)}, 0.01)
    assert bool(parameter.isfinite().all())
    assert float(parameter.max()) < 0.0


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_a_step_does_not_depend_on_the_number_of_threads(optimizer: str) -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        parameter = tensor(700, 300, seed=0)
        made = Optimizer(training(optimizer), [("layers.0.w", parameter)])
        for step in range(2):
            made.step([("layers.0.w", parameter)], {"layers.0.w": tensor(700, 300, seed=step + 1)}, 0.01)
        results.append(parameter)
    assert torch.equal(*results)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_downhill(optimizer: str) -> None:
    parameter = torch.full((8,), 2.0)
    made = Optimizer(training(optimizer, weight_decay=0.0), [("w", parameter)])
    for _ in range(200):
        made.step([("w", parameter)], {"w": 2 * parameter}, 0.02)
    assert math.sqrt(float(parameter.square().mean())) < 0.2


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_momentum_is_refused_where_it_does_nothing(optimizer: str) -> None:
    with pytest.raises(InvalidConfig, match=f'momentum = 0.9 does nothing for optimizer = "{optimizer}"') as caught:
        training(optimizer, momentum=0.9)
    assert "training.momentum" in caught.value.hint
    assert training(optimizer, momentum=0.0).momentum == 0.0
    assert training("sgd", momentum=0.9).momentum == 0.9


def test_an_unknown_optimizer_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidConfig, match=", ".join(map(repr, get_args(OptimizerName)[:-1]))):
        training("adam")
