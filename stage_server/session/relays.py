"""The relays of a stage server: keeps their list, and listens at two of them if others cannot dial it.

scheduler ──UseRelays──▶ paths ──two for this peer──▶ Listen at each ──Open──▶ Accept ──▶ the own port
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio

from swarm.errors import RelaySilent, SwarmError
from swarm.limits import RELAY_LINKS_MAX, Bucket
from swarm.pki.identity import Wallet
from swarm.process.logs import Logger
from swarm.rpc.channel import translate, write
from swarm.rpc.links.dialling import Paths
from swarm.rpc.links.tunnel import SERVICE, accept, channel_to
from swarm.rpc.mapping import parse
from swarm.types import PeerId
from swarm.wire import relay_pb2
from swarm.wire.messages import RelayAt

AGAIN_S = (0.2, 5.0)  # pause before a relay is dialled again: first, longest
LINES_PER_S, LINES_AT_ONCE = 1.0, 100  # of the log, for all that relays say

_Call: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes]


class KnownRelays:
    """Tells the paths which relays there are; this stage server can be dialled."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def know(self, relays: Sequence[RelayAt]) -> None:
        """These relays are here now."""
        self._paths.know(relays)

    def passed(self) -> None:
        """The wallet has a newer pass."""


class RelayListener(KnownRelays):
    """Listens at the relays that lead to `peer`, whose own port is `own`, while `run` runs."""

    def __init__(self, paths: Paths, peer: PeerId, own: str, wallet: Wallet, log: Logger) -> None:
        super().__init__(paths)
        self._peer = peer
        self._own = own
        self._wallet = wallet
        self._log = log
        self._changed = asyncio.Event()
        self._renewed: dict[RelayAt, asyncio.Event] = {}
        self._links: dict[asyncio.Task[None], RelayAt] = {}
        self._lines = Bucket(LINES_PER_S, LINES_AT_ONCE)

    def know(self, relays: Sequence[RelayAt]) -> None:
        super().know(relays)
        self._changed.set()

    def passed(self) -> None:
        for event in self._renewed.values():
            event.set()

    async def run(self) -> None:
        """For ever."""
        listening: dict[RelayAt, asyncio.Task[None]] = {}
        try:
            while True:
                wanted = self._paths.relays_of(self._peer)
                for gone in [relay for relay in listening if relay not in wanted]:
                    listening.pop(gone).cancel()
                for relay in wanted:
                    if relay not in listening:
                        listening[relay] = asyncio.create_task(self._keep_listening(relay))
                self._changed.clear()
                await self._changed.wait()
        finally:
            for task in [*listening.values(), *self._links]:
                task.cancel()

    async def _keep_listening(self, relay: RelayAt) -> None:
        first_s, longest_s = AGAIN_S
        pause_s, since_s = first_s, 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                since_s = loop.time()
                try:
                    await self._listen(relay)
                except SwarmError as error:
                    self._log.warning("relay lost", relay=relay.name, reason=error.message)
                pause_s = first_s if loop.time() - since_s > longest_s else min(2 * pause_s, longest_s)
                await asyncio.sleep(pause_s)
        finally:
            self._renewed.pop(relay, None)

    async def _listen(self, relay: RelayAt) -> None:
        """One Listen, until it ends."""
        channel = channel_to(relay, self._wallet)
        method: Any = channel.stream_stream(f"/{SERVICE}/Listen")
        telling: asyncio.Task[None] | None = None
        try:
            call: _Call = method()
            renewed = self._renewed[relay] = asyncio.Event()
            telling = asyncio.create_task(self._tell(call, renewed))
            while isinstance(data := await call.read(), bytes):
                opened = parse(relay_pb2.ListenDown, data)
                if opened.connection:
                    self._accept(relay, opened)
                elif self._lines.take(asyncio.get_running_loop().time()):
                    self._log.info("listens at a relay", relay=relay.name, address=relay.address)
        except grpc.RpcError as error:
            raise translate(error, f"relay {relay.name}", unavailable=RelaySilent) from None
        finally:
            if telling is not None:
                telling.cancel()
            await channel.close()

    async def _tell(self, call: _Call, renewed: asyncio.Event) -> None:
        """Show the relay the newest pass: it lets in callers with a pass for the same job."""
        try:
            while True:
                renewed.clear()
                await write(call, relay_pb2.ListenUp(token=self._wallet.pass_token).SerializeToString())
                await renewed.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader learns why

    def _accept(self, relay: RelayAt, opened: relay_pb2.ListenDown) -> None:
        """Dial the relay for the link, unless it has named more than it may carry to one stage server."""
        if sum(link == relay for link in self._links.values()) >= RELAY_LINKS_MAX:
            return

        async def carry() -> None:
            try:
                await accept(relay, opened.connection, self._own, self._wallet)
            except SwarmError as error:
                if self._lines.take(asyncio.get_running_loop().time()):
                    self._log.warning("link through a relay not accepted", relay=relay.name, reason=error.message)

        self._log.debug("link through a relay", relay=relay.name, sender=opened.sender, job_id=opened.job)
        task = asyncio.create_task(carry())
        self._links[task] = relay
        task.add_done_callback(self._links.pop)
