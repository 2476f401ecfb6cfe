"""Tests that are played: what a test does, and who plays it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

Act: TypeAlias = Callable[..., Coroutine[Any, Any, object]]
Played: TypeAlias = Callable[[Act], Callable[..., None]]


def played(run: Callable[..., object], given: int = 1) -> Played:
    """A decorator of tests, which are coroutine functions: `run` is called with the test as a function of what `run`
    gives, so many first arguments of the test. Fixtures are the other arguments of both.
    """

    def decorated(test: Act) -> Callable[..., None]:
        of_run, of_test = (list(inspect.signature(function).parameters.values()) for function in (run, test))
        of_run, of_test = of_run[1:], of_test[given:]

        def play(**fixtures: Any) -> None:
            own = {slot.name: fixtures[slot.name] for slot in of_test}
            run(lambda *what: test(*what, **own), **{slot.name: fixtures[slot.name] for slot in of_run})

        play.__name__, play.__doc__, play.__module__ = test.__name__, test.__doc__, test.__module__
        every = {slot.name: slot.replace(kind=inspect.Parameter.KEYWORD_ONLY) for slot in (*of_run, *of_test)}
        play.__signature__ = inspect.Signature(list(every.values()))  # type: ignore[attr-defined]  # as pytest reads it
        return play

    return decorated
