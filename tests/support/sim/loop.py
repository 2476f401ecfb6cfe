"""An asyncio event loop whose time jumps: hours of protocol in seconds of test, the same every time.

The loop never waits. Where asyncio would wait for files until the next timer is due, it sets its own clock to that
time, and `loop.time()` reads this clock. Where asyncio would wait for ever, nothing can happen any more: the program is
stuck, and `SimulationStuck` names what waits. Flows need no change: `asyncio.sleep` and `asyncio.timeout` ask the loop.

Two runs with one seed do the same in the same order. Tasks and futures are numbered, because asyncio keeps them in sets
and their default order is that of memory addresses (a TaskGroup cancels its children in it). Code under simulation must
not iterate over sets of strings (their order changes from process to process) or read clocks. Tasks of a simulated
process (processes.py) run only while it is not frozen.
No files, no sockets, no threads: `run_in_executor` calls the function at once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, copy_context
from typing import Any, Final, TypeVar, TypeVarTuple

from tests.support.sim.processes import Process, process_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LIMIT_S: Final = 7 * 24 * 3600.0
TIMERS_MAX: Final = 100  # as in asyncio: with more of them, timers that were cancelled are thrown out
CANCELLED_RATIO_MAX: Final = 0.5


class SimulationStuck(Exception):
    """Nothing can happen any more, but tasks still wait; or the simulated time ran out."""


def run(main: Coroutine[Any, Any, T], *, seed: int, limit_s: float = LIMIT_S) -> T:
    """Run `main` on a virtual loop from time 0 and give its result.

    `seed` feeds the generators of `rng`, and is noted on whatever exception comes out. SimulationStuck if all tasks
    wait for something that cannot come, or if simulated time passes `limit_s`.
    """
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, limit_s)) as runner:
            return runner.run(main)
    except Exception as error:
        error.add_note(f"in a simulation with seed {seed}")
        raise


def rng(name: str) -> random.Random:
    """The generator of the component `name` in the running simulation; each call starts it anew.

    Components do not share generators: an extra draw by one would change the draws of all others.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "rng() belongs to a simulation"
    return random.Random(f"{loop.seed}/{name}")


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop that `run` uses."""

    def __init__(self, seed: int, limit_s: float = LIMIT_S) -> None:
        self.seed = seed
        self.next_number = itertools.count(1).__next__  # a number that no task or future of this loop has
        self._now_s = 0.0
        self._limit_s = limit_s
        self._thread = threading.get_ident()
        super().__init__(_NoFiles())
        self.set_task_factory(_numbered_task)

    def time(self) -> float:
        return self._now_s

    def create_future(self) -> asyncio.Future[Any]:
        return _NumberedFuture(loop=self)

    def run_again(self, handles: list[asyncio.Handle]) -> None:
        """Run callbacks that a frozen process kept."""
        self._ready.extend(handles)

    # What follows is asyncio's base loop, whose parts typeshed does not show, without files, threads and debugging:
    # a simulation passes here some ten thousand times a second.
    _ready: deque[Any]
    _scheduled: list[Any]

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, jump to the next timer first."""
        ready, scheduled = self._ready, self._scheduled
        if len(scheduled) > TIMERS_MAX and self._timer_cancelled_count / len(scheduled) > CANCELLED_RATIO_MAX:
            for timer in scheduled:
                timer._scheduled = not timer._cancelled
            self._scheduled = scheduled = [timer for timer in scheduled if not timer._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        else:
            while scheduled and scheduled[0]._cancelled:
                self._timer_cancelled_count -= 1
                heapq.heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._jump()
        due_s = self._now_s + self._clock_resolution  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._when < due_s:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):  # and not what these make ready
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = process_of(handle._context)
            if process is None or not process.is_frozen:
                handle._run()
            else:
                process.keep(handle)

    def _jump(self) -> None:
        """Let time pass until the first timer."""
        if not self._scheduled:
            raise SimulationStuck(f"nothing can happen any more at {self._now_s:.3f} s; waiting: {self._waiting()}")
        self._now_s += max(0.0, self._scheduled[0]._when - self._now_s)
        if self._now_s > self._limit_s:
            raise SimulationStuck(f"simulated time passed its limit of {self._limit_s:g} s; waiting: {self._waiting()}")

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:  # type: ignore[attr-defined]
            raise RuntimeError("Event loop is closed")
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a thread called into a simulation; nothing there may run outside its loop")
        return self.call_soon(callback, *args, context=context)

    def _waiting(self) -> str:
        tasks = sorted((task for task in asyncio.all_tasks(self) if not task.done()), key=hash)
        return "; ".join(f"{task.get_name()} at {_place(task)}" for task in tasks) or "no task"


class _Handle(asyncio.Handle):
    """A callback; never traced to its source."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set is its number."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, **options: Any) -> None:
        self._number = loop.next_number()
        options.setdefault("name", f"task-{self._number}")
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class _NumberedFuture(asyncio.Future[Any]):
    """A future whose place in a set is its number."""

    def __init__(self, *, loop: VirtualLoop) -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


def _numbered_task(loop: Any, coro: Any, **options: Any) -> _NumberedTask:
    task = _NumberedTask(coro, loop=loop, **options)
    context = options.get("context")
    process = Process.current() if context is None else process_of(context)
    if process is not None:
        process.adopt(task)
    return task


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: function and line of its innermost frame."""
    stack = task.get_stack()
    if not stack:
        return "its start"
    frame = stack[-1]
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


class _NoFiles(selectors.BaseSelector):
    """Never asked: the loop jumps instead of waiting."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        raise AssertionError("a simulation waits for no files")

    # asyncio registers the pipe by which threads wake the loop; it is never used here. Nothing else has a file.
    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._keys:
            raise RuntimeError("a simulation has no files and no sockets")
        descriptor = fileobj.fileno() if hasattr(fileobj, "fileno") else fileobj
        key = self._keys[descriptor] = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj.fileno() if hasattr(fileobj, "fileno") else fileobj)

    def get_map(self) -> dict[int, selectors.SelectorKey]:  # type: ignore[override]  # a dict is the mapping it wants
        return self._keys
