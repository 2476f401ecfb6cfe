"""The claim: however slices are shared out and cut, whatever is lost, the weights are those of one process.

Every round has other shares, some of them 0, and slices of these tiny models travel in chunks of 256 elements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from scheduler.brain.commit import rounds
from scheduler.brain.commit.slices import plan_round
from scheduler.brain.inputs import ReplicaRecord
from stage_server.brain import slices
from swarm.errors import SwarmError
from swarm.job.spec import TrustSection
from swarm.reference.trainer import train_local
from swarm.types import JobState, PeerId
from swarm.wire.messages import Averaged, Event, Member, Slice, TensorHeader
from tests.simulation.engine.liars import adding_false, checked_spec, giving_false_means, play
from tests.support.scenes import Run, Task, train
from tests.support.sim.fabric import Observer
from tests.support.simulated import SCHEDULER, Tokens


class Chunks(Observer):
    """The chunks of means that arrived, and members that die between two of them."""

    def __init__(self) -> None:
        self.starts: dict[tuple[str, int, int, str], set[int]] = {}
        self.run: Run | None = None
        self.kill_after: list[int] = []  # chunks that arrive until their owner dies
        self.killed = 0
        self.rates: list[tuple[float, float]] = []  # that members have reported, up and down

    def event_leaves(self, owner: str, event: Event) -> None:
        if isinstance(event, Averaged):
            self.rates.append((event.up_bytes_per_s, event.down_bytes_per_s))

    def delivered(self, owner: str, address: str, header: TensorHeader, error: SwarmError | None) -> None:
        if not isinstance(header, Slice) or not header.averaged:
            return
        of = (header.unit, header.step, header.round.number, header.sender)
        starts = self.starts.setdefault(of, set())
        starts.add(header.start)
        if self.run is None or not self.kill_after or len(starts) < self.kill_after[0]:
            return
        if header.sender in self.run.spare():
            self.run.rig.kill(header.sender)
            self.kill_after.pop(0)
            self.killed += 1

    @property
    def most(self) -> int:
        return max(map(len, self.starts.values()))


@pytest.fixture(autouse=True)
def cut_unequally(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random("shares")

    def planned(
        replicas: Sequence[ReplicaRecord],
        sets: Mapping[PeerId, frozenset[int]],
        elements: int,
        shares: Sequence[float] | None,
        by_site: bool,
    ) -> tuple[Member, ...]:
        if shares is None and len(replicas) > 1:
            shares = [rng.choice((0.0, 0.2, 1.0, 5.0)) for _ in replicas]
            shares[rng.randrange(len(shares))] = 1.0
        return plan_round(replicas, sets, elements, shares, by_site=by_site)

    monkeypatch.setattr(rounds, "plan_round", planned)
    monkeypatch.setattr(slices, "CHUNK_ELEMENTS_MIN", 256)


@pytest.mark.parametrize("overlap", [0, 3])
def test_members_die_between_two_chunks_of_their_means(tmp_path: Path, overlap: int) -> None:
    task, seen = Task.make(tmp_path, pipeline__overlap=overlap, training__steps=6), Chunks()

    async def watch(run: Run) -> None:
        run.rig.network.observer = seen
        seen.run, seen.kill_after = run, [2, 5, 1]
        await run.until_step(1)

    train(task, 8, 1, watch)
    assert seen.killed == 3
    assert seen.most > slices.CHUNKS_MAX // 2


def test_sessions_break_while_chunks_travel(tmp_path: Path) -> None:
    task, seen = Task.make(tmp_path, training__steps=6), Chunks()

    async def cut(run: Run) -> None:
        run.rig.network.observer = seen
        await run.until_step(0)
        peers = [peer for pool in run.job.stages.values() for peer in pool]
        while not run.job.record.state.is_final:
            await asyncio.sleep(run.rng.uniform(0.1, 0.8))
            run.rig.network.cut(f"address-of-{run.rng.choice(peers)}", SCHEDULER)

    run = train(task, 6, 1, cut)
    assert run.rig.network.counts.sessions_broken > 1
    assert seen.most > slices.CHUNKS_MAX // 2


def test_members_report_what_their_links_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "MEASURED_BYTES_MIN", 4096)
    task, seen = Task.make(tmp_path, training__steps=6), Chunks()

    async def watch(run: Run) -> None:
        run.rig.network.observer = seen

    train(task, 6, 1, watch)
    assert len(seen.rates) == 6 * 6
    assert all(1e4 < rate < 1e9 for rates in seen.rates for rate in rates)


def test_slices_are_reduced_once_more_and_sums_recounted_although_slices_are_unequal(tmp_path: Path) -> None:
    spec = checked_spec(
        tmp_path, trust=TrustSection(recount=1.0, second_owner=1.0, second_hash=True), training__steps=4
    )
    tokens = Tokens.make(tmp_path, spec)
    outcome = play(spec, tokens, "zeros", 0.0, 2, peers=6)
    assert (outcome.state, outcome.accused, outcome.is_quarantined) == (JobState.SUCCEEDED, (), False)
    assert outcome.sha256 == train_local(spec, tokens.batches(spec)).sha256


def test_liars_are_caught_although_slices_are_unequal(tmp_path: Path) -> None:
    for trust, lying, guard in (
        (TrustSection(second_owner=1.0), {"device": giving_false_means}, "second owner"),
        (TrustSection(recount=1.0), {"build": adding_false}, "recount"),
    ):
        spec = checked_spec(tmp_path, trust=trust, training__steps=6)
        outcome = play(spec, Tokens.make(tmp_path, spec), "zeros", 0.0, 2, stage=0, **lying)
        assert outcome.state is JobState.SUCCEEDED, outcome.reason
        assert outcome.lies
        assert (outcome.is_quarantined, outcome.accused) == (True, ())
        assert guard in outcome.evidence
