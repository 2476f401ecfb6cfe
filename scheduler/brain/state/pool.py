"""The pool of a job's replicas: the stage of each, whether it gets work, and the steps in which it takes part.

    add ──▶ TRUSTED ──silent──▶ SUSPECT ──heard──▶ TRUSTED        a suspect gets no new work, and is a member still
               └──session broke──▶ DETACHED ──Hello──▶ TRUSTED    nothing is believed until it says what it holds
                                      any of them ──remove──▶ gone: what it held is void, until it joins anew

Each replica has one record, which is dropped when it goes. Replicas that are leaving are in `leaves`: they get no new
work either, and are not members of steps that begin later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf, nan

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.leaves import Leaves
from swarm.types import Hop, PeerId
from swarm.wire.messages import Loaded


class Trust(StrEnum):
    """Whether a replica may be given work."""

    TRUSTED = "trusted"
    SUSPECT = "suspect"
    DETACHED = "detached"  # a suspect without a session


@dataclass(slots=True)
class Standing:
    """The record of one replica."""

    replica: ReplicaRecord
    trust: Trust = Trust.TRUSTED
    loaded: Loaded | None = None
    since: int = 0  # version with which it was admitted: it has no older records
    joined_s: float = -inf
    needs_donors: bool = False  # it joined, and others hold what it needs for a commit that it has yet to make
    asked_s: float = nan  # when it was asked to leave
    nonsense: int = 0  # events that no healthy replica sends

    @property
    def is_suspect(self) -> bool:
        """Whether it gets no new work until it is heard again."""
        return self.trust is not Trust.TRUSTED


class Pool:
    """The replicas of one job."""

    def __init__(self, stages: int) -> None:
        self.leaves = Leaves()
        self.by_stage: list[list[PeerId]] = [[] for _ in range(stages)]
        self._standings: dict[PeerId, Standing] = {}  # of those that are not gone, in the order in which they came
        self._dependent: dict[PeerId, None] = {}  # those that need donors, in the same order
        self._gone: set[PeerId] = set()

    # Who is there ------------------------------------------------------------------------------------------------

    def __contains__(self, peer: object) -> bool:
        return peer in self._standings

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._standings)

    def __reversed__(self) -> Iterator[PeerId]:
        return reversed(self._standings)

    def __len__(self) -> int:
        return len(self._standings)

    def __getitem__(self, peer: PeerId) -> Standing:
        return self._standings[peer]

    def standings(self) -> list[Standing]:
        """The records of all replicas, in the order in which they came."""
        return list(self._standings.values())

    def stage_of(self, peer: PeerId) -> int:
        return self._standings[peer].replica.stage

    def name(self, peer: PeerId) -> str:
        return f"stage server {peer} (stage {self.stage_of(peer)})"

    def empty_stages(self) -> list[int]:
        return [stage for stage, peers in enumerate(self.by_stage) if not peers]

    def was_lost(self, peer: PeerId) -> bool:
        """Whether the peer was a replica, is gone, and has not joined since."""
        return peer in self._gone

    # Coming and going --------------------------------------------------------------------------------------------

    def add(self, replica: ReplicaRecord) -> None:
        self._standings[replica.peer] = Standing(replica)
        self.by_stage[replica.stage].append(replica.peer)

    def remove(self, peer: PeerId) -> ReplicaRecord:
        replica = self._standings.pop(peer).replica
        self._dependent.pop(peer, None)
        self.by_stage[replica.stage].remove(peer)
        self._gone.add(peer)
        return replica

    def joined(self, replica: ReplicaRecord, report: Loaded, now_s: float) -> None:
        """The peer has fetched what its stage holds, so it no longer counts as lost."""
        self.add(replica)
        self._gone.discard(replica.peer)
        standing = self._standings[replica.peer]
        standing.loaded, standing.joined_s, standing.needs_donors = report, now_s, True
        self._dependent[replica.peer] = None

    def dependent(self) -> list[PeerId]:
        """Replicas that joined and need donors, in the order in which they came."""
        return list(self._dependent)

    def independent(self, peer: PeerId) -> None:
        """The replica has all that its commits need."""
        self._standings[peer].needs_donors = False
        del self._dependent[peer]

    def sort(self) -> None:
        """Order the replicas of each stage by peer id, so that ties do not depend on the order of arrival."""
        for peers in self.by_stage:
            peers.sort()

    # Trust and leaving -------------------------------------------------------------------------------------------

    def suspects(self) -> list[PeerId]:
        return [peer for peer, standing in self._standings.items() if standing.is_suspect]

    def heard(self, stage: int) -> list[ReplicaRecord]:
        """The replicas of a stage that are no suspects."""
        return [self._standings[peer].replica for peer in self.by_stage[stage] if not self._standings[peer].is_suspect]

    def may_answer(self, peer: PeerId) -> bool:
        """Whether an answer of the peer may come: a replica that has lost its session has forgotten the question."""
        return peer in self and not self._standings[peer].is_suspect

    def may_work(self, peer: PeerId) -> bool:
        return not self._standings[peer].is_suspect and peer not in self.leaves

    def takes_part(self, peer: PeerId, step: int) -> bool:
        """Whether the peer is a replica that averages and commits the step."""
        return peer in self._standings and self.leaves.takes_part(peer, step)

    def members(self, step: int) -> list[PeerId]:
        """Replicas that average and commit the step."""
        return [peer for peer in self._standings if self.leaves.takes_part(peer, step)]

    def spare(self) -> set[PeerId]:
        """Replicas whose stage has another one that may work."""
        return {
            peer
            for peers in self.by_stage
            for peer in peers
            if any(other != peer and self.may_work(other) for other in peers)
        }

    def donors(self, stage: int, step: int, but: PeerId) -> list[Hop]:
        """Replicas other than `but` that have the stage's state and, from `step` on, its records."""
        standings = [self._standings[peer] for peer in self.by_stage[stage] if peer != but]
        able = [
            one.replica
            for one in standings
            if not one.is_suspect and one.since <= step and self.leaves.takes_part(one.replica.peer, step)
        ]
        return [Hop(one.peer, one.incarnation, 0, one.address) for one in able]

    def validate(self) -> None:
        """Assert that each stage lists exactly its replicas."""
        assert all(peer in self.by_stage[standing.replica.stage] for peer, standing in self._standings.items())
        assert sum(map(len, self.by_stage)) == len(self._standings)
        assert list(self._dependent) == [peer for peer, standing in self._standings.items() if standing.needs_donors]
