"""Links of so many bytes per second in virtual time: transfers share the uplinks and downlinks that they pass.

Every stage server has an uplink and a downlink, or its site has both for what crosses to other sites. All that one
sends another follows in order, as on one connection, and connections share what they pass max-min fairly: the tightest
end is shared out first. A tensor arrives when its last byte does, and its receipt takes no time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.rpc.links.peers import Moved
from swarm.types import PeerId
from swarm.wire.messages import StateReply, StateRequest, TensorHeader

ROUNDINGS_BYTES = 1e-3


@dataclass(frozen=True, slots=True)
class Line:
    """What a stage server can send and receive, in bytes per second."""

    up: float
    down: float


@dataclass(slots=True)
class _Transfer:
    header: TensorHeader
    payload: memoryview
    left_bytes: float
    receipt: asyncio.Future[None]


@dataclass(slots=True)
class _Pipe:
    """What one address sends another."""

    queue: deque[_Transfer] = field(default_factory=deque)
    rate: float = 0.0


class FluidNetwork:
    """The lines of all addresses; `take` is given each tensor that has arrived at an address."""

    def __init__(
        self,
        lines: Mapping[str, Line],
        take: Callable[[str, TensorHeader, memoryview], None],
        site_of: Mapping[str, str] | None = None,
    ) -> None:
        self._lines = lines
        self._site_of = site_of or {}
        self._take = take
        self._pipes: dict[tuple[str, str], _Pipe] = {}
        self._rates: dict[tuple[tuple[str, str], ...], list[float]] = {}  # of each set of pairs that was at work
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.sent_bytes = 0
        self.bytes_between: Counter[tuple[str, str]] = Counter()

    def links(self, owner: str) -> FluidLinks:
        return FluidLinks(self, owner)

    async def carry(self, owner: str, to: str, header: TensorHeader, payload: bytes | memoryview) -> None:
        sent = memoryview(payload).cast("B")
        receipt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flow()
        pipe = self._pipes.setdefault((owner, to), _Pipe())
        pipe.queue.append(_Transfer(header, memoryview(bytes(sent)), float(sent.nbytes), receipt))
        self.sent_bytes += sent.nbytes
        self.bytes_between[owner, to] += sent.nbytes
        self._share_out()
        await receipt

    def _flow(self) -> None:
        """Let all that moves move until now."""
        now_s = asyncio.get_running_loop().time()
        for (_, to), pipe in list(self._pipes.items()):
            if not pipe.queue:
                continue
            first = pipe.queue[0]
            first.left_bytes -= pipe.rate * (now_s - self._since_s)
            if first.left_bytes <= ROUNDINGS_BYTES:
                pipe.queue.popleft()
                try:
                    self._take(to, first.header, first.payload)
                except Exception as error:
                    first.receipt.set_exception(error)
                else:
                    if not first.receipt.done():
                        first.receipt.set_result(None)
        self._since_s = now_s

    def _share_out(self) -> None:
        busy = {pair: pipe for pair, pipe in self._pipes.items() if pipe.queue}
        if (pairs := tuple(busy)) not in self._rates:
            self._rates[pairs] = fair(pairs, self._lines, self._site_of)
        for pipe, rate in zip(busy.values(), self._rates[pairs], strict=True):
            pipe.rate = rate
        if self._timer is not None:
            self._timer.cancel()
        if busy:
            next_s = min(pipe.queue[0].left_bytes / pipe.rate for pipe in busy.values())
            self._timer = asyncio.get_running_loop().call_later(next_s, self._tick)

    def _tick(self) -> None:
        self._flow()
        self._share_out()


class FluidLinks:
    """PeerLinks of one stage server."""

    def __init__(self, network: FluidNetwork, owner: str) -> None:
        self._network, self._owner = network, owner

    async def send(
        self,
        address: str,
        header: TensorHeader,
        payload: bytes | memoryview,
        *,
        to: PeerId | None = None,
        moved: Moved | None = None,
    ) -> None:
        await self._network.carry(self._owner, address, header, payload)

    async def pull(
        self, address: str, request: StateRequest, limit_bytes: int, *, to: PeerId | None = None
    ) -> tuple[StateReply, memoryview]:
        raise NotImplementedError("only tensors travel here")

    def cut_off(self, peer: PeerId) -> None:
        pass

    async def close(self) -> None:
        pass


def fair(
    pairs: Sequence[tuple[str, str]], lines: Mapping[str, Line], site_of: Mapping[str, str] | None = None
) -> list[float]:
    """Max-min fair rates of transfers from an address to another; those between sites pass the lines of the sites."""
    sites = site_of or {}
    pairs = [(a, b) if sites.get(a) == sites.get(b) else (sites[a], sites[b]) for a, b in pairs]
    free = {(name, way): getattr(line, way) for name, line in lines.items() for way in ("up", "down")}
    rates = [0.0] * len(pairs)
    left = set(range(len(pairs)))
    while left:
        users: dict[tuple[str, str], list[int]] = {}
        for at in sorted(left):
            users.setdefault((pairs[at][0], "up"), []).append(at)
            users.setdefault((pairs[at][1], "down"), []).append(at)
        tightest = min(users, key=lambda end: free[end] / len(users[end]))
        rate = free[tightest] / len(users[tightest])
        for at in users[tightest]:
            rates[at] = rate
            free[pairs[at][0], "up"] -= rate
            free[pairs[at][1], "down"] -= rate
            left.discard(at)
    return rates
