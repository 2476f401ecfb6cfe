"""Guests: peers of a site that has no island, on their way into the island of another site (roster.py).

    Join ──▶ waits ──in front of an exchange; with it its site has enough for each stage──▶ fetches, the exchange waits
               │                                                                              └─▶ a replica: forks.py
               └──a second exchange without that──▶ fetches like any other

An island makes steps faster than a slow link carries the averaged gradient of one, so a guest would never catch up. If
it did, each step of that island would wait for the slow link. Before an exchange an island stands still, so the state
that a guest fetches stays the newest. After the exchange the guests are an island of their own.

    an island is left out, as it did not get on with the others ──▶ its site rests ──▶ its stage servers may be guests
                    ▲──────────────again: twice as long──────────────────────────────────────┘

An island that lost a stage is whole when it comes back. An evicted island may fail again at the next exchange, and the
others would wait as long again. Pure.

Not chosen: a donor that freezes the state of an exchange while its island trains, because it would hold the optimizer's
state twice; the outer weights alone, because the new island would begin without moments. Price: all islands wait once
for what the state takes on the link, limits.no_progress_s at most. Decisions: docs/decisions/105, 193.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from scheduler.brain.inputs import Join, ReplicaRecord
from scheduler.brain.islands.roster import Roster
from swarm.job.placement import Candidate
from swarm.text import listed
from swarm.types import PeerId

REST_TIMES = 10  # as long as an exchange waited in vain for a site, it does without it then
REST_S_MAX = 86_400.0


@dataclass(slots=True)
class _Guest:
    replica: ReplicaRecord
    island: int
    fetches: bool = False
    exchanges: int = 0  # for which it waited


@dataclass(frozen=True, slots=True)
class _Rest:
    """An evicted site, or peer without a site, may not come back before `until_s`."""

    until_s: float = -math.inf
    times: int = 0  # in a row
    beside: Collection[int] = ()  # the islands that were at its site and went on, by their timelines


class Guests:
    """The guests that are not replicas yet, and the sites that may send none for now."""

    def __init__(self) -> None:
        self.awaited: list[PeerId] = []  # the exchange waits for them
        self._guests: dict[PeerId, _Guest] = {}
        self._rest_until_s: dict[str, float] = {}  # by site: the exchange waits for none of its guests
        self._rests: dict[str, _Rest] = {}  # by site, or by peer that has said none

    @property
    def are_there(self) -> bool:
        return bool(self._guests)

    def arrives(self, replica: ReplicaRecord, roster: Roster) -> Join:
        """How a peer joins its island: as a guest it waits."""
        island = roster.island_of[replica.peer]
        counts = Counter(replica.site for pool in roster.replicas(island) for replica in pool)
        others = [count for site, count in counts.items() if site not in ("", replica.site)]
        is_guest = bool(replica.site) and max(others, default=0) > counts[replica.site]
        self._guests.pop(replica.peer, None)
        if is_guest:
            self._guests[replica.peer] = _Guest(replica, island)
        return Join(replica, waits=is_guest)

    def look(self, roster: Roster, now_s: float, *, in_front: bool) -> list[Join]:
        """The guests that may fetch from now on. Sets `awaited` if all islands stand `in_front` of an exchange."""
        self._forget(roster)
        self.awaited = sorted(self._wanted(roster, now_s)) if in_front else []
        may = [guest for peer, guest in self._guests.items() if peer in self.awaited or (in_front and guest.exchanges)]
        joins = [Join(guest.replica) for guest in may if not guest.fetches]
        for guest in may:
            guest.fetches = True
        return joins

    def waiting_for(self) -> str:
        """What the exchange waits for, for people; empty if it waits for no guest."""
        return f"the exchange waits for {listed(self.awaited)} to fetch the state" if self.awaited else ""

    def exchanged(self, roster: Roster, now_s: float) -> None:
        """Count an exchange for the guests that still wait, and forgive sites that came back and took part."""
        for guest in self._guests.values():
            guest.exchanges += not guest.fetches
        for island in roster.present:
            sites = {replica.site for pool in roster.replicas(island) for replica in pool} - {""}
            for name in self._names(island, roster) if len(sites) < 2 else ():  # not as guests of another site's
                rest = self._rests.get(name)
                if rest is not None and rest.until_s <= now_s and roster.timelines[island] not in rest.beside:
                    del self._rests[name]

    def leave_out(self, island: int, roster: Roster, for_s: float, now_s: float) -> str:
        """Let the stage servers of an evicted island rest, because the others waited `for_s`. Returns the log line."""
        longest_s, where = 0.0, roster.home(island)
        beside = {roster.timelines[n] for n in roster.present if n != island and roster.home(n) == where}
        for name in self._names(island, roster):
            held = self._rests.get(name, _Rest())
            times = held.times + (held.until_s <= now_s)  # sites may have several islands
            rest_s = min(REST_S_MAX, REST_TIMES * for_s * 2.0 ** min(times - 1, 30))
            self._rests[name], longest_s = _Rest(now_s + rest_s, times, beside), max(rest_s, longest_s)
        return f"its stage servers{f', or others at {where},' if where else ''} may come back in {longest_s:g} s"

    def resting(self, now_s: float) -> set[str]:
        """The sites, and peers without a site, that may form no island now."""
        return {name for name, rest in self._rests.items() if rest.until_s > now_s}

    def bars(self, idle: Candidate, roster: Roster, now_s: float) -> str:
        """Why a peer may not join now; empty if it may. Peers may always complete an island at their own site."""
        if idle.site and any(roster.home(island) == idle.site for island in roster.present):
            return ""
        rest = self._rests.get(idle.site, self._rests.get(idle.peer, _Rest()))
        told = "its island was left out, as the others waited for it in vain; it may come back in"
        return f"{told} {math.ceil(rest.until_s - now_s)} s" if rest.until_s > now_s else ""

    @staticmethod
    def _names(island: int, roster: Roster) -> Collection[str]:
        """The names under which an island rests: its site, or else its replicas."""
        home = roster.home(island)
        return [home] if home else [peer for pool in roster.islands[island].peers for peer in pool]

    def waited_in_vain(self, for_s: float, now_s: float) -> str:
        """Stop waiting for the awaited guests for a while: nothing moved for `for_s`. Returns the log line."""
        for peer in self.awaited:
            self._rest_until_s[self._guests[peer].replica.site] = now_s + REST_TIMES * for_s
        told = f"{listed(self.awaited)} did not fetch the state within {for_s:g} s: the exchange waits no longer"
        return told if self.awaited else ""

    def _wanted(self, roster: Roster, now_s: float) -> Iterator[PeerId]:
        """The guests that complete an island of their site, where exchanges wait for that site."""
        for island, site in {(guest.island, guest.replica.site) for guest in self._guests.values()}:
            if now_s < self._rest_until_s.get(site, now_s) or site in self.resting(now_s):
                continue
            if self._is_whole(island, site, roster):
                yield from self._of(island, site)

    def _of(self, island: int, site: str) -> Iterator[PeerId]:
        return (peer for peer, guest in self._guests.items() if (guest.island, guest.replica.site) == (island, site))

    def _is_whole(self, island: int, site: str, roster: Roster) -> bool:
        """Whether guests and replicas of a site are enough for an island of their own."""
        coming = Counter(self._guests[peer].replica.stage for peer in self._of(island, site))
        here = [sum(replica.site == site for replica in pool) for pool in roster.replicas(island)]
        return all(count + coming[stage] >= roster.replicas_min for stage, count in enumerate(here))

    def _forget(self, roster: Roster) -> None:
        """Forget guests that are replicas now, or have stopped joining."""
        for peer, guest in list(self._guests.items()):
            brain = roster.serves(peer)
            joins = brain is not None and brain.is_joining(peer) and brain.stage_of(peer) is None
            if not joins or roster.island_of[peer] != guest.island:
                del self._guests[peer]
