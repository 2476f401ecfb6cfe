"""What carries the traffic of a simulation: who listens where, what is under way, and who watches.

Links (links.py) and sessions (sessions.py) move over it; network.py puts them together.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from swarm.errors import PeerUnavailable, SchedulerUnreachable, SwarmError
from swarm.rpc.links.peers import StateDonor, TensorReceiver, Traffic
from swarm.rpc.session import SessionHandler
from swarm.wire.messages import Command, Event, TensorHeader
from tests.support.sim.processes import Process
from tests.support.sim.weather import DELAY_S, DETECT_S, Weather

T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """What the network has done so far; counts tensors unless stated otherwise."""

    delivered: int = 0  # handed to a receiver, duplicates included
    reordered: int = 0  # delivered after one that was sent later on the same link
    duplicated: int = 0  # delivered once more
    refused: int = 0  # by their receiver
    lost: int = 0  # they, or their receipts
    unreachable: int = 0  # nobody listened, or the receiver was killed meanwhile
    messages: int = 0  # session messages, both directions
    sessions_broken: int = 0


class Observer:
    """Sees all traffic in the order in which it happens, and may kill a process at exactly that point."""

    def sending(self, owner: str, address: str, header: TensorHeader) -> None:
        """`owner` hands a tensor to its link."""

    def delivered(self, owner: str, address: str, header: TensorHeader, error: SwarmError | None) -> None:
        """The receiver took a tensor, or refused it; `owner` does not know yet."""

    def event_leaves(self, owner: str, event: Event) -> None:
        """A stage server hands an event to its session."""

    def event_arrived(self, owner: str, event: Event) -> None:
        """The scheduler's side of the session has the event."""

    def command_arrived(self, owner: str, epoch: int, command: Command) -> None:
        """The stage server's side of the session has the command, the stage server has not seen it."""


class OpenSession(Protocol):
    """A session between two processes, as far as its end goes."""

    owner: str
    address: str

    def sever(self, error: SwarmError) -> None:
        """The connection is gone, from whichever side."""


class Flight:
    """One tensor on its way, and what its sender will be told."""

    def __init__(self, owner: str, address: str, receipt: asyncio.Future[None] | None) -> None:
        self.owner = owner
        self.address = address
        self.receipt = receipt  # of the first copy; the others have none
        self.broken = False

    def break_off(self) -> None:
        """The connection broke: the sender learns it now, whatever happens to the tensor."""
        self.broken = True
        if self.receipt is not None and not self.receipt.done():
            self.receipt.set_exception(PeerUnavailable(f"{self.address} does not answer: the connection broke"))


class Fabric:
    """The processes that listen at addresses (any string is one), and all that is under way between them."""

    def __init__(
        self,
        rng: Random,
        *,
        delay_s: tuple[float, float] = DELAY_S,
        reorder: bool = True,
        duplicate_ratio: float = 0.0,
        codec: bool = True,
        weather: Weather | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.counts = Counts()
        self.weather = weather or Weather(rng, delay_s=delay_s, duplicate_ratio=duplicate_ratio)
        self.weather.on_broken = self.break_links
        self.observer = observer or Observer()
        self._reorder = reorder
        self._codec = codec
        self._context = contextvars.copy_context()  # that of no process, as a rule
        self._processes: dict[str, Process | None] = {}
        self._flights: dict[Flight, None] = {}
        self._receivers: dict[str, tuple[TensorReceiver, Traffic]] = {}
        self._donors: dict[str, StateDonor] = {}
        self._handlers: dict[str, SessionHandler] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}  # ordered, unlike a set
        self._tasks_to: dict[str, dict[asyncio.Task[Any], None]] = defaultdict(dict)
        self._sessions: dict[OpenSession, None] = {}

    def break_links(self, one: str, other: str) -> None:
        """Break everything the two have open with each other; what is under way may still arrive."""
        for flight in [flight for flight in self._flights if {flight.owner, flight.address} == {one, other}]:
            flight.break_off()
        self.cut(one, other)
        self.cut(other, one)

    def cut(self, owner: str, address: str) -> None:
        """Break the session between two processes that both live on."""
        for session in [session for session in self._sessions if (session.owner, session.address) == (owner, address)]:
            session.sever(SchedulerUnreachable(f"{address} does not answer: the connection broke"))

    def delay(self, sender: str = "", receiver: str = "") -> float:
        return self.weather.delay(sender, receiver)

    def spawn(
        self, work: Coroutine[Any, Any, T], name: str, to: str | None = None, within: str | None = None
    ) -> asyncio.Task[T]:
        """Run `work` concurrently, as part of the process at `within` or of none.

        Cancelled when the network closes, `to` is killed or the process is.
        """
        process = self._processes.get(within) if within is not None else None
        context = process.context if process is not None else self._context.copy()
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        if to is not None:
            tasks_to = self._tasks_to[to]
            tasks_to[task] = None
            task.add_done_callback(lambda done: tasks_to.pop(done, None))
        return task

    async def reaches(self, owner: str, address: str) -> bool:
        """Whether a connection from `owner` to `address` succeeds; finding out takes as long as it really would."""
        await asyncio.sleep(self.delay(owner, address))
        passes = await self.weather.passage(owner, address) and await self.weather.passage(address, owner)
        process = self._processes.get(address)
        if passes and process is not None and process.is_frozen:
            await asyncio.sleep(DETECT_S)
            return not process.is_frozen
        return passes

    def departs(self, flight: Flight) -> None:
        self._flights[flight] = None

    def landed(self, flight: Flight) -> None:
        self._flights.pop(flight, None)

    @property
    def keeps_order(self) -> bool:
        return not self._reorder

    @property
    def encodes(self) -> bool:
        return self._codec

    def receiver_at(self, address: str) -> tuple[TensorReceiver, Traffic] | None:
        return self._receivers.get(address)

    def donor_at(self, address: str) -> StateDonor | None:
        return self._donors.get(address)

    def handler_at(self, address: str) -> SessionHandler | None:
        return self._handlers.get(address)

    def opened(self, session: OpenSession) -> None:
        self._sessions[session] = None

    def ended(self, session: OpenSession) -> None:
        self._sessions.pop(session, None)
