"""The outer steps of a job, one after the other.

    all islands hold what they propose ──▶ rounds ──complete──▶ all islands have come to the outer step ──▶ exchanged

With `overlap_steps` islands train on while the rounds run; otherwise both arrows begin at once.

Decisions: docs/decisions/044, 107.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from scheduler.brain.inputs import Exchanged
from scheduler.brain.islands.exchange import Exchanging, Rift
from scheduler.brain.islands.roster import Roster
from scheduler.brain.islands.waits import Waits
from scheduler.brain.outputs import Note, Output, Released, Send
from scheduler.brain.settings import BrainSettings
from scheduler.brain.validity import fault_of
from swarm.types import PeerId, Round
from swarm.wire.messages import Averaged, RoundFailed


class OuterSteps:
    """The exchange under way, if any."""

    def __init__(self, settings: BrainSettings, roster: Roster) -> None:
        self._settings, self._roster = settings, roster
        self._exchanging: Exchanging | None = None
        self._round = Round(settings.epoch, 1)  # the next one between islands
        self.envoys: set[PeerId] = set()  # of the newest outer step
        self.parted: set[frozenset[int]] = set()  # two islands that could not exchange, so that one was left out
        self.waits = Waits(roster)
        self._outcomes = Counter[str]()  # of the rounds of exchanges that are over
        self.took_s: float | None = None  # from the first round of this exchange until all were complete, if they are
        self._began_s = 0.0

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
        gone = [one for one in made if isinstance(one, Released)]
        return [output for one in gone for output in self.lost(one.peer, f"it was released ({one.reason})", now_s)]

    def advance(self, now_s: float) -> tuple[list[Output], Exchanged | None]:
        """Begin the rounds that can begin. Returns the exchange too once all rounds are complete."""
        outer = self._roster.captured()
        if outer is None:
            return [], None
        step = outer.step
        if self._exchanging is None:
            settings = self._settings
            self._exchanging = Exchanging(step, settings.units, self._round, settings.averaging_timeout_s)
            self._began_s = now_s
        is_due = min(self._exchanging.retries_s()) <= now_s  # else nobody is to go: who may takes long to find
        decided = self._exchanging.begin(self._roster.delegations(step), now_s) if is_due else []
        exchanged = self._exchanging.result()
        if exchanged is None or self.took_s is None:
            self.took_s = None if exchanged is None else now_s - self._began_s
        if exchanged is None or not self._roster.have_come_to(step):
            return decided, None
        self._close(self._exchanging)
        self.envoys = {peer for one in exchanged.rounds for peer in one.envoys}
        self._outcomes["averaged"] += len(exchanged.rounds)
        if exchanged.skip:
            steps_made = self._roster.courses[0].inner_steps(step)
            of = f" for fragment {outer.fragment}" if self._roster.courses[0].fragments > 1 else ""
            told = f"after step {steps_made} what islands propose{of} is not finite: all go back to the outer weights"
            decided.append(Note("warning", told))
        return decided, exchanged

    def begin_again(self, reason: str) -> list[Output]:
        """Void all rounds, complete or not: the islands have changed, and all units need the same ones."""
        if self._exchanging is None:
            return []
        aborts = self._exchanging.give_up(reason)
        self._close(self._exchanging)
        return [one for one in aborts if not isinstance(one, Send) or one.peer in self._roster.island_of]

    def _close(self, exchanging: Exchanging) -> None:
        self._round, self._exchanging = exchanging.next_round, None
        self._outcomes += exchanging.outcomes

    @property
    def outcomes(self) -> Counter[str]:
        """The number of rounds by outcome."""
        return self._outcomes + (Counter() if self._exchanging is None else self._exchanging.outcomes)

    def rifts(self, now_s: float) -> dict[frozenset[int], Rift]:
        """The islands, and pairs of islands, that cannot exchange, with an envoy's report."""
        found = {} if self._exchanging is None else self._exchanging.rifts(now_s)
        by = {one: None if rift.by is None else self._island(rift.by) for one, rift in found.items()}
        return {frozenset(map(self._island, one)): replace(rift, by=by[one]) for one, rift in found.items()}

    def _island(self, timeline: int) -> int:
        return timeline % len(self._roster.islands)

    def retries_s(self) -> list[float]:
        return [] if self._exchanging is None else self._exchanging.retries_s()

    def waiting_for(self) -> str:
        """What the exchange waits for, for people; empty if there is no exchange or it waits for nothing."""
        if self._exchanging is None or all(one.outer_step is None for one in self._roster.at_work().values()):
            return ""
        steps = self._roster.courses[0].inner_steps(self._exchanging.step)
        told = self._exchanging.waiting_for()
        return f"after step {steps}: {told}" if told else ""
