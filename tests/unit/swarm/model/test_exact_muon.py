"""swarm.model.exact_muon: it is Muon, and its proof holds. Any matrix is in tests/property/test_exact_muon.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swarm.model import exact_muon
from swarm.model.exact_muon import COEFFICIENTS, GRID, make_orthogonal, step_exactly
from tests.support.other_products import OtherProducts
from tests.support.peak import peak_bytes

SHAPES = [(64, 64), (48, 200), (200, 48), (1, 33), (33, 1), (1, 1)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(matrix: Tensor) -> Tensor:
    made = matrix.double()
    make_orthogonal(made)
    return made


def stepped(gradients: list[Tensor], *, exact: bool) -> Tensor:
    """By how much a parameter of zeros has moved after a step with each gradient."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    momentum = torch.zeros_like(gradients[0])
    torchs = torch.optim.Muon([parameter], lr=0.01, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    with torch.no_grad():
        for gradient in gradients:
            if exact:
                step_exactly(parameter, gradient, momentum, learning_rate=0.01, weight_decay=0.02)
            else:
                parameter.grad = gradient.clone()
                torchs.step()
    return parameter.detach()


def same_bits(one: Tensor, other: Tensor) -> bool:
    kind = {4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


# It is Muon -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_torchs_muon_but_for_what_bfloat16_loses(shape: tuple[int, int]) -> None:
    gradients = [random(*shape, seed=seed) for seed in range(3)]
    ours, torchs = (stepped(gradients, exact=exact) for exact in (True, False))
    assert float((ours - torchs).norm() / torchs.norm()) < 0.03


@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_costs_a_hundredth_of_what_bfloat16_does(shape: tuple[int, int]) -> None:
    """Against the same iteration in float64, without any rounding to multiples."""
    matrix = random(*shape)
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    torchs = -stepped([matrix], exact=False) / (0.01 * 0.2 * max(shape) ** 0.5)
    lost = [float((one - x).norm() / x.norm()) for one in (orthogonal(matrix), torchs.double())]
    assert lost[0] < 2e-5
    assert lost[0] < lost[1] / 100


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (64, 300)])
def test_singular_values_lie_where_torchs_iteration_brings_them(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    torchs = stepped([matrix], exact=False) / (0.01 * 0.2 * max(shape) ** 0.5)
    for made in (orthogonal(matrix), torchs.double()):
        values = torch.linalg.svdvals(made)
        assert float(values.min()) > 0.65
        assert float(values.max()) < 1.21


def test_weight_decay_and_momentum_are_torchs() -> None:
    gradient = random(8, 8)
    parameter, momentum = torch.ones(8, 8), torch.full((8, 8), 2.0)
    step_exactly(parameter, torch.zeros(8, 8), momentum, learning_rate=0.5, weight_decay=0.1)
    assert torch.equal(momentum, torch.full((8, 8), 1.9))
    before = momentum.clone()
    step_exactly(parameter, gradient, momentum, learning_rate=0.0, weight_decay=0.1)
    torch.testing.assert_close(momentum, before.lerp(gradient, 0.05))


# The same bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, (130, 310)])
def test_the_order_of_addition_changes_no_bit_and_changes_those_of_torchs_muon(shape: tuple[int, int]) -> None:
    gradients = [random(*shape, seed=seed) for seed in range(2)]
    for exact in (True, False):
        here = stepped(gradients, exact=exact)
        with OtherProducts() as other:
            there = stepped(gradients, exact=exact)
        assert other.products == 30
        assert same_bits(here, there) or not exact
        assert not same_bits(here, there) or exact or min(shape) == 1


def test_the_number_of_threads_changes_no_bit() -> None:
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        made.append(stepped([random(300, 700)], exact=True))
    assert same_bits(*made)


@pytest.mark.parametrize("shape", [(48, 200), (200, 48), (64, 64)])
def test_the_layout_in_memory_changes_no_bit(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    lying = matrix.T.contiguous().T
    assert lying.stride() != matrix.stride()
    assert same_bits(stepped([matrix], exact=True), stepped([lying], exact=True))
    assert same_bits(orthogonal(matrix), orthogonal(lying))


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-100, 2.0**-10, 2.0**100])
def test_the_scale_of_a_gradient_matters_only_below_the_least_norm(scale: float) -> None:
    """Subnormal gradients and those whose squares no float32 holds."""
    matrix = random(20, 30)
    rounded = (matrix * scale).double() / scale
    made = orthogonal(matrix * scale)
    assert bool(made.isfinite().all())
    assert torch.equal(made, orthogonal(rounded)) or float(rounded.norm()) * scale < exact_muon.NORM_MIN


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 4), (1, 1)])
def test_without_a_gradient_only_decay_moves_a_parameter(shape: tuple[int, int]) -> None:
    for zero in (0.0, -0.0):
        assert not orthogonal(torch.full(shape, zero)).any()
        parameter, momentum = torch.ones(shape), torch.zeros(shape)
        step_exactly(parameter, torch.full(shape, zero), momentum, learning_rate=0.5, weight_decay=0.5)
        assert torch.equal(parameter, torch.full(shape, 0.75))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    matrix = random(5, 7)
    matrix[2, 3] = bad
    assert bool(orthogonal(matrix).isnan().all())


# The proof ------------------------------------------------------------------------------------------------------------


def test_the_polynomials_stay_within_the_bounds_of_the_proof() -> None:
    a, b, c = COEFFICIENTS
    s = torch.linspace(0.0, 1.25, 1_000_001, dtype=torch.float64)
    moved = a * s + b * s**3 + c * s**5
    assert float(moved.min()) >= 0.0
    assert float(moved.max()) < 1.203
    g = torch.linspace(0.0, 25 / 16 + 2**-9, 1_000_001, dtype=torch.float64)
    assert float((b * g + c * g * g).abs().max()) < 2.81
    assert 1.25 * (abs(b) + 2 * abs(c) * 25 / 16) + 1.25 + 1.0 < 17
    assert 1.203 + 17 / 512 < 1.25
    assert exact_muon.ELEMENTS_MAX**0.5 / (2 * GRID) == 2**-9
    assert 2.82 * 1.25 < 8 == 2**53 / GRID**2


@pytest.mark.parametrize("kind", ["random", "rank 1", "orthogonal", "one element", "equal elements"])
@pytest.mark.parametrize("shape", [(200, 300), (300, 200), (256, 256)])
def test_no_sum_of_magnitudes_passes_2_to_the_52(
    kind: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    product, largest = exact_muon._product, [0.0]

    def watched(left: Tensor, right: Tensor) -> Tensor:
        assert torch.equal(left, left.round())
        assert torch.equal(right, right.round())
        largest[0] = max(largest[0], float((left.abs() @ right.abs()).max()))
        return product(left, right)

    monkeypatch.setattr(exact_muon, "_product", watched)
    one = torch.zeros(shape)
    one[3, 5] = 1.0
    matrix = {
        "random": random(*shape),
        "rank 1": random(shape[0], 1) @ random(1, shape[1]),
        "orthogonal": torch.linalg.qr(random(max(shape), max(shape)))[0][: shape[0], : shape[1]],
        "one element": one,
        "equal elements": torch.ones(shape),
    }[kind]
    orthogonal(matrix)
    assert 0.0 < largest[0] <= 2**52


def test_a_matrix_for_which_nothing_is_proved_is_refused() -> None:
    large = torch.empty((1 << 20, 1 << 15), device="meta", dtype=torch.float64)
    with pytest.raises(AssertionError, match="could be rounded"):
        make_orthogonal(large)


@pytest.mark.parametrize("shape", [(16, 1 << 19), (1 << 19, 16)])
def test_a_step_of_a_long_matrix_takes_16_bytes_for_each_element(shape: tuple[int, int]) -> None:
    tensors = [torch.zeros(shape), torch.ones(shape), torch.zeros(shape)]

    def step() -> None:
        step_exactly(*tensors, learning_rate=0.01, weight_decay=0.0)

    assert peak_bytes(step) < 18 * tensors[0].numel()
