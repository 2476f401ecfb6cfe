"""Muon with the same bits on every device: its matrix products are sums that no order changes.

The iteration is that of torch.optim.Muon. It makes a matrix nearly orthogonal: it divides X by its Frobenius norm, and
then sets five times

    G = X X'        P = b G + c G G        X = a X + P X

Devices add up a matrix product in different orders, and so round it otherwise. Here X, G and P are rounded to multiples
of 2^-25, which are kept as whole numbers in float64. Each product of two elements is a multiple of 2^-50, and so is a
sum of such products. float64 holds every multiple of 2^-50 up to 2^53 x 2^-50 = 8 in magnitude. As long as no sum can
pass 8, none is rounded: not in any order, not in parts, not with fused multiply-adds.

No sum passes 8. Let X have m rows and n columns, m <= n (for a tall matrix read its transpose) and m n <= 2^34. |X| is
the largest singular value, u = 2^-26 the largest error of rounding to a multiple, and M the root of m n. So m <= M and
u M <= 2^-9. Rounding a matrix of k elements changes its singular values by at most u times the root of k.

1. By Cauchy and Schwarz no part of a sum of products passes the product of the lengths of its two vectors. A row or a
   column is no longer than the largest singular value of its matrix. So it is enough that |X| |X|, |G| |G| and |P| |X|
   stay below 8.
2. |X| <= 5/4 before each iteration. At first |X| is at most the Frobenius norm, which is at most 1 + u M. Without
   rounding, an iteration turns a singular value s into a s + b s^3 + c s^5, which lies between 0 and 1.203 for s from 0
   to 5/4. Rounding G, P and X adds at most 5/4 (|b| + 2 |c| 25/16) u m, 5/4 u m and u M. With all that is smaller
   (squares of these errors, float64's own rounding) that is less than 17 u M. So |X| < 1.203 + 17/512 < 5/4 after the
   iteration.
3. Then |X| |X| <= 25/16, and |G| <= 25/16 + u m, so |G| |G| < 2.5. |b g + c g^2| < 2.81 for g from 0 to 25/16 + u m,
   so |P| < 2.82 and |P| |X| < 3.6.

All else is single IEEE operations on elements, as in exact_sums.py, and the norm is added up along the tree there. A
sum of zeros may be -0 in one order and 0 in another, so 0 is added to each sum. What is not finite gives NaN
everywhere; no such gradient reaches an optimizer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarm.model.exact_sums import sum_of_squares
from swarm.model.runtime import sum_device

# The defaults of torch.optim.Muon.
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5
NORM_MIN = 1e-7  # by which a smaller matrix is divided

GRID = 2.0**25  # multiples in 1
ELEMENTS_MAX = 2**34


def step_exactly(
    parameter: Tensor, gradient: Tensor, momentum: Tensor, *, learning_rate: float, weight_decay: float
) -> None:
    """One step of Muon for a matrix, in place, with the scale of torch's "match_rms_adamw".

    All three are float32 tensors of one device; the host does not wait for it. It takes 16 bytes for each element, and
    24 if the matrix is square.
    """
    fresh = _wide(gradient).mul_(1.0 - MOMENTUM)
    direction = _wide(momentum).mul_(MOMENTUM).add_(fresh)
    momentum.copy_(direction)
    direction.mul_(MOMENTUM).add_(fresh)  # Nesterov's
    del fresh
    make_orthogonal(direction)
    direction.mul_(-learning_rate * 0.2 * math.sqrt(max(parameter.shape)))
    parameter.copy_(_wide(parameter).mul_(1.0 - learning_rate * weight_decay).add_(direction))


def make_orthogonal(x: Tensor) -> None:
    """Bring the singular values of a float64 matrix near 1, in place; its singular vectors stay."""
    assert x.numel() <= ELEMENTS_MAX, "sums for a larger matrix could be rounded"
    # Divided by a tensor: CUDA multiplies by the rounded reciprocal of a number.
    x.div_(sum_of_squares(x.reshape(-1)).sqrt_().clamp_(min=NORM_MIN)).mul_(GRID).round_()
    for _ in range(ITERATIONS):
        _iterate(x)
    x.mul_(1.0 / GRID)


def _iterate(x: Tensor) -> None:
    """One iteration, in place, of a matrix of multiples."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    gram = _product(x.T, x) if is_tall else _product(x, x.T)
    gram.round_()
    polynomial = _product(gram, gram).mul_(c).add_(gram.mul_(b)).round_()
    del gram
    moved = _product(x, polynomial) if is_tall else _product(polynomial, x)
    x.mul_(a).add_(moved).round_()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices of multiples, in multiples; not rounded."""
    return (left @ right).mul_(1.0 / GRID).add_(0.0)


def _wide(tensor: Tensor) -> Tensor:
    """A float64 copy."""
    return tensor.to(sum_device(tensor.device)).to(torch.float64, copy=True)
