"""Replicas on their way out of their stage: to another stage, or for good.

    asked ──another replica stays──▶ leaving: no new work ──steps below `until` agreed──▶ released
      └──▶ waiting, while it is the last of its stage ──a peer joined──▶ leaving

`until` is the first step that was not open when it was decided: the replica takes part in all steps below it, averages
and commits them and keeps what its neighbours may ask for; of later steps it gets nothing and is no member. So when it
is released nothing depends on it, and nothing is done again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from scheduler.brain.settings import ON_ITS_WAY_S_MAX
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class Leave:
    """Why a replica leaves, and where to: `target` is a stage, None = out of the job."""

    reason: str
    target: int | None = None
    until: int | None = None  # None: waits


class Leaves:
    """Replicas that leave or wait to leave."""

    def __init__(self) -> None:
        self._leaves: dict[PeerId, Leave] = {}
        self._destined: dict[PeerId, tuple[Leave, float]] = {}  # released by their old stage, at which time
        self.moves = 0  # replicas that were ever released for another stage
        self.newest_move: tuple[PeerId, Leave, float] | None = None

    def __contains__(self, peer: PeerId) -> bool:
        """Whether the peer gets no new work."""
        leave = self._leaves.get(peer)
        return leave is not None and leave.until is not None

    def __iter__(self) -> Iterator[PeerId]:
        return (peer for peer in self._leaves if peer in self)

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def ask(self, peer: PeerId, leave: Leave) -> bool:
        """Ask the peer to leave; False if it was asked before. Leaving for good outranks a move."""
        known = self._leaves.get(peer)
        if known is not None and (known.target is None or leave.target is not None):
            return False
        self._leaves[peer] = leave if known is None else Leave(leave.reason, leave.target, known.until)
        return True

    def begin(self, pool: Collection[PeerId], suspects: Collection[PeerId], until: int) -> list[PeerId]:
        """The replicas of one stage that begin to leave now; one replica that can work always stays."""
        begun = []
        for peer in sorted(set(pool) & self._leaves.keys()):
            if peer not in self and any(one != peer and one not in self and one not in suspects for one in pool):
                leave = self._leaves[peer]
                self._leaves[peer] = Leave(leave.reason, leave.target, until)
                begun.append(peer)
        return begun

    def stay(self, pool: Collection[PeerId], agreed: int = 0) -> dict[PeerId, int]:
        """A stage lost all replicas but these, and all of them leave: they stay for now; each with its `until`.

        A replica that was no member of an agreed step never makes its commit, so it cannot stay.
        """
        if any(peer not in self for peer in pool):
            return {}
        staying = {}
        for peer in sorted(pool):
            leave = self._leaves[peer]
            if leave.until is None or leave.until < agreed:
                continue
            staying[peer] = leave.until
            if leave.target is not None:
                del self._leaves[peer]  # the reason to move is gone
            else:
                self._leaves[peer] = Leave(leave.reason)
        return staying

    def takes_part(self, peer: PeerId, step: int) -> bool:
        """Whether the replica is a member of the step."""
        leave = self._leaves.get(peer)
        return leave is None or leave.until is None or step < leave.until

    def due(self, agreed: int) -> list[PeerId]:
        """Replicas on which nothing depends any more, now that `agreed` steps are agreed on."""
        return [peer for peer, leave in self._leaves.items() if leave.until is not None and leave.until <= agreed]

    def done(self, peer: PeerId, now_s: float) -> Leave:
        """The peer was released."""
        leave = self._leaves.pop(peer)
        if leave.target is not None:
            self._destined = {**self._under_way(now_s), peer: (leave, now_s)}
            self.moves += 1
            self.newest_move = peer, leave, now_s
        return leave

    def forget(self, peer: PeerId) -> None:
        """The peer is gone, or joins."""
        self._leaves.pop(peer, None)
        self._destined.pop(peer, None)

    def destination(self, peer: PeerId, now_s: float) -> Leave | None:
        """Where a peer goes that was moved and is still expected there."""
        leave, _ = self._under_way(now_s).get(peer, (None, now_s))
        return leave

    def moving(self, now_s: float) -> dict[PeerId, int]:
        """Peers on their way from one stage to another, and the stage to which they go: one at most."""
        leaves = self._leaves | {peer: leave for peer, (leave, _) in self._under_way(now_s).items()}
        return {peer: leave.target for peer, leave in leaves.items() if leave.target is not None}

    def wants(self, peer: PeerId) -> Leave | None:
        """Why the peer leaves or would leave, if so."""
        return self._leaves.get(peer)

    def _under_way(self, now_s: float) -> dict[PeerId, tuple[Leave, float]]:
        return {peer: one for peer, one in self._destined.items() if now_s - one[1] <= ON_ITS_WAY_S_MAX}
