"""The ledger: notes which replica accumulated which microbatch, so that every gradient counts exactly once.

For each (step t, stage s, microbatch m) the ledger knows the hop that has to do it and the *set* of replicas that hold
its contribution in their sums. A step is full when every (s, m) has exactly one holder.

       fed ──▶ hop (peer, attempt) ──Accumulated──▶ one holder ──all (s, m)──▶ full ──▶ closed by the commit
                 │        ▲                            │
                 │        │ new hop, attempt + 1       ├──Accumulated from a displaced replica──▶ two holders
                 └─ lost ─┴──── void, gone ◀───────────┴──────── the smaller contribution is void ◀──┘

Nothing can be subtracted from a sum, so repair voids a replica's whole contribution to a step; each of its microbatches
then gets a new hop, at that stage only. Attempts come from one counter per step. A replica's *floor* in a step is the
attempt of the newest `Void` that it was sent: work up to the floor is void, later work counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swarm.types import Hop, PeerId
from swarm.wire.messages import Accumulated, ReportedCell

STORY_LINES_MAX = 64
STORIES_MAX = 4096  # of closed steps, and never of fewer than
STEPS_KEPT_MIN = 2


class Verdict(StrEnum):
    """The verdict on an `Accumulated`."""

    COUNTED = "counted"
    SECOND = "second holder"
    DUPLICATE = "duplicate"
    STALE = "stale"
    UNASKED = "unasked"  # never on a route of this microbatch: a violation


@dataclass(frozen=True, slots=True)
class Contribution:
    """One microbatch's gradient in one replica's sum; not finite: reported, but in no sum."""

    attempt: int
    finite: bool
    loss: float


@dataclass(slots=True)
class LedgerEntry:
    """The ledger's line for one (step, stage, microbatch)."""

    hop: Hop | None = None  # the newest route's; None: not routed yet, or lost
    offered: dict[PeerId, int] = field(default_factory=dict)  # newest attempt given to each replica ever asked
    holders: dict[PeerId, Contribution] = field(default_factory=dict)


@dataclass(slots=True)
class OpenStep:
    """One open step."""

    entries: list[list[LedgerEntry]]  # [stage][index]
    attempt: int = 1  # drawn by new hops
    fed: int = 0
    held: int = 0  # entries with a holder
    open: int = 0  # microbatches that were fed and lack a holder at some stage
    away: set[int] = field(default_factory=set)  # of these, all but those that only lack gradients of weights
    moved: set[int] = field(default_factory=set)  # away until no stage lacks a holder: a hop is done again
    left: list[int] = field(default_factory=list)  # stages that still lack a holder, per microbatch
    orphans: dict[int, set[int]] = field(default_factory=dict)  # fed, but without hop: index -> stages
    doubles: set[tuple[int, int]] = field(default_factory=set)  # (stage, index) with two holders
    floors: dict[PeerId, int] = field(default_factory=dict)  # what a replica did up to this attempt is void
    surprises: int = 0  # whenever the replicas will not hold what the routes said
    stories: list[list[str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The step's microbatches."""
        return len(self.left)

    def done_again(self, index: int) -> None:
        """A hop of the microbatch was lost."""
        self.moved.add(index)
        if self.left[index]:
            self.away.add(index)


class Ledger:
    """The contributions to all open steps of one timeline."""

    def __init__(
        self, timeline: int, stages: int, microbatches: int, count_of: Callable[[int], int] | None = None
    ) -> None:
        """A step has `count_of(step)` microbatches, if that is given, and never more than `microbatches`."""
        self.timeline = timeline
        self.stages = stages
        self.microbatches = microbatches
        self._count_of = count_of or (lambda step: microbatches)
        self.replayed = [0] * stages  # contributions that were void, per stage
        self.moved: Counter[tuple[int, str]] = Counter()  # hops that were taken away, by (stage, reason)
        self.duplicates = 0
        self.violations = 0
        self._entered = [0] * stages  # contributions that a replica took into its sum, less those that were struck out
        self._least_attempt = 0
        self._steps: dict[int, OpenStep] = {}
        self._outstanding: dict[PeerId, int] = {}
        self._changed: set[PeerId] = set()  # whose outstanding changed since `take_changed`
        self._closed: dict[int, list[list[str]]] = {}  # stories of the newest closed steps
        self._shares: dict[int, Counter[PeerId]] = {}  # how much of them each replica did

    # Feeding -----------------------------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """Begin to count the contributions to a step."""
        assert step not in self._steps, f"step {step} is open"
        count = self._count_of(step)
        self._steps[step] = OpenStep(
            [[LedgerEntry() for _ in range(count)] for _ in range(self.stages)],
            attempt=self._least_attempt + 1,
            left=[self.stages] * count,
            stories=[[] for _ in range(count)],
        )

    def open_steps(self) -> list[int]:
        return sorted(self._steps)

    def attempt(self, step: int) -> int:
        return self._steps[step].attempt

    def next_attempt(self, step: int) -> int:
        """Raise the step's attempt, before a batch of hops is given again."""
        self._steps[step].attempt += 1
        return self._steps[step].attempt

    def unfed(self, step: int) -> int | None:
        """The next microbatch to feed; None when all were."""
        opened = self._steps[step]
        return opened.fed if opened.fed < opened.count else None

    def feed(self, step: int, hops: Sequence[Hop], now_s: float) -> int:
        """Give the next microbatch of the step its first hops, one per stage; the index."""
        opened = self._steps[step]
        index = opened.fed
        assert index < opened.count
        assert len(hops) == self.stages
        opened.fed += 1
        opened.open += 1
        opened.away.add(index)
        for stage, hop in enumerate(hops):
            self._give(opened, stage, index, hop)
        self.tell(step, index, "fed: " + ", ".join(f"stage {s} to {hop.peer}" for s, hop in enumerate(hops)), now_s)
        return index

    def reroute(self, step: int, stage: int, index: int, hop: Hop, cause: str, now_s: float) -> None:
        """Give one orphan a new hop, of the step's present attempt (raise it once before each batch).

        If a replica holds the contribution already, the hop is that replica's: its neighbours must know where to ask.
        """
        opened = self._steps[step]
        entry = opened.entries[stage][index]
        assert entry.hop is None
        assert not entry.holders or hop.peer in entry.holders
        assert hop.attempt == opened.attempt
        self._give(opened, stage, index, hop)
        self.tell(step, index, f"stage {stage} given to {hop.peer} (attempt {hop.attempt}): {cause}", now_s)

    def hops(self, step: int, index: int) -> list[Hop | None]:
        """The newest hop of the microbatch at each stage."""
        return [entries[index].hop for entries in self._steps[step].entries]

    def adopt(self, step: int, cells: Iterable[tuple[PeerId, int, ReportedCell]], now_s: float) -> None:
        """Open a step of an earlier scheduler start from the reports of its replicas: (peer, stage, cell).

        Everything that is reported counts as fed and still lacks hops. Call `raise_attempts` first.
        """
        self.open(step)
        opened = self._steps[step]
        for peer, stage, cell in cells:
            index = cell.microbatch.index
            if not (0 <= stage < self.stages and 0 <= index < opened.count and 0 < cell.attempt < opened.attempt):
                self.violations += 1
                continue
            entry = opened.entries[stage][index]
            entry.offered[peer] = max(cell.attempt, entry.offered.get(peer, 0))
            opened.fed = max(opened.fed, index + 1)
            if cell.accumulated:
                entry.holders[peer] = Contribution(cell.attempt, cell.finite, cell.loss)
                self._entered[stage] += 1
                did = f"{peer} reports that it has accumulated (attempt {cell.attempt})"
                self.tell(step, index, f"stage {stage}: {did}", now_s)
        for stage, index, entry in self._entries(opened):
            if index < opened.fed:
                opened.orphans.setdefault(index, set()).add(stage)
            if entry.holders:
                opened.held += 1
                opened.left[index] -= 1
            if len(entry.holders) > 1:
                opened.doubles.add((stage, index))
        opened.away.update(index for index, left in enumerate(opened.left[: opened.fed]) if left)
        opened.moved.update(opened.away)
        opened.open = len(opened.away)

    def at_work(self, step: int, stage: int, index: int) -> PeerId | None:
        """The last replica asked to compute this orphan whose work on it is not void; None if there is none."""
        opened = self._steps[step]
        offered = opened.entries[stage][index].offered
        alive = [peer for peer, attempt in offered.items() if attempt > opened.floors.get(peer, 0)]
        return max(alive, key=lambda peer: (offered[peer], peer), default=None)

    def raise_attempts(self, attempt: int) -> None:
        """Give new hops, also of later steps, attempts above this one, which a replica has reported."""
        self._least_attempt = max(self._least_attempt, attempt)
        for opened in self._steps.values():
            opened.attempt = max(opened.attempt, attempt)

    # What the replicas say ---------------------------------------------------------------------------------------

    def accumulated(self, peer: PeerId, event: Accumulated, now_s: float) -> Verdict:
        """Enter a contribution, once; anything else changes nothing but the counters."""
        microbatch, stage = event.microbatch, event.stage
        step, index = microbatch.step, microbatch.index
        opened = self._steps.get(step)
        if microbatch.timeline != self.timeline or opened is None:
            self.duplicates += 1
            return Verdict.STALE
        if not (0 <= stage < self.stages and 0 <= index < opened.count):
            self.violations += 1
            return Verdict.UNASKED
        entry = opened.entries[stage][index]
        if event.attempt <= opened.floors.get(peer, 0):
            self.duplicates += 1
            late = f"late word of {peer} (attempt {event.attempt}) ignored, it is void"
            self.tell(step, index, f"stage {stage}: {late}", now_s)
            return Verdict.STALE
        if event.attempt > entry.offered.get(peer, 0):
            self.violations += 1
            return Verdict.UNASKED
        if peer in entry.holders:
            self.duplicates += event.attempt <= entry.holders[peer].attempt  # else the answer to a newer route
            return Verdict.DUPLICATE

        entry.holders[peer] = Contribution(event.attempt, event.finite, event.loss)
        self._entered[stage] += 1
        opened.surprises += entry.hop is None or entry.hop.peer != peer or not event.finite
        if entry.hop is not None and entry.hop.peer == peer:
            self._count_outstanding(peer, -1)
        finite = "" if event.finite else ", NOT finite"
        self.tell(step, index, f"stage {stage} accumulated at {peer} (attempt {event.attempt}{finite})", now_s)
        if len(entry.holders) > 1:
            opened.doubles.add((stage, index))
            return Verdict.SECOND
        opened.held += 1
        opened.left[index] -= 1
        opened.open -= not opened.left[index]
        if not opened.left[index] or (stage == 0 and index not in opened.moved):
            opened.away.discard(index)
        return Verdict.COUNTED

    # Repair ------------------------------------------------------------------------------------------------------

    def withdraw(self, step: int, peer: PeerId, cause: str, now_s: float) -> list[tuple[int, int]]:
        """Take unfinished hops from a suspect, which may still finish them; gives their (stage, index)."""
        opened = self._steps[step]
        lost = []
        for stage, index, entry in self._entries(opened):
            if entry.hop is not None and entry.hop.peer == peer and peer not in entry.holders:
                self._take_hop(opened, stage, index)
                self.moved[stage, "timeout"] += 1
                lost.append((stage, index))
                self.tell(step, index, f"stage {stage} taken from {peer}: {cause}", now_s)
        return lost

    def take(self, step: int, stage: int, index: int, cause: str, now_s: float) -> None:
        """Take one hop away from the replica that it names, which may still finish it."""
        opened = self._steps[step]
        hop = opened.entries[stage][index].hop
        assert hop is not None
        assert hop.peer not in opened.entries[stage][index].holders
        self._take_hop(opened, stage, index)
        self.moved[stage, "timeout"] += 1
        self.tell(step, index, f"stage {stage} taken from {hop.peer}: {cause}", now_s)

    def void(self, step: int, peer: PeerId, cause: str, now_s: float, reason: str = "refused") -> int:
        """Strike out all that the peer has done for the step; gives the attempt for `Void`.

        Void also deletes the cells of its unfinished hops, so those are lost too. New hops carry a newer attempt.
        """
        opened = self._steps[step]
        struck = opened.attempt
        opened.floors[peer] = struck
        opened.surprises += 1
        for stage, index, entry in self._entries(opened):
            named = entry.hop is not None and entry.hop.peer == peer
            if named:
                self._take_hop(opened, stage, index)
                self.moved[stage, reason] += 1
            if entry.holders.pop(peer, None) is not None:
                self._entered[stage] -= 1
                if len(entry.holders) == 1:
                    opened.doubles.discard((stage, index))
                elif not entry.holders:
                    opened.held -= 1
                    opened.open += not opened.left[index]
                    opened.left[index] += 1
                    opened.done_again(index)
                    self.replayed[stage] += 1
            elif not named:
                continue
            self.tell(step, index, f"stage {stage}: {peer} is void up to attempt {struck}: {cause}", now_s)
        opened.attempt += 1
        return struck

    def peer_gone(
        self, peer: PeerId, steps: Iterable[int], cause: str, now_s: float, reason: str = "gone"
    ) -> list[int]:
        """Void what the peer did in these open steps, whose work can still be done again; gives those it had a part in.

        Decided steps keep its contribution: it is in the averaged gradient that the others hold.
        """
        touched = []
        for step in steps:
            if self.has_part(step, peer):
                self.void(step, peer, cause, now_s, reason)
                touched.append(step)
        return touched

    def has_part(self, step: int, peer: PeerId) -> bool:
        """Whether the peer was ever given a hop of the step."""
        return any(peer in entry.offered for _, _, entry in self._entries(self._steps[step]))

    def superfluous(self, step: int) -> PeerId | None:
        """The replica with the smaller contribution, in a pair that holds one microbatch; None if there is no pair.

        Equal contributions: the replica that the newest route no longer names, then the greater peer id.
        """
        opened = self._steps[step]
        if not opened.doubles:
            return None
        stage, index = min(opened.doubles)
        entry = opened.entries[stage][index]

        shares = self._contributions(opened)

        def weight(peer: PeerId) -> tuple[int, bool]:
            return shares[peer], entry.hop is not None and entry.hop.peer == peer

        return min(sorted(entry.holders, reverse=True), key=weight)

    def orphans(self, step: int) -> list[tuple[int, list[int]]]:
        """Microbatches that lack a hop at some stages, in order: (index, stages)."""
        found = self._steps[step].orphans
        return [(index, sorted(found[index])) for index in sorted(found)]

    def holder(self, step: int, stage: int, index: int) -> PeerId | None:
        """The replica that holds the contribution; either of two, if two do."""
        return next(iter(self._steps[step].entries[stage][index].holders), None)

    def asked(self, step: int, stage: int, index: int) -> frozenset[PeerId]:
        """All replicas that were ever given the hop."""
        return frozenset(self._steps[step].entries[stage][index].offered)

    def displaced(self, step: int, index: int) -> list[PeerId]:
        """Replicas that were asked for the microbatch, are not named by its newest route and have not accumulated it.

        They may still be at work on it, and must hear of the newest route.
        """
        opened = self._steps[step]
        found = []
        for entries in opened.entries:
            entry = entries[index]
            for peer, attempt in entry.offered.items():
                named = entry.hop is not None and entry.hop.peer == peer
                if not named and peer not in entry.holders and attempt > opened.floors.get(peer, 0):
                    found.append(peer)
        return found

    # What is known -----------------------------------------------------------------------------------------------

    def share(self, step: int, peer: PeerId) -> int:
        """How many contributions of the step the peer holds."""
        return self._contributions(self._steps[step])[peer]

    def participants(self, step: int) -> list[PeerId]:
        """All that hold a contribution of the step, or have a hop of it, be they gone or not."""
        opened = self._steps[step]
        named = {entry.hop.peer for _, _, entry in self._entries(opened) if entry.hop is not None}
        return sorted(named | self._contributions(opened).keys())

    def is_full(self, step: int) -> bool:
        """Every (stage, microbatch) has exactly one holder."""
        opened = self._steps[step]
        return opened.held == self.stages * opened.count and not opened.doubles

    def is_finite(self, step: int) -> bool:
        """No contribution of the step was reported as not finite."""
        entries = (entry for _, _, entry in self._entries(self._steps[step]))
        return all(added.finite for entry in entries for added in entry.holders.values())

    def sets(self, step: int) -> dict[PeerId, frozenset[int]]:
        """Indexes that must be in the sum of each replica that holds any."""
        found: dict[PeerId, set[int]] = {}
        for _, index, entry in self._entries(self._steps[step]):
            for peer, one in entry.holders.items():
                if one.finite:
                    found.setdefault(peer, set()).add(index)
        return {peer: frozenset(indexes) for peer, indexes in found.items()}

    def surprises(self, step: int) -> int:
        """Rises whenever the replicas will not hold what the routes of the step said."""
        return self._steps[step].surprises

    def is_given(self, step: int) -> bool:
        """Every (stage, microbatch) was given to one replica, which holds it or will."""
        opened = self._steps[step]
        return opened.fed == opened.count and not opened.orphans and not opened.doubles

    def sets_to_come(self, step: int) -> dict[PeerId, frozenset[int]] | None:
        """What `sets` will be if nothing changes; None if a replica holds what another was given, or is not finite."""
        found: dict[PeerId, set[int]] = {}
        for _, index, entry in self._entries(self._steps[step]):
            peer = entry.hop.peer if entry.hop is not None else None
            if peer is None or any(holder != peer or not one.finite for holder, one in entry.holders.items()):
                return None
            found.setdefault(peer, set()).add(index)
        return {peer: frozenset(indexes) for peer, indexes in found.items()}

    def losses(self, step: int) -> list[float]:
        """Loss sums of a full step in order of the microbatches."""
        assert self.is_full(step)
        return [next(iter(entry.holders.values())).loss for entry in self._steps[step].entries[-1]]

    def in_flight(self) -> int:
        """Microbatches that were fed and lack a holder at some stage."""
        return sum(opened.open for opened in self._steps.values())

    def away(self) -> int:
        """Microbatches in flight that have not come back to the first stage.

        A stage may send dx on and compute the gradients of its weights later, when nothing else waits. A microbatch
        that lacks only these keeps no graph anywhere.
        """
        return sum(len(opened.away) for opened in self._steps.values())

    def left(self, until: int) -> int:
        """Microbatches of open steps up to this one that lack a holder at some stage, or were not fed."""
        return sum(one.open + one.count - one.fed for step, one in self._steps.items() if step <= until)

    def committed(self) -> tuple[int, ...]:
        """Contributions in closed steps, per stage: all that entered, less what open steps hold.

        The count does not depend on the steps. It must equal the microbatches of all steps that were committed since
        this ledger began; otherwise one was lost or counted twice.
        """
        held = [0] * self.stages
        for opened in self._steps.values():
            for stage, _, entry in self._entries(opened):
                held[stage] += len(entry.holders)
        return tuple(entered - open_ for entered, open_ in zip(self._entered, held, strict=True))

    def outstanding(self, peer: PeerId) -> int:
        """Hops that the peer was given and has not finished."""
        return self._outstanding.get(peer, 0)

    def contributions(self) -> Counter[PeerId]:
        """How many microbatches of the open and the two last closed steps each replica holds or held."""
        return sum([*self._shares.values(), *map(self._contributions, self._steps.values())], Counter[PeerId]())

    def has_changed(self, peer: PeerId) -> bool:
        """Whether the peer's outstanding hops changed since `take_changed`."""
        return peer in self._changed

    def take_changed(self) -> set[PeerId]:
        """The peers whose outstanding hops changed since the last call: only their loads are computed again."""
        changed, self._changed = self._changed, set()
        return changed

    def close(self, step: int) -> None:
        """The step is committed (or given up): later words about it are stale."""
        opened = self._steps.pop(step)
        for stage, index, entry in self._entries(opened):
            if entry.hop is not None:
                self._take_hop(opened, stage, index)
        self._closed[step] = opened.stories
        self._shares[step] = self._contributions(opened)
        for old in sorted(self._closed)[: -max(STEPS_KEPT_MIN, STORIES_MAX // self.microbatches)]:
            del self._closed[old]
        for old in sorted(self._shares)[:-STEPS_KEPT_MIN]:
            del self._shares[old]

    def tell(self, step: int, index: int, line: str, now_s: float) -> None:
        """Add a line to the story of a microbatch; a story keeps its beginning and a bounded number of lines."""
        story = self._steps[step].stories[index]
        if len(story) < STORY_LINES_MAX:
            story.append(f"{now_s:.3f} s {line}")

    def story(self, step: int, index: int) -> list[str]:
        """All transitions of a microbatch of an open step or of the newest closed ones, with their causes."""
        stories = self._steps[step].stories if step in self._steps else self._closed.get(step)
        return list(stories[index]) if stories is not None and index < len(stories) else []

    def validate(self) -> None:
        """Assert that the counts kept on the way equal those taken now, and that nothing void is counted."""
        outstanding: dict[PeerId, int] = {}
        for opened in self._steps.values():
            entries = list(self._entries(opened))
            assert opened.held == sum(1 for _, _, entry in entries if entry.holders)
            lacking = {index for index, left in enumerate(opened.left[: opened.fed]) if left}
            assert opened.open == len(lacking)
            back = {index for index in lacking - opened.moved if opened.entries[0][index].holders}
            assert opened.away == lacking - back
            assert opened.doubles == {(stage, index) for stage, index, entry in entries if len(entry.holders) > 1}
            for stage, index, entry in entries:
                for peer, one in entry.holders.items():
                    assert opened.floors.get(peer, 0) < one.attempt <= entry.offered[peer], (peer, one)
                if entry.hop is not None:
                    assert entry.hop.attempt > opened.floors.get(entry.hop.peer, 0), entry
                    if entry.hop.peer not in entry.holders:
                        outstanding[entry.hop.peer] = outstanding.get(entry.hop.peer, 0) + 1
                orphan = index < opened.fed and entry.hop is None
                assert (stage in opened.orphans.get(index, ())) == orphan, (stage, index, entry)
            for index, left in enumerate(opened.left):
                assert left == sum(1 for stage in range(self.stages) if not opened.entries[stage][index].holders)
        assert outstanding == {peer: count for peer, count in self._outstanding.items() if count}

    def _give(self, opened: OpenStep, stage: int, index: int, hop: Hop) -> None:
        entry = opened.entries[stage][index]
        assert hop.attempt > opened.floors.get(hop.peer, 0), "a void attempt cannot be given"
        entry.hop = hop
        entry.offered[hop.peer] = hop.attempt
        if stages := opened.orphans.get(index):
            stages.discard(stage)
            if not stages:
                del opened.orphans[index]
        if hop.peer not in entry.holders:
            self._count_outstanding(hop.peer, +1)

    def _take_hop(self, opened: OpenStep, stage: int, index: int) -> None:
        entry = opened.entries[stage][index]
        assert entry.hop is not None
        if entry.hop.peer not in entry.holders:
            self._count_outstanding(entry.hop.peer, -1)
        entry.hop = None
        opened.done_again(index)
        opened.surprises += 1
        opened.orphans.setdefault(index, set()).add(stage)

    def _count_outstanding(self, peer: PeerId, change: int) -> None:
        self._outstanding[peer] = self._outstanding.get(peer, 0) + change
        assert self._outstanding[peer] >= 0
        self._changed.add(peer)

    def _contributions(self, opened: OpenStep) -> Counter[PeerId]:
        return Counter(peer for _, _, entry in self._entries(opened) for peer in entry.holders)

    @staticmethod
    def _entries(opened: OpenStep) -> Iterable[tuple[int, int, LedgerEntry]]:
        for stage, entries in enumerate(opened.entries):
            for index, entry in enumerate(entries):
                yield stage, index, entry
