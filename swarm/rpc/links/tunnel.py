"""Both ends of a tunnel through a relay: a socket on this machine, and the stream that carries its bytes.

    gRPC ─TLS(name=PEER)─▶ 127.0.0.1:x ──Connect──▶ relay ◀──Accept── 127.0.0.1:y ─▶ the peer's own Peer server

TLS is between the two gRPCs, so a relay sees only sizes and times, and a byte that it changes breaks the connection.
The socket takes one connection and never another one. Decision: docs/decisions/057.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from swarm.errors import CorruptFrame, PeerUnavailable, RelaySilent, SwarmError
from swarm.listening import LOOPBACK
from swarm.pki.identity import Wallet
from swarm.pki.names import Principal, Role
from swarm.rpc import passes
from swarm.rpc.channel import NARROW, connect, translate
from swarm.rpc.mapping import parse
from swarm.types import PeerId
from swarm.wire import relay_pb2
from swarm.wire.messages import RelayAt

SERVICE: Final = "swarm.wire.Relay"
TO_KEY: Final = "swarm-to"
CONNECTION_KEY: Final = "swarm-connection"
OPEN_S_MAX: Final = 3.0  # until a relay is connected, then until it has heard, then until the other end has accepted
# Little may wait in a tunnel: a ping between its ends stands behind all of it, and must come back in time also where a
# home connection sends 10 Mbit/s.
SOCKET_BYTES: Final = 64 << 10
READ_BYTES: Final = 64 << 10

_Call: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes]
_END: Final = relay_pb2.Bytes(end=True).SerializeToString()


def channel_to(relay: RelayAt, wallet: Wallet) -> grpc.aio.Channel:
    """A channel to a relay; the relay has to prove its name."""
    identity = wallet.identity
    assert identity is not None, "relays are for those who have certificates"
    name = Principal(identity.cluster, Role.RELAY, relay.name).dns
    return connect(relay.address, identity, name, NARROW)


class Tunnel:
    """A way to one stage server: `address` is on this machine."""

    def __init__(self, address: str, channel: grpc.aio.Channel, server: asyncio.Server) -> None:
        self.address = address
        self._channel = channel
        self._server = server
        self.task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Break it."""
        self._server.close()
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
        await self._channel.close()


async def open_tunnel(relay: RelayAt, peer: PeerId, wallet: Wallet) -> Tunnel:
    """A tunnel that the peer has accepted; PeerUnavailable if it does not listen there, or the relay's answer.

    RelaySilent if the relay itself does not answer.
    """
    channel = channel_to(relay, wallet)
    try:
        method: Any = channel.stream_stream(f"/{SERVICE}/Connect")
        call: _Call = method(metadata=((TO_KEY, peer), *passes.metadata(wallet.pass_token)))
        limit_s = OPEN_S_MAX
        try:
            async with asyncio.timeout(limit_s):
                await call.wait_for_connection()
            async with asyncio.timeout(limit_s):
                await call.initial_metadata()
            limit_s = 2 * OPEN_S_MAX  # the relay gives the other end OPEN_S_MAX, and its answer has a way to go
            async with asyncio.timeout(limit_s):
                answer = await call.read()
        except TimeoutError:
            raise RelaySilent(f"relay {relay.name} did not answer within {limit_s:g} s") from None
        except grpc.RpcError as error:
            raise translate(error, f"relay {relay.name}", unavailable=RelaySilent) from None
        if answer is grpc.aio.EOF:
            raise PeerUnavailable(f"relay {relay.name} ended the link")
        made = await _listen_once(channel, call)
    except BaseException:
        await channel.close()
        raise
    return made


async def _listen_once(channel: grpc.aio.Channel, call: _Call) -> Tunnel:
    """Carry the first connection to a port of this machine; there is no second one."""
    taken = False
    tunnel: Tunnel

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        if taken:
            writer.transport.abort()
            return
        taken = True
        server.close()
        tunnel.task = asyncio.create_task(carry(reader, writer, call))  # its own: asyncio complains of cancelled ones

    server = await asyncio.start_server(serve, LOOPBACK.strip("[]"), 0, limit=READ_BYTES, backlog=1)
    _narrow(server.sockets[0])  # the connections that it takes are alike
    tunnel = Tunnel(f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}", channel, server)
    return tunnel


async def accept(relay: RelayAt, connection: str, own: str, wallet: Wallet) -> None:
    """The end of a stage server that listens at a relay: carry one link to its own port `own`, until it ends.

    SwarmError if it does not come about; a link that breaks later is the business of its ends.
    """
    channel = channel_to(relay, wallet)
    try:
        host, _, port = own.rpartition(":")
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=READ_BYTES)
        except (OSError, TimeoutError) as error:
            raise PeerUnavailable(f"the own port {own} takes no connection: {error}") from None
        method: Any = channel.stream_stream(f"/{SERVICE}/Accept")
        await carry(reader, writer, method(metadata=((CONNECTION_KEY, connection),)))
    finally:
        await channel.close()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: _Call) -> None:
    """Carry bytes both ways until both have ended, or either end breaks: then the other one is broken too."""
    _narrow(writer.get_extra_info("socket"))
    writer.transport.set_write_buffer_limits(SOCKET_BYTES)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_outwards(reader, call))
            tasks.create_task(_inwards(call, writer))
        writer.close()
        await call.done_writing()
        async with asyncio.timeout(OPEN_S_MAX):
            await call.code()  # the relay has carried all
            await writer.wait_closed()
    except* (grpc.RpcError, asyncio.InvalidStateError, OSError, SwarmError, TimeoutError):
        pass
    finally:
        call.cancel()
        writer.transport.abort()


def _narrow(door: socket.socket) -> None:
    for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        door.setsockopt(socket.SOL_SOCKET, side, SOCKET_BYTES)


async def _outwards(reader: asyncio.StreamReader, call: _Call) -> None:
    while data := await reader.read(READ_BYTES):
        await call.write(relay_pb2.Bytes(payload=data).SerializeToString())
    await call.write(_END)


async def _inwards(call: _Call, writer: asyncio.StreamWriter) -> None:
    while isinstance(data := await call.read(), bytes):
        message = parse(relay_pb2.Bytes, data)
        if message.payload:
            writer.write(message.payload)
            await writer.drain()
        if message.end:
            with suppress(OSError):
                writer.write_eof()
            return
    raise CorruptFrame("the link broke off")
