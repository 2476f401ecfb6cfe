"""A relay's session with its scheduler: the key for passes and revocations come down, the carried bytes go up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from swarm.errors import IncompatibleVersion, NotAdmitted, Revoked, SchedulerUnreachable, SwarmError
from swarm.pki.identity import Wallet
from swarm.pki.names import scheduler_of
from swarm.process.logs import Logger
from swarm.relay.service import RelayService
from swarm.rpc.channel import connect, translate, write
from swarm.rpc.mapping import from_message, parse
from swarm.types import PROTOCOL_VERSION
from swarm.wire import relay_pb2
from swarm.wire.messages import CutOff, Welcome

SERVICE = "swarm.wire.Relays"
REPORT_S = 5.0
AGAIN_S = (0.2, 5.0)  # pause before the scheduler is dialled again: first, longest
ROWS_MAX = 1024  # of one report

_Call: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes]


class RelaySession:
    """Keeps a relay attached to its scheduler; links go on while it is away."""

    def __init__(
        self, address: str, product: str, service: RelayService, wallet: Wallet, log: Logger, report_s: float = REPORT_S
    ) -> None:
        """`address` is where stage servers dial this relay."""
        self._hello = relay_pb2.RelayHello(protocol=PROTOCOL_VERSION, product=product, address=address)
        self._service = service
        self._wallet = wallet
        self._log = log
        self._report_s = report_s
        self.is_attached = False

    async def keep(self, find_scheduler: Callable[[], Awaitable[str]]) -> None:
        """For ever; raises only what no waiting mends: Revoked, IncompatibleVersion, a first NotAdmitted."""
        first_s, longest_s = AGAIN_S
        was_attached, pause_s = False, first_s
        while True:
            try:
                await self._attach(await find_scheduler())
            except (Revoked, IncompatibleVersion):
                raise
            except SwarmError as error:
                if isinstance(error, NotAdmitted) and not was_attached and not self.is_attached:
                    raise
                self._log.warning("scheduler not reached", reason=error.message)
            was_attached = was_attached or self.is_attached
            pause_s = first_s if self.is_attached else min(2 * pause_s, longest_s)
            self.is_attached = False
            await asyncio.sleep(pause_s)

    async def _attach(self, scheduler: str) -> None:
        """One session, until it ends."""
        identity = self._wallet.identity
        assert identity is not None, "a relay has a certificate"
        channel = connect(scheduler, identity, scheduler_of(identity.cluster).dns)
        telling: asyncio.Task[None] | None = None
        try:
            method: Any = channel.stream_stream(f"/{SERVICE}/Attach")
            call: _Call = method()
            telling = asyncio.create_task(self._tell(call))
            while isinstance(data := await call.read(), bytes):
                said = parse(relay_pb2.RelayDown, data)
                if said.HasField("welcome"):
                    self._service.welcomed(from_message(Welcome, said.welcome))
                    self.is_attached = True
                    self._log.info("attached to scheduler", scheduler=scheduler)
                elif said.HasField("cut_off"):
                    self._service.cut_off(from_message(CutOff, said.cut_off))
            self._log.warning("scheduler ended the session", scheduler=scheduler)
        except grpc.RpcError as error:
            raise translate(error, scheduler, unavailable=SchedulerUnreachable) from None
        finally:
            if telling is not None:
                telling.cancel()
            await channel.close()

    async def _tell(self, call: _Call) -> None:
        try:
            await write(call, relay_pb2.RelayUp(hello=self._hello).SerializeToString())
            while True:
                await asyncio.sleep(self._report_s)
                rows = [
                    relay_pb2.Carried(job=job, sender=sender, to=to, size_bytes=size_bytes)
                    for (job, sender, to), size_bytes in self._service.take_used().items()
                ]
                for start in range(0, len(rows), ROWS_MAX):
                    await write(call, relay_pb2.RelayUp(carried=rows[start : start + ROWS_MAX]).SerializeToString())
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader learns why
