"""How much curvature momentum bears when a share of the gradients is one step old: the table in docs/convergence.md.

    python -m benchmarks.models.delay

On the quadratic c/2 * x^2 an optimizer step is linear, so it is stable where the roots of its recurrence lie within the
unit circle. Printed is the greatest rate x c for which they do. The step's numerator is (1 - lookahead) times Adam's
first moment plus lookahead times the gradient, without the denominator.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

BETA = 0.9


def radius(rate: float, *, late: float, lookahead: float) -> float:
    """Spectral radius of the recurrence of (x_t, x_{t-1}, m_t) for curvature 1; `late` is a share of the gradient."""
    gradient = np.array([1.0 - late, late, 0.0])
    moment = BETA * np.array([0.0, 0.0, 1.0]) + (1 - BETA) * gradient
    position = np.array([1.0, 0.0, 0.0]) - rate * ((1 - lookahead) * moment + lookahead * gradient)
    return float(np.abs(np.linalg.eigvals(np.array([position, [1.0, 0.0, 0.0], moment]))).max())


def stable_up_to(*, late: float, lookahead: float) -> float:
    """The greatest stable rate x curvature, by bisection."""
    low, high = 1e-4, 1e4
    for _ in range(100):
        middle = (low * high) ** 0.5
        if radius(middle, late=late, lookahead=lookahead) <= 1 + 1e-9:
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    shares = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
    table = Table("lookahead", *(f"{share:g} late" for share in shares))
    for lookahead in (0.0, 0.1, 0.3):
        limits = [stable_up_to(late=share, lookahead=lookahead) for share in shares]
        table.add_row(f"{lookahead:g}", *(f"{limit:.3g}" for limit in limits))
    Console().print(table)


if __name__ == "__main__":
    main()
