"""Puts a scheduler together on given ports: the program, the simulated world and the tests all do it here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from scheduler.api.members.passes import Issuer, Passes
from scheduler.api.members.relays import RelayDesk
from scheduler.api.sessions import Connections, Sessions
from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.allocator import Allocator
from scheduler.jobs.commands import Jobs
from scheduler.jobs.listener import JobTransfer, PeerListener
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.removal import JobRemoval
from scheduler.jobs.restart import Restart
from scheduler.jobs.runner import JobRunner
from scheduler.jobs.starts import Timelines
from scheduler.storage.drains import Drains
from scheduler.storage.members.quarantine import Quarantine


@dataclass(slots=True)
class Scheduler:
    """A scheduler that was put together: load it, then start it."""

    jobs: Jobs
    membership: Membership
    connections: Connections
    sessions: Sessions
    listener: PeerListener
    transfer: JobTransfer
    peers: Peers
    allocator: Allocator
    restart: Restart
    drains: Drains
    tasks: asyncio.TaskGroup
    passes: Passes | None = None
    relays: RelayDesk | None = None

    async def load(self) -> None:
        """Read the state that an earlier start left. No peer may dial before that."""
        await self.drains.load()
        await self.peers.load()
        await self.restart.load()
        await self.jobs.removal.load()

    def start(self) -> None:
        """Hand out idle peers, and notice silent ones, for ever."""
        self.tasks.create_task(self.allocator.run())
        self.tasks.create_task(self.sessions.watch())
        if self.passes is not None:
            self.tasks.create_task(self.passes.keep())

    def stop(self) -> None:
        """From here on, the end of a session means nothing for jobs."""
        self.peers.is_stopping = True


def assemble(
    ports: SchedulerPorts,
    tasks: asyncio.TaskGroup,
    membership: Membership | None = None,
    *,
    issuer: Issuer | None = None,
    keep_jobs_s: float = 0.0,
) -> Scheduler:
    """Make every part, each from those above it. Background work runs in `tasks`.

    Without an `issuer` stage servers get no passes. Jobs are removed `keep_jobs_s` after their end; 0: never.
    """
    membership = membership or Membership()
    connections = Connections(ports.log)
    drains = Drains(ports.stores.database, ports.log)
    registry = JobRegistry(ports)
    passes = None if issuer is None else Passes(issuer, registry, membership, connections, ports.wall_s)
    relays = None if passes is None else RelayDesk(passes, connections, ports.log, ports.wall_s)
    quarantine = Quarantine(ports.stores.database, ports.log, ports.wall_s)
    peers = Peers(ports, registry, membership, passes or connections, tasks, quarantine)
    timelines = Timelines(ports, registry, peers.wake)
    runner = JobRunner(ports, registry, peers, membership, timelines, tasks)
    allocator = Allocator(ports, registry, peers, membership, runner)
    restart = Restart(ports, registry, peers, timelines, runner, tasks)
    removal = JobRemoval(ports, registry, keep_jobs_s)
    jobs = Jobs(ports, registry, peers, membership, timelines, allocator, drains, removal)
    listener = PeerListener(ports, registry, membership, peers, runner, drains, tasks)
    if relays is not None:
        relays.on_change = listener.on_relays
        listener.on_relays(False)  # until one attaches
    transfer = JobTransfer(ports.stores, registry)
    sessions = Sessions(ports, membership, connections, listener, transfer, tasks, passes)
    parts = (jobs, membership, connections, sessions, listener, transfer, peers, allocator, restart, drains, tasks)
    return Scheduler(*parts, passes, relays)
