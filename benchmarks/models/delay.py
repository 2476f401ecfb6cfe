"""How much curvature momentum bears when gradients are one step old: the table behind docs/convergence.md.

    python -m benchmarks.models.delay

On the quadratic c/2 * x^2 an optimizer step is linear, so it is stable where the roots of its recurrence lie within the
unit circle. Printed is the greatest rate x c for which they do. "momentum" is Adam's first moment (an average with
weight beta1), "nesterov" is NAdam's: the step adds the fresh gradient once more. Both without their denominators.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table


def radius(rate: float, beta: float, *, delay: int, nesterov: bool) -> float:
    """Spectral radius of the recurrence of (x_t, x_{t-1}, m_t) for curvature 1; `delay` is 0 or 1."""
    gradient = np.array([1.0, 0.0, 0.0]) if delay == 0 else np.array([0.0, 1.0, 0.0])
    moment = beta * np.array([0.0, 0.0, 1.0]) + (1 - beta) * gradient
    update = beta * moment + (1 - beta) * gradient if nesterov else moment
    position = np.array([1.0, 0.0, 0.0]) - rate * update
    return float(np.abs(np.linalg.eigvals(np.array([position, [1.0, 0.0, 0.0], moment]))).max())


def stable_up_to(beta: float, *, delay: int, nesterov: bool) -> float:
    """The greatest stable rate x curvature, by bisection."""
    low, high = 1e-4, 1e4
    for _ in range(100):
        middle = (low * high) ** 0.5
        if radius(middle, beta, delay=delay, nesterov=nesterov) <= 1 + 1e-9:
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    table = Table("beta1", "momentum", "nesterov", "momentum, delay 1", "nesterov, delay 1")
    for beta in (0.0, 0.5, 0.9, 0.95, 0.99):
        limits = [stable_up_to(beta, delay=delay, nesterov=nesterov) for delay in (0, 1) for nesterov in (False, True)]
        table.add_row(f"{beta:g}", *(f"{limit:.3g}" for limit in limits))
    Console().print(table)


if __name__ == "__main__":
    main()
