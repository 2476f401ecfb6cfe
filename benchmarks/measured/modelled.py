"""Modelled compute: computations that take given times, so that several share a processor and none waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def takes(
    owner: Any,
    name: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Let every call of `owner.name` last so long, or as long as it does by itself if that is longer."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = clock()
        result = original(*args, **kwargs)
        sleep(max(0.0, began_s + seconds - clock()))
        return result

    setattr(owner, name, call)
