"""The outer steps of a job and the rounds of each: for every unit, one envoy of each island and stage that holds it.

    all islands have come to the step ──▶ a round per unit ──all envoys report, alike──▶ exchanged
                                              ▲      │
                                              └pause─┴── envoys failed or say nothing, one is lost, or holds other bytes
                                                         than the others

Proposals depend only on the weights at the outer step, which all replicas of a stage share. So a round can be repeated
with other envoys until the step is committed.

A failed round goes on until the envoys of all islands but one have reported, or their time is over. Each envoy names
every island that it missed, so for each pair of islands it is known whether they reached each other.

An exchange has patience with islands that have not come, or that others do not reach. Without them it is made once that
is over. They are late: they take over what the others have moved, keep what they trained, and the next exchange of the
fragment has it all. It waits for them, so islands are one exchange apart at most.

Not chosen: a deadline in seconds, because periods take from seconds to hours; outer weights in the place of what a late
island has, because its work would be lost.

Decisions: docs/decisions/044, 064, 065, 107, 193.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from scheduler.brain.commit.digests import average_of, outvoted
from scheduler.brain.commit.slices import squared_norms
from scheduler.brain.events import fault_of
from scheduler.brain.islands.roster import Delegation, Roster, Waits
from scheduler.brain.islands.rows import NEWEST as EXCHANGES_NEWEST
from scheduler.brain.outputs import Exchanged, Fail, Note, OuterRound, Output, Released, Send
from scheduler.brain.settings import BrainSettings
from swarm.errors import ReplicaDiverged
from swarm.job.course import OuterCourse, OuterStep
from swarm.text import listed
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import AbortRound, Averaged, Envoy, Exchange, RoundFailed

PAUSE_S, PAUSE_S_MAX = 1.0, 30.0  # before a round is repeated, doubled with each time in a row
DISPUTES_MAX = 2  # of the envoys of a unit, where most islands do not agree; the next one ends the job
LATE, LATER = 1.5, 3.0  # times averaging.timeout_s: then the first round, or one behind it, has waited for envoys
NEWEST = 3  # rounds of a unit, by which islands are judged
HASTY = 7  # rounds of a unit that fail, in a minute and a half, before one waits for those that say nothing


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """Why an island, or a pair of islands, could not exchange, as an envoy reports it."""

    said: str
    by: int | None = None  # the timeline whose envoys alone say so, where those of the other one deny it


@dataclass(slots=True)
class _UnitRound:
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
        return bool(self.missed) and len({envoy.timeline for envoy in self.silent()}) <= 1

    def silent(self) -> list[Envoy]:
        """The envoys that have not reported."""
        return [envoy for envoy in self.envoys if envoy.peer not in self.reports and envoy.peer not in self.missed]

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

    def rifts(self, now_s: float, must_speak_s: float) -> dict[frozenset[int], LinkFailure]:
        """The timelines that failed by themselves, and the pairs that did not reach each other."""
        of, found = self._timelines(), dict[frozenset[int], LinkFailure]()
        told: dict[frozenset[int], dict[int, str]] = {}
        for peer, missed in sorted(self.missed.items()):
            for other, said in sorted(missed.items()):
                told.setdefault(frozenset((of[peer], of[other])), {}).setdefault(of[peer], said)
        silent = {envoy.timeline: envoy.peer for envoy in self.silent()}
        for pair, by in told.items():
            first = min(by)
            is_denied = len(by) < len(pair) and not silent.keys() & pair
            found[pair] = LinkFailure(by[first], first if is_denied else None)
        if min(now_s, self.ended_s) >= self.began_s + must_speak_s:
            found |= {frozenset((timeline,)): LinkFailure(f"{peer} says nothing") for timeline, peer in silent.items()}
        return found

    def _timelines(self) -> dict[PeerId, int]:
        return {envoy.peer: envoy.timeline for envoy in self.envoys}


@dataclass(slots=True)
class _UnitRounds:
    """The rounds of one unit."""

    newest: list[_UnitRound] = field(default_factory=list)  # NEWEST at most
    is_under_way: bool = False  # the last one of them, or it is complete
    failures: int = 0
    was_late: bool = False
    disputes: int = 0
    retry_s: float = -math.inf
    trouble: str = ""

    @property
    def under_way(self) -> _UnitRound | None:
        return self.newest[-1] if self.is_under_way else None

    @property
    def is_complete(self) -> bool:
        return self.is_under_way and self.newest[-1].is_complete

    def of(self, number: Round, peer: PeerId) -> _UnitRound | None:
        """The round with this number, if the peer is one of its envoys."""
        found = next((made for made in self.newest if made.number == number), None)
        return found if found is not None and any(envoy.peer == peer for envoy in found.envoys) else None

    def rifts(self, now_s: float, must_speak_s: float) -> dict[frozenset[int], LinkFailure]:
        """What failed in all of the newest finished rounds; if nothing did, what failed in the last one."""
        over = [
            round_ for round_ in self.newest if round_ is not self.under_way or now_s >= round_.began_s + must_speak_s
        ]
        if self.is_complete or not over:
            return {}
        *before, last = (round_.rifts(now_s, must_speak_s) for round_ in over)
        for envoy in over[-1].silent() if before else ():  # nor did its island say anything in the round before
            last |= {each: rift for each, rift in before[-1].items() if each == {envoy.timeline}}
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
        for unit, rounds in self._rounds.items():
            if self._late_s(rounds) <= now_s and self._relieves(unit, rounds.newest[-1].silent(), known):
                silent = listed(each.peer for each in rounds.newest[-1].silent())
                outputs += self._again(unit, rounds.newest[-1].trouble or f"no word came from {silent}", now_s)
                rounds.was_late = True
            envoys = self._envoys(unit, rounds.failures, known)
            if rounds.is_under_way or rounds.retry_s > now_s or not envoys:
                continue
            if rounds.newest and rounds.newest[-1].ended_s == math.inf:
                outputs += self._aborts(unit, rounds.newest[-1])
                rounds.newest[-1].ended_s = now_s
            rounds.newest, rounds.is_under_way = (
                [*rounds.newest[1 - NEWEST :], _UnitRound(self._next, envoys, now_s)],
                True,
            )
            outputs += [Send(each.peer, self._command(unit, self._next, envoys, each)) for each in envoys]
            self._next = Round(self._next.epoch, self._next.number + 1)
        return outputs

    def averaged(self, peer: PeerId, event: Averaged, now_s: float) -> list[Output]:
        """An envoy has the mean proposal. Fails the job if repeatedly no majority of islands holds the same mean."""
        rounds = self._rounds.get(event.unit)
        made = None if rounds is None else rounds.of(event.round, peer)
        if rounds is None or made is None or all(each.peer != peer for each in made.silent()):
            return []
        made.reports[peer] = event
        if not rounds.is_under_way and made is rounds.newest[-1] and made.ended_s == math.inf and made.is_complete:
            rounds.is_under_way = True  # the last word came late, but before the next round
            self.outcomes["failed"] -= 1
        if rounds.under_way is not made:
            return []
        if made.is_judged:
            return self._again(event.unit, made.trouble, now_s)
        if not made.is_complete or len(set(map(average_of, made.reports.values()))) == 1:
            return []
        held = ", ".join(f"{at} holds {made.reports[at].digest}" for at in sorted(made.reports))
        told = f"envoys differ in the mean proposal of unit {event.unit}, outer step {self.step}: {held}"
        if made.overrules():
            return self._again(event.unit, told, now_s)
        rounds.disputes += 1
        if rounds.disputes > DISPUTES_MAX:
            return [Fail(ReplicaDiverged.code, told, "run the same release on all stage servers")]
        return [*self._again(event.unit, told, now_s), *self._void(event.unit)]

    def failed(self, peer: PeerId, event: RoundFailed, now_s: float) -> list[Output]:
        """An envoy could not exchange: repeat the round after a pause, with other envoys if there are any."""
        rounds = self._rounds.get(event.unit)
        made = None if rounds is None else rounds.of(event.round, peer)
        if rounds is None or made is None:
            return []
        made.failed(peer, event)
        return self._again(event.unit, made.trouble, now_s) if rounds.under_way is made and made.is_judged else []

    def lost(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """The peer is gone, or lost its rounds with its session: repeat its rounds."""
        outputs, told = list[Output](), f"{peer} is lost: {reason}"
        for unit, rounds in self._rounds.items():
            for envoy in rounds.newest[-1].envoys if rounds.newest and rounds.newest[-1].ended_s == math.inf else ():
                if envoy.peer == peer:
                    self._lost[envoy.timeline] = (self._lost.get(envoy.timeline, (0, ""))[0] + 1, told)
                    outputs += [*self._again(unit, told, now_s), *self._void(unit)]
                    pause_s = _pause_s(rounds.failures - 1)
                    rounds.retry_s = min(rounds.retry_s, now_s + pause_s)  # whatever others still say of it is void
        return outputs

    def give_up(self, reason: str) -> list[Output]:
        """Abort all rounds, complete or not, because the proposing islands have changed."""
        self.outcomes["aborted"] += sum(rounds.is_under_way for rounds in self._rounds.values())
        newest = [(unit, rounds.newest[-1]) for unit, rounds in self._rounds.items() if rounds.newest]
        aborts = [each for unit, made in newest for each in self._aborts(unit, made)]
        return [Note("warning", f"the exchange begins again: {reason}"), *aborts]

    def result(self) -> Exchanged | None:
        """The means that all envoys agree on, once the rounds of all units are complete."""
        if not all(rounds.is_complete for rounds in self._rounds.values()):
            return None
        made = {unit: rounds.newest[-1] for unit, rounds in self._rounds.items()}
        norms = [norm for each in made.values() for norm in each.reports[min(each.reports)].norms]
        squared = math.fsum(squared_norms(norms))
        rounds = [OuterRound(unit, of.number, tuple(envoy.peer for envoy in of.envoys)) for unit, of in made.items()]
        is_finite = math.isfinite(squared)
        return Exchanged(self.step, tuple(rounds), not is_finite, math.sqrt(squared) if is_finite else 0.0)

    def broken(self, now_s: float) -> dict[frozenset[int], LinkFailure]:
        """The timelines, and pairs of timelines, that cannot exchange, by the newest rounds of all units."""
        found: dict[frozenset[int], LinkFailure] = {}
        for rounds in self._rounds.values():
            found |= rounds.rifts(now_s, self._timeout_s + PAUSE_S)  # envoys begin at about the same time
        return found

    def rifts(self, now_s: float) -> dict[frozenset[int], LinkFailure]:
        """The same; if there are none, the timeline that lost most envoys."""
        found = self.broken(now_s)
        if not found and self._lost:  # no round came to its end, for want of these envoys
            most = max(self._lost, key=lambda timeline: self._lost[timeline][0])
            found[frozenset((most,))] = LinkFailure(self._lost[most][1])
        return found

    def retries_s(self) -> list[float]:
        """When rounds are due, and when those under way are late."""
        return [self._late_s(rounds) if rounds.is_under_way else rounds.retry_s for rounds in self._rounds.values()]

    def waiting_for(self) -> str:
        """The reason why the exchange waits, for a person; empty if all rounds are complete."""
        parts = []
        for unit, rounds in self._rounds.items():
            if rounds.under_way is None:
                parts.append(f"{unit} is exchanged again" + (f", since {rounds.trouble}" if rounds.trouble else ""))
            elif not rounds.is_complete:
                parts.append(f"{listed(each.peer for each in rounds.under_way.silent())} ({unit})")
        return f"waits for the exchange between islands: {'; '.join(parts)}" if parts else ""

    def _late_s(self, rounds: _UnitRounds) -> float:
        """When the round under way is late; never, if it is complete."""
        if rounds.under_way is None or rounds.is_complete:
            return math.inf
        return rounds.under_way.began_s + (LATER if rounds.was_late else LATE) * self._timeout_s

    def _relieves(self, unit: UnitName, silent: Iterable[Envoy], known: Iterable[Delegation]) -> bool:
        """Whether others can go for some that say nothing; the same ones would only have to begin again."""
        pools = [delegation.replicas[stage] for delegation in known for stage in self._units[unit]]
        alone = {pool[0].peer for pool in pools if len(pool) == 1}
        return any(envoy.peer not in alone for envoy in silent)

    def _again(self, unit: UnitName, trouble: str, now_s: float) -> list[Output]:
        """Let the next round begin after a pause, in which other envoys may say how they fared."""
        rounds = self._rounds[unit]
        if not rounds.is_under_way:
            return []
        rounds.is_under_way, rounds.trouble = False, trouble
        rounds.retry_s = now_s + _pause_s(rounds.failures)
        if rounds.failures >= HASTY and rounds.newest[-1].silent():
            rounds.retry_s = max(rounds.retry_s, rounds.newest[-1].began_s + self._timeout_s + PAUSE_S)
        rounds.failures += 1
        self.outcomes["failed"] += 1
        told = f"round {rounds.newest[-1].number.number} of unit {unit} between islands failed: {trouble}"
        return [Note("warning", told)]

    def _void(self, unit: UnitName) -> list[Output]:
        """Discard the unit's last round; it says nothing about reachability."""
        return self._aborts(unit, self._rounds[unit].newest.pop())

    def _aborts(self, unit: UnitName, made: _UnitRound) -> list[Output]:
        return [Send(envoy.peer, AbortRound(envoy.timeline, self.step, unit, made.number)) for envoy in made.envoys]

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
                for replica in (*able[first:], *able[:first])[: None if len(known) == 1 else 1]:
                    envoys.append(
                        Envoy(replica.peer, replica.incarnation, replica.address, delegation.timeline, tokens)
                    )
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
    ahead of island 0's each time that a digit of `failures` changes; so any two islands run apart.
    """
    turn = failures
    while island and many > 1:
        island, digit = divmod(island, many)
        failures //= many
        turn += digit * failures
    return turn % many


def going(
    ready: Mapping[int, float],
    at_work: Collection[int],
    owed: Collection[int],
    *,
    whole: bool,
    least: int,
    patience_s: float,
    now_s: float,
) -> tuple[int, ...] | float:
    """The islands that go into an exchange now, or when to ask again.

    `ready`: since when islands hold what they propose. `owed`: those that were late in the exchange before. A `whole`
    exchange has all, any other one has `least` islands at least.
    """
    missing = {*at_work} - ready.keys()
    if not missing:
        return tuple(sorted(ready))
    if whole or missing & {*owed} or len(ready) < max(1, least):
        return math.inf
    until_s = min(ready.values()) + patience_s
    return tuple(sorted(ready)) if now_s >= until_s else until_s


def next_of_fragment(course: OuterCourse, step: int) -> OuterStep:
    """The outer step that merges the fragment of outer step `step` the next time."""
    fragment, one = course.outer_at(step).fragment, course.next_outer(step + 1)
    while one is not None and one.fragment != fragment:
        one = course.next_outer(one.step + 1)
    assert one is not None, "a fragment is merged once more behind the last inner step"
    return one


class OuterSteps:
    """The outer steps of a job, one after the other: the exchange under way, if any.

        all hold what they propose, ──▶ rounds ──complete, and one has come──▶ made: a durable row ──▶ each merges once
        or patience is over              │  ▲                                                          it has come there
                                         └──┴─ some do not reach others: without

    With `overlap_steps` islands train on while the rounds run. A whole exchange is made once all have come. The next
    one begins once all islands at work have merged.
    """

    def __init__(self, settings: BrainSettings, roster: Roster, patience: float = math.inf) -> None:
        """`patience`: how long islands that are ready wait for others, in shares of the newest period's time."""
        self._settings, self._roster, self._patience = settings, roster, patience
        self._exchanging: Exchanging | None = None
        self._going: tuple[int, ...] = ()  # the islands in it
        self._newest: deque[Exchanged] = deque(maxlen=EXCHANGES_NEWEST + 2 * roster.courses[0].fragments)
        self._ready_s: dict[int, float] = {}  # since when islands hold what they propose in the coming exchange
        self._periods_s: dict[int, float] = {}  # by fragment: since when its period runs
        self._until_s = math.inf  # when patience is over
        self._resumed: dict[int, int] = {}  # the inner steps of islands when the scheduler was restarted
        self._resumed_s = 0.0
        self._round = Round(settings.epoch, 1)  # the next one between islands
        self.envoys: set[PeerId] = set()  # of the newest outer step
        self.parted: set[frozenset[int]] = set()  # two islands that could not exchange, so that one was left out
        self.waits = Waits(roster)
        self.late = Counter[int]()  # how often islands were late
        self._was_late: dict[int, str] = {}  # how late islands at work were the last time, for people
        self.took_s: float | None = None  # from the first round of this exchange until all were complete, if they are
        self._outcomes = Counter[str]()  # of the rounds of exchanges that are over
        self._began_s = 0.0

    def resume(self, exchanges: Sequence[Exchanged], committed: Mapping[int, int], now_s: float) -> None:
        """Go on behind the newest exchanges of an earlier start of the scheduler, with islands at these versions."""
        self._newest.extend(exchanges)
        self._resumed = {n: self._course.inner_steps(version) for n, version in committed.items()}
        self._resumed_s = now_s
        for made in exchanges[-1:]:
            self.envoys = {peer for round_ in made.rounds for peer in round_.envoys}
            late = {n for n in self._roster.present if self._roster.timelines[n] in made.late}
            self._roster.late |= {n: now_s for n in late if committed.get(n, 0) <= made.step}

    @property
    def made(self) -> Exchanged | None:
        """The newest exchange, if it is known."""
        return self._newest[-1] if self._newest else None

    def rebases(self, island: int, step: int) -> bool:
        """Whether an island was late in the exchange of an outer step."""
        timeline = self._roster.timelines[island]
        return any(made.step == step and timeline in made.late for made in self._newest)

    def gone(self) -> str:
        """Why the newest exchange cannot be had any more: all that made it are lost; empty if it can."""
        made, roster = self.made, self._roster
        if made is None or made.whole or roster.is_unsettled:
            return ""
        at_work = roster.at_work().values()
        have = any(brain.settings.timeline in made.islands or brain.has_made(made.step) for brain in at_work)
        step = self._course.inner_steps(made.step)
        return "" if have else f"the islands that made the exchange after step {step} are lost, and no other has it yet"

    def owed(self, fragment: int) -> dict[int, Exchanged]:
        """The islands that were late in the newest exchange of a fragment, and that exchange."""
        of = (made for made in reversed(self._newest) if self._course.outer_at(made.step).fragment == fragment)
        newest = next(of, None)
        at_work = self._roster.at_work().items()
        return {n: newest for n, brain in at_work if newest is not None and brain.settings.timeline in newest.late}

    def owes(self) -> dict[int, int]:
        """The outer steps of the next exchanges of fragments of which islands were late, by fragment."""
        owed = [made for fragment in range(self._course.fragments) for made in self.owed(fragment).values()]
        following = [next_of_fragment(self._course, made.step) for made in owed]
        return {outer.fragment: outer.step for outer in following}

    @property
    def _course(self) -> OuterCourse:
        return self._roster.courses[0]

    def concerns(self, peer: PeerId, event: Averaged | RoundFailed) -> bool:
        """Whether the event is of a round between islands."""
        island = self._roster.island_of.get(peer)
        return island is not None and self._roster.courses[island].is_outer(event.step)

    def heard(self, peer: PeerId, event: Averaged | RoundFailed, now_s: float) -> list[Output]:
        """An envoy reports on an outer round. Fails the job if envoys differ repeatedly."""
        exchanging, island = self._exchanging, self._roster.serves(peer)
        if exchanging is None or island is None:
            return []
        if event.step != exchanging.step or event.timeline != island.settings.timeline:
            return []
        if fault := fault_of(peer, event, island.settings, max(island.agreed, event.step)):
            return exchanging.lost(peer, f"it {fault}", now_s)
        if isinstance(event, RoundFailed):
            return exchanging.failed(peer, event, now_s)
        return exchanging.averaged(peer, event, now_s)

    def lost(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """A peer is lost: rounds of which it was an envoy are repeated."""
        return [] if self._exchanging is None else self._exchanging.lost(peer, reason, now_s)

    def released(self, made: Iterable[Output], now_s: float) -> list[Output]:
        """Repeat the rounds of replicas that an island released: they drop what they hold."""
        gone = [(output.peer, f"it was released ({output.reason})") for output in made if isinstance(output, Released)]
        return [output for peer, reason in gone for output in self.lost(peer, reason, now_s)]

    def advance(self, now_s: float, is_whole: Callable[[int], bool]) -> tuple[list[Output], Exchanged | None]:
        """Begin the rounds that can begin. Returns the exchange too once it is made; from then on it is in `made`.

        `is_whole`: whether all islands have to make an outer step at once.
        """
        outer = self._roster.next_exchange(self.made, hurries=self._patience == math.inf)
        if outer is None:
            self._ready_s.clear()
            return [], None
        step, captured, decided = outer.step, self._roster.captured(outer), list[Output]()
        self._ready_s = {island: self._ready_s.get(island, now_s) for island in captured}
        if self._exchanging is not None and (less := self._without_some(outer, is_whole, now_s)) is not None:
            rest = sorted({*self._going} - {*less})
            who = f"island{'s' * (len(rest) > 1)} {listed(map(str, rest))} {'are' if len(rest) > 1 else 'is'}"
            decided += self.begin_again(f"{who} not reached")
            self._compose(outer, less, now_s)
        if self._exchanging is None:
            chosen = self._chosen(outer, is_whole, now_s)
            if isinstance(chosen, float):
                self._until_s = chosen
                return decided, None
            self._compose(outer, chosen, now_s)
        assert self._exchanging is not None
        is_due = min(self._exchanging.retries_s()) <= now_s  # else nobody is to go: who may takes long to find
        if is_due:
            delegations = self._roster.delegations(step, self._going, self.owed(outer.fragment))
            decided += self._exchanging.begin(delegations, now_s)
        exchanged = self._exchanging.result()
        if exchanged is None or self.took_s is None:
            self.took_s = None if exchanged is None else now_s - self._began_s
        if exchanged is None:
            return decided, None
        whole, late = is_whole(step), [n for n in self._roster.present if n not in self._going]
        if whole and late:
            return [*decided, *self.begin_again("all islands are to be in it, as the job is to be saved")], None
        come = [n for n in self._going if self._roster.islands[n].outer_step == step]
        if len(come) < (len(self._going) if whole else 1):  # before, only envoys would hold what a row names
            return decided, None
        self._periods_s[outer.fragment], self._ready_s = now_s, {}
        timelines = self._roster.timelines
        in_it, behind = (tuple(timelines[n] for n in of) for of in (self._going, late))
        is_level = whole and not self.owes().keys() - {outer.fragment}
        made = replace(exchanged, islands=in_it, whole=is_level, late=behind)
        return [*decided, *self._enter(made, late, now_s)], made

    def _chosen(self, outer: OuterStep, is_whole: Callable[[int], bool], now_s: float) -> tuple[int, ...] | float:
        """The islands that go into the coming exchange, or when to ask again."""
        present, owed = self._roster.present, self.owed(outer.fragment)
        patience_s = self._patience_s(outer)
        is_whole_now = len(self._ready_s) < len(present) and (patience_s == math.inf or is_whole(outer.step))
        least = self._roster.least
        return going(self._ready_s, present, owed, whole=is_whole_now, least=least, patience_s=patience_s, now_s=now_s)

    def _patience_s(self, outer: OuterStep) -> float:
        """How long the coming exchange waits for islands, by the time since the fragment's exchange before. If that was
        before a restart of the scheduler, by the pace at which the first island came here since."""
        if not self._ready_s or self._patience == math.inf:
            return math.inf
        first = min(self._ready_s, key=self._ready_s.__getitem__)
        period_s = self._ready_s[first] - self._periods_s.get(outer.fragment, math.inf)
        made = outer.captured - self._resumed.get(first, outer.captured)
        if period_s == -math.inf and made > 0:
            period_s = (self._ready_s[first] - self._resumed_s) * (outer.captured - outer.since) / made
        return self._patience * max(0.0, period_s) if period_s > -math.inf else math.inf

    def _compose(self, outer: OuterStep, islands: tuple[int, ...], now_s: float) -> None:
        settings = self._settings
        self._exchanging = Exchanging(outer.step, settings.units, self._round, settings.averaging_timeout_s)
        self._going, self._began_s, self._until_s = islands, now_s, now_s + self._patience_s(outer)

    def _without_some(self, outer: OuterStep, is_whole: Callable[[int], bool], now_s: float) -> tuple[int, ...] | None:
        """Once patience with its rounds is over: the largest group of islands that reach each other, if not all do.
        None if all in it are owed, as the others do not reach them and could not have what they make."""
        exchanging, owed = self._exchanging, self.owed(outer.fragment)
        if exchanging is None or now_s < self._until_s or len(self._going) == 1 or exchanging.result() is not None:
            return None
        islands = {n: self._roster.islands[n] for n in self._going}
        apart = {frozenset(map(self._island, pair)) for pair in exchanging.broken(now_s)}
        stages = range(len(self._settings.split))
        apart |= {frozenset([n]) for n, of in islands.items() if not all(of.delegates(at, outer.step) for at in stages)}
        sizes = {n: sum(map(len, brain.peers)) for n, brain in islands.items()}
        stay = largest_group(sizes, apart, doubts(apart | self.parted)) if apart else self._going
        is_enough = max(1, self._roster.least) <= len(stay) < len(self._going)
        return stay if is_enough and owed.keys() < {*stay} and not is_whole(outer.step) else None

    def _enter(self, made: Exchanged, late: Sequence[int], now_s: float) -> list[Note]:
        """The exchange is made: its row can be written. What to tell people."""
        assert self._exchanging is not None
        self._newest.append(made)
        self._roster.late |= dict.fromkeys(late, now_s)
        self.late.update(late)
        self._close(self._exchanging)
        self.envoys = {peer for round_ in made.rounds for peer in round_.envoys}
        self._outcomes["averaged"] += len(made.rounds)
        step = self._course.inner_steps(made.step)
        told = f"is late: the exchange after step {step} is made without it; it keeps its steps, and they count at step"
        notes = [Note("warning", f"island {n} {told} {next_of_fragment(self._course, made.step).behind}") for n in late]
        if made.skip:
            of = f" for fragment {self._course.outer_at(made.step).fragment}" if self._course.fragments > 1 else ""
            told = f"after step {step} what islands propose{of} is not finite: all go back to the outer weights"
            notes.append(Note("warning", told))
        return notes

    def have_merged(self, now_s: float) -> list[Note]:
        """Late islands that have made the outer step of the newest exchange are late no more; what to tell people."""
        made, late = self.made, self._roster.late
        here = [n for n in late if made is not None and self._roster.islands[n].agreed > made.step]
        self._was_late |= {n: self.late_text(n, now_s, often=False) for n in here}
        for island in here:
            del late[island]
        return [Note("info", f"island {n} is back, and {self._was_late[n]}") for n in here]

    def late_text(self, island: int, now_s: float, *, often: bool = True) -> str:
        """How late an island is, or was the last time, what was done, and how often; empty if it never was."""
        since_s, made = self._roster.late.get(island), self.made
        more = f"; {self.late[island]} exchanges so far without it" if often and self.late[island] > 1 else ""
        if since_s is None or made is None:
            return f"was {told}{more}" if (told := self._was_late.get(island)) else ""
        step, counts = self._course.inner_steps(made.step), next_of_fragment(self._course, made.step).behind
        told = f"{now_s - since_s:.3g} s late at step {step}: the others exchanged without it"
        return f"{told}; it keeps its steps, and they count at step {counts}{more}"

    def without(self, island: int) -> list[Output]:
        """An island is lost: begin again, if it is in the exchange."""
        self._was_late.pop(island, None)
        return self.begin_again(f"island {island} is lost") if island in self._going else []

    def begin_again(self, reason: str) -> list[Output]:
        """Void all rounds, complete or not: the islands have changed, and all units need the same ones."""
        if self._exchanging is None:
            return []
        aborts = self._exchanging.give_up(reason)
        self._close(self._exchanging)
        return [output for output in aborts if not isinstance(output, Send) or output.peer in self._roster.island_of]

    def _close(self, exchanging: Exchanging) -> None:
        self._round, self._exchanging = exchanging.next_round, None
        self._outcomes += exchanging.outcomes

    @property
    def outcomes(self) -> Counter[str]:
        """The number of rounds by outcome."""
        return self._outcomes + (Counter() if self._exchanging is None else self._exchanging.outcomes)

    def rifts(self, now_s: float) -> dict[frozenset[int], LinkFailure]:
        """The islands, and pairs of islands, that cannot exchange, with an envoy's report."""
        found = {} if self._exchanging is None else self._exchanging.rifts(now_s)
        by = {pair: None if rift.by is None else self._island(rift.by) for pair, rift in found.items()}
        return {frozenset(map(self._island, pair)): replace(rift, by=by[pair]) for pair, rift in found.items()}

    def _island(self, timeline: int) -> int:
        return timeline % len(self._roster.islands)

    def retries_s(self) -> list[float]:
        return [self._until_s, *([] if self._exchanging is None else self._exchanging.retries_s())]

    def waiting_for(self) -> str:
        """What the exchange waits for, for people; empty if there is no exchange or it waits for nothing."""
        if self._exchanging is None or all(brain.outer_step is None for brain in self._roster.at_work().values()):
            return ""
        steps = self._roster.courses[0].inner_steps(self._exchanging.step)
        told = self._exchanging.waiting_for()
        return f"after step {steps}: {told}" if told else ""


HINT = "raise averaging.timeout_s and limits.no_progress_s if they are only slow"


def islands_to_evict(roster: Roster, outer: OuterSteps, for_s: float, now_s: float) -> dict[int, str]:
    """The islands to evict once nothing has moved for `limits.no_progress_s`, each with the reason.

    Empty if too few would remain or the fault is unknown.

        the others wait at the outer step, or have trained all ──▶ the islands that have not come so far
        envoys say nothing in round after round ──▶ their island
        envoys do not reach each other ──▶ all but the largest group in which no island failed to reach another
        the last checkpoint lacks parts, a second time ──▶ the islands that did not hand them over

        island 0 ── island 1
             ╲         ╱
              island 2         no link of 2 works: 0 and 1 go on
    """
    found = _at_fault(roster, outer, for_s, now_s)
    if len(roster.present) - len(found) < max(1, roster.least):
        return {}
    outer.parted |= {pair for pair in outer.rifts(now_s) if len(pair & found.keys()) == 1}
    return found


def _at_fault(roster: Roster, outer: OuterSteps, for_s: float, now_s: float) -> dict[int, str]:
    islands = roster.at_work()
    if all(brain.saves_only for brain in islands.values()):
        owing = {n: listed(peers) for n, brain in islands.items() if (peers := brain.owing(again=True))}
        told = f"handed over no part of the checkpoint for {for_s:g} s, a second time"
        return {n: f"{peers} {told}" for n, peers in owing.items()}
    behind = [n for n, brain in islands.items() if brain.outer_step is None and not brain.saves_only]
    if behind:
        return dict.fromkeys(behind, f"no step was committed for {for_s:g} s, and the other islands wait")
    rifts = outer.rifts(now_s)
    sizes = {n: sum(map(len, brain.peers)) for n, brain in islands.items()}
    stay = largest_group(sizes, rifts, doubts(rifts.keys() | outer.parted), Counter(rift.by for rift in rifts.values()))
    return {n: _told(n, rifts, for_s) for n in islands if n not in stay}


def largest_group(
    sizes: Mapping[int, int], apart: Collection[frozenset[int]], *doubts: Mapping[int | None, int]
) -> tuple[int, ...]:
    """The largest group of islands in which no island, and no pair, is in `apart`.

    Among equals, the group whose islands have the fewest `doubts`, one kind after the other; then the most stage
    servers (`sizes`); then the lowest numbers.
    """
    groups = [group for many in range(len(sizes) + 1) for group in combinations(sorted(sizes), many)]
    able = [group for group in groups if not any(pair.issubset(group) for pair in apart)]

    def worth(group: tuple[int, ...]) -> tuple[object, ...]:
        doubted = [-sum(of.get(island, 0) for island in group) for of in doubts]
        return len(group), doubted, sum(sizes[n] for n in group), [-n for n in group]

    return max(able, key=worth)


def doubts(apart: Iterable[frozenset[int]]) -> Counter[int | None]:
    """With how many islands each could not exchange, now or when one of the pair was evicted."""
    return Counter(island for pair in apart if len(pair) > 1 for island in pair)


def _told(island: int, rifts: Mapping[frozenset[int], LinkFailure], for_s: float) -> str:
    if alone := rifts.get(frozenset((island,))):
        return f"its stage servers took part in no exchange for {for_s:g} s: {alone.said} (look at their logs; {HINT})"
    said = {other: rift.said for pair, rift in rifts.items() if island in pair for other in pair - {island}}
    others = f"island{'s' * (len(said) > 1)} {listed(map(str, said))}"
    why = f"{said[min(said)]} (look at the links between them; {HINT})"
    return f"it could not exchange with {others} for {for_s:g} s: {why}"
