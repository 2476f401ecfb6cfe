"""The rounds of one outer step: for every unit, one envoy of each island and stage that holds it.

    all islands have come to the step ──▶ a round per unit ──all envoys report, alike──▶ exchanged
                                              ▲      │
                                              └pause─┴── envoys failed or say nothing, one is lost, or holds other bytes
                                                         than the others

Proposals depend only on the weights at the outer step, which all replicas of a stage share. So a round can be repeated
with other envoys until the step is committed.

A failed round goes on until the envoys of all islands but one have reported, or their time is over. Each envoy names
every island that it missed, so for each pair of islands it is known whether they reached each other.

Decisions: docs/decisions/065, 193.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.brain.commit.digests import average_of, outvoted
from scheduler.brain.commit.slices import squared_norms
from scheduler.brain.inputs import Exchanged, OuterRound, ReplicaRecord
from scheduler.brain.outputs import Fail, Note, Output, Send
from swarm.errors import ReplicaDiverged
from swarm.text import listed
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import AbortRound, Averaged, Envoy, Exchange, RoundFailed

PAUSE_S, PAUSE_S_MAX = 1.0, 30.0  # before a round is repeated, doubled with each time in a row
DISPUTES_MAX = 2  # of the envoys of a unit, where most islands do not agree; the next one ends the job
LATE, LATER = 1.5, 3.0  # times averaging.timeout_s: then the first round, or one behind it, has waited for envoys
NEWEST = 3  # rounds of a unit, by which islands are judged
HASTY = 7  # rounds of a unit that fail, in a minute and a half, before one waits for those that say nothing


@dataclass(frozen=True, slots=True)
class Delegation:
    """The replicas that may exchange for an island, by stage, and the tokens by which its proposal weighs."""

    timeline: int
    tokens: int
    replicas: Mapping[int, tuple[ReplicaRecord, ...]]


@dataclass(frozen=True, slots=True)
class Rift:
    """Why an island, or a pair of islands, could not exchange, as an envoy reports it."""

    said: str
    by: int | None = None  # the timeline whose envoys alone say so, where those of the other one deny it


@dataclass(slots=True)
class _Round:
    """One round of a unit, with the reports of its envoys."""

    number: Round
    envoys: tuple[Envoy, ...]
    began_s: float
    ended_s: float = math.inf  # the next one began
    trouble: str = ""  # the first failure
    reports: dict[PeerId, Averaged] = field(default_factory=dict)
    missed: dict[PeerId, dict[PeerId, str]] = field(default_factory=dict)  # by accuser: whom, or itself, and why

    @property
    def is_complete(self) -> bool:
        return len(self.reports) == len(self.envoys)

    @property
    def is_judged(self) -> bool:
        """Whether it failed, and for each pair of islands an envoy reported whether they reached each other."""
        return bool(self.missed) and len({one.timeline for one in self.silent()}) <= 1

    def silent(self) -> list[Envoy]:
        """The envoys that have not reported."""
        return [one for one in self.envoys if one.peer not in self.reports and one.peer not in self.missed]

    def failed(self, peer: PeerId, event: RoundFailed) -> None:
        """Note an accusation. It counts even after the round was given up because of another report."""
        of, accused = self._timelines(), PeerId(event.accused)
        self.reports.pop(peer, None)
        blames = accused if of.get(accused, of[peer]) != of[peer] else peer
        self.missed.setdefault(peer, {})[blames] = f"{peer} says {event.reason}"
        self.trouble = self.trouble or f"{peer} says {event.reason}" + (f" (accuses {accused})" if accused else "")

    def overrules(self) -> bool:
        """Whether all envoys of most islands hold one mean. Envoys with another one count as failed then."""
        of, held = self._timelines(), dict[int, frozenset[Hashable]]()
        for peer, report in self.reports.items():
            held[of[peer]] = held.get(of[peer], frozenset()) | {average_of(report)}
        odd = outvoted(held)
        right = frozenset[Hashable]().union(*(means for timeline, means in held.items() if timeline not in odd))
        if len(right) != 1:
            return False
        for peer in [peer for peer, report in self.reports.items() if average_of(report) not in right]:
            told = f"{peer} holds {self.reports.pop(peer).digest}, and most islands hold another mean"
            self.missed[peer] = {peer: told}
        return True

    def rifts(self, now_s: float, must_speak_s: float) -> dict[frozenset[int], Rift]:
        """The timelines that failed by themselves, and the pairs that did not reach each other."""
        of, found = self._timelines(), dict[frozenset[int], Rift]()
        told: dict[frozenset[int], dict[int, str]] = {}
        for peer, missed in sorted(self.missed.items()):
            for other, said in sorted(missed.items()):
                told.setdefault(frozenset((of[peer], of[other])), {}).setdefault(of[peer], said)
        silent = {one.timeline: one.peer for one in self.silent()}
        for pair, by in told.items():
            first = min(by)
            is_denied = len(by) < len(pair) and not silent.keys() & pair
            found[pair] = Rift(by[first], first if is_denied else None)
        if min(now_s, self.ended_s) >= self.began_s + must_speak_s:
            found |= {frozenset((one,)): Rift(f"{peer} says nothing") for one, peer in silent.items()}
        return found

    def _timelines(self) -> dict[PeerId, int]:
        return {envoy.peer: envoy.timeline for envoy in self.envoys}


@dataclass(slots=True)
class _UnitRounds:
    """The rounds of one unit."""

    newest: list[_Round] = field(default_factory=list)  # NEWEST at most
    is_under_way: bool = False  # the last one of them, or it is complete
    failures: int = 0
    was_late: bool = False
    disputes: int = 0
    retry_s: float = -math.inf
    trouble: str = ""

    @property
    def under_way(self) -> _Round | None:
        return self.newest[-1] if self.is_under_way else None

    @property
    def is_complete(self) -> bool:
        return self.is_under_way and self.newest[-1].is_complete

    def of(self, number: Round, peer: PeerId) -> _Round | None:
        """The round with this number, if the peer is one of its envoys."""
        found = (one for one in self.newest if one.number == number and any(each.peer == peer for each in one.envoys))
        return next(found, None)

    def rifts(self, now_s: float, must_speak_s: float) -> dict[frozenset[int], Rift]:
        """What failed in all of the newest finished rounds; if nothing did, what failed in the last one."""
        over = [one for one in self.newest if one is not self.under_way or now_s >= one.began_s + must_speak_s]
        if self.is_complete or not over:
            return {}
        *before, last = (one.rifts(now_s, must_speak_s) for one in over)
        for one in over[-1].silent() if before else ():  # nor did its island say anything in the round before
            last |= {each: rift for each, rift in before[-1].items() if each == {one.timeline}}
        return {each: last[each] for each in last.keys() & set(last).intersection(*before) or last.keys()}


class Exchanging:
    """The rounds of one outer step; `first` is the number of the first round."""

    def __init__(self, step: int, units: Mapping[UnitName, tuple[int, ...]], first: Round, timeout_s: float) -> None:
        self.step = step
        self._units = units
        self._next = first
        self._timeout_s = timeout_s
        self._rounds = {unit: _UnitRounds() for unit in units}
        self._lost: dict[int, tuple[int, str]] = {}  # by timeline: how many of its envoys, and how the newest one
        self.outcomes: Counter[str] = Counter()  # of its rounds that are over

    @property
    def next_round(self) -> Round:
        """The number of the next round."""
        return self._next

    def begin(self, delegations: Iterable[Delegation], now_s: float) -> list[Output]:
        """Give up late rounds; start due rounds for which every island has envoys."""
        outputs: list[Output] = []
        known = list(delegations)
        for unit, one in self._rounds.items():
            if self._late_s(one) <= now_s and self._relieves(unit, one.newest[-1].silent(), known):
                silent = listed(each.peer for each in one.newest[-1].silent())
                outputs += self._again(unit, one.newest[-1].trouble or f"no word came from {silent}", now_s)
                one.was_late = True
            envoys = self._envoys(unit, one.failures, known)
            if one.is_under_way or one.retry_s > now_s or not envoys:
                continue
            if one.newest and one.newest[-1].ended_s == math.inf:
                outputs += self._aborts(unit, one.newest[-1])
                one.newest[-1].ended_s = now_s
            one.newest, one.is_under_way = [*one.newest[1 - NEWEST :], _Round(self._next, envoys, now_s)], True
            outputs += [Send(each.peer, self._command(unit, self._next, envoys, each)) for each in envoys]
            self._next = Round(self._next.epoch, self._next.number + 1)
        return outputs

    def averaged(self, peer: PeerId, event: Averaged, now_s: float) -> list[Output]:
        """An envoy has the mean proposal. Fails the job if repeatedly no majority of islands holds the same mean."""
        one = self._rounds.get(event.unit)
        made = None if one is None else one.of(event.round, peer)
        if one is None or made is None or all(each.peer != peer for each in made.silent()):
            return []
        made.reports[peer] = event
        if not one.is_under_way and made is one.newest[-1] and made.ended_s == math.inf and made.is_complete:
            one.is_under_way = True  # the last word came late, but before the next round
            self.outcomes["failed"] -= 1
        if one.under_way is not made:
            return []
        if made.is_judged:
            return self._again(event.unit, made.trouble, now_s)
        if not made.is_complete or len(set(map(average_of, made.reports.values()))) == 1:
            return []
        held = ", ".join(f"{at} holds {made.reports[at].digest}" for at in sorted(made.reports))
        told = f"envoys differ in the mean proposal of unit {event.unit}, outer step {self.step}: {held}"
        if made.overrules():
            return self._again(event.unit, told, now_s)
        one.disputes += 1
        if one.disputes > DISPUTES_MAX:
            return [Fail(ReplicaDiverged.code, told, "run the same release on all stage servers")]
        return [*self._again(event.unit, told, now_s), *self._void(event.unit)]

    def failed(self, peer: PeerId, event: RoundFailed, now_s: float) -> list[Output]:
        """An envoy could not exchange: repeat the round after a pause, with other envoys if there are any."""
        one = self._rounds.get(event.unit)
        made = None if one is None else one.of(event.round, peer)
        if one is None or made is None:
            return []
        made.failed(peer, event)
        return self._again(event.unit, made.trouble, now_s) if one.under_way is made and made.is_judged else []

    def lost(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """The peer is gone, or lost its rounds with its session: repeat its rounds."""
        outputs, told = list[Output](), f"{peer} is lost: {reason}"
        for unit, one in self._rounds.items():
            for envoy in one.newest[-1].envoys if one.newest and one.newest[-1].ended_s == math.inf else ():
                if envoy.peer == peer:
                    self._lost[envoy.timeline] = (self._lost.get(envoy.timeline, (0, ""))[0] + 1, told)
                    outputs += [*self._again(unit, told, now_s), *self._void(unit)]
                    pause_s = _pause_s(one.failures - 1)
                    one.retry_s = min(one.retry_s, now_s + pause_s)  # whatever others still say of it is void
        return outputs

    def give_up(self, reason: str) -> list[Output]:
        """Abort all rounds, complete or not, because the proposing islands have changed."""
        self.outcomes["aborted"] += sum(one.is_under_way for one in self._rounds.values())
        newest = [(unit, one.newest[-1]) for unit, one in self._rounds.items() if one.newest]
        aborts = [each for unit, made in newest for each in self._aborts(unit, made)]
        return [Note("warning", f"the exchange begins again: {reason}"), *aborts]

    def result(self) -> Exchanged | None:
        """The means that all envoys agree on, once the rounds of all units are complete."""
        if not all(one.is_complete for one in self._rounds.values()):
            return None
        made = {unit: one.newest[-1] for unit, one in self._rounds.items()}
        norms = [norm for one in made.values() for norm in one.reports[min(one.reports)].norms]
        squared = math.fsum(squared_norms(norms))
        rounds = [OuterRound(unit, one.number, tuple(each.peer for each in one.envoys)) for unit, one in made.items()]
        is_finite = math.isfinite(squared)
        return Exchanged(self.step, tuple(rounds), not is_finite, math.sqrt(squared) if is_finite else 0.0)

    def rifts(self, now_s: float) -> dict[frozenset[int], Rift]:
        """The timelines, and pairs of timelines, that cannot exchange, by the newest rounds of all units."""
        found: dict[frozenset[int], Rift] = {}
        for one in self._rounds.values():
            found |= one.rifts(now_s, self._timeout_s + PAUSE_S)  # envoys begin at about the same time
        if not found and self._lost:  # no round came to its end, for want of these envoys
            most = max(self._lost, key=lambda one: self._lost[one][0])
            found[frozenset((most,))] = Rift(self._lost[most][1])
        return found

    def retries_s(self) -> list[float]:
        """When rounds are due, and when those under way are late."""
        return [self._late_s(one) if one.is_under_way else one.retry_s for one in self._rounds.values()]

    def waiting_for(self) -> str:
        """The reason why the exchange waits, for a person; empty if all rounds are complete."""
        parts = []
        for unit, one in self._rounds.items():
            if one.under_way is None:
                parts.append(f"{unit} is exchanged again" + (f", since {one.trouble}" if one.trouble else ""))
            elif not one.is_complete:
                parts.append(f"{listed(each.peer for each in one.under_way.silent())} ({unit})")
        return f"waits for the exchange between islands: {'; '.join(parts)}" if parts else ""

    def _late_s(self, one: _UnitRounds) -> float:
        """When the round under way is late; never, if it is complete."""
        if one.under_way is None or one.is_complete:
            return math.inf
        return one.under_way.began_s + (LATER if one.was_late else LATE) * self._timeout_s

    def _relieves(self, unit: UnitName, silent: Iterable[Envoy], known: Iterable[Delegation]) -> bool:
        """Whether others can go for some that say nothing; the same ones would only have to begin again."""
        pools = [one.replicas[stage] for one in known for stage in self._units[unit]]
        alone = {pool[0].peer for pool in pools if len(pool) == 1}
        return any(one.peer not in alone for one in silent)

    def _again(self, unit: UnitName, trouble: str, now_s: float) -> list[Output]:
        """Let the next round begin after a pause, in which other envoys may say how they fared."""
        one = self._rounds[unit]
        if not one.is_under_way:
            return []
        one.is_under_way, one.trouble = False, trouble
        one.retry_s = now_s + _pause_s(one.failures)
        if one.failures >= HASTY and one.newest[-1].silent():
            one.retry_s = max(one.retry_s, one.newest[-1].began_s + self._timeout_s + PAUSE_S)
        one.failures += 1
        self.outcomes["failed"] += 1
        told = f"round {one.newest[-1].number.number} of unit {unit} between islands failed: {trouble}"
        return [Note("warning", told)]

    def _void(self, unit: UnitName) -> list[Output]:
        """Discard the unit's last round; it says nothing about reachability."""
        return self._aborts(unit, self._rounds[unit].newest.pop())

    def _aborts(self, unit: UnitName, made: _Round) -> list[Output]:
        return [Send(one.peer, AbortRound(one.timeline, self.step, unit, made.number)) for one in made.envoys]

    def _envoys(self, unit: UnitName, failures: int, delegations: Iterable[Delegation]) -> tuple[Envoy, ...]:
        """One envoy of each stage that holds the unit, island by island; the first of an island proposes. None if one
        is missing.

        After a failure others go. In a single island all go, as nothing has to be sent.
        """
        envoys: list[Envoy] = []
        known = list(delegations)
        for island, delegation in enumerate(known):
            tokens = delegation.tokens
            for stage in self._units[unit]:
                able = delegation.replicas[stage]
                if not able:
                    return ()
                first = _turn(failures, island, len(able))
                for one in (*able[first:], *able[:first])[: None if len(known) == 1 else 1]:
                    envoys.append(Envoy(one.peer, one.incarnation, one.address, delegation.timeline, tokens))
                    tokens = 0
        return tuple(envoys)

    def _command(self, unit: UnitName, number: Round, envoys: tuple[Envoy, ...], to: Envoy) -> Exchange:
        return Exchange(to.timeline, self.step, unit, number, envoys, self._timeout_s)


def _pause_s(failures: int) -> float:
    """Seconds that a unit rests before its next round, by the number of failures before the last one."""
    return min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(failures, 10))


def _turn(failures: int, island: int, many: int) -> int:
    """The index of the replica that goes for an island, of `many`: envoys of two islands try all pairs.

    In step only like pairs would be tried. Each digit of `island`, to the base `many`, is by how much its turns run
    ahead of those of island 0 each time that a digit of `failures` changes; so any two islands run apart.
    """
    turn = failures
    while island and many > 1:
        island, digit = divmod(island, many)
        failures //= many
        turn += digit * failures
    return turn % many
