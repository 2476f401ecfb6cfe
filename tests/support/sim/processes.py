"""Processes of a simulation: groups of tasks in one loop that can be frozen and killed together.

A task belongs to the process in whose context it was made, and so does whatever it starts. Frozen (SIGSTOP), none of
the process's callbacks runs, not even timers: they wait in order and run, late, when it goes on. Killed (kill -9), its
tasks are cancelled; what they do while they unwind must have no effect outside, so the ports of a dead process do
nothing (`is_dead`).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

_CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """One simulated process; `main` is what it runs, and ends it."""

    def __init__(self, name: str, incarnation: int = 1) -> None:
        self.name = name
        self.incarnation = incarnation
        self.is_dead = False
        self.is_frozen = False
        self.freezes = 0  # so far
        self.task: asyncio.Task[Any] | None = None
        self._context = contextvars.copy_context()
        self._context.run(_CURRENT.set, self)
        self._tasks: dict[asyncio.Task[Any], None] = {}  # ordered, unlike a set
        self._held: list[asyncio.Handle] = []

    @staticmethod
    def current() -> Process | None:
        """The process whose code runs now; None outside of all."""
        return _CURRENT.get()

    @staticmethod
    def outside() -> contextvars.Context:
        """A context in which tasks belong to no process."""
        context = contextvars.copy_context()
        context.run(_CURRENT.set, None)
        return context

    @property
    def context(self) -> contextvars.Context:
        """A context in which tasks belong to this process."""
        return self._context.copy()

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `main` as this process."""
        loop = asyncio.get_running_loop()
        self.task = loop.create_task(main, name=f"{self.name}.{self.incarnation}", context=self.context)
        return self.task

    def freeze(self) -> None:
        """Run nothing of this process until `thaw`."""
        self.is_frozen = not self.is_dead
        self.freezes += 1

    def thaw(self) -> None:
        """Go on with what waited, in the order in which it became ready."""
        self.is_frozen = False
        held, self._held = self._held, []
        loop = asyncio.get_running_loop()
        assert hasattr(loop, "run_again"), "processes belong to a simulation"
        loop.run_again(held)

    def kill(self) -> None:
        """End the process without a word; its tasks are cancelled in the order in which they were made."""
        if self.is_dead:
            return
        self.is_dead = True
        self.thaw()
        for task in list(self._tasks):
            task.cancel()

    # For the loop

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """A task of this process was made."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None), context=contextvars.Context())
        if self.is_dead:
            task.cancel()

    def keep(self, handle: asyncio.Handle) -> None:
        """The callback has to wait: the process is frozen."""
        self._held.append(handle)


def process_of(context: contextvars.Context) -> Process | None:
    """The process to which a context belongs."""
    return context.get(_CURRENT)
