"""The network of a simulation: the same ports as gRPC, between objects in one process.

Tensors travel each on its own: after a random delay, so they overtake each other, and some arrive twice. Session
messages are delayed too but keep their order in each direction, as a stream does. Everything passes through the real
encoding (unless `codec` is off), and everything that was done to the traffic is counted: a test that wants disorder can
assert that it got some. weather.py says what links do to traffic. A process (processes.py) that listens here is served
in its own tasks, so a frozen one does not answer. All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import asyncio

from swarm.errors import SchedulerUnreachable
from swarm.rpc.links.peers import NoTraffic, StateDonor, TensorReceiver, Traffic
from swarm.rpc.session import SessionHandler
from tests.support.sim.fabric import Fabric
from tests.support.sim.links import SimPeerLinks
from tests.support.sim.processes import Process
from tests.support.sim.sessions import SimSchedulerLink
from tests.support.sim.weather import DETECT_S


class SimNetwork(Fabric):
    """Connects links with the receivers and handlers that listen at addresses; any string is an address."""

    def add_receiver(
        self, address: str, receiver: TensorReceiver, traffic: Traffic | None = None, donor: StateDonor | None = None
    ) -> None:
        """Let a stage server listen for tensors, and for joiners, at `address`."""
        self._receivers[address] = (receiver, traffic or NoTraffic())
        if donor is not None:
            self._donors[address] = donor
        self._processes[address] = Process.current()

    def add_handler(self, address: str, handler: SessionHandler) -> None:
        """Let a scheduler listen for sessions at `address`."""
        self._handlers[address] = handler
        self._processes[address] = Process.current()

    def peer_links(self, owner: str, traffic: Traffic | None = None) -> SimPeerLinks:
        """The PeerLinks of the process at `owner`."""
        return SimPeerLinks(self, owner, traffic or NoTraffic())

    def scheduler_link(self, owner: str, address: str) -> SimSchedulerLink:
        """The SchedulerLink of the process at `owner` to the scheduler at `address`."""
        return SimSchedulerLink(self, owner, address)

    def kill(self, address: str) -> None:
        """Kill the process at `address`: it stops listening, its connections break, deliveries to it fail.

        What it sent before may still arrive. The test cancels the process's own tasks.
        """
        self._receivers.pop(address, None)
        self._donors.pop(address, None)
        self._handlers.pop(address, None)
        for task in list(self._tasks_to.pop(address, ())):
            task.cancel()
        for session in [session for session in self._sessions if address in (session.owner, session.address)]:
            session.sever(SchedulerUnreachable(f"{session.address} does not answer: the connection broke"))

    def freeze(self, address: str) -> None:
        """Stop the process at `address` (SIGSTOP); after DETECT_S its peers take it for dead."""
        process = self._processes[address]
        assert process is not None, f"{address} is no process"
        process.freeze()
        this = process.freezes

        def detect() -> None:
            if process.is_frozen and process.freezes == this:
                for flight in [flight for flight in self._flights if address in (flight.owner, flight.address)]:
                    flight.break_off()
                for session in [session for session in self._sessions if address in (session.owner, session.address)]:
                    session.sever(SchedulerUnreachable(f"{session.address} does not answer: the connection broke"))

        asyncio.get_running_loop().call_later(DETECT_S, detect, context=self._context)

    async def close(self) -> None:
        """Stop everything that is still under way."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(list(self._tasks))
