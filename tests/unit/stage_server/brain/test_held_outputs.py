"""Held outputs stay within their bytes; the newest is always among them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from stage_server.brain.held_outputs import HeldOutputs
from swarm.types import Direction, Microbatch


@dataclass(frozen=True)
class Thing:
    size_bytes: int


def key(index: int) -> tuple[Microbatch, Direction]:
    return Microbatch(0, 0, index), Direction.FORWARD


def test_the_oldest_goes_first_and_is_named() -> None:
    hold: HeldOutputs[Thing] = HeldOutputs(10)
    assert hold.put(key(0), Thing(4)) == []
    assert hold.put(key(1), Thing(4)) == []
    assert hold.put(key(2), Thing(4)) == [key(0)]
    assert hold.get(key(0)) is None
    assert hold.size_bytes == 8


def test_an_output_over_the_whole_budget_is_held_alone() -> None:
    hold: HeldOutputs[Thing] = HeldOutputs(10)
    hold.put(key(0), Thing(4))
    assert hold.put(key(1), Thing(99)) == [key(0)]
    assert hold.get(key(1)) == Thing(99)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.booleans())))
def test_whatever_is_put_and_dropped_the_bytes_add_up(acts: list[tuple[int, int, bool]]) -> None:
    hold: HeldOutputs[Thing] = HeldOutputs(20)
    held: dict[int, int] = {}
    for index, size_bytes, drop in acts:
        if drop:
            hold.drop(key(index))
            held.pop(index, None)
        else:
            held.pop(index, None)
            held[index] = size_bytes
            for microbatch, _ in hold.put(key(index), Thing(size_bytes)):
                del held[microbatch.index]
        assert hold.size_bytes == sum(held.values())
        assert len(hold) == len(held)
        assert hold.size_bytes <= 20 or len(hold) == 1
        assert all(hold.get(key(one)) == Thing(size) for one, size in held.items())
