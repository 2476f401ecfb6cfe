"""What a member does with a round: which one counts, what it must hold, when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import Mean, Reduction
from stage_server.replica.averaging.error_feedback import ErrorFeedback
from stage_server.replica.averaging.mailbox import Mailbox
from stage_server.replica.averaging.rounds import RoundRunner
from swarm.errors import SetMismatch, SwarmError
from swarm.model.codec import PROPOSAL_DTYPE
from swarm.types import JobId, PeerId, Round, RoundFault, UnitName
from swarm.wire.messages import (
    AbortRound,
    Average,
    Averaged,
    Commit,
    Envoy,
    Exchange,
    Member,
    ParameterNorm,
    Recheck,
    Rechecked,
    RoundFailed,
    Slice,
    UnitRound,
)
from tests.support.acts import Played, played
from tests.support.devices import SimDevice
from tests.support.ports import ports_of
from tests.support.sim import loop as sim
from tests.support.sim.network import SimNetwork

UNIT = UnitName("stage-0")
ME = ReplicaId(JobId("job"), PeerId("a"), 1, 0)
ELEMENTS = 4


class Numbers:
    """A stage whose sums are one number."""

    number = 6.0
    are_filtered = False

    def part(self, step: int, unit: UnitName) -> Tensor:
        return torch.full((ELEMENTS,), self.number)

    def expect(self, unit: UnitName, mean: Tensor) -> Tensor:
        return mean

    def forget(self) -> None:
        self.number = 0.0

    @property
    def places(self) -> Numbers:
        return self

    def squared_norms(self, unit: UnitName, mean: Tensor) -> tuple[ParameterNorm, ...]:
        return ()

    @property
    def proposals(self) -> Numbers:
        return self

    def places_at(self, step: int) -> Numbers:
        return self

    def parameters_of(self, unit: UnitName) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        return (("w", 0, (ELEMENTS,)),)

    def size_bytes(self, name: str) -> int:
        return ELEMENTS

    def coded(self, name: str) -> Tensor:
        return torch.zeros(ELEMENTS, dtype=torch.uint8)


@dataclass
class Table:
    """Rounds of one member, and what it told."""

    rounds: RoundRunner
    stage: Numbers
    device: SimDevice
    leftovers: ErrorFeedback
    told: list[Averaged | RoundFailed | Rechecked] = field(default_factory=list)


@asynccontextmanager
async def table(codec_name: str = "none") -> AsyncIterator[Table]:
    def fail(error: SwarmError) -> None:
        raise AssertionError(error)

    async with asyncio.TaskGroup() as tasks:
        told: list[Any] = []
        network = SimNetwork(Random(0))
        stage: Any = Numbers()
        device = SimDevice(lambda: 1.0)
        computing = tasks.create_task(device.work_forever())
        ports = ports_of(device, network.peer_links("at a"), told.append, tasks)
        leftovers = ErrorFeedback(codec_name)
        rounds = RoundRunner(ME, stage, Reduction(None), ports, fail, Mailbox(ME.peer, 0, 2), leftovers)
        yield Table(rounds, stage, device, leftovers, told)
        rounds.abort_all()
        computing.cancel()
        await network.close()


def average(number: int = 1, step: int = 0, others: tuple[str, ...] = ()) -> Average:
    """A round in which we own nothing that others have, and others own nothing."""
    members = (Member(ME.peer, 1, "at a", 0, ELEMENTS, "mine"),)
    members += tuple(Member(PeerId(other), 1, f"at {other}", ELEMENTS, ELEMENTS, "theirs") for other in others)
    return Average(0, step, UNIT, Round(1, number), members, 2, 3.0)


def commit(number: int, step: int = 0) -> Commit:
    return Commit(0, step, step + 1, (UnitRound(UNIT, Round(1, number)),), 0.1, 1.0, False)


def in_simulation(codec_name: str = "none") -> Played:
    async def main(act: Any) -> None:
        async with table(codec_name) as made:
            await act(made)

    return played(lambda act: sim.run(main(act), seed=1, limit_s=60.0))


@in_simulation()
async def test_the_sum_is_divided_and_held_for_the_commit_that_names_the_round(made: Table) -> None:
    assert made.rounds.take(average())
    made.rounds.sealed(0, "mine")
    await asyncio.sleep(1.0)
    (told,) = made.told
    assert isinstance(told, Averaged)
    assert made.rounds.means(commit(2)) is None, "the mean of another round must not be taken for it"
    means = made.rounds.means(commit(1))
    assert means is not None
    assert means[UNIT].gradient.tolist() == [3.0] * ELEMENTS
    assert means[UNIT].digest == told.digest
    made.rounds.close(commit(1))
    assert made.rounds.means(commit(1)) is None


@in_simulation()
async def test_what_was_void_before_the_round_is_not_in_its_sums(made: Table) -> None:
    """A Void is obeyed behind what the device computes; until then the sums hold what the cells no longer count."""
    made.device.timed(lambda: None)
    made.device.run(made.stage.forget)
    assert made.rounds.take(average())
    made.rounds.sealed(0, "mine")
    await asyncio.sleep(2.0)
    means = made.rounds.means(commit(1))
    assert means is not None
    assert means[UNIT].gradient.tolist() == [0.0] * ELEMENTS


@in_simulation("int8")
async def test_what_compression_left_out_is_averaged_with_the_next_step_that_is_applied(made: Table) -> None:
    made.leftovers.committed(0, {UNIT: torch.full((ELEMENTS,), 2.0)})
    for step, skip, mean in ((1, True, 4.0), (2, False, 4.0), (3, False, 3.0)):
        assert made.rounds.take(average(step=step))
        made.rounds.sealed(step, "mine")
        await asyncio.sleep(1.0)
        applied = replace(commit(1, step), skip=skip)
        means = made.rounds.means(applied)
        assert means is not None
        assert means[UNIT].gradient.tolist() == [mean] * ELEMENTS, "a skipped step has used nothing up"
        made.rounds.close(applied)


@in_simulation()
async def test_the_digest_tells_the_bytes_of_means_apart(made: Table) -> None:
    for step, tokens in enumerate((2, 3, 2)):
        made.rounds.take(replace(average(step=step), tokens=tokens))
        made.rounds.sealed(step, "mine")
    await asyncio.sleep(1.0)
    first, second, third = [told.digest for told in made.told if isinstance(told, Averaged)]
    assert first == third != second


@in_simulation()
async def test_a_member_that_holds_another_set_says_so_and_sums_nothing(made: Table) -> None:
    assert made.rounds.take(average())
    made.rounds.sealed(0, "another")
    await asyncio.sleep(1.0)
    (told,) = made.told
    assert isinstance(told, RoundFailed)
    assert SetMismatch.code in told.reason
    assert told.cause is RoundFault.SET
    assert made.rounds.means(commit(1)) is None


@in_simulation()
async def test_only_the_newest_round_of_a_unit_counts(made: Table) -> None:
    assert made.rounds.take(average(2))
    assert not made.rounds.take(average(1))
    assert not made.rounds.take(average(2))
    made.rounds.sealed(0, "mine")
    await asyncio.sleep(1.0)
    assert [told.round for told in made.told] == [Round(1, 2)]
    assert not made.rounds.abort(AbortRound(0, 0, UNIT, Round(1, 1))), "an older round is not the one under way"
    assert made.rounds.take(average(3))
    assert made.rounds.means(commit(2)) is None, "a newer round says that no row has the older"


@in_simulation()
async def test_a_round_that_was_told_ahead_takes_its_time_until_the_step_is_full(made: Table) -> None:
    ahead = replace(average(others=("b",)), ahead=True)
    assert not made.rounds.full(ahead), "it is not known"
    assert made.rounds.take(ahead)
    made.rounds.sealed(0, "mine")
    await asyncio.sleep(20.0)
    assert made.told == []
    assert not made.rounds.full(replace(ahead, ahead=False)), "it is under way already"
    assert not made.rounds.full(replace(ahead, ahead=False)), "its time began with the first word"
    await asyncio.sleep(2.9)
    assert made.told == []
    await asyncio.sleep(0.2)
    (told,) = made.told
    assert isinstance(told, RoundFailed)
    assert told.accused == "b"


@in_simulation()
async def test_a_full_step_seals_what_still_waits_for_its_set(made: Table) -> None:
    ahead = replace(average(), ahead=True)
    assert made.rounds.take(ahead)
    assert not made.rounds.take(replace(ahead, ahead=False)), "it is the same round"
    assert made.rounds.full(replace(ahead, ahead=False))
    made.rounds.abort(AbortRound(0, 0, UNIT, Round(1, 1)))
    assert not made.rounds.full(replace(ahead, ahead=False)), "it was given up"


@in_simulation()
async def test_a_member_that_sends_nothing_is_accused_when_the_time_is_over(made: Table) -> None:
    made.rounds.take(average(others=("b",)))
    made.rounds.sealed(0, "mine")
    await asyncio.sleep(2.9)
    assert made.told == []
    await asyncio.sleep(0.2)
    (told,) = made.told
    assert isinstance(told, RoundFailed)
    assert (told.accused, told.cause) == ("b", RoundFault.MEMBER)


@in_simulation()
async def test_an_envoy_tells_of_all_that_it_missed_at_once(made: Table) -> None:
    envoys = tuple(Envoy(PeerId(one), 1, f"at {one}", n, 30) for n, one in enumerate("abc"))
    made.rounds.exchange(Exchange(0, 0, UNIT, Round(1, 1), envoys, 3.0))
    await asyncio.sleep(4.0)
    told = [event for event in made.told if isinstance(event, RoundFailed)]
    assert sorted((said.accused, said.cause) for said in told) == [("b", RoundFault.MEMBER), ("c", RoundFault.MEMBER)]


@in_simulation()
async def test_what_an_exchange_sent_and_received_is_counted(made: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    async def made_at_once(*_: object) -> Mean:
        return Mean(torch.zeros(ELEMENTS), "digest", (), travelled=(2 * ELEMENTS, ELEMENTS))

    monkeypatch.setattr("stage_server.replica.averaging.rounds.run_exchange", made_at_once)
    envoys = tuple(Envoy(PeerId(one), 1, f"at {one}", n, 30 * (n < 2)) for n, one in enumerate("abc"))
    made.rounds.exchange(Exchange(0, 0, UNIT, Round(1, 1), envoys, 3.0))
    await asyncio.sleep(1.0)
    (told,) = made.told
    assert isinstance(told, Averaged)
    for direction, counted in (("sent", 2 * ELEMENTS), ("received", ELEMENTS)):
        registry, labels = made.rounds._ports.metrics.registry, {"direction": direction}
        assert registry.get_sample_value("swarm_outer_bytes_total", labels) == counted


@in_simulation()
async def test_how_many_sites_a_round_had_is_shown_until_the_next(made: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    async def made_at_once(*_: object) -> Mean:
        return Mean(torch.zeros(ELEMENTS), "digest", ())

    monkeypatch.setattr("stage_server.replica.averaging.rounds.run_round", made_at_once)
    for step, groups, shown in ((0, ("lyon", "lyon", "berlin"), 2), (1, ("", "", ""), 0)):
        command = average(step=step, others=("b", "c"))
        members = (replace(member, group=group) for member, group in zip(command.members, groups, strict=True))
        assert made.rounds.take(replace(command, members=tuple(members)))
        made.rounds.sealed(step, "mine")
        await asyncio.sleep(1.0)
        registry = made.rounds._ports.metrics.registry
        assert registry.get_sample_value("swarm_round_groups", {"stage": "0"}) == shown


@in_simulation()
async def test_a_round_that_was_given_up_is_not_reduced_again(made: Table) -> None:
    command = Recheck(0, 0, UNIT, Round(1, 1), 7, ME.peer, PeerId("b"))
    made.rounds.take(average())
    made.rounds.sealed(0, "mine")
    await asyncio.sleep(1.0)
    made.rounds.abort_all()
    made.rounds.recheck(command)
    told = made.told[-1]
    assert isinstance(told, Rechecked)
    assert (told.number, told.took, told.fault) == (7, (), "the round was given up here")


def slice_of(sender: str, start: int, elements: int, dtype: str, timeline: int = 0) -> Slice:
    of_round = (timeline, 0, UNIT, Round(1, 1))
    return Slice(JobId("job"), *of_round, False, start, PeerId(sender), 1, dtype, elements, 8 * elements)


@in_simulation()
async def test_an_exchange_is_given_up_when_it_stands_still_not_when_a_slow_line_makes_it_long(made: Table) -> None:
    """Only what an envoy sent itself counted as progress. One whose line is fast had sent its proposal long ago, and
    accused the other one, whose proposal was on its way through a slow line."""
    envoys = (Envoy(ME.peer, 1, "at a", 6, 0), Envoy(PeerId("b"), 1, "at b", 7, 30))
    made.rounds.exchange(Exchange(6, 0, UNIT, Round(1, 1), envoys, 3.0))
    moved = made.rounds.mailbox.admit(slice_of("b", 0, ELEMENTS, PROPOSAL_DTYPE, timeline=6))
    for _ in range(8):
        await asyncio.sleep(2.0)
        moved()
    assert not made.told
    await asyncio.sleep(3.5)
    (told,) = made.told
    assert isinstance(told, RoundFailed)
    assert told.accused == "b"


@in_simulation()
async def test_a_slice_is_reduced_again_however_slowly_its_parts_come(made: Table) -> None:
    members = (Member(ME.peer, 1, "at a", 0, 2, ""), Member(PeerId("b"), 1, "at b", 2, ELEMENTS, ""))
    command = Average(0, 0, UNIT, Round(1, 1), members, 2, 3.0)
    assert made.rounds.take(command)
    made.rounds._means[0, UNIT, Round(1, 1)] = Mean(torch.zeros(ELEMENTS), "digest", ())
    made.rounds.recheck(Recheck(0, 0, UNIT, Round(1, 1), 7, PeerId("b"), ME.peer))
    moved = made.rounds.mailbox.admit(slice_of("b", 2, ELEMENTS - 2, "float64"))
    for _ in range(8):
        await asyncio.sleep(2.0)
        moved()
    assert not made.told
    await asyncio.sleep(3.5)
    (told,) = made.told
    assert isinstance(told, Rechecked)
    assert "1 of 2 parts came" in told.fault
