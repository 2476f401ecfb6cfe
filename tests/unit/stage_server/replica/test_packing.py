import asyncio

import pytest

from stage_server.replica.packing import DELIVERY_S_MAX, PAUSE_S, Letter, deliver
from swarm.errors import RetryElsewhere
from swarm.rpc.links.peers import Moved
from swarm.types import PeerId
from swarm.wire.messages import Member, TensorHeader
from tests.support.headers import header_of
from tests.support.sim import loop as sim


class BusyNeighbour:
    """Links to a neighbour that is busy at first."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.tried_s: list[float] = []

    async def send(
        self, address: str, header: TensorHeader, payload: bytes, *, to: PeerId, moved: Moved | None = None
    ) -> None:
        self.tried_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.5)
        if len(self.tried_s) <= self.refusals:
            raise RetryElsewhere("busy")


def delivered(links: BusyNeighbour) -> None:
    sim.run(
        deliver(links, Member(PeerId("a"), 1, "a:1", 0, 1, ""), Letter(header_of(4), b"abcd")), seed=1, limit_s=60.0
    )  # type: ignore[arg-type]


def test_what_a_busy_neighbour_turned_away_is_sent_again_after_a_pause() -> None:
    links = BusyNeighbour(3)
    delivered(links)
    pauses = [after - before - 0.5 for before, after in zip(links.tried_s, links.tried_s[1:], strict=False)]
    assert len(pauses) == 3
    assert all(0 < pause <= most for pause, most in zip(pauses, (PAUSE_S, PAUSE_S, 2 * PAUSE_S), strict=True))


def test_a_neighbour_that_stays_busy_is_reported() -> None:
    links = BusyNeighbour(1000)
    with pytest.raises(RetryElsewhere):
        delivered(links)
    assert DELIVERY_S_MAX - 0.5 <= links.tried_s[-1] - links.tried_s[0] <= DELIVERY_S_MAX + 1.0
