"""The pool of a job's replicas: the stage of each, whether it gets work, and the steps in which it takes part.

    add ──▶ TRUSTED ──silent──▶ SUSPECT ──heard──▶ TRUSTED        a suspect gets no new work, and is a member still
               └──session broke──▶ DETACHED ──Hello──▶ TRUSTED    nothing is believed until it says what it holds
                                      any of them ──remove──▶ gone: what it held is void, until it joins anew

Each replica has one record, which is dropped when it goes. Replicas that are leaving are in `leaves`: they get no new
work either, and are not members of steps that begin later.

Decision: docs/decisions/028.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, nan
from random import Random

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.settings import ON_ITS_WAY_S_MAX
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
        able = [standing.replica for standing in standings if not standing.is_suspect and standing.since <= step]
        able = [replica for replica in able if self.leaves.takes_part(replica.peer, step)]
        return [Hop(replica.peer, replica.incarnation, 0, replica.address) for replica in able]

    def validate(self) -> None:
        """Assert that each stage lists exactly its replicas."""
        assert all(peer in self.by_stage[standing.replica.stage] for peer, standing in self._standings.items())
        assert sum(map(len, self.by_stage)) == len(self._standings)
        assert list(self._dependent) == [peer for peer, standing in self._standings.items() if standing.needs_donors]


@dataclass(frozen=True, slots=True)
class Leave:
    """Why a replica leaves, and where to: `target` is a stage, None = out of the job."""

    reason: str
    target: int | None = None
    until: int | None = None  # None: waits


class Leaves:
    """Replicas on their way out of their stage: to another stage, or for good.

        asked ──another replica stays──▶ leaving: no new work ──steps below `until` agreed──▶ released
          └──▶ waiting, while it is the last of its stage ──a peer joined──▶ leaving

    `until` is the first step that was not open when it was decided: the replica takes part in all steps below it,
    averages and commits them and keeps what its neighbours may ask for; of later steps it gets nothing and is no
    member. So when it is released nothing depends on it, and nothing is done again.

    Replicas that leave or wait to leave.
    """

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
            stay = [other for other in pool if other not in (peer, *suspects) and other not in self]
            if stay and peer not in self:
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


DONORS_MAX = 8  # named to one joiner: enough to share the load and to survive deaths, few enough for thousands of peers
PAUSE_S = 5.0  # before a peer that failed to join tries again; doubles with each time in a row
PAUSE_S_MAX = 300.0


@dataclass(slots=True)
class Joiner:
    """One attempt of one peer; `number` tells it from earlier ones."""

    replica: ReplicaRecord
    number: int
    since_s: float
    waits: bool = False  # it does not know yet what to fetch
    answered: int = 0  # reports
    answered_version: int = -1  # of the newest of them
    report: Loaded | None = None  # waits for an answer
    nonsense: int = 0  # events that no healthy peer sends


@dataclass(slots=True)
class _JoinFailures:
    count: int
    until_s: float
    reason: str


class Joiners:
    """Joiners: peers on their way into a job at work, with their reports and the answers, until they are replicas.

        begin ──▶ fetches ──Loaded(version, digest)──▶ reported ──right and new enough──▶ admitted: a replica
                     ▲                                    │
                     └────────── Follow: answered ────────┘ too old: the job went on

    A joiner keeps what it reported until it is answered, so a report stays true while it is judged. A joiner at version
    v is admitted while v + 1 is not yet agreed by all replicas. The commits that it is missing are then still open, and
    the job cannot advance past them without it, so it cannot fall behind again. A joiner as fast as the others gets in,
    however short the steps are.

    It lacks the averaged gradients of rounds in which it was no member, and fetches them from the logs of other
    replicas.

    All joiners of one job.
    """

    def __init__(self) -> None:
        self._joiners: dict[PeerId, Joiner] = {}
        self._failures: dict[PeerId, _JoinFailures] = {}
        self._number = 0

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._joiners

    def __len__(self) -> int:
        return len(self._joiners)

    def __iter__(self) -> Iterator[Joiner]:
        return iter(list(self._joiners.values()))

    def get(self, peer: PeerId) -> Joiner | None:
        return self._joiners.get(peer)

    def begin(self, replica: ReplicaRecord, now_s: float, *, waits: bool = False) -> Joiner:
        """Let the peer join the stage; an earlier attempt is forgotten."""
        self._number += 1
        joiner = self._joiners[replica.peer] = Joiner(replica, self._number, now_s, waits)
        return joiner

    def fetches(self, peer: PeerId, now_s: float) -> Joiner | None:
        """A joiner that waited may fetch from now on; None if there is none."""
        joiner = self._joiners.get(peer)
        if joiner is None or not joiner.waits:
            return None
        joiner.waits, joiner.since_s = False, now_s
        return joiner

    def reported(self, peer: PeerId, event: Loaded) -> bool:
        """The peer's state is complete; False if that is news of an earlier attempt, or was answered already.

        With a new session a peer repeats every report that was not answered; the versions that it reports only rise.
        """
        joiner = self._joiners.get(peer)
        if joiner is None or event.join != joiner.number or event.version <= joiner.answered_version:
            return False
        joiner.report = event
        return True

    def answer(self, joiner: Joiner) -> None:
        """Drop a report that was too old, and tell the joiner so."""
        assert joiner.report is not None
        joiner.answered_version = joiner.report.version
        joiner.report = None
        joiner.answered += 1

    def admitted(self, peer: PeerId) -> Joiner:
        """The peer is a replica now."""
        self._failures.pop(peer, None)
        return self._joiners.pop(peer)

    def forget(self, peer: PeerId) -> Joiner | None:
        """The peer is gone, or was taken out."""
        return self._joiners.pop(peer, None)

    def failed(self, peer: PeerId, reason: str, now_s: float) -> None:
        """The peer could not join: not again for a while."""
        self.forget(peer)
        count = self._failures[peer].count + 1 if peer in self._failures else 1
        pause_s = min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(count - 1, 10))
        self._failures[peer] = _JoinFailures(count, now_s + pause_s, reason)

    def barred(self, peer: PeerId, now_s: float) -> str:
        """Why the peer may not try now; empty if it may."""
        failures = self._failures.get(peer)
        if failures is None or failures.until_s <= now_s:
            return ""
        return f"it could not join ({failures.reason}); again in {failures.until_s - now_s:.0f} s"


def choose_donors(candidates: Sequence[Hop], rng: Random) -> tuple[Hop, ...]:
    """The donors that a joiner may ask: all candidates, or a random few of many."""
    return tuple(candidates if len(candidates) <= DONORS_MAX else rng.sample(list(candidates), DONORS_MAX))
