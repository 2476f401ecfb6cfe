"""How much a run tries of each claim: `make test` the cases that tell most, `make test-all` all of them.

No claim is left out of `make test`: what it leaves out are further seeds, shapes and examples of the same claim.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("SWARM_TEST_ALL") == "1"


def others(*cases: T) -> tuple[T, ...]:
    """Further cases of a claim, which `make test-all` alone tries."""
    return cases if ALL else ()


def seeds(count: int, *kept: int) -> tuple[int, ...]:
    """These seeds, and in `make test-all` the others below `count` too."""
    return (*kept, *others(*(seed for seed in range(count) if seed not in kept)))


def examples(count: int) -> int:
    """How many examples hypothesis makes: a quarter, in `make test-all` all."""
    return count if ALL else count // 4
