"""Devices that compute on the event loop, in virtual time."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from stage_server.device import Timed
from swarm.model.stage import Stage
from swarm.types import Microbatch

if TYPE_CHECKING:
    import pytest  # benchmarks use this module without it

T = TypeVar("T")

ASIDE_SHARE = 0.01  # of the time of a microbatch: what a piece of work beside the computations takes


class InlineDevice:
    """Computes at once, then lets `seconds()` of virtual time pass."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.name = torch.device("cpu")
        self._share = 1.0  # of `seconds()`: what the work that runs now takes
        self._seconds = seconds
        self._turn = asyncio.Lock()

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.ensure_future(self._after(work(), 0.0))

    def timed(self, work: Callable[[], T]) -> Awaitable[Timed[T]]:
        seconds, self._share = self._seconds(), 1.0
        result = work()
        seconds *= self._share
        return asyncio.ensure_future(self._after(Timed(result, seconds), seconds))

    def halving(self, stage: Stage) -> Stage:
        """Let dx alone, and the gradients of the weights alone, take half as long as a backward of this stage."""

        def backward(*given: Any, keep: bool = False, **named: Any) -> Any:
            self._share = 0.5 if keep else 1.0
            return type(stage).backward(stage, *given, keep=keep, **named)

        def weigh(microbatch: Microbatch) -> bool:
            self._share = 0.5
            return type(stage).weigh(stage, microbatch)

        stage.backward, stage.weigh = backward, weigh  # type: ignore[method-assign]
        return stage

    def aside(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.ensure_future(_beside(work(), ASIDE_SHARE * self._seconds()))

    def release(self) -> None:
        pass

    async def _after(self, result: T, seconds: float) -> T:
        async with self._turn:  # asyncio locks are fair: first come, first served, as on the thread
            await asyncio.sleep(seconds)
        return result


async def _beside(result: T, seconds: float) -> T:
    await asyncio.sleep(seconds)
    return result


class Steady(InlineDevice):
    """Takes a tenth of a second for a forward, and for a backward."""

    def __init__(self, _seconds: object) -> None:
        super().__init__(lambda: 0.1)


class SimDevice:
    """A compute thread in virtual time: each piece of work first takes its seconds, then has its effect, in order."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.name = torch.device("cpu")
        self.slowness = 1.0
        self._seconds = seconds
        self._work: deque[tuple[Callable[[], Any], asyncio.Future[Any], float]] = deque()
        self._ready = asyncio.Event()

    def run(self, work: Callable[[], Any]) -> Awaitable[Any]:
        return self._put(work, 0.0)

    def timed(self, work: Callable[[], Any]) -> Awaitable[Timed[Any]]:
        seconds = self._seconds() * self.slowness
        return self._put(lambda: Timed(work(), seconds), seconds)

    async def aside(self, work: Callable[[], Any]) -> Any:
        return work()

    def release(self) -> None:
        pass

    def _put(self, work: Callable[[], Any], seconds: float) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work.append((work, future, seconds))
        self._ready.set()
        return future

    async def work_forever(self) -> None:
        while True:
            while not self._work:
                self._ready.clear()
                await self._ready.wait()
            work, future, seconds = self._work.popleft()
            if seconds:
                await asyncio.sleep(seconds)
            try:
                result = work()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)


def noted_threads(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[threading.Thread]:
    """The threads on which a function is called from now on, call by call."""
    called, threads = getattr(owner, name), []

    def noted(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return called(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    return threads
