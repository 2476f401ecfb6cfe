"""The rounds of one outer step: for every unit, one envoy of each island and stage that holds it.

    all islands have come to the step ──▶ a round per unit ──all envoys report, alike──▶ exchanged
                                              ▲      │
                                              └pause─┴── an envoy failed, is lost, or holds other bytes than the others

Proposals depend on the weights at the outer step alone, and all replicas of a stage share these. So a round can
be repeated with other envoys at any time until the step is committed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.brain.commit.digests import average_of
from scheduler.brain.commit.slices import squared_norms
from scheduler.brain.inputs import Exchanged, OuterRound, ReplicaRecord
from scheduler.brain.outputs import Fail, Note, Output, Send
from swarm.errors import ReplicaDiverged
from swarm.events import Averaged, RoundFailed
from swarm.messages import AbortRound, Envoy, Exchange
from swarm.text import listed
from swarm.types import PeerId, Round, UnitName

PAUSE_S, PAUSE_S_MAX = 1.0, 30.0  # before a round is repeated, doubled with each time in a row
DISPUTES_MAX = 2  # of the envoys of a unit; the next one ends the job


@dataclass(frozen=True, slots=True)
class Delegation:
    """The replicas that may take part for an island, by stage. Its proposal counts by the tokens that it trained."""

    timeline: int
    tokens: int
    replicas: Mapping[int, tuple[ReplicaRecord, ...]]


@dataclass(slots=True)
class _UnitRound:
    """The rounds of one unit."""

    round: Round | None = None  # the present one
    envoys: tuple[Envoy, ...] = ()
    reports: dict[PeerId, Averaged] = field(default_factory=dict)
    failures: int = 0
    disputes: int = 0
    retry_s: float = -math.inf
    trouble: str = ""
    began_s: float = -math.inf  # the present round
    told: dict[Round, tuple[Envoy, ...]] = field(default_factory=dict)  # who was in which round
    apart: dict[Round, dict[frozenset[int], str]] = field(default_factory=dict)  # timelines: which envoys said what

    @property
    def is_complete(self) -> bool:
        return self.round is not None and len(self.reports) == len(self.envoys)

    def missing(self) -> list[PeerId]:
        return [one.peer for one in self.envoys if one.peer not in self.reports]

    def note(self, peer: PeerId, event: RoundFailed) -> None:
        """An envoy accuses one of another island; also once the round was given up, for what another one said."""
        of = {envoy.peer: envoy.timeline for envoy in self.told[event.round]}
        pair = frozenset((of[peer], of.get(PeerId(event.accused), of[peer])))
        if len(pair) > 1:
            self.apart.setdefault(event.round, {})[pair] = f"{peer} says {event.reason}"


class Exchanging:
    """The rounds of the outer step that all islands have come to; `first` is the number of the first round."""

    def __init__(self, step: int, units: Mapping[UnitName, tuple[int, ...]], first: Round, timeout_s: float) -> None:
        self.step = step
        self._units = units
        self._next = first
        self._timeout_s = timeout_s
        self._rounds = {unit: _UnitRound() for unit in units}
        self.outcomes: Counter[str] = Counter()  # of its rounds that are over

    @property
    def next_round(self) -> Round:
        """The number of the next round."""
        return self._next

    def begin(self, delegations: Iterable[Delegation], now_s: float) -> list[Output]:
        """Start the rounds that are due and for which every island has envoys."""
        outputs: list[Output] = []
        known = list(delegations)
        for unit, one in self._rounds.items():
            envoys = self._envoys(unit, one.failures, known)
            if one.round is None and one.retry_s <= now_s and envoys:
                one.round, one.envoys, one.reports, one.began_s = self._next, envoys, {}, now_s
                one.told[one.round] = envoys
                self._next = Round(self._next.epoch, self._next.number + 1)
                outputs += [Send(envoy.peer, self._command(unit, one.round, envoys, envoy)) for envoy in envoys]
        return outputs

    def averaged(self, peer: PeerId, event: Averaged, now_s: float) -> list[Output]:
        """An envoy has the mean proposal; Fail comes out if envoys hold different ones time and again."""
        one = self._rounds.get(event.unit)
        if one is None or one.round != event.round or peer not in one.missing():
            return []
        one.reports[peer] = event
        if not one.is_complete or len({average_of(report) for report in one.reports.values()}) == 1:
            return []
        one.disputes += 1
        held = ", ".join(f"{at} holds {one.reports[at].digest}" for at in sorted(one.reports))
        told = f"envoys differ in the mean proposal of unit {event.unit}, outer step {self.step}: {held}"
        if one.disputes > DISPUTES_MAX:
            return [Fail(ReplicaDiverged.code, told, "run the same release on all stage servers")]
        return self._again(event.unit, f"{told}; exchanged again", now_s)

    def failed(self, peer: PeerId, event: RoundFailed, now_s: float) -> list[Output]:
        """An envoy could not exchange: again after a pause, with other envoys if there are any."""
        one = self._rounds.get(event.unit)
        if one is None or all(envoy.peer != peer for envoy in one.told.get(event.round, ())):
            return []
        one.note(peer, event)
        if one.round != event.round:
            return []
        accuses = f" (accuses {event.accused})" if event.accused else ""
        return self._again(event.unit, f"{peer} says {event.reason}{accuses}", now_s)

    def lost(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """The peer is gone, or has forgotten its rounds with its session: its rounds are repeated."""
        units = [unit for unit, one in self._rounds.items() if any(envoy.peer == peer for envoy in one.envoys)]
        return [output for unit in units for output in self._again(unit, f"{peer} is lost: {reason}", now_s)]

    def give_up(self, reason: str) -> list[Output]:
        """Abort all rounds, complete or not: who proposes has changed."""
        found = [(unit, one.round, one.envoys) for unit, one in self._rounds.items() if one.round is not None]
        self.outcomes["aborted"] += len(found)
        aborts = [
            Send(each.peer, AbortRound(each.timeline, self.step, unit, number))
            for unit, number, envoys in found
            for each in envoys
        ]
        return [Note("warning", f"the exchange begins again: {reason}"), *aborts]

    def result(self) -> Exchanged | None:
        """The means that all envoys agree on, once the rounds of all units are complete."""
        if not all(one.is_complete for one in self._rounds.values()):
            return None
        norms = [norm for one in self._rounds.values() for norm in one.reports[min(one.reports)].norms]
        squared = math.fsum(squared_norms(norms))
        rounds = [
            OuterRound(unit, one.round, tuple(envoy.peer for envoy in one.envoys))
            for unit, one in self._rounds.items()
            if one.round is not None
        ]
        is_finite = math.isfinite(squared)
        return Exchanged(self.step, tuple(rounds), not is_finite, math.sqrt(squared) if is_finite else 0.0)

    def apart(self) -> dict[frozenset[int], str]:
        """The timelines of islands that did not reach each other in a third of the rounds, and what envoys said."""
        found: dict[frozenset[int], str] = {}
        for one in self._rounds.values():
            failed = [] if one.is_complete else list(one.apart.values())
            often = Counter(pair for said in failed for pair in said)
            found |= {pair: said[pair] for said in failed for pair in said if 3 * often[pair] >= len(failed)}
        return found

    def silent(self, now_s: float) -> set[int]:
        """The timelines of envoys that have said nothing of a round that must be over, where another has the mean."""
        late = [one for one in self._rounds.values() if one.round and one.began_s + self._timeout_s <= now_s]
        open_ = [one for one in late if one.reports]
        return {envoy.timeline for one in open_ for envoy in one.envoys if envoy.peer not in one.reports}

    def retries_s(self) -> list[float]:
        return [one.retry_s for one in self._rounds.values() if one.round is None]

    def waiting_for(self) -> str:
        """The reason why the exchange waits, for a person."""
        parts = []
        for unit, one in self._rounds.items():
            if one.round is None:
                parts.append(f"{unit} is exchanged again" + (f", since {one.trouble}" if one.trouble else ""))
            elif not one.is_complete:
                parts.append(f"{listed(one.missing())} ({unit})")
        return f"waits for the exchange between islands: {'; '.join(parts)}"

    def _again(self, unit: UnitName, trouble: str, now_s: float) -> list[Output]:
        one = self._rounds[unit]
        if one.round is None:
            return []
        number, envoys = one.round, one.envoys
        one.round, one.envoys, one.reports, one.trouble = None, (), {}, trouble
        one.retry_s = now_s + min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(one.failures, 10))
        one.failures += 1
        self.outcomes["failed"] += 1
        told = f"round {number.number} of unit {unit} between islands failed: {trouble}"
        aborts = [Send(each.peer, AbortRound(each.timeline, self.step, unit, number)) for each in envoys]
        return [Note("warning", told), *aborts]

    def _envoys(self, unit: UnitName, failures: int, delegations: Iterable[Delegation]) -> tuple[Envoy, ...]:
        """One envoy of each stage that holds the unit, island by island; the first of an island proposes. None if one
        is missing.

        After a failure the next replica of each stage goes. In a single island all go, as nothing has to be sent.
        """
        envoys: list[Envoy] = []
        known = list(delegations)
        for delegation in known:
            tokens = delegation.tokens
            for stage in self._units[unit]:
                able = delegation.replicas[stage]
                if not able:
                    return ()
                first = failures % len(able)
                for one in (*able[first:], *able[:first])[: None if len(known) == 1 else 1]:
                    envoys.append(Envoy(one.peer, one.incarnation, one.address, delegation.timeline, tokens))
                    tokens = 0
        return tuple(envoys)

    def _command(self, unit: UnitName, number: Round, envoys: tuple[Envoy, ...], to: Envoy) -> Exchange:
        return Exchange(to.timeline, self.step, unit, number, envoys, self._timeout_s)
