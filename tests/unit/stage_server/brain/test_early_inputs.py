"""Inputs that come before their routes: bounded, and no claim stands in the way of another."""

from __future__ import annotations

from stage_server.brain.early_inputs import (
    EARLY_BYTES_MAX,
    EARLY_BYTES_OF_SENDER_MAX,
    EARLY_MAX,
    EARLY_OF_SENDER_MAX,
    Claim,
    EarlyInputs,
)
from swarm.types import Direction, Hop, Microbatch, PeerId

TRUE = Claim(PeerId("true"), 17, 3)


def subject(index: int, step: int = 0) -> tuple[Microbatch, str]:
    return Microbatch(0, step, index), Direction.FORWARD


def stranger(number: int, attempt: int = 3) -> Claim:
    return Claim(PeerId(f"x{number}"), number, attempt)


def early() -> EarlyInputs[tuple[Microbatch, str], str]:
    return EarlyInputs(lambda subject: subject)


def test_each_claim_has_a_place_of_its_own_and_the_first_input_of_a_claim_stays() -> None:
    held = early()
    for other in (Claim(PeerId("true"), 18, 3), Claim(PeerId("true"), 17, 4), stranger(1)):
        assert held.put(subject(0), other, "false", 8, is_known=False)
    assert held.put(subject(0), TRUE, "true", 8, is_known=True)
    assert held.put(subject(0), TRUE, "again", 8, is_known=True)
    assert held.take(subject(0), Claim.of(Hop(PeerId("true"), 17, 3, "at true"))) == "true"
    assert held.take(subject(0), TRUE) is None
    assert (len(held), held.size_bytes) == (3, 24)
    held.drop(lambda _, claim: claim.attempt == 3)
    assert (len(held), held.size_bytes) == (1, 8)


def test_one_sender_has_a_share_and_keeps_what_is_due_first() -> None:
    held, each = early(), EARLY_BYTES_OF_SENDER_MAX // 4
    for index in (3, 2, 4, 1):
        assert held.put(subject(index), TRUE, str(index), each, is_known=False)
    assert not held.put(subject(5), TRUE, "5", each, is_known=False)
    assert held.put(subject(0), TRUE, "0", each, is_known=False)
    assert [held.take(subject(index), TRUE) for index in range(6)] == ["0", "1", "2", "3", None, None]
    for index in range(2 * EARLY_OF_SENDER_MAX):
        held.put(subject(index), TRUE, "", 1, is_known=False)
    assert len(held) == EARLY_OF_SENDER_MAX


def test_a_flood_under_many_names_is_bounded_and_gives_way_to_peers_that_a_route_has_named() -> None:
    held, each = early(), EARLY_BYTES_MAX // 64
    for number in range(500):
        held.put(subject(0), stranger(number), "false", each, is_known=False)
    assert held.size_bytes <= EARLY_BYTES_MAX
    for index in range(4):
        assert held.put(subject(index, step=1), TRUE, f"true {index}", each, is_known=True)
    for number in range(500):
        held.put(subject(0), stranger(number, 9), "false", each, is_known=False)
    assert [held.take(subject(index, step=1), TRUE) for index in range(4)] == [f"true {index}" for index in range(4)]
    assert held.size_bytes <= EARLY_BYTES_MAX
    held.drop(lambda *_: True)
    assert (len(held), held.size_bytes) == (0, 0)


def test_inputs_without_bytes_are_bounded_by_their_number() -> None:
    held = early()
    for number in range(2 * EARLY_MAX):
        held.put(subject(number), stranger(number), "", 1, is_known=False)
    assert len(held) == EARLY_MAX


def test_an_input_that_is_larger_than_the_bounds_has_room_alone() -> None:
    held = early()
    assert held.put(subject(1), TRUE, "large", 2 * EARLY_BYTES_MAX, is_known=False)
    assert not held.put(subject(2), TRUE, "second", 2 * EARLY_BYTES_MAX, is_known=False)
    assert held.put(subject(0), TRUE, "first", 2 * EARLY_BYTES_MAX, is_known=False)
    assert held.take(subject(1), TRUE) is None
