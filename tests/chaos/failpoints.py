"""Places at which a process ends itself, put there from outside: the product knows nothing of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

HIT = "failpoint hit: "  # in the log of the process


class Failpoint:
    """Ends the process, or sends it another signal, when a place is passed for the `hit`-th time."""

    def __init__(self, name: str, hit: int) -> None:
        self.name = name
        self._left = hit
        self.signal = signal.SIGKILL

    def passed(self) -> None:
        """The place is passed."""
        self._left -= 1
        if self._left == 0:
            self.act()

    def act(self) -> None:
        """Send the signal now."""
        sys.stderr.write(f"{HIT}{self.name}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), self.signal)

    def before(self, owner: Any, name: str, counts: Callable[..., bool] = lambda *_: True) -> None:
        """Pass right before `owner.name` is called, of the calls whose arguments count."""
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if counts(*args):
                self.passed()
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def after(self, owner: Any, name: str, counts: Callable[..., bool] = lambda *_: True) -> None:
        """Pass right after an awaited `owner.name` is done, of the calls whose arguments count."""
        original: Callable[..., Awaitable[Any]] = getattr(owner, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await original(*args, **kwargs)
            if counts(*args):
                self.passed()
            return result

        setattr(owner, name, call)


def take_flags(arguments: list[str]) -> tuple[str, int, list[str]]:
    """`--at POINT --hit N` in front, and the flags of the program behind them."""
    match arguments:
        case ["--at", point, "--hit", hit, *rest]:
            return point, int(hit), rest
    raise SystemExit("usage: --at POINT --hit N, then the program's own flags")
