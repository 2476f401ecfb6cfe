"""Slices of averaging: only those that are due from a member of the round enter it, whatever else arrives."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from stage_server.brain.neighbours import EARLY_BYTES_MAX, EARLY_BYTES_OF_SENDER_MAX
from stage_server.replica.averaging.mailbox import Mailbox, SliceKey
from swarm.errors import Refused, RetryElsewhere, StaleMessage
from swarm.model.codec import SLICE_CODECS, decode_slice, encode_slice
from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Average, Envoy, Exchange, Member, Slice

UNIT = UnitName("stage-0")
ME, OTHER = PeerId("a"), PeerId("b")
PART = Slice(JobId("job"), 0, 0, UNIT, Round(1, 1), False, 0, OTHER, 7, "float32", 2, 8)
MEAN = replace(PART, averaged=True, start=2)


def average(number: int = 1, step: int = 0, incarnation: int = 7) -> Average:
    """Both members own a half."""
    members = (Member(ME, 1, "at a", 0, 2, "mine"), Member(OTHER, incarnation, "at b", 2, 4, "theirs"))
    return Average(0, step, UNIT, Round(1, number), members, 2, 3.0)


def values(value: float, elements: int = 2) -> memoryview:
    return memoryview(torch.full((elements,), value).numpy()).cast("B")


def mailbox(*commands: Average) -> Mailbox:
    made = Mailbox(ME, 0, 1)
    for command in commands:
        made.begin(command)
    return made


def take(made: Mailbox, header: Slice, value: float) -> None:
    """As a stage server takes a slice from the wire."""
    made.admit(header)
    made.put(header, values(value, header.elements))


async def held(made: Mailbox, header: Slice) -> list[float]:
    return (await made.get(SliceKey.of(header))).values().tolist()  # type: ignore[no-any-return]  # of torch


async def test_a_slice_is_for_its_own_round_only() -> None:
    made = mailbox(average(2))
    with pytest.raises(StaleMessage, match="was given up"):
        take(made, PART, 1.0)
    for number in (3, 4):
        take(made, replace(PART, round=Round(1, number)), 3.0)
    wanted = asyncio.ensure_future(held(made, replace(PART, round=Round(1, 2))))
    await asyncio.sleep(0)
    assert not wanted.done()
    take(made, replace(PART, round=Round(1, 2)), 1.0)
    assert await wanted == [1.0, 1.0]
    made.begin(average(4))
    assert await held(made, replace(PART, round=Round(1, 4))) == [3.0, 3.0]
    assert len(made.early) == 0


LIARS = {
    "another peer": replace(PART, sender=PeerId("x")),
    "another incarnation": replace(PART, incarnation=8),
    "we ourselves": replace(PART, sender=ME, incarnation=1),
    "the slice of another owner": replace(PART, start=2),
    "a mean of what is not its own": replace(PART, averaged=True),
    "another size": replace(PART, elements=1, total_bytes=4),
}


@pytest.mark.parametrize("liar", LIARS.values(), ids=list(LIARS))
@pytest.mark.parametrize("late", [False, True], ids=["before the round", "after the round"])
async def test_a_false_slice_neither_enters_the_mean_nor_hides_the_true_one(liar: Slice, late: bool) -> None:
    """Slices were known by the name that their sender claims, and the first was taken: what a stranger sent in a
    member's name entered the mean, and all members agreed on it."""
    made = mailbox(*[average()] * late)
    if late:
        with pytest.raises(Refused, match="is due from"):
            take(made, liar, 1e9)
        with pytest.raises(Refused, match="is due from"):
            made.put(liar, values(1e9, liar.elements))
    else:
        take(made, liar, 1e9)
        if liar.elements == PART.elements:
            take(made, PART, 1.0)
        made.begin(average())
    take(made, PART, 1.0)
    take(made, MEAN, 2.0)
    assert await held(made, PART) == [1.0, 1.0]
    assert await held(made, MEAN) == [2.0, 2.0]
    assert len(made.early) == 0


@pytest.mark.parametrize("late", [False, True], ids=["before the round", "after the round"])
async def test_a_second_slice_is_ignored_if_it_is_the_same_and_refused_if_it_differs(late: bool) -> None:
    made = mailbox(*[average()] * late)
    for _ in range(2):
        take(made, PART, 1.0)
    with pytest.raises(Refused, match="came in the name of b"):
        take(made, PART, 2.0)
    if not late:
        made.begin(average())
    assert await held(made, PART) == [1.0, 1.0]


async def test_after_a_flood_of_early_slices_the_true_ones_are_taken_and_little_is_held() -> None:
    """4 GiB of slices for step 2^60 were never freed, and every true slice was refused from then on."""
    made = mailbox()
    for step in (2, 1 << 60):
        with pytest.raises(Refused, match="far ahead"):
            take(made, replace(PART, step=step), 1e9)
    elements = EARLY_BYTES_OF_SENDER_MAX // 16
    large = replace(PART, elements=elements, total_bytes=4 * elements)
    for number in range(4):
        take(made, replace(large, round=Round(9, number)), 1e9)
    with pytest.raises(RetryElsewhere, match="bytes of slices wait"):
        take(made, replace(large, round=Round(9, 9)), 1e9)
    refused = 0
    for number in range(40):
        try:
            take(made, replace(large, sender=PeerId(f"x{number}"), step=number % 2), 1e9)
        except RetryElsewhere:
            refused += 1
    assert refused
    assert made.early.size_bytes <= EARLY_BYTES_MAX
    made.begin(average())
    take(made, PART, 1.0)
    take(made, MEAN, 2.0)
    assert await held(made, PART) == [1.0, 1.0]
    take(made, replace(PART, step=1), 1.0)  # of a member of a round: strangers make room
    assert made.early.size_bytes <= EARLY_BYTES_MAX
    made.close(0)
    made.begin(average(step=1))
    assert await held(made, replace(PART, step=1)) == [1.0, 1.0]
    made.close(1)
    assert (len(made.early), made.early.size_bytes) == (0, 0)


async def test_slices_of_committed_steps_are_refused_and_forgotten() -> None:
    made = mailbox(average())
    take(made, PART, 1.0)
    made.close(0)
    with pytest.raises(StaleMessage, match="step 0 is committed"):
        take(made, PART, 1.0)
    made.put(PART, values(1.0))  # its header was admitted before the commit
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):  # what is there is given at once
            await held(made, PART)


@pytest.mark.parametrize("codec_name", SLICE_CODECS)
async def test_a_compressed_slice_that_comes_again_must_be_the_same_bytes(codec_name: str) -> None:
    made = mailbox(average())
    payload, dtype = encode_slice(torch.tensor([0.1, 1e9]), codec_name)
    header = replace(PART, dtype=dtype, total_bytes=payload.nbytes)
    made.put(header, payload)
    made.put(header, payload)
    other, _ = encode_slice(torch.tensor([0.1, 2e9]), codec_name)
    with pytest.raises(Refused, match="two different slices"):
        made.put(header, other)
    assert await held(made, header) == decode_slice(payload, dtype, 2).tolist()


async def test_parts_of_the_slice_of_another_are_taken_where_it_is_reduced_once_more() -> None:
    third = PeerId("c")
    members = (
        Member(ME, 1, "at a", 0, 2, "mine"),
        Member(OTHER, 7, "at b", 2, 4, "theirs"),
        Member(third, 9, "at c", 4, 6, "theirs"),
    )
    command = replace(average(), members=members)
    made = mailbox(command)
    again = replace(PART, start=2)
    with pytest.raises(Refused, match="no such slice is due"):
        take(made, again, 1.0)
    made.expect(replace(command, round=Round(1, 9)), OTHER)
    with pytest.raises(Refused, match="no such slice is due"):
        take(made, again, 1.0)
    made.expect(command, OTHER)
    take(made, again, 1.0)
    take(made, replace(again, sender=third, incarnation=9), 2.0)
    assert await held(made, again) == [1.0, 1.0]
    assert await held(made, replace(again, sender=third, incarnation=9)) == [2.0, 2.0]
    with pytest.raises(Refused, match="no such slice is due"):
        take(made, replace(again, start=4), 1.0)


def exchange(number: int = 1) -> Exchange:
    """Three islands; the first stage's and the last stage's replicas of each hold the unit, and the first proposes."""
    envoys = [
        Envoy(PeerId(f"{'ab'[stage]}{island}"), 7, "", island, 5 if stage == 0 else 0)
        for island in range(3)
        for stage in range(2)
    ]
    return Exchange(0, 0, UNIT, Round(1, number), tuple(envoys), 3.0)


async def test_in_an_outer_round_one_proposal_is_due_from_each_other_island() -> None:
    made = Mailbox(PeerId("b0"), 0, 1)
    made.begin(exchange(), range(5, 6))
    proposal = Slice(JobId("job"), 0, 0, UNIT, Round(1, 1), False, 0, PeerId("a1"), 7, "uint8", 5, 5)
    for wrong in (
        replace(proposal, sender=PeerId("b1")),
        replace(proposal, sender=PeerId("a0")),
        replace(proposal, incarnation=6),
        replace(proposal, elements=4),
        replace(proposal, averaged=True),
    ):
        with pytest.raises(Refused, match="no such slice is due"):
            made.admit(wrong)
    for sender in ("a1", "a2"):
        header = replace(proposal, sender=PeerId(sender))
        made.admit(header)
        made.put(header, memoryview(bytes(range(5))))
        assert (await made.get(SliceKey.of(header))).values().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("early", [False, True])
async def test_a_proposal_may_be_shorter_where_islands_leave_numbers_out_and_never_longer(early: bool) -> None:
    made = Mailbox(PeerId("b0"), 0, 1)
    proposals = {
        size: Slice(JobId("job"), 0, 0, UNIT, Round(1, 1), False, 0, PeerId(sender), 7, "uint8", size, size)
        for sender, size in (("a1", 3), ("a2", 6))
    }
    if early:
        for size, header in proposals.items():
            made.put(header, memoryview(bytes(size)))
    made.begin(exchange(), range(2, 6))
    for size in (1, 6):
        with pytest.raises(Refused, match="no such slice is due"):
            made.admit(replace(proposals[3], elements=size))
    if not early:
        made.put(proposals[3], memoryview(bytes(3)))
    assert (await made.get(SliceKey.of(proposals[3]))).values().tolist() == [0, 0, 0]
    assert SliceKey.of(proposals[6]) not in made._slices, "it was early, and is too long"
