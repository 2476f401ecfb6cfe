"""Every call that ends is counted once, by how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from swarm.errors import NotFound
from swarm.rpc.channel import abort, bind, connect, new_server
from swarm.rpc.guard import Guard
from swarm.rpc.meter import Meter
from tests.support.members import LOOPBACK

Calls = list[tuple[str, str]]


class Service:
    async def answers(self, request: bytes, context: Any) -> bytes:
        return request

    async def refuses(self, request: bytes, context: Any) -> bytes:
        await abort(context, NotFound("there is none", hint="look"))
        raise AssertionError

    async def fails(self, request: bytes, context: Any) -> bytes:
        raise ValueError("a fault of ours")

    async def streams(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        yield request

    async def hangs(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        await asyncio.Event().wait()

    async def writes(self, request: bytes, context: Any) -> None:
        await context.write(request)


@asynccontextmanager
async def serving(calls: Calls, guard: Guard | None = None) -> AsyncIterator[grpc.aio.Channel]:
    def handled(method: str, code: str, seconds: float) -> None:
        assert 0.0 <= seconds < 10.0
        calls.append((method, code))

    server, service = new_server(guard, meter=Meter(handled)), Service()
    unary = {
        name: grpc.unary_unary_rpc_method_handler(getattr(service, name)) for name in ("answers", "refuses", "fails")
    }
    streams = {
        name: grpc.unary_stream_rpc_method_handler(getattr(service, name)) for name in ("streams", "hangs", "writes")
    }
    handlers = grpc.method_handlers_generic_handler("swarm.wire.Test", unary | streams)
    server.add_generic_rpc_handlers((handlers,))
    port = bind(server, LOOPBACK)
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def until(calls: Calls, count: int) -> None:
    async with asyncio.timeout(60):
        while len(calls) < count:
            await asyncio.sleep(0.01)


async def test_a_call_is_counted_by_its_method_and_status() -> None:
    calls: Calls = []
    async with serving(calls) as channel:
        assert await channel.unary_unary("/swarm.wire.Test/answers")(b"1") == b"1"
        for method in ("streams", "writes"):
            parts = [part async for part in channel.unary_stream(f"/swarm.wire.Test/{method}")(b"1")]
            assert set(parts) == {b"1"}
        for method in ("refuses", "fails", "nothing"):
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary(f"/swarm.wire.Test/{method}")(b"1")
        await until(calls, 5)
    expected = {"answers": "OK", "streams": "OK", "writes": "OK", "refuses": "NOT_FOUND", "fails": "UNKNOWN"}
    assert calls == [(f"Test/{method}", code) for method, code in expected.items()], "no caller makes up a label"


async def test_a_stream_that_its_caller_leaves_was_cancelled() -> None:
    calls: Calls = []
    async with serving(calls) as channel:
        call = channel.unary_stream("/swarm.wire.Test/hangs")(b"1")
        assert await call.read() == b"1"
        call.cancel()
        await until(calls, 1)
    assert calls == [("Test/hangs", "CANCELLED")]


async def test_a_call_that_a_guard_refuses_is_counted_too() -> None:
    calls: Calls = []
    async with serving(calls, Guard(lambda caller, method: None)) as channel:
        with pytest.raises(grpc.RpcError):
            await channel.unary_unary("/swarm.wire.Test/answers")(b"1")
        await until(calls, 1)
    assert calls == [("Test/answers", "UNAUTHENTICATED")]
