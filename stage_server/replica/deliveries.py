"""Tensors and questions on their way to neighbours: one copy at a time, sent again for as long as it is needed.

A replica does not fail because a neighbour cannot be reached. It reports the link (`Undelivered`), so that the
scheduler routes around it, and tries again until the tensor arrives or a newer route makes it superfluous.

Decision: docs/decisions/022.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from stage_server.brain.link_codecs import LinkCodecs
from stage_server.ports import ReplicaPorts
from stage_server.replica.packing import Letter
from swarm.errors import PeerUnavailable, StaleMessage, SwarmError
from swarm.types import Direction, Hop, PeerId
from swarm.wire.messages import (
    Boundary,
    EvaluationBoundary,
    EvaluationUndelivered,
    Need,
    Slice,
    TensorHeader,
    Undelivered,
)

# A link that fails for this long is reported, and again after REPEAT_S: the scheduler may have had no other route.
UNDELIVERED_S = 1.0
REPEAT_S = 5.0
PAUSE_S = (0.05, 1.0)  # between attempts: first, longest
# A second copy may be sent once nothing of the first, or of what is before it, has arrived for this long.
HANGING_S = 5.0


_Key: TypeAlias = tuple[Hashable, PeerId, int]


@dataclass(slots=True)
class _UnderWay:
    moved_s: float  # when it began, or last came further


class Deliveries:
    """The tensors and questions that one replica is sending."""

    def __init__(self, ports: ReplicaPorts, codecs: LinkCodecs) -> None:
        self._ports = ports
        self._codecs = codecs  # learns how fast the links are
        self._under_way: dict[_Key, _UnderWay] = {}
        self._addresses: dict[tuple[PeerId, int], str] = {}

    def learn(self, hops: Iterable[Hop]) -> None:
        """Remember where peers are: only the scheduler says so, questions come without an address."""
        self._addresses.update({(hop.peer, hop.incarnation): hop.address for hop in hops})

    def knows(self, peer: PeerId, incarnation: int) -> bool:
        """Whether the scheduler has named this process on a route."""
        return (peer, incarnation) in self._addresses

    def codec_to(self, to: PeerId | None, side: Direction, elements: int) -> str:
        """The codec for an output of this many elements, chosen for the link to its receiver."""
        name, change = self._codecs.codec_to(to, side, elements)
        if change is not None:
            facts = {"before": change.before, "codec": change.codec, "bytes_per_s": round(change.bytes_per_s)}
            self._ports.log.info("link changes its codec", to=change.to, **facts)
        if to is not None:
            self._ports.metrics.encoded(side.value, name)
        return name

    def send(
        self, to: Hop, subject: Hashable, letter: Callable[[], Letter | None], matters: Callable[[], bool]
    ) -> None:
        """Deliver what `letter` gives to `to`, unless the same `subject` is under way, for as long as it `matters`.

        `letter` is asked before each attempt; None means that the tensor is no longer held.
        """
        key = (subject, to.peer, to.attempt)
        now_s = asyncio.get_running_loop().time()
        before = self._under_way.get(key)
        if before is not None and now_s - before.moved_s < HANGING_S:
            return
        under_way = self._under_way[key] = _UnderWay(now_s)
        self._ports.work.start(self._deliver(key, under_way, to, letter, matters))

    async def _deliver(
        self,
        key: _Key,
        under_way: _UnderWay,
        to: Hop,
        letter: Callable[[], Letter | None],
        matters: Callable[[], bool],
    ) -> None:
        loop = asyncio.get_running_loop()
        report_s = under_way.moved_s + UNDELIVERED_S
        pause_s = PAUSE_S[0]
        try:
            while (sent := letter()) is not None:
                try:
                    address = self._addresses.get((to.peer, to.incarnation))
                    if address is None:
                        raise PeerUnavailable(f"no route has told yet where {to.peer} is")
                    await self._send(address, to.peer, sent, under_way)
                    return
                except StaleMessage as error:
                    # It has moved on, or is not as far as we are; if it lacks the tensor it will ask.
                    self._ports.log.debug("neighbour refused", peer=to.peer, reason=error.message)
                    return
                except SwarmError as error:
                    reason = error.message  # the error itself would hold this frame, and with it the replica
                if not matters():
                    return
                if loop.time() >= report_s:
                    report_s = loop.time() + REPEAT_S
                    self._ports.log.warning("neighbour not reached", peer=to.peer, reason=reason)
                    self._ports.emit(_undelivered(sent.header, to, reason))
                await asyncio.sleep(pause_s)
                if not matters():
                    return
                pause_s = min(2 * pause_s, PAUSE_S[1])
        finally:
            if self._under_way.get(key) is under_way:
                del self._under_way[key]

    async def _send(self, address: str, to: PeerId, sent: Letter, under_way: _UnderWay) -> None:
        loop = asyncio.get_running_loop()

        def moved() -> None:
            under_way.moved_s = loop.time()

        start = self._codecs.start(to, loop.time())
        await self._ports.links.send(address, sent.header, sent.payload, to=to, moved=moved)
        if isinstance(sent.header, Boundary):
            self._codecs.delivered(to, start, sent.header.total_bytes, loop.time())


def _undelivered(header: TensorHeader, to: Hop, reason: str) -> Undelivered | EvaluationUndelivered:
    match header:
        case Boundary() | Need():
            return Undelivered(header.microbatch, header.stage, to.peer, to.attempt, reason)
        case EvaluationBoundary():
            return EvaluationUndelivered(header.batch, header.stage, to.peer, to.attempt, reason)
        case Slice():
            raise AssertionError("slices have deadlines of their own")
        case _:
            assert_never(header)
