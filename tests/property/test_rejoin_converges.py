"""Joining under faults: whatever dies, lags, forgets or lies, a joiner ends with the others' state or with none.

The world below is a stage whose donors commit, die, come back with short logs, answer late, twice or never, and hand
out damaged chunks; the joiner's own memory is kept as one version per chunk, and a replay of the wrong step shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_server.brain.rejoin import (
    AskChunk,
    AskRecords,
    Chunk,
    CommitLog,
    Digest,
    Drop,
    GiveUp,
    Order,
    ReadyToJoin,
    Rejoin,
    RejoinSettings,
    Replay,
    StoreChunk,
)
from swarm.types import PeerId

RECORD_BYTES = 10
DAMAGED = -1000


def chunks(number: int, ratio: int = 4) -> list[Chunk]:
    return [Chunk(index, (), ratio * RECORD_BYTES, RECORD_BYTES) for index in range(number)]


@dataclass
class Donor:
    log: CommitLog

    @property
    def version(self) -> int:
        return self.log.version


@dataclass
class World:
    rng: Random
    rejoin: Rejoin
    chunk_count: int
    log_bytes: int
    settings: RejoinSettings
    newest: int
    donors: dict[PeerId, Donor] = field(default_factory=dict)
    asks: list[AskChunk | AskRecords] = field(default_factory=list)
    digests: list[tuple[int, str]] = field(default_factory=list)
    state: dict[int, int] = field(default_factory=dict)
    admitted: ReadyToJoin | None = None
    now_s: float = 0.0
    asked: Counter[PeerId] = field(default_factory=Counter)

    def take(self, orders: Sequence[Order], payload: int | None = None) -> None:
        """Carry orders out; `payload` is the version of the chunk that just came."""
        for order in orders:
            match order:
                case AskChunk() | AskRecords():
                    self.asks.append(order)
                    self.asked[order.donor] += 1
                case StoreChunk(chunk, version):
                    assert payload is not None
                    self.state[chunk] = payload
                    assert version == payload or payload <= DAMAGED
                case Replay(chunk, step):
                    assert self.state[chunk] == step or self.state[chunk] <= DAMAGED
                    self.state[chunk] += 1
                case Drop():
                    self.state.clear()
                    self.admitted = None
                case Digest(ticket, _):
                    self.digests.append((ticket, self.digest()))
                case ReadyToJoin(version, first_step):
                    assert set(self.state) == set(range(self.chunk_count))
                    assert set(self.state.values()) == {version} == {self.rejoin.newest}
                    assert first_step in (version, version + 1)
                    assert self.admitted is None or version > self.admitted.version
                    self.admitted = order
                case GiveUp(reason):
                    raise AssertionError(reason)
        self.validate()

    def validate(self) -> None:
        settings = self.settings
        open_asks = [ask for ask in self.asks if ask.ticket in self.rejoin._asks]
        assert len(open_asks) <= settings.asks_max
        assert all(count <= settings.asks_per_donor_max for count in Counter(ask.donor for ask in open_asks).values())
        assert len({ask.chunk for ask in open_asks}) == len(open_asks)

    def digest(self) -> str:
        """Equal to the version's name only if every chunk is of that version, undamaged."""
        versions = set(self.state.values())
        return str(versions.pop()) if len(versions) == 1 and len(self.state) == self.chunk_count else "mixed"

    def answer(self, ask: AskChunk | AskRecords, *, damage: bool = False) -> None:
        donor = self.donors.get(ask.donor)
        if donor is not None:
            donor.log.want()
        if donor is None:
            self.take(self.rejoin.failed(ask.ticket, self.now_s))
        elif isinstance(ask, AskChunk):
            payload = DAMAGED - 1000 if damage else donor.version
            previous = self.rng.random() < 0.5
            orders = self.rejoin.pulled(
                ask.ticket, donor.version, previous=previous, reach=donor.log.reach, now_s=self.now_s
            )
            self.take(orders, payload)
        else:
            steps = donor.log.steps(ask.start, ask.stop)
            if steps is None:
                self.take(self.rejoin.out_of_reach(ask.ticket, reach=donor.log.reach, now_s=self.now_s))
            else:
                self.take(self.rejoin.recorded(ask.ticket, steps.stop, reach=donor.log.reach, now_s=self.now_s))

    def commit(self) -> None:
        self.newest += 1

    def catch_up(self, donor: Donor) -> None:
        while donor.version < self.newest:
            donor.log.append(donor.version, RECORD_BYTES * self.chunk_count)

    def tell(self) -> None:
        """The scheduler says what is newest, and what all agree on."""
        self.take(self.rejoin.committed(self.newest, self.now_s))
        self.take(self.rejoin.agreed(self.newest, str(self.newest), self.now_s))

    def tell_donors(self) -> None:
        self.take(self.rejoin.donors(self.donors, self.now_s))

    def storm(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += self.rng.choice([0.01, 0.1, 1.0])
            roll = self.rng.random()
            if roll < 0.1:
                self.commit()
            elif roll < 0.2:
                self.tell()
            elif roll < 0.3 and self.donors:
                self.catch_up(self.donors[self.rng.choice(sorted(self.donors))])
            elif roll < 0.36 and self.donors:
                del self.donors[self.rng.choice(sorted(self.donors))]
            elif roll < 0.45:
                name = PeerId(f"d{self.rng.randrange(5)}")
                self.donors.setdefault(name, Donor(CommitLog(self.log_bytes, self.newest)))
            elif roll < 0.55:
                self.tell_donors()
            elif roll < 0.6 and self.digests:
                self.take(self.rejoin.digested(*self.digests.pop(0), self.now_s))
            elif roll < 0.65:
                self.take(self.rejoin.tick(self.now_s))
            elif self.asks:
                ask = self.rng.choice(self.asks)
                what = self.rng.random()
                if what < 0.85:
                    self.asks.remove(ask)  # else the answer comes twice
                if what < 0.2:
                    self.take(self.rejoin.failed(ask.ticket, self.now_s))
                else:
                    self.answer(ask, damage=what < 0.23)

    def calm(self, commits: int, every: int) -> int:
        """Nothing fails any more; the ticks until the joiner is admitted and up to date."""
        self.donors.setdefault(PeerId("d9"), Donor(CommitLog(self.log_bytes, self.newest)))
        for tick in range(1, 4000):
            self.now_s += 0.05
            if commits and tick % every == 0:
                self.commit()
                commits -= 1
            for donor in self.donors.values():
                self.catch_up(donor)
            self.tell_donors()
            self.tell()
            for ask in list(self.asks):
                self.asks.remove(ask)
                self.answer(ask)
            while self.digests:
                self.take(self.rejoin.digested(*self.digests.pop(0), self.now_s))
            self.take(self.rejoin.tick(self.now_s))
            if self.admitted and not commits and self.admitted.version == self.newest:
                return tick
        raise AssertionError(f"no end: the newest version is {self.rejoin.newest}")


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 12),
    log_records=st.sampled_from([0, 1, 3, 100]),
    ratio=st.sampled_from([1, 4, 100]),
    ticks=st.integers(0, 400),
    commits=st.integers(0, 20),
    staleness=st.sampled_from([0, 1]),
)
def test_a_joiner_is_admitted_when_faults_stop_and_never_with_a_mixed_state(
    seed: int, count: int, log_records: int, ratio: int, ticks: int, commits: int, staleness: int
) -> None:
    options = RejoinSettings(staleness=staleness, asks_max=4, mismatches_max=10**6)
    rejoin = Rejoin(PeerId("me"), chunks(count, ratio), options)
    world = World(Random(seed), rejoin, count, log_records * RECORD_BYTES * count, options, newest=3)
    world.storm(ticks)
    assert world.calm(commits, every=30) < 30 * commits + 600
    assert world.admitted is not None
    assert world.admitted.version == world.newest


def test_with_records_enough_no_chunk_is_pulled_twice_while_versions_advance() -> None:
    options = RejoinSettings(asks_max=1)
    rejoin = Rejoin(PeerId("me"), chunks(10, 100), options)
    world = World(Random(1), rejoin, 10, 10**9, options, newest=3)
    for number in range(3):
        world.donors[PeerId(f"d{number}")] = Donor(CommitLog(10**9, 3))
    pulls = Counter[int]()
    take = world.take

    def count(orders: Sequence[Order], payload: int | None = None) -> None:
        pulls.update(order.chunk for order in orders if isinstance(order, AskChunk))
        take(orders, payload)

    world.take = count  # type: ignore[method-assign]
    world.calm(commits=5, every=3)
    assert set(pulls.values()) == {1}


@pytest.mark.parametrize(("donors", "chunk_count"), [(20, 16), (40, 8)])
def test_three_hundred_joiners_do_not_herd(donors: int, chunk_count: int) -> None:
    names = [PeerId(f"donor-{number}") for number in range(donors)]
    first: Counter[PeerId] = Counter()
    total: Counter[PeerId] = Counter()
    first_chunks: Counter[int] = Counter()
    for number in range(300):
        rejoin = Rejoin(PeerId(f"joiner-{number}"), chunks(chunk_count), RejoinSettings())
        orders = rejoin.donors(names, 0.0)
        first.update(order.donor for order in orders if isinstance(order, AskChunk))
        first_chunks.update(order.chunk for order in orders[:1] if isinstance(order, AskChunk))
        mine: Counter[PeerId] = Counter()
        while orders:
            order = orders.pop(0)
            if isinstance(order, AskChunk):
                mine[order.donor] += 1
                orders += rejoin.pulled(order.ticket, 5, previous=True, reach=0, now_s=0.0)
        assert sum(mine.values()) == chunk_count
        assert max(mine.values()) - min(mine[name] for name in names) <= 1
        total.update(mine)
    for counts, share in ((first, 300 * 8 / donors), (total, 300 * chunk_count / donors)):
        assert max(counts.values()) <= 1.5 * share
    assert max(first_chunks.values()) <= 3 * 300 / chunk_count
