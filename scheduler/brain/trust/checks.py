"""Spot checks of computations, and the verdicts on replicas that compute something else.

    Accumulated with hashes ──▶ claims ──a microbatch is complete──┬─ each hop must have taken what its neighbour made
                                   │                               └─ some hops are drawn and computed again elsewhere
                                   └─ a hop that was done twice must have the same results

A hop is drawn after all of its route have reported, so no replica knows beforehand which hops will be checked. A step
is not committed while a check of it is open. A verdict makes everything without a row void, at every stage, because
tensors from a liar are wrong elsewhere too. Committed steps stay.

Two neighbours that say different things of one tensor cannot be told apart by computing: either may lie. The step is
computed again and the pair is avoided. A replica that two others contradict in this way is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from itertools import product
from operator import eq
from random import Random

from scheduler.brain.commit.digests import Remedy, StartOver
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.trust.inquiries import Inquiry, Stand
from scheduler.brain.trust.strikes import Strikes
from scheduler.brain.trust.verdicts import SHOWN, Place, Work, evidence, inconstant, odd_ones, second_evidence
from swarm.text import counted, listed
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Check, Checked

ANSWER_S_MAX = 30.0  # then another replica is asked
SILENT_MAX, SILENT_S = 3, 600.0  # overdue answers of a checker beside the same neighbours, until it rests for so long
SPOT_CHECK, REPEATED, NEIGHBOURS = "spot check", "done again by another replica", "its neighbours"

Beside = tuple[PeerId | None, ...]  # the replicas from which a checker gets its inputs


class Checks:
    """The checks of one job; nothing happens unless the job file asks for them."""

    def __init__(self, state: BrainState, strikes: Strikes, rng: Random) -> None:
        self._state, self._strikes = state, strikes
        self._rate = state.settings.spot_check
        self.is_on = state.settings.hashes_hops
        if self.is_on:
            self._rng = Random(rng.getrandbits(64))
        self._claims: dict[int, dict[Place, dict[PeerId, Work]]] = {}  # by step, also those that became void
        self._touched: set[tuple[int, int]] = set()  # microbatches about which something was said
        self._silent: dict[tuple[PeerId, int], list[tuple[float, Beside]]] = {}  # overdue answers, by checker and stage
        self._unchecked: set[tuple[PeerId, str]] = set()  # replicas that were said to go unchecked, and why
        self._drawn: set[tuple[Place, PeerId]] = set()
        self._open: dict[Place, Inquiry] = {}
        self._number = 0

    # What replicas say -------------------------------------------------------------------------------------------

    def accumulated(self, peer: PeerId, event: Accumulated) -> None:
        """A replica's word on a hop whose gradient it has added."""
        step, index = event.microbatch.step, event.microbatch.index
        run = self._state.progress.runs.get(step)
        if self.is_on and run is not None and run.can_be_redone:
            place = Place(step, event.stage, index)
            self._claims.setdefault(step, {}).setdefault(place, {})[peer] = Work.of(event)
            self._drawn.discard((place, peer))
            self._touched.add((step, index))

    def checked(self, peer: PeerId, event: Checked, now_s: float) -> None:
        """A replica has computed a hop again, or cannot; an answer to an older request changes nothing."""
        place = Place(event.microbatch.step, event.stage, event.microbatch.index)
        inquiry = self._open.get(place)
        if inquiry is None or (inquiry.asked, inquiry.number) != (peer, event.number):
            self._state.ledger.duplicates += 1
        elif event.fault:
            inquiry.gave_up(peer)
        elif not inquiry.answered(peer, Work.of(event)):
            told = f"{peer} was given other inputs than {inquiry.holder} to check {place} with"
            self._state.outbox.note("warning", told)

    def word(self, place: Place, peer: PeerId) -> Work | None:
        """The report of a replica on a hop."""
        return self._claims.get(place.step, {}).get(place, {}).get(peer)

    def dispute(self, place: Place, holder: PeerId, mine: Work, other: PeerId, theirs: Work, guard: str) -> None:
        """Another replica has computed a hop again and got something else from the same inputs."""
        if place not in self._open:
            self._open[place] = self._inquiry(place, holder, guard, {holder: mine, other: theirs})

    # What follows ------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> list[Remedy]:
        """Compare reports, draw checks and ask for them; gives remedies for replicas that are wrong."""
        if not self.is_on:
            return []
        found: list[Remedy] = []
        for step, index in sorted(self._touched):
            found = found or self._look_at(step, index, now_s)
        self._touched.clear()
        for place in list(self._open):
            found = found or self._go_on(self._open[place], now_s)
        if found:
            self._forget_undecided()
        return found

    def permits(self, step: int) -> bool:
        """Whether nothing of the step waits to be checked."""
        return not any(place.step == step for place in self._open)

    def close(self, step: int) -> None:
        """The step's row is durable: forget the reports on it."""
        self._claims.pop(step, None)
        self._drawn = {drawn for drawn in self._drawn if drawn[0].step > step}

    def times_s(self) -> list[float]:
        """When an answer is overdue."""
        return [one.since_s + ANSWER_S_MAX for one in self._open.values() if one.asked is not None]

    def waiting_for(self, step: int) -> str:
        open_ = [one for place, one in self._open.items() if place.step == step]
        asked = sorted({one.asked for one in open_ if one.asked is not None})
        return f"waits for {counted(len(open_), 'spot check')} by {listed(asked) or 'nobody yet'}"

    # Comparing ---------------------------------------------------------------------------------------------------

    def _look_at(self, step: int, index: int, now_s: float) -> list[Remedy]:
        """Something was said of a microbatch: compare the words of one hop, then those of neighbours, then draw."""
        claims, ledger = self._claims.get(step, {}), self._state.ledger
        if step not in ledger.open_steps():
            return []
        places = [Place(step, stage, index) for stage in range(ledger.stages)]
        for place in places:
            self._compare_repeated(place, claims.get(place, {}))
        holders = [ledger.holder(step, stage, index) for stage in range(ledger.stages)]
        words: list[tuple[PeerId, Work]] = []
        for place, holder in zip(places, holders, strict=True):
            if holder is None or holder not in claims.get(place, {}):
                return []  # not complete, or from before a restart of the scheduler
            words.append((holder, claims[place][holder]))
        for place, (one, made), (other, took) in zip(places, words, words[1:], strict=False):
            for what, left, right in (("y", made.y, took.x), ("dx", made.g, took.dx)):
                if left != right:
                    behind = Place(step, place.stage + 1, index)
                    return self._contradict(place if what == "y" else behind, what, one, other, (left, right), now_s)
        for place, (holder, work) in zip(places, words, strict=True):
            self._draw(place, holder, work)
        return []

    def _compare_repeated(self, place: Place, said: dict[PeerId, Work]) -> None:
        """A hop that several replicas did from the same inputs must have the same results."""
        holder = self._state.ledger.holder(place.step, place.stage, place.index)
        if holder not in said or len(said) < 2 or place in self._open:
            return
        alike = {peer: work for peer, work in said.items() if work.inputs == said[holder].inputs}
        if len({work.results for work in alike.values()}) > 1:
            self._open[place] = self._inquiry(place, holder, REPEATED, {holder: said[holder], **alike})

    def _draw(self, place: Place, holder: PeerId, work: Work) -> None:
        if (place, holder) in self._drawn:
            return
        self._drawn.add((place, holder))
        if self._rng.random() < self._rate and place not in self._open:
            self._open[place] = self._inquiry(place, holder, SPOT_CHECK, {holder: work})

    def _inquiry(self, place: Place, holder: PeerId, guard: str, said: dict[PeerId, Work]) -> Inquiry:
        pool = self._state.pool
        return Inquiry(place, holder, pool[holder].replica.device if holder in pool else "", guard, said)

    def _contradict(
        self, maker: Place, what: str, one: PeerId, other: PeerId, hashes: tuple[str, str], now_s: float
    ) -> list[Remedy]:
        """Two neighbours name one tensor differently: one of them lies, or another replica had the hop before."""
        left, right = (text[:SHOWN] or "nothing" for text in hashes)
        told = f"{what} of {maker} is {left} as {one} says, and {right} as {other} says"
        self._state.links.accuse(one, other, now_s)
        if any(len(self._state.ledger.asked(maker.step, stage, maker.index)) > 1 for stage in self._beside(maker)):
            return [StartOver(told)]
        return self._strikes.contradict(one, other, told, NEIGHBOURS, now_s)

    def _beside(self, maker: Place) -> list[int]:
        return [at for at in (maker.stage - 1, maker.stage, maker.stage + 1) if 0 <= at < self._state.ledger.stages]

    # Asking ------------------------------------------------------------------------------------------------------

    def _go_on(self, inquiry: Inquiry, now_s: float) -> list[Remedy]:
        """Move an inquiry on: it is over, decided, or another replica is asked."""
        place, ledger = inquiry.place, self._state.ledger
        is_open = place.step in ledger.open_steps()
        if not is_open or ledger.holder(place.step, place.stage, place.index) != inquiry.holder:
            del self._open[place]  # what it was about is void
            return []
        if inquiry.asked is not None and inquiry.near != self._near(place):
            inquiry.asked = None  # the inputs are elsewhere now
        if inquiry.asked is not None and not self._is_answering(inquiry, now_s):
            if now_s - inquiry.since_s >= ANSWER_S_MAX:
                late = self._silent.setdefault((inquiry.asked, place.stage), [])
                late.append((now_s, _beside(inquiry.near)))
            inquiry.gave_up(inquiry.asked)
        if inquiry.asked is not None:
            return []
        others = self._able(inquiry, now_s)
        match inquiry.stand(others):
            case Stand.ASKS:
                self._ask(inquiry, others, now_s)
                return []
            case Stand.ALIKE:
                self._strikes.counts[inquiry.holder] += 1
            case Stand.ODD:
                self._strikes.counts[inquiry.holder] += 1
                return self._convict_odd(inquiry, now_s)
            case Stand.SPLIT:
                return self._split(inquiry, now_s)
            case Stand.UNANSWERED:
                self._leave_unchecked(inquiry)
        del self._open[place]
        return []

    def _leave_unchecked(self, inquiry: Inquiry) -> None:
        """Nobody has computed the hop again; the log says so once for each replica and cause."""
        holder = inquiry.holder
        why = "who was asked gave no answer" if inquiry.tries else "no other replica of the stage could"
        if (holder, why) not in self._unchecked:
            self._unchecked.add((holder, why))
            more = "(others of its hops may follow, without a word here)"
            self._state.outbox.note("info", f"{inquiry.place} of {holder} is not checked: {why} {more}")

    def _able(self, inquiry: Inquiry, now_s: float) -> list[PeerId]:
        """Replicas that can compute the hop, with the bits of the holder's kind of device, and were not silent."""
        pool, place, near = self._state.pool, inquiry.place, self._near(inquiry.place)
        return [
            peer
            for peer in sorted(pool.by_stage[place.stage])
            if pool.may_work(peer)
            and pool.takes_part(peer, place.step)
            and (not inquiry.device or pool[peer].replica.device == inquiry.device)
            and not self._rests(peer, place.stage, _beside(near), now_s)
        ]

    def _rests(self, checker: PeerId, stage: int, near: Beside, now_s: float) -> bool:
        """Whether a checker was silent so often that it is not asked for now: beside these neighbours, or at all.

        If a neighbour does not hand its tensor over, an honest checker is silent. So silence is counted beside each,
        and is the checker's own where one such neighbour on each side does not explain all of it.
        """
        late = [one for one in self._silent.pop((checker, stage), ()) if now_s - one[0] < SILENT_S]
        if late:
            self._silent[checker, stage] = late
        times = Counter(beside for _, beside in late)
        return times[near] >= SILENT_MAX or (times.total() >= SILENT_MAX and not _explained(set(times)))

    def _is_answering(self, inquiry: Inquiry, now_s: float) -> bool:
        """Whether the answer may still come: the asked replica is trusted, and has had less than ANSWER_S_MAX."""
        pool, asked = self._state.pool, inquiry.asked
        if asked is None or asked not in pool or pool[asked].is_suspect:
            return False
        return now_s - inquiry.since_s < ANSWER_S_MAX

    def _near(self, place: Place) -> tuple[Hop | None, ...]:
        hops = self._state.ledger.hops(place.step, place.index)
        return tuple(hops[at] for at in (place.stage - 1, place.stage + 1) if 0 <= at < len(hops))

    def _ask(self, inquiry: Inquiry, others: list[PeerId], now_s: float) -> None:
        """Let another replica compute the hop, once its neighbours are known."""
        place = inquiry.place
        hops = self._state.ledger.hops(place.step, place.index)
        candidates = inquiry.candidates(others)
        if not candidates or any(hop is None for hop in hops):
            if not candidates:
                inquiry.tries += 1
            return
        inquiry.asked, inquiry.number, inquiry.since_s = self._rng.choice(candidates), self.next_number(), now_s
        inquiry.near = self._near(place)
        self.send(place, inquiry.asked, inquiry.number)

    def next_number(self) -> int:
        """The number of a new request."""
        self._number += 1
        return self._number

    def send(self, place: Place, checker: PeerId, number: int) -> None:
        """Let a replica compute a hop again, and its neighbours send what they hold."""
        state = self._state
        hops, replica = state.ledger.hops(place.step, place.index), state.pool[checker].replica
        hops[place.stage] = Hop(checker, replica.incarnation, state.ledger.attempt(place.step), replica.address)
        route = tuple(hop for hop in hops if hop is not None)
        microbatch = Microbatch(state.settings.timeline, place.step, place.index)
        version = state.version_of(place.step, place.index)
        command = Check(microbatch, version, place.stage, number, route)
        for peer in (checker, *(hop.peer for hop in self._near(place) if hop is not None)):
            state.outbox.send(peer, command)

    # Verdicts ----------------------------------------------------------------------------------------------------

    def _convict_odd(self, inquiry: Inquiry, now_s: float) -> list[Remedy]:
        """Convict the replicas that a majority contradicts: a third one has proved them wrong."""
        found: list[Remedy] = []
        for peer in odd_ones(inquiry.said):
            text = evidence(inquiry.place, peer, inquiry.said, inquiry.guard)
            found += self._strikes.convict(peer, text, now_s, is_proven=True)
        return found

    def _split(self, inquiry: Inquiry, now_s: float) -> list[Remedy]:
        """Without a majority, a replica that contradicts itself is wrong."""
        said, place = inquiry.said, inquiry.place
        if len(said) == len(inquiry.again) == 2 and (peer := inconstant(said, inquiry.again)) is not None:
            return self._strikes.convict(
                peer, second_evidence(place, peer, said, inquiry.again), now_s, is_proven=False
            )
        return self._leave_unclear(evidence(place, inquiry.holder, said, inquiry.guard), tuple(said))

    def _leave_unclear(self, text: str, peers: tuple[PeerId, ...]) -> list[Remedy]:
        """It is unclear who is right: the step is computed again, but not for ever."""
        return [self._strikes.unclear(text, peers) or StartOver(f"unclear who is right: {text}")]

    def _forget_undecided(self) -> None:
        """Everything without a row is computed again."""
        for run in self._state.progress.undecided():
            self._claims.pop(run.step, None)
            self._drawn = {drawn for drawn in self._drawn if drawn[0].step != run.step}
            self._open = {place: one for place, one in self._open.items() if place.step != run.step}


def _beside(near: tuple[Hop | None, ...]) -> Beside:
    return tuple(None if hop is None else hop.peer for hop in near)


def _explained(besides: Set[Beside]) -> bool:
    """Whether one neighbour on each side takes part in all of these."""
    suspects = product(*map(set, zip(*besides, strict=True)))
    return any(all(any(map(eq, one, beside)) for beside in besides) for one in suspects)
