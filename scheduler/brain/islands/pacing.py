"""Cuts the leases of islands (swarm/job/leases.py) so that all come to the end of a period together.

    a period is about to begin, an island falls behind, or is lost ──▶ a Cut ──durable──▶ entered; until then no island
                                                                                           begins a step that it changes

An island is expected to be free once its steps under way are over, and to end when it has trained its lease at the rate
of its newest steps; or of the step under way, if that takes longer already. Leases are cut anew where the last island
would then end earlier: by a fortieth of the period, and by three quarters of a step of the fastest one. A period begins
with equal leases, unless others gain as much.

A lost island leaves what it has not begun to the others at once. It keeps a microbatch a step if it may begin anew amid
a period. Pure. Decision: docs/decisions/126.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.brain.islands.forks import Division
from scheduler.brain.islands.roster import Roster
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import Note, WriteRows
from scheduler.brain.state.brain_state import Mode
from swarm.job.course import OuterCourse
from swarm.job.leases import Cut, Leases, fill

NEWEST = 8  # steps by which an island's rate is known
DIFFERS = 1.5  # times faster or slower than before, or than expected
GAIN, GAIN_STEPS = 0.025, 0.75  # of a period, and steps: what other leases gain at least
MOVED_MIN = 2  # microbatches that leave the last island
UNKNOWN = (Mode.WAITING, Mode.GATHERING)  # it is not known yet which steps an island has begun
NEVER = 1e-9  # the rate of an island that is not there, beside that of the slowest


@dataclass(slots=True)
class IslandPace:
    """How fast an island trains, from its steps."""

    course: OuterCourse
    begun: int  # steps
    done: int  # that all its replicas made
    done_s: float
    began_s: dict[int, float] = field(default_factory=dict)  # of its steps under way
    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NEWEST))  # microbatches, seconds

    def note(self, brain: JobBrain, now_s: float) -> bool:
        """Whether a step is over since the last time."""
        self.began_s |= dict.fromkeys(range(self.begun, brain.begun), now_s)
        is_over, self.begun = brain.agreed > self.done, brain.begun
        for step in range(self.done, brain.agreed):
            began_s = self.began_s.pop(step, None)
            if began_s is not None and not self.course.is_outer(step):
                self._measured(self.course.microbatches(step, 0), max(1e-6, now_s - max(began_s, self.done_s)))
            self.done, self.done_s = step + 1, now_s
        return is_over

    def _measured(self, count: int, seconds: float) -> None:
        """A step took so long; older ones count no more if the newest two differ much from them."""
        self.newest.append((count, seconds))
        *before, older, newer = (0, 0.0), *self.newest
        if len(before) > 1 and not 1 / DIFFERS < _rate((older, newer)) / _rate(before[1:]) < DIFFERS:
            self.newest = deque((older, newer), maxlen=NEWEST)

    def rate(self, now_s: float) -> float | None:
        """Microbatches a second; None if that was not measured."""
        if not self.newest:
            return None
        rate = _rate(self.newest)
        count, spent_s = self._under_way(now_s)
        return count / spent_s if spent_s > DIFFERS * count / rate else rate

    def free_s(self, now_s: float, rate: float) -> float:
        """Seconds until its steps under way are over."""
        steps = (step for step in self.began_s if not self.course.is_outer(step))
        left_s = sum(self.course.microbatches(step, 0) for step in steps) / rate
        return max(0.0, left_s - self._under_way(now_s)[1])

    def _under_way(self, now_s: float) -> tuple[int, float]:
        """The microbatches of its oldest step under way, and the seconds since that began; (0, 0) if there is none."""
        if self.done not in self.began_s or self.course.is_outer(self.done):
            return 0, 0.0
        return self.course.microbatches(self.done, 0), now_s - max(self.began_s[self.done], self.done_s)


def _rate(steps: Collection[tuple[int, float]]) -> float:
    return sum(count for count, _ in steps) / sum(seconds for _, seconds in steps)


class Pacing:
    """Cuts the leases of a job's islands; None: they have equal shares of each step, for good."""

    def __init__(self, roster: Roster, leases: Leases | None) -> None:
        self._roster, self._leases, self._course = roster, leases, roster.courses[0]
        self._paces: dict[int, IslandPace] = {}
        self._first: dict[int, int] = {}  # the first inner step that an island had not begun when it was seen last
        self._is_open = True  # whether nothing waits to be durable
        self._is_new = False  # whether something happened by which leases may be cut anew
        self._late_s: dict[int, float] = {}  # how long behind the first one islands would have ended
        self.relief: dict[int, str] = {}  # what was done in this period for islands that fell behind, for people
        self.relieved = Counter[int]()  # microbatches that others train in the place of an island, so far
        if leases is not None:
            first = min(self._course.inner_steps(brain.settings.first_step) for brain in roster.islands)
            leases.decided = max(leases.decided, leases.period(first).stop)
            leases.closed = dict.fromkeys(range(leases.islands), leases.decided)

    def note(self, now_s: float) -> None:
        """Record how far islands are."""
        at_work = self._roster.at_work() if self._leases is not None else {}
        for island in self._paces.keys() - at_work.keys():
            del self._paces[island]
            self._is_new = True
        for island, brain in at_work.items():
            if brain.mode in UNKNOWN:
                continue
            new = IslandPace(self._roster.courses[island], brain.begun, brain.agreed, now_s)
            self._is_new |= self._paces.setdefault(island, new).note(brain, now_s)

    def durable(self, cut: Cut) -> None:
        """These leases hold from now on."""
        assert self._leases is not None
        self._leases.cut(cut)
        self._leases.closed = dict.fromkeys(range(self._leases.islands), self._leases.decided)
        self._is_open = True

    def look(self, divisions: Iterable[Division], now_s: float) -> list[Note | WriteRows]:
        """Cut leases anew where that is due. `divisions`: the islands that are about to begin."""
        leases, at_work = self._leases, self._roster.at_work()
        if leases is None or not self._is_open:
            return []
        known = {island: brain for island, brain in at_work.items() if brain.mode not in UNKNOWN}
        first = {island: self._course.inner_steps(brain.begun) for island, brain in known.items()}
        stands = [first[n] for n, brain in known.items() if not self._course.is_outer(brain.begun)]
        first |= {new.island: self._course.inner_steps(new.fork.version) for new in divisions}
        self._first |= first
        if leases.decided <= max(stands, default=0) < self._course.inner.steps:
            self.relief.clear()
            others = dict.fromkeys(range(leases.islands), leases.decided)
            cut = self._cut(leases.period(leases.decided), first, others, now_s) if known == at_work else None
            return self._close(cut or Cut(others))  # an island that is not known yet has not begun the period either
        if not self._is_new or known != at_work:
            return []
        self._is_new = False
        before = leases.period(min(first.values(), default=0)).start
        for start in range(before, leases.decided, max(1, len(leases.period(0)))):
            if (cut := self._cut(leases.period(start), first, self._first, now_s)) is not None:
                return self._close(cut, self._told(cut))
        return []

    def _close(self, cut: Cut, told: str = "") -> list[Note | WriteRows]:
        assert self._leases is not None
        self._is_open = False
        self._leases.closed |= cut.from_step
        return [*([Note("info", told)] if told else []), WriteRows((), shares=(cut,))]

    def _told(self, cut: Cut) -> str:
        """What is done for which island, for people."""
        assert self._leases is not None
        parts = []
        for island, step in cut.from_step.items():
            less = self._leases.tail(island, step) - sum(end - first for first, end in cut.leases[island])
            if less > 0:
                self.relieved[island] += less
                late = f"it would come {late_s:.3g} s late, and " if (late_s := self._late_s.get(island)) else ""
                self.relief[island] = f"{late}others train {less} of its microbatches from its step {step + 1} on"
                parts.append(f"island {island}: {self.relief[island]}")
        return "; ".join(parts)

    def _cut(self, period: range, able: Mapping[int, int], seen: Mapping[int, int], now_s: float) -> Cut | None:
        """The leases of a period from the first inner steps on that are not begun, if others than those of now are due.

        `able`: the islands that train; `seen` has lost ones too.
        """
        assert self._leases is not None
        leases, course = self._leases, self._course
        begin = {n: max(step, leases.since(n, period)) for n, step in {**seen, **able}.items() if step < period.stop}
        here = sorted(begin.keys() & able.keys())
        left = {n: leases.tail(n, step) for n, step in begin.items()}
        least = {n: int(n in here or course.fragments > 1 or course.overlap_steps > 0) for n in begin}
        steps = {n: period.stop - step for n, step in begin.items()}
        is_due = any(left[n] > least[n] * steps[n] for n in begin.keys() - set(here))
        known = {n: rate for n in here if n in self._paces and (rate := self._paces[n].rate(now_s))}
        if not here or (not is_due and len(known) < max(2, len(here))):
            return None
        usual = sum(known.values()) / len(known) if known else 1.0
        rates = {n: known.get(n, usual) for n in here}
        free_s = {n: leases.tail(n, able[n]) / rates[n] if able[n] < period.start else 0.0 for n in here}
        for n in self._paces.keys() & set(here):
            free_s[n] += self._paces[n].free_s(now_s, rates[n])
        ends_s = {n: free_s[n] + left[n] / rates[n] for n in here}
        self._late_s = {n: end_s - min(ends_s.values()) for n, end_s in ends_s.items()}
        step_s = min(left[n] / steps[n] / rates[n] for n in here)
        rates |= dict.fromkeys(begin.keys() - set(here), NEVER * min(rates.values()))
        islands = {n: (free_s.get(n, 0.0), rates[n], steps[n], least[n]) for n in begin}
        parts = fill(sum(left.values()), islands, leases.microbatches)
        gain_s = max(ends_s.values()) - max(free_s[n] + parts[n] / rates[n] for n in here)
        givers = begin.keys() - set(here) if is_due else [max(here, key=ends_s.__getitem__)]
        is_worth = is_due or gain_s > max(GAIN * len(period), GAIN_STEPS) * step_s
        return leases.anew(begin, parts) if is_worth and sum(left[n] - parts[n] for n in givers) >= MOVED_MIN else None
