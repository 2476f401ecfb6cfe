"""Writes that a database may refuse for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from swarm.errors import DatabaseRejected, DatabaseUnavailable

PATIENCE_S = 10.0  # that what can be written later, too, waits for a database that takes no writes


async def patiently(
    write: Callable[[], Awaitable[None]],
    patience_s: float,
    refused: Callable[[DatabaseUnavailable], None] = lambda error: None,
) -> None:
    """Repeat a refused write, for `patience_s`; then DatabaseUnavailable. `refused` hears of refusals 1, 2, 4 ..."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s

    def before_sleep(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, DatabaseUnavailable) and state.attempt_number & (state.attempt_number - 1) == 0:
            refused(error)

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(DatabaseUnavailable),
        wait=wait_random_exponential(multiplier=0.1, max=5.0),
        stop=lambda _state: loop.time() >= deadline_s,  # its clock: simulated time counts
        before_sleep=before_sleep,
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            await write()


async def or_say(write: Callable[[], Awaitable[None]], patience_s: float, say: Callable[..., None]) -> None:
    """The same for what is known in memory until the scheduler ends: `say` hears the `reason` why it is not stored."""
    try:
        await patiently(write, patience_s)
    except (DatabaseUnavailable, DatabaseRejected) as error:
        say(reason=error.message)
