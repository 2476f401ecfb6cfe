"""The relay process: everything is made here, handed down, and ends with one TaskGroup."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from swarm.errors import InvalidConfig
from swarm.listening import LOOPBACK, check_free, host_for
from swarm.pki.https import Https
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.pki.tokens import JoinLine
from swarm.process.callers import Logins
from swarm.process.http import HttpEndpoint
from swarm.process.lifecycle import check_announce, check_listen, lock_folder, say_ready
from swarm.process.logs import get_logger
from swarm.process.malloc import keep_trimmed
from swarm.relay.budget import Budget
from swarm.relay.metrics import RelayMetrics
from swarm.relay.service import RelayService, add_relay_service, may_relay
from swarm.relay.session import RelaySession
from swarm.rpc.channel import NARROW, bind, new_server
from swarm.rpc.enrolment import Enrolment, once_reached, own_name, tell_host
from swarm.rpc.guard import Guard, Meter
from swarm.text import is_loopback
from swarm.types import PROTOCOL_VERSION

STOP_S_MAX = 0.5  # links stay open until we break them
PORT = 7955


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The relay's flags, checked."""

    listen: str  # "" = port 7955 at this machine's address on the way to the scheduler
    announce: str  # "" = the address it listens at
    scheduler: str  # "" = the one that it joined
    join: JoinLine | None
    http_host: str
    http_port: int | None  # None = off
    data_dir: Path
    budget: Budget
    logins: Logins = field(default_factory=Logins)  # that may read metrics on loopback

    def check(self) -> None:
        """InvalidConfig, UsageError."""
        if self.listen:
            check_listen(self.listen)
        check_announce(self.listen or f"{LOOPBACK}:{PORT}", self.announce)


async def serve(options: RelayOptions) -> None:
    """Run until cancelled; errors as for a stage server."""
    log, product = get_logger("relay"), metadata.version("swarm-stages")
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_folder(options.data_dir))
        if options.listen:  # before a token is used up
            check_free(options.listen)
        name, wallet = own_name(options.data_dir), Wallet()
        enrolment = Enrolment(name, options.data_dir / "pki", wallet, log, role=Role.RELAY)
        if options.join is not None:
            await enrolment.join(options.join)

        async def find() -> str:
            """Where the scheduler is; by then this process has a certificate for it."""
            address = options.scheduler or enrolment.scheduler
            if not address:
                raise InvalidConfig(
                    f"{options.data_dir} does not say where its scheduler is",
                    hint="join first: swarm relay --join LINE; an admin prints LINE with: "
                    "swarm token create --role relay",
                )
            await enrolment.admit(address)
            return address

        async def find_host() -> str:
            """Where this process listens, as no flag says it."""
            return await asyncio.to_thread(host_for, await find())

        await once_reached(find, log)  # it proves who it is from the first moment on
        listen = options.listen
        if not listen:
            host = LOOPBACK if options.announce else await once_reached(find_host, log)
            listen = f"{host}:{PORT}"
            check_free(listen)
            if not is_loopback(host):
                tell_host(log, host)
        identity = wallet.identity
        assert identity is not None
        metrics = RelayMetrics(product, PROTOCOL_VERSION)
        service = RelayService(identity.cluster, metrics, budget=options.budget)
        metrics.process.certificate(lambda: wallet.ends_unix_s)
        guard = Guard(may_relay, lambda method, who, error: metrics.process.auth_failed(error.code))
        server = new_server(guard, more=NARROW, meter=Meter(metrics.process.handled))
        add_relay_service(server, service)
        host, bound = listen.rpartition(":")[0], bind(server, listen, wallet)
        address = options.announce or f"{host}:{bound}"
        await server.start()
        stack.push_async_callback(server.stop, STOP_S_MAX)
        session = RelaySession(address, product, service, wallet, log)
        http_address = ""
        if options.http_port is not None:
            endpoint = HttpEndpoint(
                options.http_host,
                options.http_port,
                metrics.registry,
                lambda: [] if session.is_attached else ["no scheduler"],
                asyncio.get_running_loop(),
                next_free=True,
                logins=options.logins,
                door=None if is_loopback(options.http_host) else Https(wallet, options.data_dir / "pki/https.pem"),
            )
            http_address = f"{options.http_host}:{endpoint.start()}"
            stack.callback(endpoint.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(enrolment.renew())
        tasks.create_task(keep_trimmed())
        log.info("relay started", name=name, address=address, http=http_address)
        say_ready("relay", name=name, address=address, http=http_address)
        await session.keep(find)
