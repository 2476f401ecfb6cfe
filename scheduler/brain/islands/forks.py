"""An island that begins as a copy of another, in the place of one that was lost: some replicas of each stage go over.

    outer step s is exchanged ──▶ planned: durable with the rows of s; half the replicas of each stage leave from s + 1
        ──each has made the commit of s, and left──▶ whole: the island begins with version s + 1, on a new timeline
        ──none of them is left at a stage──▶ given up

Replicas of one foreign site go together, so an island is of one site (roster.py). If a foreign site has filled every
stage of an island whose own site has several, the own replicas leave that island to it.

After an outer step all islands hold the outer weights and nothing else, so nothing of the other island counts twice,
and no state has to travel. Pure. Decisions: docs/decisions/091, 105.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from scheduler.brain.inputs import AskToLeave, ReplicaRecord
from scheduler.brain.islands.roster import Roster
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import Admitted, Fork, Note
from scheduler.brain.settings import BrainSettings
from swarm.types import PeerId


@dataclass(slots=True)
class Division:
    """Replicas of one island that go over to another, which begins with them."""

    island: int
    origin: int
    fork: Fork
    awaited: dict[PeerId, ReplicaRecord]  # they have not left yet
    arrived: dict[PeerId, ReplicaRecord] = field(default_factory=dict)

    def is_whole(self, stages: int) -> bool:
        """Whether each stage has a replica."""
        return {replica.stage for replica in self.arrived.values()} == set(range(stages))

    def settings(self, roster: Roster) -> BrainSettings:
        """The settings of the island that begins. It saves when the others do, and does not evaluate."""
        before, saving = roster.islands[self.island].settings, roster.islands[self.origin].saving_rules
        timeline, first_step = self.fork.timeline, self.fork.version
        return replace(before, timeline=timeline, first_step=first_step, files=(), evaluates=False, saving=saving)

    def begin(self, roster: Roster, rng: Random) -> list[Note | Admitted]:
        """Put the island to work again, with the replicas that went over; they hold the outer weights."""
        settings, course = self.settings(roster), roster.courses[self.island]
        roster.renew(self.island, JobBrain(settings, Random(rng.getrandbits(64)), course), self.arrived)
        told = f"island {self.island} begins anew after step {course.inner_steps(settings.first_step)}"
        places = [Admitted(replica.peer, roster.place(self.island, replica.stage)) for replica in self.arrived.values()]
        return [Note("info", f"{told}, as a copy of island {self.origin}"), *places]


class Divisions:
    """The islands that are about to begin."""

    def __init__(self) -> None:
        self._of: list[Division] = []

    def __iter__(self) -> Iterator[Division]:
        return iter(list(self._of))

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, division: Division) -> None:
        self._of.append(division)

    def begin(self, roster: Roster, version: int, resting: Collection[str] = ()) -> list[tuple[int, AskToLeave]]:
        """Divide islands after an outer step; returns the island and the order for each replica that is to leave."""
        leaves = []
        for division in plan(roster, version, resting):
            self.add(division)
            leaves += [
                (division.origin, AskToLeave(peer, f"goes over to island {division.island}"))
                for peer in division.awaited
            ]
        moved = "its island is another site's now"
        return leaves or [(island, AskToLeave(peer, moved)) for island, peer in handed_over(roster, version, resting)]

    def settled(self, roster: Roster) -> list[Division]:
        """Remove and return the divisions that await no replica any more."""
        found = []
        for division in list(self._of):
            origin = roster.islands[division.origin]
            for peer in list(division.awaited):
                if division.origin in roster.lost or origin.leaves_from(peer) != division.fork.version:
                    del division.awaited[peer]  # it is lost, or has to stay
            if not division.awaited:
                self._of.remove(division)
                found.append(division)
        return found

    def left(self, peer: PeerId, version: int | None) -> bool:
        """Note that a replica left its island with this version. Whether it goes over, so that it is not released."""
        for division in self._of:
            if peer in division.awaited and division.fork.version == version:
                division.arrived[peer] = division.awaited.pop(peer)
                return True
        return False

    def lost(self, peer: PeerId) -> bool:
        """The peer is gone or out of touch and does not go over. Returns whether it had left its island."""
        for division in self._of:
            division.awaited.pop(peer, None)
        return any(division.arrived.pop(peer, None) is not None for division in self._of)


def plan(roster: Roster, version: int, resting: Collection[str] = ()) -> list[Division]:
    """The lost islands that begin with `version`, each with the island that it copies and the replicas that go over.

    An island gives the replicas of one foreign site, else half of the replicas of each stage, if `limits.min_replicas`
    remain on both sides. The largest island gives first, and each gives to one. Replicas that are `resting`, by name or
    site, stay.
    """
    least, able = roster.replicas_min, _able(roster, version, resting)
    divisions = []
    for island, origin in zip(sorted(roster.lost), _givers(roster, able), strict=False):
        pools, guests = able[origin], _guests(able[origin], roster.home(origin), least)
        if guests and any(len(pool) - len(some) < least for pool, some in zip(pools, guests, strict=True)):
            guests = []
        halves = [sorted(pool, key=lambda one: one.peer)[1::2] for pool in pools]
        going = {replica.peer: replica for pool in guests or halves for replica in pool}
        fork = Fork(roster.next_timeline(island), roster.timelines[origin], version)
        divisions.append(Division(island, origin, fork, going))
    return divisions


def may_divide(roster: Roster, version: int, resting: Collection[str]) -> bool:
    """Whether islands would begin with `version`, or give replicas back."""
    return bool(_givers(roster, _able(roster, version, resting)) or handed_over(roster, version, resting))


def _givers(roster: Roster, able: Mapping[int, list[list[ReplicaRecord]]]) -> list[int]:
    """The islands that can spare replicas, the largest first; none if no island is lost."""
    many = sorted(able, key=lambda island: (-min(map(len, able[island])), -sum(map(len, able[island])), island))
    return [n for n in many if roster.lost and all(len(pool) >= 2 * roster.replicas_min for pool in able[n])]


def handed_over(roster: Roster, version: int, resting: Collection[str] = ()) -> list[tuple[int, PeerId]]:
    """The islands and replicas to part with `version`, so that each island is of one site.

    If a site that serves no other island has `limits.min_replicas` at each stage, its replicas stay, and replicas of
    sites that serve other islands leave. A site never leaves its last island.
    """
    least, able = roster.replicas_min, _able(roster, version, resting)
    sites = {island: {replica.site for pool in pools for replica in pool} - {""} for island, pools in able.items()}
    leaves = []
    for island, pools in able.items():
        elsewhere = {site for other, found in sites.items() if other != island for site in found}
        if any(_enough(pools, site, least) for site in sites[island] - elsewhere):
            leaves += [(island, replica.peer) for pool in pools for replica in pool if replica.site in elsewhere]
            sites[island] -= elsewhere
    return leaves


def _able(roster: Roster, version: int, resting: Collection[str]) -> dict[int, list[list[ReplicaRecord]]]:
    """Per island and stage, the replicas that may leave with `version`."""
    found = {}
    for island, brain in roster.at_work().items():
        pools = [brain.may_divide(stage, version - 1) for stage in range(len(brain.settings.split))]
        found[island] = [[each for each in pool if not {each.site, each.peer} & {*resting}] for pool in pools]
    return found


def _guests(pools: Sequence[Sequence[ReplicaRecord]], home: str, least: int) -> list[list[ReplicaRecord]]:
    """Per stage, the replicas of one foreign site, if that site can fill every stage; otherwise none."""
    sites = sorted({replica.site for pool in pools for replica in pool} - {"", home})
    return next((found for site in sites if (found := _enough(pools, site, least))), [])


def _enough(pools: Sequence[Sequence[ReplicaRecord]], site: str, least: int) -> list[list[ReplicaRecord]]:
    """Per stage, the replicas of a site; none at all if some stage has too few."""
    of_site = [[replica for replica in pool if replica.site == site] for pool in pools]
    return of_site if all(len(pool) >= least for pool in of_site) else []
