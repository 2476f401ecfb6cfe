"""Guests: peers of a site that has no island, on their way into the island of another site (roster.py).

    Join ──▶ waits ──in front of an exchange; with it its site has enough for each stage──▶ fetches, the exchange waits
               │                                                                              └─▶ a replica: forks.py
               └──a second exchange without that──▶ fetches like any other

An island that trains makes steps faster than a slow link carries the averaged gradient of one, so a guest would never
come up with it. If it did, each step of that island would wait for the slow link. In front of an exchange an island
stands still, so what a guest fetches stays the newest, and behind it the guests are an island of their own. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.brain.inputs import Join, ReplicaRecord
from scheduler.brain.islands.roster import Roster
from swarm.text import listed
from swarm.types import PeerId

REST_TIMES = 10  # as long as an exchange waited in vain for guests of a site, it waits for none of them then


@dataclass(slots=True)
class _Guest:
    replica: ReplicaRecord
    island: int
    fetches: bool = False
    exchanges: int = 0  # for which it waited


class Guests:
    """The guests that are not replicas yet."""

    def __init__(self) -> None:
        self.awaited: list[PeerId] = []  # the exchange waits for them
        self._guests: dict[PeerId, _Guest] = {}
        self._rest_until_s: dict[str, float] = {}  # by site

    def arrives(self, replica: ReplicaRecord, roster: Roster) -> Join:
        """How a peer joins that the roster has admitted."""
        island = roster.island_of[replica.peer]
        counts = Counter(one.site for pool in roster.replicas(island) for one in pool)
        others = [count for site, count in counts.items() if site not in ("", replica.site)]
        is_guest = bool(replica.site) and max(others, default=0) > counts[replica.site]
        self._guests.pop(replica.peer, None)
        if is_guest:
            self._guests[replica.peer] = _Guest(replica, island)
        return Join(replica, waits=is_guest)

    def look(self, roster: Roster, now_s: float, *, in_front: bool) -> list[Join]:
        """Who fetches from now on; whom the exchange waits for, if all islands are in front of one."""
        self._forget(roster)
        self.awaited = sorted(self._wanted(roster, now_s)) if in_front else []
        may = [one for peer, one in self._guests.items() if peer in self.awaited or (in_front and one.exchanges)]
        joins = [Join(one.replica) for one in may if not one.fetches]
        for one in may:
            one.fetches = True
        return joins

    def waiting_for(self) -> str:
        """What the exchange waits for, for a person; empty if for no guest."""
        return f"the exchange waits for {listed(self.awaited)} to fetch the state" if self.awaited else ""

    def exchanged(self) -> None:
        """An exchange was made without those that wait."""
        for guest in self._guests.values():
            guest.exchanges += not guest.fetches

    def waited_in_vain(self, for_s: float, now_s: float) -> str:
        """Nothing has moved for so long: exchanges wait for nobody of these sites for a while. What people are told."""
        for peer in self.awaited:
            self._rest_until_s[self._guests[peer].replica.site] = now_s + REST_TIMES * for_s
        told = f"{listed(self.awaited)} did not fetch the state within {for_s:g} s: the exchange waits no longer"
        return told if self.awaited else ""

    def _wanted(self, roster: Roster, now_s: float) -> Iterator[PeerId]:
        """The guests of each site that would have an island with them, if exchanges wait for its guests."""
        for island, site in {(one.island, one.replica.site) for one in self._guests.values()}:
            if now_s >= self._rest_until_s.get(site, now_s) and self._is_whole(island, site, roster):
                yield from self._of(island, site)

    def _of(self, island: int, site: str) -> Iterator[PeerId]:
        return (peer for peer, one in self._guests.items() if (one.island, one.replica.site) == (island, site))

    def _is_whole(self, island: int, site: str, roster: Roster) -> bool:
        """Whether guests and replicas of a site are enough for an island of their own."""
        coming = Counter(self._guests[peer].replica.stage for peer in self._of(island, site))
        here = [sum(one.site == site for one in pool) for pool in roster.replicas(island)]
        return all(count + coming[stage] >= roster.replicas_min for stage, count in enumerate(here))

    def _forget(self, roster: Roster) -> None:
        """Forget those that are replicas now, or do not join any more."""
        for peer, guest in list(self._guests.items()):
            brain = roster.serves(peer)
            joins = brain is not None and brain.is_joining(peer) and brain.stage_of(peer) is None
            if not joins or roster.island_of[peer] != guest.island:
                del self._guests[peer]
