"""The averaging of full steps: one round per unit, given up when a contribution changes, repeated when it fails.

step is full ──▶ a round per unit ──all members report, alike──▶ averaged
    ▲                │     ▲                                        │
    │                │     └──a pause──── fails: two cannot exchange slices; one of them leaves if that goes on
    └── reopened ────┴── a contribution is void ◀── all of a stage that held the averages are lost ◀┘

Members hear of their round ahead: as soon as all microbatches are given away, since what each of them will hold is
known then. A member begins when it holds that. So a step does not wait for a word of the scheduler between its last
microbatch and its average. If all came as it was given, these are the rounds of the full step. Otherwise they are given
up at the first surprise, and the full step begins others.

Decisions: docs/decisions/007, 032, 102.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from scheduler.brain.commit.by_site import SiteRounds
from scheduler.brain.commit.digests import Expel, Remedy, average_of, vote
from scheduler.brain.commit.slices import plan_round
from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.outputs import Fail
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.links import ROUNDS_MAX, ROUNDS_SEEN_MAX, Troubles
from scheduler.brain.state.step import Ahead, Phase, StepEvent, StepRun, UnitAveraging
from swarm.errors import JobFailed
from swarm.text import listed
from swarm.types import TIED_UNIT, PeerId, Round, RoundFault, UnitName
from swarm.wire.messages import AbortRound, Average, Averaged, Member, RoundFailed, Void

DISPUTES_MAX = 2  # of a unit's members in one step: the round is repeated, the step is computed again


class Rounds:
    """The rounds of one job; `elements` is the size of each unit."""

    def __init__(self, state: BrainState, elements: Mapping[UnitName, int]) -> None:
        self._state = state
        self._elements = elements
        self._excuses = FailureBudget()
        self.forms = SiteRounds(state)
        self._number = 0

    def look_ahead(self, run: StepRun) -> None:
        """Tell members of their rounds once all microbatches are given away; give those up that came otherwise."""
        ledger = self._state.ledger
        if run.phase is not Phase.FEEDING:
            return
        if run.ahead is not None and run.ahead.surprises != ledger.surprises(run.step):
            self._give_up_ahead(run, "a microbatch did not come as it was given")
        if run.was_ahead or not ledger.is_given(run.step):
            return
        run.was_ahead = True
        sets = ledger.sets_to_come(run.step)
        if sets is not None:
            rounds = {unit: self._plan(run, unit, sets) for unit in self._state.settings.units}
            run.ahead = Ahead(rounds, sets, ledger.surprises(run.step))
            for unit, averaging in rounds.items():
                self._tell(run, unit, averaging, averaging.missing(), ahead=True)

    def start(self, run: StepRun, now_s: float) -> list[Remedy]:
        """The step is full: average every unit over the sets that the ledger has, unless it is skipped.

        Gives remedies, as `averaged` does.
        """
        found: list[Remedy] = []
        if run.skip:
            return found
        run.sets = self._state.ledger.sets(run.step)
        if run.ahead is not None and not self._is_as_told(run, run.ahead):
            self._give_up_ahead(run, "other replicas average it")
        if run.ahead is not None:
            run.rounds, run.ahead = run.ahead.rounds, None
            for unit, averaging in run.rounds.items():
                self._tell(run, unit, averaging, averaging.missing())
            for unit, averaging in list(run.rounds.items()):
                if run.rounds.get(unit) is averaging:  # else given up, for what another unit's members said
                    found += self._complete(run, unit, averaging, now_s)
        else:
            for unit in self._state.settings.units:
                self._start_unit(run, unit)
        return found

    def repeat(self, run: StepRun, now_s: float) -> None:
        """Repeat the failed rounds whose pause is over and in which no suspect takes part."""
        for unit, trouble in self.paused(run).items():
            stages = self._state.settings.units[unit]
            waits = any(
                self._state.pool.stage_of(peer) in stages and self._state.pool.leaves.takes_part(peer, run.step)
                for peer in self._state.pool.suspects()
            )
            if trouble.retry_s <= now_s and not waits:
                self._start_unit(run, unit)

    def paused(self, run: StepRun) -> dict[UnitName, Troubles]:
        """Units of a step in averaging whose round failed and was not repeated yet."""
        if run.phase is not Phase.AVERAGING:
            return {}
        return {unit: trouble for unit, trouble in run.troubles.items() if unit not in run.rounds}

    def retries_s(self) -> list[float]:
        return [trouble.retry_s for run in self._state.progress.runs.values() for trouble in self.paused(run).values()]

    def waiting_for(self, run: StepRun, now_s: float) -> str:
        again = [
            f"tries the averaging again{_in(trouble.retry_s - now_s)}: {trouble.told}"
            for trouble in self.paused(run).values()
        ]
        missing = [
            f"{listed(one.missing())}, which average {'the tied embedding' if unit == TIED_UNIT else unit}"
            for unit, one in run.rounds.items()
            if one.missing()
        ]
        return "; ".join([*([f"waits for {'; '.join(missing)}"] if missing else []), *again])

    # What members say --------------------------------------------------------------------------------------------

    def averaged(self, peer: PeerId, event: Averaged, now_s: float) -> list[Remedy]:
        """Note that a member has the mean. Once all have reported, returns remedies for members that differ."""
        averaging, run = self._present(peer, event), self._state.progress.runs.get(event.step)
        if averaging is None or run is None or peer in averaging.reports:
            self._state.ledger.duplicates += 1
            return []
        averaging.reports[peer] = event
        return [] if run.phase is Phase.FEEDING else self._complete(run, event.unit, averaging, now_s)

    def failed(self, peer: PeerId, event: RoundFailed, now_s: float) -> Remedy | None:
        """A member could not average: repeat the round, perhaps after a pause; a remedy once that does not help."""
        averaging, run = self._present(peer, event), self._state.progress.runs.get(event.step)
        if event.cause is RoundFault.RELAYS:
            self._excuses.blames_relays(peer, now_s)
        if averaging is None or run is None:
            return None
        if run.phase is Phase.FEEDING:
            self._give_up_ahead(run, event.reason)
            return None  # the full step will show whether there is a fault
        if event.cause is RoundFault.SET:
            return self._other_set(run, peer, event.reason, now_s)
        trouble = run.troubles.setdefault(event.unit, Troubles())
        accused = self._accused(averaging, peer, event)
        self.forms.failed(event.unit, averaging)
        self._abort(run, event.unit)
        count = trouble.failed(peer, accused, now_s)
        says = f"{self._state.pool.name(peer)} says {event.reason}" + (f" (accuses {accused})" if accused else "")
        told = f"round {averaging.round.number} of unit {event.unit}, step {event.step}, failed: {says}"
        self._state.outbox.note("warning", told)
        if accused is not None:
            self._state.links.accuse(peer, accused, now_s)
        pair = [named for named in (peer, accused) if named is not None]
        if event.cause is RoundFault.RELAYS and self._is_excused(averaging, pair, now_s):
            return None  # neither of the two leaves, and rounds go on
        spare = self._state.pool.spare()
        odd = self._unreached_of(pair, spare) if event.cause is not RoundFault.RELAYS else []
        if count < (ROUNDS_SEEN_MAX if odd else ROUNDS_MAX) or any(self._state.pool[end].is_suspect for end in pair):
            return None  # membership will say whether a suspect is gone
        if event.cause is RoundFault.RELAYS:
            pair = [peer]  # nobody else says so: it costs nobody else his place
        share = {member.peer: self._state.ledger.share(run.step, member.peer) for member in averaging.members}
        leaver = trouble.leaver(odd or pair, spare, share)
        if leaver is not None:
            return Expel(leaver, f"it cannot average with the others; {says}")
        if accused is None:
            hint = "check the network between stage servers, or raise averaging.timeout_s"
            return Fail(JobFailed.code, f"{told}, {count} times", hint)
        return None

    # What is done again ------------------------------------------------------------------------------------------

    def void(self, run: StepRun, peer: PeerId, cause: str, now_s: float, reason: str = "refused") -> None:
        """Strike out all that a replica did for a step, and let it know."""
        self.reopen(run, f"{peer} is void")
        struck = self._state.ledger.void(run.step, peer, cause, now_s, reason)
        self._state.outbox.send(peer, Void(self._state.settings.timeline, run.step, struck))

    def reopen(self, run: StepRun, cause: str) -> None:
        """Contributions of a step that is being averaged change: give its rounds up and accumulate again."""
        if run.ahead is not None:
            self._give_up_ahead(run, cause)
        if run.phase is Phase.AVERAGING:
            self._abort_all(run)
            run.turn(StepEvent.REOPENED, cause)

    def start_over(self, run: StepRun, cause: str, now_s: float) -> None:
        """Strike out all contributions to a step without a row, because the wrong one is unknown."""
        if run.phase is Phase.DECIDED:
            self._abort_all(run)
            run.turn(StepEvent.REOPENED, cause)
        self.reopen(run, cause)
        for peer in self._state.pool:
            if self._state.ledger.has_part(run.step, peer):
                self.void(run, peer, cause, now_s)
        for gone in self._state.ledger.participants(run.step):  # a decided step keeps what the lost have done for it
            self._state.ledger.peer_gone(gone, [run.step], cause, now_s)

    def lost(self, peer: PeerId) -> None:
        """The peer is no replica any more: the averages that it held are gone, though it may come back."""
        for run in self._state.progress.runs.values():
            for averaging in run.told:
                averaging.lost.add(peer)

    def undecide_unheld(self, now_s: float) -> None:
        """Average again each step without a row whose average no replica of some stage holds any more."""
        for run in list(self._state.progress.runs.values()):
            if run.phase is Phase.DECIDED and not run.skip and not self._is_held(run):
                self._undecide(run, now_s)

    def _complete(self, run: StepRun, unit: UnitName, averaging: UnitAveraging, now_s: float) -> list[Remedy]:
        """Once all members of a round have reported, returns remedies for members that differ.

        Without a majority the round is repeated, then the step computed again, before the job stops. A round by site is
        repeated first: of members that differ, the carrier may be the odd one.
        """
        if not averaging.is_complete:
            return []
        self.forms.averaged(unit, averaging)
        said = {peer: average_of(report) for peer, report in averaging.reports.items()}
        what = f"the bytes or norms of the averaged gradient of unit {unit}, step {run.step}"
        found = vote(said, what, self._state.pool.by_stage, recover=self._state.settings.recover)
        if not found:
            return []
        self._state.ledger.violations += 1
        run.disputes[unit] += 1
        first, again = found[0], "averaged" if run.disputes[unit] == 1 else "computed"
        recovers = self._state.settings.recover and run.disputes[unit] <= DISPUTES_MAX
        if not averaging.is_by_site and (isinstance(first, Expel) or not recovers):
            return found
        told = first.message if isinstance(first, Fail) else first.cause
        self._state.outbox.note("error", f"{told}; {again} again")
        self.forms.failed(unit, averaging)
        if run.disputes[unit] == 1:
            self._abort(run, unit)
            self._start_unit(run, unit)
        else:
            self.start_over(run, "its members differ in the average", now_s)
        return []

    def _accused(self, averaging: UnitAveraging, peer: PeerId, event: RoundFailed) -> PeerId | None:
        """The accused peer, if the accusation can be true: of two that exchange slices one owns one, or carries one."""
        owns = {member.peer: member.stop > member.start for member in averaging.members}
        accused = PeerId(event.accused)
        may_mean = accused != peer and accused in owns and accused in self._state.pool
        return accused if may_mean and (owns[accused] or owns[peer] or averaging.is_by_site) else None

    def _unreached_of(self, pair: list[PeerId], spare: Collection[PeerId]) -> list[PeerId]:
        """The one of two that the scheduler cannot dial either, if it can be spared; else none."""
        unreached = [end for end in pair if end in self._state.unreached]
        return unreached if len(pair) == 2 and len(unreached) == 1 and unreached[0] in spare else []

    def _is_excused(self, averaging: UnitAveraging, pair: list[PeerId], now_s: float) -> bool:
        """Whether relays are to blame, as the first of the pair says; two that have addresses need none."""
        hidden = {member.peer for member in averaging.members if not member.address}
        if not self._state.relays_here and not hidden.isdisjoint(pair):
            return True  # until a relay is back
        return self._excuses.excuses(pair[0], now_s)

    def _other_set(self, run: StepRun, peer: PeerId, reason: str, now_s: float) -> Remedy | None:
        """A member reports another set than the ledger's: its contributions are done again, here or elsewhere."""
        self._state.ledger.violations += 1
        name = self._state.pool.name(peer)
        self._state.outbox.note("error", f"{name} holds another set than the ledger: {reason}; done again")
        if not self._excuses.other_set(peer, now_s) and peer in self._state.pool.spare():
            return Expel(peer, "again and again its set is not the ledger's")
        self.void(run, peer, "its set is not the ledger's", now_s)
        return None

    def _start_unit(self, run: StepRun, unit: UnitName) -> None:
        averaging = run.rounds[unit] = self._plan(run, unit, run.sets)
        self._tell(run, unit, averaging, averaging.missing())

    def _plan(self, run: StepRun, unit: UnitName, sets: Mapping[PeerId, frozenset[int]]) -> UnitAveraging:
        """A new round of the unit, in which each member holds its set."""
        members, trouble = self._members(run, unit), run.troubles.get(unit)
        self._number += 1
        number = Round(self._state.settings.epoch, self._number)
        if trouble:
            shares, by_site = trouble.owners([member.peer for member in members]), False
        else:
            shares, by_site = self.forms.plan(unit, number, members, again=unit in run.disputes)
        return UnitAveraging(number, plan_round(members, sets, self._elements[unit], shares, by_site=by_site))

    def _members(self, run: StepRun, unit: UnitName) -> list[ReplicaRecord]:
        pool = self._state.pool
        served = [peer for stage in sorted(set(self._state.settings.units[unit])) for peer in pool.by_stage[stage]]
        return [pool[peer].replica for peer in served if pool.takes_part(peer, run.step)]

    def _tell(
        self, run: StepRun, unit: UnitName, averaging: UnitAveraging, peers: Iterable[PeerId], *, ahead: bool = False
    ) -> None:
        settings = self._state.settings
        tokens = settings.tokens_of(self._state.course.at(run.step).portion)
        facts = (settings.timeline, run.step, unit, averaging.round, averaging.members, tokens)
        command = Average(*facts, settings.averaging_timeout_s, ahead)
        for peer in peers:
            self._state.outbox.send(peer, command)

    def _is_as_told(self, run: StepRun, ahead: Ahead) -> bool:
        """Whether the full step is what its members heard ahead."""
        return run.sets == ahead.sets and all(
            _processes(self._members(run, unit)) == _processes(averaging.members)
            for unit, averaging in ahead.rounds.items()
        )

    def _give_up_ahead(self, run: StepRun, cause: str) -> None:
        assert run.ahead is not None
        run.history.append(f"rounds that were told ahead are given up: {cause}")
        for unit, averaging in run.ahead.rounds.items():
            self._tell_abort(run, unit, averaging)
        run.ahead = None

    def _abort(self, run: StepRun, unit: UnitName) -> None:
        self._tell_abort(run, unit, run.rounds.pop(unit))

    def _tell_abort(self, run: StepRun, unit: UnitName, averaging: UnitAveraging) -> None:
        command = AbortRound(self._state.settings.timeline, run.step, unit, averaging.round)
        for member in averaging.members:
            self._state.outbox.send(member.peer, command)

    def _abort_all(self, run: StepRun) -> None:
        for unit in list(run.rounds):
            self._abort(run, unit)

    def _present(self, peer: PeerId, event: Averaged | RoundFailed) -> UnitAveraging | None:
        """The round that the event is about, if it is still the unit's present one."""
        run = self._state.progress.runs.get(event.step)
        averaging = run.rounds.get(event.unit) if run and run.phase is Phase.AVERAGING else None
        if run is not None and run.ahead is not None:
            averaging = run.ahead.rounds.get(event.unit)
        current = averaging is not None and event.timeline == self._state.settings.timeline
        if averaging is None or not current or averaging.round != event.round or not averaging.is_member(peer):
            return None
        return averaging

    def _is_held(self, run: StepRun) -> bool:
        """Whether each stage has a replica that holds the averages of the step."""
        return all(
            any(averaging.is_held_by(peer) for peer in self._state.pool.by_stage[stage])
            for unit, averaging in run.rounds.items()
            for stage in self._state.settings.units[unit]
        )

    def _undecide(self, run: StepRun, now_s: float) -> None:
        """Average the step again: a stage lost all holders of its average before the row was written."""
        lost = sorted({peer for averaging in run.rounds.values() for peer in averaging.lost})
        self._abort_all(run)
        run.turn(StepEvent.REOPENED, "nobody of a stage holds the average any more")
        told = f"step {run.step} was averaged, and all who hold that of a stage are lost: done again"
        self._state.outbox.note("warning", told)
        for peer in lost:
            self._state.ledger.peer_gone(peer, [run.step], "gone with the average", now_s)


def _processes(members: Iterable[ReplicaRecord | Member]) -> set[tuple[PeerId, int]]:
    return {(member.peer, member.incarnation) for member in members}


def _in(seconds: float) -> str:
    return f" in {math.ceil(seconds)} s" if seconds > 0.0 else ""


ALONE_MAX = 12
SETS_MAX = ROUNDS_MAX
WINDOW_S = 600.0
TOGETHER_S = 60.0  # two that blame relays within so long agree


class FailureBudget:
    """Excuses for a failed round that cannot be checked, and how often a member may give them.

        no relay answers ──┬── others say so too ──▶ excused: relays are to blame, and no member leaves
                           └── it alone says so ──▶ excused ALONE_MAX times in WINDOW_S, then it leaves
        its set is not the ledger's ──────────────▶ done again SETS_MAX times in WINDOW_S, then it leaves

    Rounds that fail again and again begin at most five seconds after each other: alone, a member delays a step by about
    forty seconds. A restart of a relay takes less. No other member leaves for a false excuse. The delay has no bound
    here if two members agree, if the one has a stage to itself and so cannot leave, or if the scheduler sees no relay
    and one of the pair has no address (rounds.py): then the job waits, until limits.no_progress_s.
    """

    def __init__(self) -> None:
        self._blamed_s: dict[PeerId, float] = {}  # when each blamed relays, the last time
        self._alone: dict[PeerId, list[float]] = {}
        self._sets: dict[PeerId, list[float]] = {}

    def blames_relays(self, peer: PeerId, now_s: float) -> None:
        """The member says that no relay answers, also of a round that was given up already."""
        self._blamed_s[peer] = now_s

    def excuses(self, peer: PeerId, now_s: float) -> bool:
        """Whether relays are to blame that a round has failed, as the member says."""
        others = [at_s for other, at_s in self._blamed_s.items() if other != peer]
        return any(now_s - at_s < TOGETHER_S for at_s in others) or _again(self._alone, peer, now_s) <= ALONE_MAX

    def other_set(self, peer: PeerId, now_s: float) -> bool:
        """The member holds another set than the ledger; whether it may go on."""
        return _again(self._sets, peer, now_s) <= SETS_MAX


def _again(book: dict[PeerId, list[float]], peer: PeerId, now_s: float) -> int:
    """Note it once more; how often it was within the window."""
    book[peer] = [at_s for at_s in book.get(peer, []) if now_s - at_s < WINDOW_S]
    book[peer].append(now_s)
    return len(book[peer])
