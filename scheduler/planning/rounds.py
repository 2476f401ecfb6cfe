"""What rounds of averaging take in a play."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from scheduler.planning.pool import PeerPool, PoolPeer
from swarm.types import PeerId, Round, UnitName
from swarm.wire import messages


class RoundTimes:
    """The seconds of rounds, flat or by site, whichever is shorter: a job finds that out (brain/commit/by_site.py).

    A round waits for the round before it of its unit, whose bytes take the same lines: where all microbatches are late,
    a round is ready before the last has ended. `adds_up`: members of a site may add up their parts.
    """

    def __init__(self, pool: PeerPool, *, adds_up: bool) -> None:
        self._pool, self._adds_up = pool, adds_up
        self._known: dict[object, float] = {}
        self._ends: dict[tuple[int, UnitName], dict[tuple[int, Round], float]] = {}  # of rounds by timeline and unit

    def clear(self) -> None:
        """The job stalls: no round goes on."""
        self._known.clear()
        self._ends.clear()

    def lines_changed(self) -> None:
        """A peer has come, with lines of its own; rounds that have begun go on."""
        self._known.clear()

    def begun(
        self,
        command: messages.Average,
        peers: Mapping[PeerId, PoolPeer],
        size_bytes: float,
        fixed_s: float,
        now_s: float,
    ) -> float:
        """For how long a round of so many bytes goes on from now; `fixed_s` of it depend on nothing."""
        key = command.unit, *((member.peer, member.group, member.start, member.stop) for member in command.members)
        if key not in self._known:
            members = [peers[member.peer] for member in command.members]
            self._known[key] = self._shorter_s(command.members, members, 8.0 * size_bytes) if len(members) > 1 else 0.0
        where = command.timeline, command.unit
        ends = {at: end_s for at, end_s in self._ends.get(where, {}).items() if end_s > now_s}
        ends_s = max(now_s, *ends.values()) if ends else now_s
        ends_s += self._known[key] + fixed_s
        self._ends[where] = ends | {(command.step, command.round): ends_s}
        return ends_s - now_s

    def aborted(self, command: messages.Average) -> None:
        """A round that has begun carries nothing any more."""
        self._ends.get((command.timeline, command.unit), {}).pop((command.step, command.round), None)

    def _shorter_s(self, members: Sequence[messages.Member], peers: Sequence[PoolPeer], bits: float) -> float:
        alone, at_site = [peer.name for peer in peers], [peer.site or f"/{peer.name}" for peer in peers]
        can_add_up = self._adds_up and 1 < len(set(at_site)) < len(peers)
        seconds = []
        for parties in (alone, at_site) if can_add_up else (alone,):
            sizes = Counter(parties)
            shares = [1.0 / len(sizes) / sizes[party] for party in parties]
            if any(member.group for member in members) is (parties is at_site):
                elements = max(1, members[-1].stop)
                shares = [(member.stop - member.start) / elements for member in members]
            seconds.append(self._seconds(peers, shares, parties, bits))
        return min(seconds)

    def _seconds(
        self, peers: Sequence[PoolPeer], shares: Sequence[float], parties: Sequence[str], bits: float
    ) -> float:
        """What a round takes among parties whose members add up their parts: the slowest line of a member, or the
        slowest way between two, and three of the ways, with two more within a party.

        Parts go one way, means back, and a member is done when it has the receipts of its means.
        """
        sizes, owned = Counter(parties), defaultdict[str, float](float)
        for party, share in zip(parties, shares, strict=True):
            owned[party] += share
        ways = defaultdict[tuple[str, str], float](float)
        line_s, far_s, near_s, others = 0.0, 0.0, 0.0, len(sizes) - 2
        each = list(zip(peers, shares, parties, strict=True))
        for peer, share, party in each:
            size = sizes[party]
            moved = 2.0 - 1.0 / size - owned[party] + (others + size) * share
            line_s = max(line_s, moved / min(peer.up_bits_per_s, peer.down_bits_per_s))
            for other, its, there in each:
                if peer is other:
                    continue
                link, ends = self._pool.link(peer, other), (self._pool.end_of(peer), self._pool.end_of(other))
                amount = 2.0 / size if party == there else its / size + share / sizes[there]
                ways[ends if ends[0] != ends[1] else (peer.name, other.name)] += amount / link.bits_per_s
                far_s = max(far_s, link.delay_s)
                near_s = max(near_s, link.delay_s if party == there else 0.0)
        return max(line_s, max(ways.values())) * bits + 3.0 * far_s + 2.0 * near_s
