"""The stage-server process: everything is made here, handed down, and ends with one TaskGroup."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc.aio
import torch

from stage_server.device import ThreadDevice, watch_memory
from stage_server.metrics import StageServerMetrics
from stage_server.options import MemoryShare, StageServerOptions
from stage_server.ports import HubPolicy, MemoryBudget
from stage_server.session.gate import PassGate
from stage_server.session.relays import KnownRelays, RelayListener
from stage_server.session.server import ServerPorts, ServerSettings, StageServer
from swarm.errors import InvalidConfig, RoleForbids, SwarmError
from swarm.limits import Bucket
from swarm.listening import LOOPBACK, check_free, host_for
from swarm.model.runtime import (
    CONTEXT_BYTES,
    choose_device,
    describe_device,
    free_bytes,
    is_gpu,
    is_slow_at_bfloat16,
    limit_memory,
    total_bytes,
    use,
    used_bytes,
)
from swarm.mqtt import topics
from swarm.mqtt.bus import Bus
from swarm.mqtt.discovery import find_scheduler
from swarm.mqtt.endpoint import parse_url
from swarm.pki.https import Https
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.process.cores import cores
from swarm.process.http import HttpEndpoint
from swarm.process.lifecycle import Farewell, lock_first, own_addresses, say_ready
from swarm.process.logs import Logger, configure, get_logger
from swarm.process.malloc import keep_trimmed, tune_malloc
from swarm.rpc.channel import CONNECTION_S_MAX, PATIENT, bind, new_server
from swarm.rpc.enrolment import Enrolment, once_reached, own_name, tell_host
from swarm.rpc.guard import Caller, Guard, Meter
from swarm.rpc.links.dialling import Paths
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.rpc.session import GrpcSchedulerLink
from swarm.text import is_loopback, is_wildcard, size
from swarm.types import PROTOCOL_VERSION, Memory, PeerId
from swarm.wire.messages import Hello

STOP_S_MAX = 0.5  # neighbours' streams stay open until we break them
PORTS_TRIED_MAX = 100
DENIALS_PER_S, DENIALS_AT_ONCE = 1.0, 20  # that are written down
HANG_UP_S_MAX = 2.0  # how long a scheduler may take to end a session that this process leaves


async def serve(options: StageServerOptions, farewell: Farewell) -> None:
    """Run until cancelled; sets how `farewell` leaves in order.

    `options` have been checked. Raises InvalidConfig if an address, folder or device cannot be used or lacks the memory
    that is offered, NotAllowed if the folder is in use.
    """
    tune_malloc()
    device_name = choose_device(options.device)
    use(device_name)  # for what arrives on this thread
    offered = _offered(options.max_memory, device_name)
    threads = options.threads or min(torch.get_num_threads(), cores())  # torch knows OMP_NUM_THREADS, and no quota
    product = metadata.version("swarm-stages")
    metrics = StageServerMetrics(product, PROTOCOL_VERSION)
    log = get_logger("stage-server")
    async with AsyncExitStack() as stack:
        # Two processes under one identity would push each other out for ever.
        folder, lock = lock_first(options.data_dirs)
        stack.enter_context(lock)
        check_free(options.listens)
        peer, wallet = PeerId(own_name(folder)), Wallet()
        enrolment = await _enrolled(options, peer, folder, wallet, metrics)
        options = await _with_host(options, enrolment, partial(_find, options, enrolment, wallet, folder))
        find = partial(_find, options, enrolment, wallet, folder)
        speaks_tls = not options.insecure and not options.is_alone
        if speaks_tls:  # others reach this process: it proves who it is from the first moment on
            await once_reached(find, log)
        device = ThreadDevice(device_name, threads)
        stack.callback(device.close)
        paths = Paths(proxy=options.proxy, host=options.address(0).rpartition(":")[0])
        links = GrpcPeerLinks(metrics, wallet=wallet, paths=paths)
        stack.push_async_callback(links.close)
        denials = Denials(metrics, log)
        server, port = _peer_server(options, wallet if speaks_tls else None, denials, metrics)
        stage_server: StageServer | None = None
        gate: PassGate | None = None
        if not options.insecure:
            gate = PassGate(wallet, lambda: None if stage_server is None else stage_server.place, denials.note)
        http_address = _serve_http(
            options, metrics, lambda: stage_server is not None and stage_server.is_attached, wallet, folder, stack
        )
        limit_memory(device_name, offered.device_bytes)
        used = partial(used_bytes, device_name)
        metrics.memory(used, offered)
        identity = _hello(options, peer, product, device_name, threads, offered, port, http_address)
        bus = _bus(options, identity, metrics) if options.broker else None
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        listener = _relay_listener(options, paths, peer, port, wallet) if options.via_relay else None
        relays = None if options.insecure else listener or KnownRelays(paths)
        dial = partial(GrpcSchedulerLink, wallet=wallet)
        ports = ServerPorts(device, links, find, dial, tasks, metrics, log, passes=gate, relays=relays)
        stage_server = StageServer(identity, ports, _settings(options, offered))
        metrics.identify(peer, served := partial(_served, stage_server))
        metrics.watch_links(stage_server.links)
        _forward_log(options, stage_server, peer)
        if enrolment is not None:
            tasks.create_task(enrolment.renew())
        tasks.create_task(watch_memory(used, offered.device_bytes, device, metrics, log))
        tasks.create_task(keep_trimmed(lambda: served() is not None))
        add_peer_service(server, stage_server, metrics, stage_server, gate)
        await server.start()
        if listener is not None:
            tasks.create_task(listener.run())
        stack.push_async_callback(server.stop, STOP_S_MAX)
        if bus is not None:
            bus.announce(topics.peer(peer, options.swarm), _presence(identity))
            tasks.create_task(bus.run())
        facts = {"peer": peer, "address": identity.address, "http": http_address}
        log.info("stage server started", **facts, device=identity.device, folder=str(folder))
        say_ready("stage-server", **facts)
        farewell.begin = partial(_hand_over, stage_server, tasks, options.drain_timeout_s, log)
        await stage_server.serve()


def _offered(max_memory: MemoryShare, device: torch.device) -> Memory:
    """The memory of the device, and of the host beside a GPU, that jobs may take."""
    free = free_bytes(device)
    memory_bytes = max_memory.of(free, total_bytes(device))
    if memory_bytes > free:
        log = get_logger("stage-server")
        log.warning("--max-memory is more than is free now", max_memory=size(memory_bytes), free=size(free))
    if not is_gpu(device):
        return Memory(memory_bytes, 0)
    host_bytes = max_memory.of_host(free_bytes(torch.device("cpu")))
    return Memory(max(0, memory_bytes - CONTEXT_BYTES), host_bytes)


async def _enrolled(
    options: StageServerOptions, peer: PeerId, folder: Path, wallet: Wallet, metrics: StageServerMetrics
) -> Enrolment | None:
    """The membership of this process; it has joined if it was given a line to join with. None in plaintext."""
    metrics.process.insecure(options.insecure)
    if options.insecure:
        return None
    metrics.process.certificate(lambda: wallet.ends_unix_s)
    enrolment = Enrolment(peer, folder / "pki", wallet, get_logger("stage-server"))
    if options.join is not None:
        await enrolment.join(options.join)
    return enrolment


async def _find(options: StageServerOptions, enrolment: Enrolment | None, wallet: Wallet, folder: Path) -> str:
    """Where the scheduler is; by then this process has a certificate for it."""
    address = _known_scheduler(options, enrolment)
    if not address:
        if not options.broker:
            raise InvalidConfig(f"{folder} does not say where its scheduler is", hint="add --scheduler")
        address = (await find_scheduler(options.broker, swarm=options.swarm)).address
    if enrolment is not None:
        await enrolment.admit(address)
    host = address.rpartition(":")[0].strip("[]")
    # The scheduler lets only those attach with loopback addresses that are on its own machine.
    wallet.is_alone = options.is_alone or is_loopback(host) or host in own_addresses()
    return address


def _known_scheduler(options: StageServerOptions, enrolment: Enrolment | None) -> str:
    return options.scheduler or ("" if options.broker or enrolment is None else enrolment.scheduler)


async def _with_host(
    options: StageServerOptions, enrolment: Enrolment | None, find: Callable[[], Awaitable[str]]
) -> StageServerOptions:
    """The options with the host at which this process listens, if no flag says it."""
    known = _known_scheduler(options, enrolment)
    where = known.rpartition(":")[0] if known or not options.broker else parse_url(options.broker).host
    if not options.is_beside_scheduler or not where or is_loopback(where):
        return options

    async def find_host() -> str:
        return await asyncio.to_thread(host_for, await find())

    options = replace(options, host=await once_reached(find_host, get_logger("stage-server")))
    if not options.is_alone:
        tell_host(get_logger("stage-server"), options.host)
    return options


def _serve_http(
    options: StageServerOptions,
    metrics: StageServerMetrics,
    is_attached: Callable[[], bool],
    wallet: Wallet,
    folder: Path,
    stack: AsyncExitStack,
) -> str:
    """Serve metrics and probes over HTTP; gives the address, empty if off."""
    if options.http_port is None:
        return ""
    is_open = options.insecure or is_loopback(options.http_host)
    endpoint = HttpEndpoint(
        options.http_host,
        options.http_port,
        metrics.registry,
        lambda: [] if is_attached() else ["no scheduler"],
        asyncio.get_running_loop(),
        next_free=True,
        logins=options.logins,
        door=None if is_open else Https(wallet, folder / "pki/https.pem"),
    )
    address = f"{options.http_host}:{endpoint.start()}"
    stack.callback(endpoint.close)
    return address


def _hello(
    options: StageServerOptions,
    peer: PeerId,
    product: str,
    device: torch.device,
    threads: int,
    offered: Memory,
    port: int,
    http_address: str,
) -> Hello:
    """What this process says of itself in each session."""
    return Hello(
        peer=peer,
        incarnation=time.time_ns(),
        protocol=PROTOCOL_VERSION,
        product=product,
        address=options.address(port),
        http_address=http_address,
        device=describe_device(device),
        threads=threads,
        memory_bytes=offered.device_bytes,
        host_bytes=offered.host_bytes,
        pinned_stage=options.stage,
        via_relay=options.via_relay,
        slow_bfloat16=is_slow_at_bfloat16(device),
        site=options.site,
        forwarded=options.is_forwarded(port),
    )


def _bus(options: StageServerOptions, identity: Hello, metrics: StageServerMetrics) -> Bus:
    gone = {"peer": identity.peer, "state": "gone", "incarnation": identity.incarnation}
    will = (topics.peer(identity.peer, options.swarm), gone)
    metrics.process.mqtt_link(False)
    return Bus(options.broker, f"swarm-{identity.peer}", will=will, on_connected=metrics.process.mqtt_link)


def _presence(identity: Hello) -> dict[str, Any]:
    """What the broker keeps of this process while it is here."""
    return {
        "peer": identity.peer,
        "state": "here",
        "incarnation": identity.incarnation,
        "address": identity.address,
        "http": identity.http_address,
        "device": identity.device,
    }


def _relay_listener(
    options: StageServerOptions, paths: Paths, peer: PeerId, port: int, wallet: Wallet
) -> RelayListener:
    host = options.listens.rpartition(":")[0]
    own = f"{LOOPBACK if is_wildcard(host) else host}:{port}"
    return RelayListener(paths, peer, own, wallet, get_logger("stage-server"))


def _forward_log(options: StageServerOptions, stage_server: StageServer, peer: PeerId) -> None:
    """From now on the lines of the log go to the scheduler too."""
    loop, forward_log = asyncio.get_running_loop(), stage_server.forward_log

    def forward(time_s: float, level: str, text: str) -> None:
        with suppress(RuntimeError):  # lines come from any thread, also while the loop is closing
            loop.call_soon_threadsafe(forward_log, time_s, level, text)

    configure(options.log_level, options.log_format, forward, facts={"peer": peer})


def _settings(options: StageServerOptions, offered: Memory) -> ServerSettings:
    budget, hub = MemoryBudget.of(offered), HubPolicy(options.allow_hub, options.hub_token)
    return ServerSettings(options.connect_retry_s_max, options.orphan_timeout_s, budget, hub=hub)


def _served(stage_server: StageServer) -> tuple[str, int] | None:
    place = stage_server.place
    return None if place is None else (place.job, place.stage)


class Denials:
    """Counts who is turned away from this stage server, and writes down some of them."""

    def __init__(self, metrics: StageServerMetrics, log: Logger) -> None:
        self._metrics = metrics
        self._log = log
        self._lines = Bucket(DENIALS_PER_S, DENIALS_AT_ONCE)

    def note(self, who: str, error: SwarmError) -> None:
        self._metrics.process.auth_failed(error.code)
        if self._lines.take(time.monotonic()):
            self._log.warning("turned away", who=who, error_code=error.code, reason=error.message)


def may_exchange(caller: Caller, method: str) -> None:
    """Only stage servers may exchange tensors with a stage server; its routes and rounds say which of them."""
    if caller.principal.role is not Role.STAGE_SERVER:
        raise RoleForbids(f"{caller.principal} is no stage server and may not call {method.rpartition('/')[2]}")


def _hand_over(
    server: StageServer, tasks: asyncio.TaskGroup, timeout_s: float, log: Logger, end: Callable[[], object]
) -> bool:
    """Let others take the stage over and leave the scheduler; False if the process is to end at once instead."""
    reason = "its process was told to end"
    if timeout_s <= 0 or not server.is_attached:
        return False
    if server.leave(reason):
        log.info("hands its work over; the same signal again ends it at once", timeout_s=timeout_s)

    async def wait() -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await server.handed_over()
        except TimeoutError:
            log.warning("ends without having handed over its work", waited_s=timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(HANG_UP_S_MAX):
                await server.hang_up(reason)
        end()

    tasks.create_task(wait())
    return True


def _peer_server(
    options: StageServerOptions, wallet: Wallet | None, denials: Denials, metrics: StageServerMetrics
) -> tuple[grpc.aio.Server, int]:
    """The server for neighbours, and its port: the given one, 7951 or the next free one. No wallet: in plaintext."""
    guard = None if wallet is None else Guard(may_exchange, lambda _, who, error: denials.note(who, error))
    meter = Meter(metrics.process.handled)
    # On a slow link its pings wait behind the dialler's tensors; the dialler notices sooner if the link is dead.
    server = new_server(guard, None if options.insecure else CONNECTION_S_MAX, PATIENT, meter)
    if options.listen:
        return server, bind(server, options.listen, wallet)
    for port in range(7951, 7951 + PORTS_TRIED_MAX):  # several stage servers share a machine
        with suppress(InvalidConfig):
            return server, bind(server, f"{options.host}:{port}", wallet)
    return server, bind(server, f"{options.host}:0", wallet)
