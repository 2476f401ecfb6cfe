"""The claim: a peer that a job has expelled is not given to it again until it is started anew."""

from __future__ import annotations

from scheduler.brain.fleet.unfit import PEERS_MAX, UnfitPeers
from swarm.types import PeerId


def test_an_expelled_peer_is_kept_away_until_it_is_started_anew() -> None:
    unfit = UnfitPeers()
    unfit.add(PeerId("a"), 3, "needs 9 GiB")
    assert unfit.why(PeerId("a"), 3) == "the job expelled it (needs 9 GiB); start it anew"
    assert unfit.why(PeerId("a"), 4) == ""
    assert unfit.why(PeerId("b"), 3) == ""


def test_the_memory_is_bounded() -> None:
    unfit = UnfitPeers()
    for incarnation in range(PEERS_MAX + 1):
        unfit.add(PeerId("a"), incarnation, "")
    assert not unfit.why(PeerId("a"), 0)
    assert unfit.why(PeerId("a"), 1)
    assert unfit.why(PeerId("a"), PEERS_MAX)
