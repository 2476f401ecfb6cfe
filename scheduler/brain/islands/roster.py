"""The islands of a job: which are at work, which peers serve them, and how far they are together.

    at work ──it has lost a stage──▶ lost ──others had replicas to spare, behind an outer step──▶ at work, a new life

Each life of an island has a timeline of its own, so no message of an earlier life counts. Only the two arrows change
something; all else are questions.

The home of an island is a site. A peer joins the island at its site. If its site has no island, it joins an island
whose site has several, or any island while one is lost. After the next exchange its site has an island (forks.py).

Decision: docs/decisions/105.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from scheduler.brain.commit.digests import outvoted
from scheduler.brain.inputs import ReplicaRecord, Resumed
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import Exchanged
from scheduler.brain.state.brain_state import Mode
from swarm.job.course import TIMELINES_MAX, OuterCourse, OuterStep
from swarm.job.placement import Candidate
from swarm.types import Decision, Hop, IslandState, PeerId
from swarm.wire.messages import Hello

ALLIES_MAX = 4  # of other islands, whom a replica may ask for the mean proposals


@dataclass(frozen=True, slots=True)
class Delegation:
    """The replicas that may exchange for an island, by stage, and the tokens by which its proposal weighs."""

    timeline: int
    tokens: int
    replicas: Mapping[int, tuple[ReplicaRecord, ...]]


@dataclass(slots=True)
class Roster:
    """`islands` has the newest life of each island; a job with fewer than `least` of them stalls."""

    islands: list[JobBrain]
    courses: tuple[OuterCourse, ...]
    least: int
    lost: dict[int, str] = field(default_factory=dict)  # islands that are not at work, and why
    late: dict[int, float] = field(default_factory=dict)  # islands that have not come to a made exchange, since when
    island_of: dict[PeerId, int] = field(default_factory=dict)
    _given: dict[int, int] = field(default_factory=dict)  # the newest timeline that was meant for a next life

    # The arrows ------------------------------------------------------------------------------------------------------

    def lose(self, island: int, why: str) -> None:
        self.lost[island] = why
        self.late.pop(island, None)
        self.island_of = {peer: at for peer, at in self.island_of.items() if at != island}

    def renew(self, island: int, brain: JobBrain, peers: Iterable[PeerId]) -> None:
        """A lost island begins its next life."""
        self.islands[island] = brain
        del self.lost[island]
        self.island_of |= dict.fromkeys(peers, island)

    # Questions -------------------------------------------------------------------------------------------------------

    @property
    def present(self) -> tuple[int, ...]:
        """The islands that are at work."""
        return tuple(number for number in range(len(self.islands)) if number not in self.lost)

    def at_work(self) -> dict[int, JobBrain]:
        return {number: self.islands[number] for number in self.present}

    @property
    def timelines(self) -> tuple[int, ...]:
        """The current timeline of each island; for a lost island, its last one."""
        return tuple(brain.settings.timeline for brain in self.islands)

    def serves(self, peer: PeerId) -> JobBrain | None:
        """The island that a peer serves, or joins."""
        island = self.island_of.get(peer)
        return None if island is None else self.islands[island]

    def admits(self, hello: Hello) -> bool:
        """Whether the island of the peer's timeline is at work, and admits it."""
        island = hello.timeline % len(self.islands)
        return island not in self.lost and self.islands[island].admits(hello)

    def is_fork(self, island: int) -> bool:
        """Whether the island began as a copy of another."""
        return self.timelines[island] // len(self.islands) >= TIMELINES_MAX

    def next_timeline(self, island: int) -> int:
        """A timeline for the island's next life, never given before."""
        newest = max(self.timelines[island], self._given.get(island, 0))
        self._given[island] = newest + TIMELINES_MAX * len(self.islands)
        return self._given[island]

    def place(self, island: int, stage: int) -> int:
        """The number of an island's stage among the stages of all islands."""
        return island * len(self._stages) + stage

    def can_spare(self, island: int, *, was_loading: bool) -> bool:
        """Whether the others go on without the island. A job that still loads is placed again instead."""
        return (not was_loading or self.is_fork(island)) and len(self.present) > self.least

    @property
    def is_unsettled(self) -> bool:
        """Whether it is not known yet how far each island is."""
        return any(
            brain.mode in (Mode.WAITING, Mode.GATHERING) or (brain.mode is Mode.LOADING and self.is_fork(number))
            for number, brain in self.at_work().items()
        )

    def next_exchange(self, made: Exchanged | None, *, hurries: bool) -> OuterStep | None:
        """The outer step of the next exchange, once all islands at work have made the step of the exchange before.

        If it `hurries`, they need only have begun with that step, where all were in the exchange.
        """
        steps = {self.courses[number].next_outer(brain.begun) for number, brain in self.at_work().items()}
        outer = steps.pop() if len(steps) == 1 else None
        if outer is None or made is None or (made.whole and hurries):
            return outer
        # who has made that step lets go of what others may need for it, as soon as it makes the next one
        has_all = outer.step > made.step and all(brain.agreed > made.step for brain in self.at_work().values())
        return outer if has_all else None

    def captured(self, outer: OuterStep) -> list[int]:
        """The islands at work that hold what they propose for the next outer step."""
        version, at_work = outer.captured_version, self.at_work().items()
        return [number for number, brain in at_work if brain.mode is Mode.RUNNING and brain.agreed >= version]

    @property
    def outer_step(self) -> int | None:
        """The outer step that all islands at work have come to, if they have."""
        found = {brain.outer_step for brain in self.at_work().values()}
        return found.pop() if len(found) == 1 else None

    def may_begin_behind(self, step: int) -> bool:
        """Whether islands may begin behind an outer step: nothing is under way between them, and the job goes on."""
        course = self.courses[0]
        return step + 1 < course.steps and course.level_from(step) == step + 1

    def level(self, settled: int) -> int:
        """The first version from `settled` on, behind an outer step that no island has passed."""
        begun = {number: max(brain.begun, settled) for number, brain in self.at_work().items()}
        return max(self.courses[number].level_from(version) for number, version in begun.items())

    def neediest(
        self, stages: Iterable[int], sent: Mapping[int, Mapping[PeerId, int]] = MappingProxyType({})
    ) -> list[int]:
        """The islands, fewest peers in these stages first; replicas, joiners and peers `sent` to an island count."""
        wanted, islands = set(stages), self.at_work()
        coming = {number: [*sent.get(number, {}).values()] for number in islands}
        held = {n: sum(len(brain.present(at)) + coming[n].count(at) for at in wanted) for n, brain in islands.items()}
        return sorted(held, key=held.__getitem__)

    @property
    def replicas_min(self) -> int:
        """How many replicas an island keeps, or begins with, at each stage."""
        return max(1, self.islands[0].settings.rebalance.min_replicas)

    def replicas(self, island: int) -> list[list[ReplicaRecord]]:
        """Per stage, the replicas of an island at work that neither leave nor are out of touch."""
        one = self.islands[island]
        return [one.delegates(stage, one.begun) for stage in self._stages]

    def home(self, island: int) -> str:
        """The site where most of the island's replicas are; empty if no replica names a site."""
        present = (replica for stage in self._stages for replica in self.islands[island].present(stage))
        counts = Counter(replica.site for replica in present if replica.site)
        return min(counts, key=lambda site: (-counts[site], site)) if counts else ""

    def open_to(self, site: str) -> list[int]:
        """The islands that a peer of a site may join: its site's own, else islands that may become its site's."""
        homes = {island: self.home(island) for island in self.present}
        if not site or not any(homes.values()):
            return list(homes)
        own = [island for island, home in homes.items() if home == site]
        guests = [n for n in homes if any(r.site == site for at in self._stages for r in self.islands[n].present(at))]
        nobodys = [island for island, home in homes.items() if not home]
        doubled = [island for island, home in homes.items() if [*homes.values()].count(home) > 1]
        return own or guests or nobodys or doubled or (list(homes) if self.lost else [])

    def admit(self, replica: ReplicaRecord) -> None:
        """Assign the joining peer to an island."""
        able = self.open_to(replica.site) or self.present
        self.island_of[replica.peer] = next(island for island in self.neediest([replica.stage]) if island in able)

    def where_to_join(
        self,
        idle: Candidate,
        fitting: Iterable[int],
        now_s: float,
        coming: Mapping[PeerId, int],
        sites: Mapping[PeerId, str] = MappingProxyType({}),
    ) -> Decision[int]:
        """A stage of the island with the fewest replicas that is open to the peer's site.

        `sites`: the sites of the peers that are `coming`. Peers of one site come to one island.
        """
        islands = self.at_work()
        sent: dict[int, dict[PeerId, int]] = {number: {} for number in islands}
        alike: dict[int, list[int]] = {number: [] for number in islands}  # the stages of those of the peer's site
        for peer, stage in coming.items():  # as if all came now
            if not any(brain.is_joining(peer) or brain.stage_of(peer) is not None for brain in islands.values()):
                site = sites.get(peer, "")
                able = self._open_to(site, (n for n in islands if any(sites.get(at) == site for at in sent[n])))
                island = next(island for island in self.neediest([stage], sent) if island in (able or islands))
                sent[island][peer] = stage
                if site == idle.site:
                    alike[island].append(stage)
        fits = list(fitting)
        decision: Decision[int] = Decision(None, f"no island is at {idle.site}, where it is")
        able = self._open_to(idle.site, (island for island in islands if alike[island]))
        for island in (n for n in self.neediest(self._stages, sent) if n in able):
            lacking = self._lacking(island, idle.site, fits, alike[island])
            decision = islands[island].where_to_join(idle, lacking, now_s, sent[island])
            if decision.plan is not None:
                break
        return decision

    def _open_to(self, site: str, joined: Iterable[int]) -> list[int]:
        """The islands that a peer of a site may join, if peers of its site are on their way to the islands `joined`."""
        able = self.open_to(site)
        if not site or any(self.home(island) == site for island in able):
            return able
        return [island for island in joined if island in able] or able

    def _lacking(self, island: int, site: str, fitting: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
        """The stages with the fewest guests. A guest site needs one peer per stage before it can form an island."""
        if not site or self.home(island) in ("", site):
            return fitting
        counts = Counter(dict.fromkeys(fitting, 0))
        held = ((stage, replica.site) for stage in fitting for replica in self.islands[island].present(stage))
        counts.update(stage for stage, at in held if at == site)
        counts.update(stage for stage in coming if stage in counts)
        return [stage for stage, count in counts.items() if count == min(counts.values())]

    @property
    def _stages(self) -> range:
        return range(len(self.islands[0].settings.split))

    def delegations(self, step: int, islands: Iterable[int], owed: Mapping[int, Exchanged]) -> list[Delegation]:
        """The replicas that may exchange for each of the islands at an outer step, and the tokens that its proposal
        counts; an island that is `owed` was late in that exchange of the fragment, so its span begins there."""
        found = []
        for number in islands:
            brain, course, settings = self.islands[number], self.courses[number], self.islands[number].settings
            first = course.inner_steps(settings.first_step) if self.is_fork(number) else 0
            begin = course.span(owed[number].step if number in owed else step).start
            span = [
                inner for inner in range(begin, course.span(step).stop) if inner >= first
            ]  # before, it was another's
            tokens = sum(settings.tokens_of(course.inner.at(inner).portion) for inner in span)
            able = {stage: tuple(brain.delegates(stage, step)) for stage in range(len(settings.split))}
            found.append(Delegation(settings.timeline, tokens, able))
        return found

    def allies(self, island: int, peer: PeerId, step: int, envoys: set[PeerId]) -> list[Hop]:
        """Replicas of other islands that hold, or will hold, the mean proposals for the peer's stage: envoys first, and
        replicas of late islands last.

        Until others have fetched the mean, only envoys hold it. If an envoy is lost then, other islands still have it.
        """
        stage = self.islands[island].stage_of(peer)
        others = [number for number in self.present if number != island and stage is not None]
        others.sort(key=self.late.__contains__)  # a late one has nothing to give yet
        able = [replica for number in others for replica in self.islands[number].delegates(stage or 0, step)]
        able.sort(key=lambda replica: replica.peer not in envoys)
        return [Hop(replica.peer, replica.incarnation, 0, replica.address) for replica in able[:ALLIES_MAX]]


def still_at_work(
    courses: Sequence[OuterCourse],
    first_version: int,
    resumed: Sequence[Resumed],
    exchanges: Sequence[Exchanged] = (),
    timelines: Sequence[int] = (),
) -> tuple[Resumed | None, ...]:
    """How each island goes on after a restart of the scheduler, on a timeline that began with `first_version`.

    None if the others have exchanged without it, or if it has neither a step nor a stage server: it was not placed when
    the timeline began, or lost at once. An island that is about to fork has no stage server, but a newer version.

    `exchanges`: the newest ones; an island that the last one names, by its timeline, has come to it or will. Without
    any, the rows of an outer step came together.
    """
    exchanged = max(path.outer_before(life.committed) for path, life in zip(courses, resumed, strict=True))
    named = [False] * len(courses)
    if exchanges:
        exchanged = max(exchanged, exchanges[-1].step + 1)
        named = [timeline in exchanges[-1].islands + exchanges[-1].late for timeline in timelines]
    began = [bool(life.known) or life.committed > first_version for life in resumed]
    is_known = any(began)
    return tuple(
        life if (is_named or life.committed >= exchanged) and (has_begun or not is_known) else None
        for life, has_begun, is_named in zip(resumed, began, named, strict=True)
    )


WAITS = (IslandState.WAITING, IslandState.EXCHANGING)


class Waits:
    """How long each island has stood at exchanges since the job's brain began, by what it waited for.

    Not chosen: states sampled every two seconds, because an exchange on fast links is shorter than that.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._seconds: dict[int, dict[IslandState, float]] = {}  # by island
        self._waiting: dict[int, IslandState] = {}  # since `_noted_s`
        self._noted_s = 0.0

    def note(self, now_s: float) -> None:
        """Record what each island waits for; it counts until the next call."""
        self._seconds = {island: dict(self.of(island, now_s)) for island in range(len(self._roster.islands))}
        found = states(self._roster)
        self._waiting, self._noted_s = {island: state for island, state in found.items() if state in WAITS}, now_s

    def of(self, island: int, now_s: float) -> Mapping[IslandState, float]:
        """Seconds that an island has waited, by state."""
        waited = dict.fromkeys(WAITS, 0.0) | self._seconds.get(island, {})
        if island in self._waiting:
            waited[self._waiting[island]] += now_s - self._noted_s
        return waited


def states(roster: Roster) -> dict[int, IslandState]:
    """What each island does now."""
    all_are_there = roster.outer_step is not None
    at_work = {n: _state(brain, roster.courses[n], all_are_there) for n, brain in roster.at_work().items()}
    return dict.fromkeys(roster.lost, IslandState.LOST) | at_work | dict.fromkeys(roster.late, IslandState.LATE)


def _state(island: JobBrain, course: OuterCourse, all_are_there: bool) -> IslandState:
    if island.mode in (Mode.SAVING, Mode.ENDED):
        return IslandState.SAVING
    if island.mode is not Mode.RUNNING:
        return IslandState.LOADING
    if not course.is_outer(island.agreed):
        return IslandState.TRAINING
    if island.begun > island.agreed:
        return IslandState.EXCHANGING
    if island.outer_step is None:
        return IslandState.EVALUATING
    return IslandState.EXCHANGING if all_are_there else IslandState.WAITING


class OuterDigests:
    """Whether islands hold the same outer weights, at their beginning and after each outer step."""

    def __init__(self, courses: Sequence[OuterCourse]) -> None:
        self._courses = courses
        self._held: dict[tuple[int, int], dict[int, str]] = {}  # by version and stage: of each island

    def compare(self, islands: Mapping[int, JobBrain], *, forget: bool) -> dict[int, str]:
        """The islands whose outer weights differ from the majority's, with the fault; all islands without a majority.

        `forget`: drop versions that all `islands` have passed.
        """
        for number, brain in islands.items():
            version = brain.agreed
            if version != brain.settings.first_step and not self._courses[number].is_outer(version - 1):
                continue
            for stage in range(len(brain.settings.split)):
                if digest := brain.agreed_digest(stage):  # not known of what was agreed before a restart
                    self._held.setdefault((version, stage), {})[number] = digest.rpartition("-")[2]
        oldest = min(brain.agreed for brain in islands.values())
        for (version, stage), said in list(self._held.items()):
            held = {number: said[number] for number in sorted(said.keys() & islands.keys())}
            self._held[version, stage] = held  # without that of an earlier life
            yet = {number for number, brain in islands.items() if brain.agreed < version or brain.mode is Mode.LOADING}
            odd = outvoted(held)
            if odd and yet <= held.keys():
                told = ", ".join(f"island {number} holds {digest}" for number, digest in held.items())
                where = f"after step {self._courses[0].inner_steps(version)}"
                fault = f"islands differ in the outer weights of stage {stage} {where}: {told}"
                return dict.fromkeys(odd if len(odd) < len(held) else islands, fault)
            if forget and version < oldest:
                del self._held[version, stage]
        return {}
