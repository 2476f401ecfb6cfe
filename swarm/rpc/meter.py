"""Counts the calls that a server answers, by method and by how they end, and takes their time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from swarm.rpc.guard import kind

Handled: TypeAlias = Callable[[str, str, float], None]
"""Hears of a call that ended: its method ("Jobs/Get"), the name of its status code, and how long it took, seconds."""

_OURS = "swarm.wire."


class Meter(grpc.aio.ServerInterceptor):
    """Reports every call of an existing method to `handled`, also calls that a guard refused."""

    def __init__(self, handled: Handled) -> None:
        self._handled = handled

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        name = f"{kind(handler.request_streaming)}_{kind(handler.response_streaming)}"
        behaviour = getattr(handler, name)
        method = handler_call_details.method.removeprefix("/").removeprefix(_OURS)

        async def answer(request: Any, context: Any) -> Any:
            with self._timed(method, context):
                return await behaviour(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._timed(method, context):
                async with aclosing(behaviour(request, context)) as replies:
                    async for reply in replies:
                        yield reply

        metered: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{name}_rpc_method_handler")(
            stream if inspect.isasyncgenfunction(behaviour) else answer,
            handler.request_deserializer,
            handler.response_serializer,
        )
        return metered

    @contextmanager
    def _timed(self, method: str, context: Any) -> Iterator[None]:
        began_s, code = time.monotonic(), grpc.StatusCode.UNKNOWN.name
        try:
            yield
            code = grpc.StatusCode.OK.name
        except grpc.aio.AbortError:
            code = context.code().name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self._handled(method, code, time.monotonic() - began_s)
