"""The scheduler process: everything is made here, handed down, and ends with one TaskGroup."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from random import SystemRandom
from typing import Any

import grpc
import grpc.aio

from scheduler.api.announcer import BusAnnouncer
from scheduler.api.health import Health
from scheduler.api.job_service import JobService
from scheduler.api.members.admission import Gatekeeper
from scheduler.api.members.endings import watch_endings
from scheduler.api.members.reach import Reach
from scheduler.api.views import Overview
from scheduler.assembly import Scheduler, assemble
from scheduler.brain.fleet.membership import Membership
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.jobs.job import Announcer
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.series import show, tidy
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.database import Database, DatabaseWatch, database_in
from scheduler.storage.stores import Stores
from scheduler.web.feed import Entrance, Feed
from scheduler.web.listener import Asgi
from scheduler.web.pages import Pages
from scheduler.web.site import Site, targets
from swarm.errors import InvalidConfig
from swarm.mqtt import topics
from swarm.mqtt.broker import local_broker
from swarm.mqtt.bus import Bus
from swarm.mqtt.discovery import Announcement
from swarm.mqtt.presence import Presence
from swarm.pki.authority import AWAY_S, LIFE_S
from swarm.process.callers import Logins
from swarm.process.http import HttpListener, MainLoop, Probes
from swarm.process.lifecycle import check_announce, check_listen, lock_folder, say_ready
from swarm.process.logs import Logger, get_logger
from swarm.process.malloc import keep_trimmed
from swarm.rpc.channel import bind, new_server
from swarm.rpc.guard import Meter
from swarm.rpc.session import add_session_service
from swarm.text import is_loopback
from swarm.types import PROTOCOL_VERSION
from swarm.wire import jobs_pb2_grpc, relay_pb2_grpc

GRACE_S = 5.0  # how long a suspect may stay silent or cut off before it is gone
# Calls under way at the end get this long; streams to watchers and peers would stay open forever.
STOP_S_MAX = 0.5


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The scheduler's flags, checked."""

    listen: str
    announce: str  # "" = the address it listens at
    http_host: str
    http_port: int | None  # None = off
    db: str  # SQLAlchemy URL, or "sqlite" for a file in data_dir
    broker: str  # "embedded" | "none" | mqtt URL
    data_dir: Path
    insecure: bool
    grace_s: float = GRACE_S
    swarm: str = topics.DEFAULT_SWARM  # its name at the broker
    record: bool = False  # what happens to the brains of jobs
    checkpoint_roots: tuple[Path | str, ...] = ()  # a job may name a folder or a URL below these, or below data_dir
    certificate_life_s: float = LIFE_S
    certificate_grace_s: float = AWAY_S  # how long after its end a certificate is still renewed; 0 = not at all
    keep_jobs_s: float = 0.0  # how long ended jobs are kept; 0 = for ever
    join_listen: str = ""  # "" = the host of the address, at 7949 or any free port
    otlp: str = ""  # where a collector takes traces; "" = nowhere
    otlp_ratio: float = 0.01
    logins: Logins = field(default_factory=Logins)  # that may look at the HTTP port on loopback


async def serve(options: SchedulerOptions) -> None:
    """Run until cancelled.

    Raises InvalidConfig if an address, folder or database cannot be used, NotAllowed if the folder is in use.
    """
    check_listen(options.listen)
    if options.join_listen:
        check_listen(options.join_listen, "--join-listen")
    check_announce(options.listen, options.announce)
    product = metadata.version("swarm-stages")
    log = get_logger("scheduler")
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_folder(options.data_dir))
        commits, files, savers, readers = _threads(stack)
        metrics = SchedulerMetrics(product, PROTOCOL_VERSION)
        look = _exporter(options, product, stack).look if options.otlp else None
        url = database_in(options.data_dir) if options.db == "sqlite" else options.db
        database = await Database.open(url, commits, options.data_dir, metrics.stored)
        stack.push_async_callback(database.close)
        watch = DatabaseWatch(database, metrics.database_link)

        broker = await stack.enter_async_context(local_broker()) if options.broker == "embedded" else options.broker
        bus = None if broker == "none" else _bus(options, broker, database, metrics)
        announcer = Announcer() if bus is None else BusAnnouncer(bus, options.swarm)

        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        admission = None if options.insecure else await _gatekeeper(options, database, metrics, log, stack)
        metrics.process.insecure(options.insecure)
        server = new_server(None if admission is None else admission.guard, meter=Meter(metrics.process.handled))
        wallet = None if admission is None else admission.wallet
        host, bound = options.listen.rpartition(":")[0], bind(server, options.listen, wallet)
        address = options.announce or f"{host}:{bound}"
        if options.insecure:
            log.warning("--insecure: whoever reaches this address owns the swarm", address=address)
        presence = None if bus is None else await _presence(options, bus, address, database, product, tasks)
        record, roots = options.record, options.checkpoint_roots
        stores = Stores.under(options.data_dir, database, files, readers, savers, record=record, checkpoint_roots=roots)
        ports = SchedulerPorts(stores, announcer, metrics, SystemRandom(), time.time, log, product)
        membership = Membership(grace_s=options.grace_s)
        stack.callback(ports.stores.logs.flush)
        issuer = None if admission is None else admission.issuer
        scheduler = assemble(ports, tasks, membership, issuer=issuer, keep_jobs_s=options.keep_jobs_s)
        await scheduler.load()

        health = Health(watch, bus, scheduler.jobs.registry.awaits_database)
        asks: Callable[[], Person] = (lambda: ANYBODY) if admission is None else admission.asks
        service = JobService(scheduler.jobs, membership, product, time.time, asks, scheduler.relays, health.troubles)
        joins = ""
        if admission is not None:
            cut = (scheduler.sessions, scheduler.relays)
            joins = await admission.serve(server, options.listen, bound, address, options.join_listen, *cut)
            tasks.create_task(admission.renew())
            told = scheduler.listener.on_reach
            tasks.create_task(Reach(membership, scheduler.connections, admission.wallet, log, told).run())
        tasks.create_task(watch_endings(membership, scheduler.connections, scheduler.listener.on_transition, log))
        await _serve_calls(server, service, scheduler, stack)
        http_address = _serve_http(options, scheduler, membership, admission, health, ports, address, stack)
        if presence is not None:
            tasks.create_task(presence.hold())
        scheduler.start()
        tasks.create_task(scheduler.peers.calibrate())
        registry = scheduler.jobs.registry
        for upkeep in (watch.run(), tidy(registry, membership, ports), show(registry, ports, options.data_dir, look)):
            tasks.create_task(upkeep)
        tasks.create_task(scheduler.jobs.removal.tidy())
        tasks.create_task(keep_trimmed())
        broker = bus.endpoint.shown if bus is not None else broker  # without the password
        facts = {"address": address, "http": http_address, "broker": broker, "joins": joins}
        log.info("scheduler started", epoch=database.epoch, **facts)
        say_ready("scheduler", **facts)
        await asyncio.Event().wait()


def _threads(stack: AsyncExitStack) -> Iterator[ThreadPoolExecutor]:
    """Own threads for each, so no commit waits behind the files of a checkpoint or a reader of logs, and no job starts
    late because the storage of another's checkpoints hangs."""
    for name, count in (("database", 1), ("files", 4), ("checkpoints", 4), ("logs", 2)):
        yield stack.enter_context(ThreadPoolExecutor(max_workers=count, thread_name_prefix=name))


def _bus(options: SchedulerOptions, broker: str, database: Database, metrics: SchedulerMetrics) -> Bus:
    name = f"swarm-scheduler-{database.epoch}-{SystemRandom().randbytes(4).hex()}"
    metrics.process.mqtt_link(False)
    return Bus(broker, name, will=(topics.scheduler(options.swarm), {}), on_connected=metrics.process.mqtt_link)


async def _presence(
    options: SchedulerOptions, bus: Bus, address: str, database: Database, product: str, tasks: asyncio.TaskGroup
) -> Presence:
    """The place at the broker by which others find the scheduler, as nobody else has it."""
    tasks.create_task(bus.run())
    announcement = Announcement(address, database.epoch, product, database=database.name)
    presence = Presence(bus, options.swarm, announcement)
    if options.broker != "embedded":  # which nobody else knows
        await presence.claim()
    return presence


async def _gatekeeper(
    options: SchedulerOptions, database: Database, metrics: SchedulerMetrics, log: Logger, stack: AsyncExitStack
) -> Gatekeeper:
    life_s, away_s = options.certificate_life_s, options.certificate_grace_s
    admission = await Gatekeeper.open(options.data_dir, database, log, life_s, metrics.process.auth_failed, away_s)
    stack.callback(admission.close)
    metrics.process.certificate(partial(getattr, admission.wallet, "ends_unix_s"))
    return admission


async def _serve_calls(
    server: grpc.aio.Server, service: JobService, scheduler: Scheduler, stack: AsyncExitStack
) -> None:
    """Answer clients, stage servers and relays until the stack is left."""
    add_session_service(server, scheduler.sessions)
    jobs_pb2_grpc.add_JobsServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    if scheduler.relays is not None:
        relay_pb2_grpc.add_RelaysServicer_to_server(scheduler.relays, server)  # type: ignore[no-untyped-call]
    await server.start()
    stack.push_async_callback(server.stop, STOP_S_MAX)
    stack.callback(scheduler.sessions.close)
    if scheduler.relays is not None:
        stack.callback(scheduler.relays.close)
    stack.callback(scheduler.stop)


def _serve_http(
    options: SchedulerOptions,
    scheduler: Scheduler,
    membership: Membership,
    admission: Gatekeeper | None,
    health: Health,
    ports: SchedulerPorts,
    address: str,
    stack: AsyncExitStack,
) -> str:
    """Serve metrics, probes, the targets of Prometheus and the page over HTTP; gives the address, empty if off."""
    http_address = ""
    if options.http_port is None:
        return http_address
    door = None if admission is None or is_loopback(options.http_host) else admission.https

    def scraped() -> list[dict[str, Any]]:
        return targets(http_address, address, membership.peers(), insecure=options.insecure)

    loop = MainLoop(asyncio.get_running_loop())
    seen_by_all = Overview(scheduler.jobs, membership, lambda: ANYBODY, time.time, scheduler.relays)
    entrance: Entrance = (lambda _: ANYBODY) if door is None or admission is None else admission.visitor
    check_member = (lambda _: None) if admission is None else admission.scraper
    owner = (lambda _: "") if admission is None else admission.members.inviter
    feed = Feed(seen_by_all, entrance, ports.product, health.troubles, owner)
    is_local = is_loopback(options.http_host)
    site = Site(
        loop,
        ports.metrics.registry,
        Probes(loop, health.not_ready, health.remarks),
        door,
        scraped,
        Pages(loop, feed, is_local=is_local, logins=options.logins).routes(),
        check_member,
        is_local=is_local,
        logins=options.logins,
    )
    listener = HttpListener(options.http_host, options.http_port, Asgi(site.application()), door)
    http_address = f"{options.http_host}:{listener.start()}"
    stack.callback(listener.close)
    return http_address


def _exporter(options: SchedulerOptions, product: str, stack: AsyncExitStack) -> Any:
    """A MicrobatchExporter; its module is imported by those alone who use it, as its packages are an extra."""
    try:
        module = import_module("scheduler.otlp")
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"--otlp needs the Python package {error.name}", hint='install it with: pip install "swarm-stages[otel]"'
        ) from None
    exporter = module.MicrobatchExporter(options.otlp, options.otlp_ratio, product, time.time)
    stack.callback(exporter.close)
    return exporter
