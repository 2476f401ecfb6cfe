"""A gRPC server that a test has made, at a free port of this machine, and links, as long as a test needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from swarm.pki.identity import Wallet
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.peers import GrpcPeerLinks


@asynccontextmanager
async def serving(server: grpc.aio.Server, wallet: Wallet | None = None, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Its address."""
    port = bind(server, f"{host}:0", wallet)
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(None)


def server_of(
    guard: grpc.aio.ServerInterceptor | None = None,
    meter: grpc.aio.ServerInterceptor | None = None,
    service: str = "test.Service",
    **methods: grpc.RpcMethodHandler[bytes, bytes],
) -> grpc.aio.Server:
    """A server with these methods of one service, by name."""
    server = new_server(guard, meter=meter)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    return server


@asynccontextmanager
async def links_here() -> AsyncIterator[GrpcPeerLinks]:
    links = GrpcPeerLinks()
    try:
        yield links
    finally:
        await links.close()
