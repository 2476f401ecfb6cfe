"""Whether the members of a round add up their parts within each site before these leave it, and how much each owns.

    by site ──four rounds──▶ flat ──four rounds──▶ the faster of both ──64 rounds, then twice as many──▶ the other,
                                                           ▲                                             to compare
                                                           └─────────────────four rounds─────────────────────┘

A round by site sends between sites once what a flat one sends once for each member, and sends twice as much within
them (stage_server/brain/ways.py). Which of the two is faster depends on the links, so time decides, anew when a site
comes or goes. Members may come and go within their sites: where many die it would never be decided. It takes two sites,
one of them with two members; a member that names no site is at a site of its own. Rounds are flat where a job checks
sums or means or clips parts, because a carrier adds up the parts of its site before anybody else sees them. A failed
round is repeated flat, which shows whose fault it is. Rounds are flat from then on as if these had been faster, or
until members change. So they are after a round whose members differ in the mean.

To `SliceShares` a site is one party with the sum of its members' rates. Members of a site own alike.

Decision: docs/decisions/230.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from scheduler.brain.commit.slices import AGAIN_ROUNDS, REMEMBERED, ROUNDS_MIN, SHORTER_MIN, SliceShares
from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.step import UnitAveraging
from swarm.types import PeerId, Round, UnitName

FAILED = "a round by site failed"


@dataclass(slots=True)
class _Choice:
    """The form of a unit's rounds among these sites: by site (True), or flat (False)."""

    sites: frozenset[str]
    members: frozenset[PeerId] = frozenset()
    round: Round | None = None  # the newest of this form
    by_site: bool = True
    is_trial: bool = False  # of the form that was not the faster one
    why: str = ""  # rounds are flat
    left: int = ROUNDS_MIN  # rounds until the other form is tried, or the trial is over
    pause_rounds: int = AGAIN_ROUNDS[0]
    took_s: dict[bool, deque[float]] = field(default_factory=dict)

    def ended(self, round_s: float) -> None:
        """A round of the present form took so long."""
        self.took_s.setdefault(self.by_site, deque(maxlen=REMEMBERED)).append(round_s)
        self.left -= 1
        if self.left:
            return
        if self.is_trial:
            is_shorter = median(self.took_s[True]) <= SHORTER_MIN * median(self.took_s[False])
            self.keep(by_site=is_shorter, why="rounds by site took no less time")
        else:
            self.by_site, self.is_trial, self.left, self.why = not self.by_site, True, ROUNDS_MIN, "to compare"
            self.took_s.pop(self.by_site, None)

    def keep(self, *, by_site: bool, why: str) -> None:
        self.by_site, self.is_trial, self.why = by_site, False, why
        self.left, self.pause_rounds = self.pause_rounds, min(2 * self.pause_rounds, AGAIN_ROUNDS[1])


class SiteRounds:
    """The forms of all units' rounds; `told` says which and why, of units whose members name sites."""

    def __init__(self, state: BrainState) -> None:
        self._state = state
        self._flat, self._by_site = SliceShares(state), SliceShares(state)
        self._choices: dict[UnitName, _Choice] = {}
        self.told: dict[UnitName, str] = {}

    def plan(
        self, unit: UnitName, round_: Round, members: Sequence[ReplicaRecord], *, again: bool
    ) -> tuple[list[float] | None, bool]:
        """The shares of a round, in the order of its members (None: equal ones), and whether it goes by site.

        `again`: its members differed in the mean the last time.
        """
        peers, parties = [member.peer for member in members], [member.site or f"/{member.peer}" for member in members]
        choice, sizes = self._choices.get(unit), Counter(parties)
        is_cured = choice is not None and choice.why == FAILED and choice.members != frozenset(peers)
        if choice is None or choice.sites != sizes.keys() or is_cured:
            choice = self._choices[unit] = _Choice(frozenset(sizes))
        choice.round, choice.members = round_, frozenset(peers)
        why = self._why_never(sizes) or (not choice.by_site and choice.why) or ""
        self._tell(unit, sizes, why)
        if why or again:
            return self._flat.plan(unit, round_, peers), False
        shares = self._by_site.plan(unit, round_, list(sizes)) or [1.0] * len(sizes)
        each = {party: share / sizes[party] for party, share in zip(sizes, shares, strict=True)}
        return [each[party] for party in parties], True

    def averaged(self, unit: UnitName, averaging: UnitAveraging) -> None:
        """All members of a round hold the mean: learn how fast their links are, and how long it took."""
        rates: dict[str, float] = defaultdict(float)
        for member in averaging.members:
            report = averaging.reports[member.peer]
            party = (member.group or f"/{member.peer}") if averaging.is_by_site else member.peer
            rates[party] += min(report.up_bytes_per_s, report.down_bytes_per_s)
        round_s = median(report.duration_s for report in averaging.reports.values())
        form = self._by_site if averaging.is_by_site else self._flat
        form.averaged(unit, averaging.round, rates, round_s)
        choice = self._choices.get(unit)
        if choice and choice.round == averaging.round and choice.by_site is averaging.is_by_site:
            choice.ended(round_s)

    def failed(self, unit: UnitName, averaging: UnitAveraging) -> None:
        """Members of a round could not make the mean, or differ in it."""
        choice = self._choices.get(unit)
        if choice and averaging.is_by_site and choice.members == averaging.peers:
            choice.keep(by_site=False, why=FAILED)

    def _why_never(self, sizes: Counter[str]) -> str:
        """Why rounds are flat whatever they take; empty: they need not be."""
        settings = self._state.settings
        if settings.recount or settings.second_owner or settings.clips:
            return "the job checks sums or means, or clips parts"
        if len(sizes) == 1:
            return "all members are at one site"
        return "no site has two members" if max(sizes.values()) == 1 else ""

    def _tell(self, unit: UnitName, sizes: Counter[str], why: str) -> None:
        largest_first = sorted(sizes.items(), key=lambda party: (-party[1], party[0]))
        named = [f"{site} {count}" for site, count in largest_first if not site.startswith("/")]
        if not named or sizes.total() == 1:
            return
        alone = [f"{len(sizes) - len(named)} alone"] * (len(sizes) > len(named))
        text = f"flat: {why}" if why else f"by site: {', '.join(named + alone)}"
        before = self.told.get(unit, text if why else "")  # that they are flat is no news at first
        self.told[unit] = text
        if text != before:
            self._state.outbox.note("info", f"unit {unit} averages {text}")
