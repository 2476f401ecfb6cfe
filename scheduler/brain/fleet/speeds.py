"""How fast the stage servers are of which a new job may get some, by what was seen of them in jobs before.

Decision: docs/decisions/140.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from scheduler.brain.fleet.membership import Peer
from swarm.job.overlap import UNMEASURED, FleetSpeed


def fleet_speed(peers: Sequence[Peer]) -> FleetSpeed:
    """The medians of these peers' paces and of the links between them; nothing if one of these is unknown.

    Medians, because a stage server may claim any speed, and it is unknown which links a job will use.
    """
    here = {peer.hello.peer for peer in peers}
    links = [link for peer in peers for link in peer.measured.links if link.to in here]
    computing = _sound(peer.measured.multiply_adds_per_s for peer in peers)
    rates, receipts_s = _sound(link.bytes_per_s for link in links), _sound(link.receipt_s for link in links)
    if not (computing and rates and receipts_s):
        return UNMEASURED
    return FleetSpeed(median(computing), median(rates), median(receipts_s))


def _sound(values: Iterable[float]) -> list[float]:
    return [value for value in values if 0.0 < value < math.inf]
