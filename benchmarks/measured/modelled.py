"""Modelled compute: computations that take given times, so that several share a processor and none waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Modelled:
    """Computations that take given times, on any processor."""

    pass_s: float  # a forward through a process' layers, and a backward
    step_s: float = 0.015  # an optimizer step: that of AdamW for 4.3 million parameters on one core
    whole: bool = False  # no stage server splits a backward

    @property
    def seconds(self) -> tuple[str, str]:
        """Both, as a command's words."""
        return str(self.pass_s), str(self.step_s)

    @property
    def stage_server(self) -> tuple[str, ...]:
        """The program that has them, with its own flags."""
        pass_s, step_s = self.seconds
        words = ("benchmarks.measured.modelled_stage_server", "--compute", pass_s, "--step", step_s)
        return (*words, "--whole") if self.whole else words


def takes(
    owner: Any,
    name: str,
    seconds: float | Callable[..., float],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Let every call of `owner.name` last so long, or as long as it does by itself if that is longer.

    `seconds` may be a function of the call's arguments.
    """
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = clock()
        result = original(*args, **kwargs)
        lasts_s = seconds(*args, **kwargs) if callable(seconds) else seconds
        sleep(max(0.0, began_s + lasts_s - clock()))
        return result

    setattr(owner, name, call)
