"""Membership of peers: the life of a peer as the scheduler sees it.

      hello ──▶ IDLE ──assigned──▶ LOADING ──loaded──▶ SERVING ──released──▶ IDLE
                 │                    │                   │
                 └──── silent, disconnected ──────────────┴──▶ SUSPECT ──heard──▶ back where it was
                                                                  │
                            leaving: ... ──▶ DRAINING             └──grace over──▶ GONE ──hello──▶ IDLE

A peer with a name that is quarantined is QUARANTINED wherever it would be IDLE, until an admin releases it.

A peer that joins a running job counts as loaded once the stage could continue with it alone.

A peer of an island that may be late (scheduler/brain/islands/brain.py) stays suspect while the whole island is silent:
the others exchange without it, and it loses nothing when its link or its machine comes back. Its grace begins once one
of the island is heard again.

A peer is an id and an incarnation (one per process start). Messages of an older incarnation change nothing. A newer one
replaces it, and the older is gone at once. A peer that was gone comes back with nothing, since its work was void.

Decision: docs/decisions/006.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Protocol
from urllib.parse import unquote

from swarm.errors import NotAllowed, NotFound, StaleMessage
from swarm.job.overlap import UNMEASURED, FleetSpeed
from swarm.limits import REFERENCE_CHARACTERS_MAX
from swarm.types import NO_JOB, JobId, Memory, PeerId, PeerState
from swarm.wire.messages import Calibrated, Hello, LinkSpeed

NO_STAGE = -1
CALIBRATING = "calibrating"  # the reason of an idle peer that measures itself
CALIBRATED_AFTER_S, CALIBRATION_S_MAX = 10.0, 5.0  # idle for so long; then at work for so long at most
ANSWER_S = 30.0  # with the time to build a layer; a later answer counts, too
FIGURE_MAX = 1e18  # no device and no line is as fast
FAULT_CHARACTERS_MAX = 200
BESIDE_OTHERS = "it listens on loopback, where stage servers of other machines do not reach it"


def offer(hello: Hello) -> Memory:
    """The memory that a stage server offers."""
    return Memory(hello.memory_bytes, hello.host_bytes)


def check_reference(reference: str) -> None:
    """NotFound for a reference that is longer than any: to look for four million letters holds the event loop."""
    if len(reference) > REFERENCE_CHARACTERS_MAX:
        raise NotFound(f"nothing has a name of {len(reference)} characters", hint="see: swarm ls -a; swarm peers")


class Happening(StrEnum):
    """The events of a known peer."""

    ASSIGNED = "assigned"
    LOADED = "loaded"
    RELEASED = "released"
    HEARD = "heard"
    LOST_SIGHT = "lost sight"
    LEAVING = "leaving"
    STAYING = "staying"
    FREED = "freed"
    GRACE_OVER = "grace over"


_S, _H = PeerState, Happening
RETURN = None  # to the state that the peer had before it became suspect

TRANSITIONS: dict[tuple[PeerState, Happening], PeerState | None] = {
    (_S.IDLE, _H.ASSIGNED): _S.LOADING,
    (_S.LOADING, _H.LOADED): _S.SERVING,
    (_S.LOADING, _H.RELEASED): _S.IDLE,
    (_S.SERVING, _H.RELEASED): _S.IDLE,
    (_S.IDLE, _H.LOST_SIGHT): _S.SUSPECT,
    (_S.LOADING, _H.LOST_SIGHT): _S.SUSPECT,
    (_S.SERVING, _H.LOST_SIGHT): _S.SUSPECT,
    (_S.DRAINING, _H.LOST_SIGHT): _S.SUSPECT,
    (_S.IDLE, _H.LEAVING): _S.DRAINING,
    (_S.LOADING, _H.LEAVING): _S.DRAINING,
    (_S.SERVING, _H.LEAVING): _S.DRAINING,
    (_S.DRAINING, _H.STAYING): _S.IDLE,
    (_S.QUARANTINED, _H.FREED): _S.IDLE,
    (_S.QUARANTINED, _H.LOST_SIGHT): _S.SUSPECT,
    (_S.QUARANTINED, _H.LEAVING): _S.DRAINING,
    (_S.SUSPECT, _H.HEARD): RETURN,
    (_S.SUSPECT, _H.GRACE_OVER): _S.GONE,
}


@dataclass(frozen=True, slots=True)
class Transition:
    """A peer changed state; `job` and `stage` are what it had before."""

    peer: PeerId
    incarnation: int
    before: PeerState | None  # None: was unknown
    after: PeerState
    reason: str
    job: JobId = NO_JOB
    stage: int = NO_STAGE
    session_lost: bool = False  # it became suspect because its session broke, not because it was silent


@dataclass(frozen=True, slots=True)
class Measured:
    """What was last seen of a peer at work, else what it says of itself; kept when its job is over, for the next
    one. 0 = not known."""

    links: tuple[LinkSpeed, ...] = ()  # to the neighbours that it had
    multiply_adds_per_s: float = 0.0  # of a forward, over the time of forward and backward
    up_bytes_per_s: float = 0.0  # of its line to the scheduler
    down_bytes_per_s: float = 0.0
    receipt_s: float = 0.0  # of a message to the scheduler


NOT_MEASURED = Measured()


@dataclass(frozen=True, slots=True)
class Fellows:
    """The replicas of an island that may be late; while all of them are silent they stay suspects for `silence_s`."""

    peers: Collection[PeerId] = ()
    silence_s: float = 0.0


NO_FELLOWS = Fellows()


@dataclass(slots=True)
class Peer:
    """The record of one peer; only Membership changes it."""

    hello: Hello
    state: PeerState
    reason: str
    since_s: float
    heard_s: float
    job: JobId = NO_JOB
    stage: int = NO_STAGE
    resume: PeerState = PeerState.IDLE  # where a suspect returns to
    leaving: str = ""  # why it must hand its work over
    unreached: str = ""  # why others may not be able to dial it
    links: tuple[LinkSpeed, ...] = ()  # to the neighbours in its job, as it last reported
    measured: Measured = NOT_MEASURED
    asked_s: float = -math.inf  # when it was asked to calibrate itself


class Membership:
    """The pool of peers; methods give the transitions that they caused, in order.

    A peer is suspect when its session broke or after `suspect_after_s` of silence, gone `grace_s` later or when its
    process has ended, and forgotten `forget_after_s` after that. Methods about an unknown or gone peer change nothing.
    """

    def __init__(self, suspect_after_s: float = 2.5, grace_s: float = 5.0, forget_after_s: float = 600.0) -> None:
        self._suspect_after_s = suspect_after_s
        self.grace_s = grace_s
        self._forget_after_s = forget_after_s
        self._peers: dict[PeerId, Peer] = {}
        self._quarantined: dict[PeerId, str] = {}  # names, whether they are here or not, and why

    # What happens ------------------------------------------------------------------------------------------------

    def hello(self, hello: Hello, now_s: float) -> list[Transition]:
        """A session was dialled: by a new peer, a new incarnation, or a peer that lost its connection.

        Raises StaleMessage if a newer incarnation is known. The same incarnation keeps job and stage, unless it was
        gone, has given its job up, or serves another job.
        """
        known = self._peers.get(hello.peer)
        if known is None:
            return [self._enter(hello, now_s, None, "joined")]
        held = known.hello.incarnation
        if hello.incarnation < held:
            raise StaleMessage(
                f"{hello.peer} dialled as incarnation {hello.incarnation}, incarnation {held} is known",
                hint="another process runs under this peer's identity, or an older one woke up: stop it",
            )
        if known.state is PeerState.GONE:
            return [self._enter(hello, now_s, known.state, "came back after it was gone")]
        if hello.incarnation > held:
            gone = self._move(known, PeerState.GONE, f"replaced by incarnation {hello.incarnation}", now_s)
            return [gone, self._enter(hello, now_s, PeerState.GONE, "restarted")]
        if known.leaving and known.job == NO_JOB and not hello.job:
            # Its session ended in order, its process has not. If it is still to leave, one of the two says so again.
            gone = self._move(known, PeerState.GONE, f"it ended in order: {known.leaving}", now_s)
            return [gone, self._enter(hello, now_s, PeerState.GONE, "came back after it had left")]
        # A peer that lost its session while it loaded hears again what to load.
        loading = (known.resume if known.state is PeerState.SUSPECT else known.state) is PeerState.LOADING
        if known.job not in (NO_JOB, hello.job) and (hello.job or not loading):
            gone = self._move(known, PeerState.GONE, "it lost its session and with it the job's state", now_s)
            return [gone, self._enter(hello, now_s, PeerState.GONE, "dialled again")]
        known.hello = hello
        return self.heard(hello.peer, now_s)

    def heard(self, peer: PeerId, now_s: float) -> list[Transition]:
        """Something came from the peer: a suspect is trusted again."""
        known = self._peers.get(peer)
        if known is None or known.state is PeerState.GONE:
            return []
        known.heard_s = max(known.heard_s, now_s)
        return self._happen(known, Happening.HEARD, "heard again", now_s)

    def reached(self, peer: PeerId, incarnation: int, fault: str) -> bool:
        """Whether others can dial the peer, as far as is known: "" if so. Gives whether this is a new fault."""
        known = self._peers.get(peer)
        if known is None or known.hello.incarnation != incarnation:
            return False
        is_new, known.unreached = bool(fault) and not known.unreached, fault
        return is_new

    def measured(self, peer: PeerId, links: tuple[LinkSpeed, ...], multiply_adds_per_s: float = 0.0) -> None:
        """The peer, which serves a job, tells how fast its links to others are; how fast it computes was seen."""
        known = self._peers.get(peer)
        if known is not None and known.job != NO_JOB:
            known.links = tuple(link for link in links if link.to in self._peers)
            is_sound = 0.0 < multiply_adds_per_s < FIGURE_MAX
            speed = multiply_adds_per_s if is_sound else known.measured.multiply_adds_per_s
            known.measured = replace(known.measured, links=known.links, multiply_adds_per_s=speed)

    def calibrate(self, now_s: float) -> PeerId | None:
        """The idle peer that is to measure itself now, and counts as asked; each once, unless a job came first. One at
        a time, so that the scheduler's line is its alone. None that has just come, as a job may want it."""
        idle = self.idle_peers()
        for known in idle:
            if known.reason == CALIBRATING:
                if now_s - known.asked_s < ANSWER_S:
                    return None
                known.reason = f"calibration: no answer for {ANSWER_S:g} s"
        due = [
            known
            for known in idle
            if now_s - known.since_s >= CALIBRATED_AFTER_S and known.asked_s == -math.inf and not known.unreached
        ]
        if not due:
            return None
        known = min(due, key=lambda known: (known.since_s, known.hello.peer))
        known.asked_s, known.reason = now_s, CALIBRATING
        return known.hello.peer

    def calibrated(self, peer: PeerId, found: Calibrated) -> None:
        """The peer says what it measured when it was asked. What a job shows of it counts more."""
        known = self._peers.get(peer)
        if known is None or known.asked_s == -math.inf or known.measured.receipt_s:
            return
        speed, *line = (
            value if 0.0 < value < FIGURE_MAX else 0.0
            for value in (found.multiply_adds_per_s, found.up_bytes_per_s, found.down_bytes_per_s, found.receipt_s)
        )
        known.measured = Measured(known.measured.links, known.measured.multiply_adds_per_s or speed, *line)
        if known.reason == CALIBRATING:
            told = f": {found.fault[:FAULT_CHARACTERS_MAX]}" if found.fault else ""
            known.reason = f"calibrated{told}"

    def disconnected(self, peer: PeerId, incarnation: int, now_s: float, reason: str = "") -> list[Transition]:
        """The session of this incarnation broke; one of an older incarnation is ignored."""
        known = self._peers.get(peer)
        if known is None or known.hello.incarnation != incarnation:
            return []
        if known.state is PeerState.DRAINING and known.job == NO_JOB:
            reason = reason or f"it ended in order: {known.leaving}"
        transitions = self._happen(known, Happening.LOST_SIGHT, reason or "session broke", now_s)
        return [replace(transition, session_lost=True) for transition in transitions]

    def ended(self, peer: PeerId, incarnation: int, now_s: float, reason: str) -> list[Transition]:
        """The process whose session broke has ended: no grace is needed. One that is heard again has not."""
        known = self._peers.get(peer)
        if known is None or known.hello.incarnation != incarnation:
            return []
        return self._happen(known, Happening.GRACE_OVER, f"{known.reason}; {reason}", now_s)

    def leaving(self, peer: PeerId, now_s: float, reason: str = "") -> list[Transition]:
        """The peer asked to hand its work over."""
        known = self._peers.get(peer)
        if known is None:
            return []
        known.leaving = known.leaving or reason or "wants to leave"
        if known.state is PeerState.SUSPECT:
            known.resume = PeerState.DRAINING
        return self._happen(known, Happening.LEAVING, known.leaving, now_s)

    def stay(self, peer: PeerId, now_s: float) -> list[Transition]:
        """The peer that asked to hand its work over, and has, may be given stages again.

        NotAllowed if it has work to hand over, or is not heard.
        """
        known = self._peers.get(peer)
        if known is None or not known.leaving:
            return []
        if known.state is not PeerState.DRAINING:
            raise NotAllowed(
                f"stage server {peer} is {known.state}: {known.reason}", hint="wait until it is heard again"
            )
        if known.job != NO_JOB:
            raise NotAllowed(
                f"stage server {peer} still hands its work over",
                hint=f"wait until it serves no job; swarm explain {peer} says what it waits for",
            )
        known.leaving = ""
        return self._happen(known, Happening.STAYING, "drained no longer", now_s)

    def revoked(self, peer: PeerId, now_s: float, reason: str) -> list[Transition]:
        """The peer is no member any more: it is gone at once, without grace."""
        known = self._peers.get(peer)
        if known is None or known.state is PeerState.GONE:
            return []
        return [self._move(known, PeerState.GONE, reason, now_s)]

    def quarantine(self, peer: PeerId, now_s: float, reason: str) -> list[Transition]:
        """The peer is given no stage any more; a stage that it has must be taken from it."""
        self._quarantined[peer] = reason
        known = self._peers.get(peer)
        if known is None or known.state is not PeerState.IDLE:
            return []
        return [self._move(known, PeerState.IDLE, known.reason, now_s)]

    def free(self, peer: PeerId, now_s: float) -> list[Transition]:
        """The peer may be given stages again."""
        self._quarantined.pop(peer, None)
        known = self._peers.get(peer)
        if known is None:
            return []
        if known.resume is PeerState.QUARANTINED:
            known.resume = PeerState.IDLE
        return self._happen(known, Happening.FREED, "released by an admin", now_s)

    def tick(self, now_s: float, fellows_of: Callable[[Peer], Fellows] = lambda _: NO_FELLOWS) -> list[Transition]:
        """Look at the clock: find the peers that were silent too long. `fellows_of` is asked of suspects alone."""
        transitions: list[Transition] = []
        for name, known in list(self._peers.items()):
            silence_s = now_s - known.heard_s
            if known.state is PeerState.GONE:
                if now_s - known.since_s >= self._forget_after_s:
                    del self._peers[name]
            elif known.state is PeerState.SUSPECT:
                if now_s - known.since_s >= self.grace_s and not self._may_be_late(known, fellows_of(known), now_s):
                    told = f"{known.reason}; not heard for {silence_s:.1f} s (swarm scheduler --grace {self.grace_s:g})"
                    transitions += self._happen(known, Happening.GRACE_OVER, told, now_s)
            elif silence_s >= self._suspect_after_s:
                transitions += self._happen(known, Happening.LOST_SIGHT, f"silent for {silence_s:.1f} s", now_s)
        return transitions

    def _may_be_late(self, known: Peer, fellows: Fellows, now_s: float) -> bool:
        """Whether a suspect stays one after its grace: its whole island is silent, or was until less than that ago. Not
        one that is to leave."""
        held = [fellow for peer in fellows.peers if (fellow := self._peers.get(peer)) is not None]
        back_s = [fellow.since_s for fellow in held if fellow.state not in (PeerState.SUSPECT, PeerState.GONE)]
        until_s = min([known.heard_s + fellows.silence_s, *(since_s + self.grace_s for since_s in back_s)])
        return not known.leaving and now_s < until_s

    def stood_still(self, seconds: float, now_s: float) -> None:
        """The scheduler itself did not run for a while (SIGSTOP, a machine at its limit): no peer was silent."""
        for known in self._peers.values():
            known.heard_s = min(now_s, known.heard_s + seconds)
            known.since_s = min(now_s, known.since_s + seconds)

    # What is decided ---------------------------------------------------------------------------------------------

    def assign(self, peer: PeerId, job: JobId, stage: int, now_s: float) -> list[Transition]:
        """Give an idle peer a stage of a job; NotAllowed if it is not idle."""
        known = self._peers.get(peer)
        if known is None or known.state is not PeerState.IDLE:
            state = "unknown" if known is None else known.state
            raise NotAllowed(f"{peer} is {state}, only an idle peer can be given a stage")
        if known.reason == CALIBRATING:
            known.asked_s = -math.inf  # it gave way, and is asked again
        known.job, known.stage = job, stage
        return self._happen(known, Happening.ASSIGNED, f"stage {stage} of {job}", now_s)

    def adopt(self, peer: PeerId, job: JobId, stage: int, now_s: float) -> list[Transition]:
        """An idle peer continues with the stage that it holds: it served it under an earlier scheduler."""
        return [*self.assign(peer, job, stage, now_s), *self.serving(peer, now_s)]

    def serving(self, peer: PeerId, now_s: float) -> list[Transition]:
        """The peer has loaded its stage."""
        known = self._peers.get(peer)
        if known is None:
            return []
        if known.state is PeerState.SUSPECT and known.resume is PeerState.LOADING:
            known.resume = PeerState.SERVING
        return self._happen(known, Happening.LOADED, f"stage {known.stage} of {known.job}", now_s)

    def release(self, peer: PeerId, now_s: float, reason: str = "") -> list[Transition]:
        """The peer's job is over: it is idle. A suspect becomes idle when it is heard again."""
        known = self._peers.get(peer)
        if known is None or known.state is PeerState.GONE:
            return []
        transitions = self._happen(known, Happening.RELEASED, reason or f"{known.job} is over", now_s)
        if known.resume in (PeerState.LOADING, PeerState.SERVING):
            known.resume = PeerState.IDLE
        known.job, known.stage, known.links = NO_JOB, NO_STAGE, ()
        return transitions

    # What is known -----------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many peers are known."""
        return len(self._peers)

    def get(self, peer: PeerId) -> Peer | None:
        return self._peers.get(peer)

    def peers(self) -> list[Peer]:
        """All peers that are not forgotten, in order of peer id."""
        return [self._peers[name] for name in sorted(self._peers)]

    def find(self, reference: str) -> Peer:
        """The peer with this id, else the only one whose id begins with it, gone peers last; NotFound."""
        check_reference(reference)
        if (exact := self._peers.get(PeerId(reference))) is not None:
            return exact
        begins = [known for known in self.peers() if reference and known.hello.peer.startswith(reference)]
        found = [known for known in begins if known.state is not PeerState.GONE] or begins
        if not found:
            raise NotFound(f'there is no stage server "{reference}"', hint="list them with: swarm peers")
        if len(found) > 1:
            names = ", ".join(known.hello.peer for known in found[:5])
            raise NotFound(f'"{reference}" begins the names of {len(found)} stage servers: {names}', hint="name one")
        return found[0]

    def idle_peers(self) -> list[Peer]:
        """The peers that can be given a stage, in order of peer id."""
        return [known for known in self.peers() if known.state is PeerState.IDLE]

    def lasting_peers(self) -> list[Peer]:
        """The peers that may serve for long, idle or busy: not gone, not leaving, not quarantined, in order of id.

        A quarantined name counts in every state: its stage is taken from it, and a suspect is heard again as such.
        """
        out = [known for known in self.peers() if known.state is not PeerState.GONE and not known.leaving]
        return [known for known in out if known.hello.peer not in self._quarantined]

    def validate(self) -> None:
        for name, known in self._peers.items():
            assert known.hello.peer == name
            assert (known.job == NO_JOB) == (known.stage == NO_STAGE), known
            if known.state is PeerState.IDLE:
                assert known.job == NO_JOB, known
            if known.state in (PeerState.LOADING, PeerState.SERVING):
                assert known.job != NO_JOB, known

    def _enter(self, hello: Hello, now_s: float, before: PeerState | None, reason: str) -> Transition:
        state = PeerState.IDLE
        if hello.peer in self._quarantined:
            state, reason = PeerState.QUARANTINED, self._quarantined[hello.peer]
        self._peers[hello.peer] = Peer(hello, state, reason, now_s, now_s)
        return Transition(hello.peer, hello.incarnation, before, state, reason)

    def _happen(self, known: Peer, happening: Happening, reason: str, now_s: float) -> list[Transition]:
        if (known.state, happening) not in TRANSITIONS:
            return []
        after = TRANSITIONS[known.state, happening]
        if after is PeerState.SUSPECT:
            known.resume = known.state
        if after is RETURN:
            after = known.resume
            reason = known.leaving if after is PeerState.DRAINING else reason
        return [self._move(known, after, reason, now_s)]

    def _move(self, known: Peer, after: PeerState, reason: str, now_s: float) -> Transition:
        if after is PeerState.IDLE and known.hello.peer in self._quarantined:
            after, reason = PeerState.QUARANTINED, self._quarantined[known.hello.peer]
        transition = Transition(
            known.hello.peer, known.hello.incarnation, known.state, after, reason, known.job, known.stage
        )
        known.state, known.reason, known.since_s = after, reason, now_s
        if after is PeerState.GONE:
            known.job, known.stage, known.links = NO_JOB, NO_STAGE, ()
        return transition


class SessionOrigin(Protocol):
    """A session, and whence it came as gRPC names it: ipv4:203.0.113.7:40312."""

    @property
    def incarnation(self) -> int: ...

    @property
    def connection(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Origin:
    """Whence the newest session of a peer came."""

    incarnation: int
    connection: str

    def shows_end_of(self, one: Peer) -> bool:
        """Whether the peer's address would refuse connections if its process had ended."""
        host, hello = unquote(self.connection).partition(":")[2].rpartition(":")[0], one.hello
        is_own = hello.address.rpartition(":")[0] == host and not hello.forwarded
        return is_own and hello.incarnation == self.incarnation and not one.unreached


class Endings:
    """The peers whose address shows whether their process has ended: an ended process listens no longer.

    A session that broke may come back, so its peer has the grace period. A process that was killed does not: its
    machine refuses connections at once at the port that the process had. That counts only

        once for each session, after it broke and while there is no other
        at the host from which the session came, as nobody else's word of a port counts
        at a port of the process itself: a tunnel or a router that forwards one fails without it
        at an address that could be dialled before (scheduler/api/members/reach.py), as far as that is known
    """

    def __init__(self) -> None:
        self._origins: dict[PeerId, _Origin] = {}

    def look(self, peers: Iterable[Peer], session_of: Callable[[PeerId], SessionOrigin | None]) -> list[Hello]:
        """The peers that shall be dialled now. Sessions that begin and break between two looks are not seen."""
        before, self._origins, found = self._origins, {}, []
        for known in peers:
            peer = known.hello.peer
            if (session := session_of(peer)) is not None:
                self._origins[peer] = _Origin(session.incarnation, session.connection)
            elif (origin := before.get(peer)) is None or known.state is PeerState.GONE:
                continue
            elif known.state is not PeerState.SUSPECT:
                self._origins[peer] = origin  # membership has not heard of it yet
            elif origin.shows_end_of(known):
                found.append(known.hello)
        return found


def fleet_speed(peers: Sequence[Peer]) -> FleetSpeed:
    """The medians of these peers' paces and of the links between them, else of their lines to the scheduler; nothing
    if one of the first three is unknown.

    Medians, because a stage server may claim any speed, and it is unknown which links a job will use.
    """
    at = {peer.hello.peer: peer.hello.site for peer in peers}
    links = [link for peer in peers for link in peer.measured.links if link.to in at]
    far = [
        link for peer in peers for link in peer.measured.links if at.get(link.to, peer.hello.site) != peer.hello.site
    ]
    between = _sound(link.bytes_per_s for link in (far if any(at.values()) else links))
    computing = _sound(peer.measured.multiply_adds_per_s for peer in peers)
    rates, receipts_s = _sound(link.bytes_per_s for link in links), _sound(link.receipt_s for link in links)
    if not rates:  # no two of them were neighbours: take their lines
        rates = _sound(min(peer.measured.up_bytes_per_s, peer.measured.down_bytes_per_s) for peer in peers)
        receipts_s = _sound(peer.measured.receipt_s for peer in peers)
    if not (computing and rates and receipts_s):
        return UNMEASURED
    return FleetSpeed(median(computing), median(rates), median(receipts_s), median(between) if between else 0.0)


def filled(values: Sequence[float], otherwise: float = 0.0) -> list[float]:
    """What was measured of each peer, and the median of these where nothing was; `otherwise` if it was of none."""
    known = _sound(values)
    usual = median(known) if known else otherwise
    return [value if 0.0 < value < math.inf else usual for value in values]


def _sound(values: Iterable[float]) -> list[float]:
    return [value for value in values if 0.0 < value < math.inf]
