"""Strikes against replicas that computed wrong numbers, and the remedies for the job.

proven by a third ──────────────────────▶ expelled, and quarantined (scheduler/brain/fleet/quarantine.py)
not proven ──a second within a day──────▶
unclear who is right ─────────again and again──▶ the job stops and names them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from scheduler.brain.commit.digests import Expel, Remedy, StartOver
from scheduler.brain.fleet.quarantine import STRIKES_MAX, STRIKES_S
from scheduler.brain.outputs import Fail, Struck
from scheduler.brain.state.brain_state import BrainState
from swarm.errors import ReplicaDiverged
from swarm.text import listed
from swarm.types import PeerId

SHOWN = 8  # characters of a hash in evidence
UNCLEAR_MAX = 3  # times that the same replicas contradict each other and nobody can decide


class Strikes:
    """The strikes of one job's replicas."""

    def __init__(self, state: BrainState) -> None:
        self._state = state
        self.counts: Counter[PeerId] = Counter()  # hops of a replica that were computed again by others
        self._strikes: dict[PeerId, list[float]] = {}
        self._doubts: dict[PeerId, dict[PeerId, float]] = {}
        self._unclear: Counter[frozenset[PeerId]] = Counter()

    def convict(self, peer: PeerId, text: str, now_s: float, *, is_proven: bool) -> list[Remedy]:
        """Strike a wrong replica, with the evidence in `text`. Returns the remedy for the job."""
        strikes = [at_s for at_s in self._strikes.get(peer, []) if now_s - at_s < STRIKES_S]
        self._strikes[peer] = [*strikes, now_s]
        is_out = is_proven or len(self._strikes[peer]) >= STRIKES_MAX
        self._state.ledger.violations += 1
        self._state.outbox.put(Struck(peer, text, is_proven, self.counts[peer]))
        cause = f"wrong numbers: {text}"
        return [Expel(peer, cause)] if is_out and peer in self._state.pool else [StartOver(f"{peer}: {cause}")]

    def prove(self, evidence: Mapping[PeerId, str], now_s: float) -> list[Remedy]:
        """Convict replicas that are proven wrong, each with its evidence."""
        return [found for peer, text in evidence.items() for found in self.convict(peer, text, now_s, is_proven=True)]

    def contradict(self, one: PeerId, other: PeerId, told: str, guard: str, now_s: float) -> list[Remedy]:
        """Note that two replicas contradict each other about a tensor. Convicts one that two others contradict."""
        for peer, against in ((one, other), (other, one)):
            doubts = self._doubts.setdefault(peer, {})
            doubts[against] = now_s
            self._doubts[peer] = {peer: at_s for peer, at_s in doubts.items() if now_s - at_s < STRIKES_S}
        for peer, against in ((one, other), (other, one)):
            if len(self._doubts[peer]) > 1 and len(self._doubts[against]) == 1:
                text = f"{told}; {listed(sorted(self._doubts[peer]))} contradict it ({guard})"
                return self.convict(peer, text, now_s, is_proven=True)
        return self.undecided(told, (one, other))

    def undecided(self, text: str, peers: Iterable[PeerId]) -> list[Remedy]:
        """No majority: recompute the step, at most UNCLEAR_MAX times, then fail the job."""
        return [self.unclear(text, peers) or StartOver(f"unclear who is right: {text}")]

    def unclear(self, text: str, peers: Iterable[PeerId]) -> Fail | None:
        """Count a case without a majority. Fails the job at the UNCLEAR_MAX-th case of the same replicas."""
        self._state.ledger.violations += 1
        named = frozenset(peers)
        self._unclear[named] += 1
        if self._unclear[named] < UNCLEAR_MAX:
            return None
        hint = "let another stage server join the stage, which then decides, or stop the one that is broken; then: "
        message = f"{listed(sorted(named))} contradict each other again and again: {text}"
        return Fail(ReplicaDiverged.code, message, f"{hint}swarm resume {self._state.settings.job}")
