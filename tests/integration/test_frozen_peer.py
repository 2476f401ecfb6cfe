"""A process that is stopped (SIGSTOP) keeps its sockets open; only pings that it does not answer give it away."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import pytest

from swarm.errors import PeerUnavailable, SchedulerUnreachable
from swarm.rpc.channel import KEEPALIVE_TIMEOUT_MS
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.rpc.session import GrpcSchedulerLink
from swarm.types import Direction, JobId, Microbatch, PeerId
from swarm.wire.messages import Event, Hello, Need

NOTICED_S_MAX = 40.0  # pings go out every second and may take two; the rest is for a busy machine
SERVER = """
import asyncio, sys
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.session import add_session_service

class Silent:
    def admit(self, header): pass
    async def receive(self, header, payload): await asyncio.Event().wait()
    async def attach(self, events):
        await anext(events)
        await asyncio.Event().wait()
        yield

async def main():
    server = new_server()
    add_peer_service(server, Silent())
    add_session_service(server, Silent())
    print(bind(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
HEADER = Need(JobId("j"), Microbatch(0, 0, 0), Direction.FORWARD, 0, 1, PeerId("p"), 1)


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """A process that takes everything and answers nothing: (its address, its id)."""
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield f"127.0.0.1:{int(child.stdout.readline())}", child.pid
    finally:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]  # made with a pipe


@pytest.mark.timeout(300)
async def test_a_stopped_process_is_noticed_by_tensors_and_by_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.rpc.channel.KEEPALIVE_TIMEOUT_MS", KEEPALIVE_TIMEOUT_MS)

    async def hello() -> AsyncGenerator[Event, None]:
        yield Hello(PeerId("p"), 1, 1, "0", "127.0.0.1:1", "", "cpu", 1, 0, -1, JobId(""), 0, 0)
        await asyncio.Event().wait()

    async def session(address: str) -> None:
        link = GrpcSchedulerLink(address)
        try:
            async for _ in link.attach(hello()):
                pass
        finally:
            await link.close()

    with server() as (address, pid):
        links = GrpcPeerLinks()
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(links.send(address, HEADER, b""))
        attached = asyncio.ensure_future(session(address))
        await asyncio.wait({sending, attached}, timeout=3.0)
        assert not sending.done(), "a process that only takes its time is not dead"
        assert not attached.done()
        os.kill(pid, signal.SIGSTOP)
        stopped_s = loop.time()
        async with asyncio.timeout(NOTICED_S_MAX):
            with pytest.raises(PeerUnavailable):
                await sending
            with pytest.raises(SchedulerUnreachable):
                await attached
        print(f"noticed after {loop.time() - stopped_s:.1f} s")
        await links.close()
