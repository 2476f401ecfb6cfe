"""What a sum that is computed once more proves, whatever is said of the part that was given away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swarm.types import PeerId
from swarm.wire.messages import Checked, Event, Rechecked, Recounted
from tests.support.obedient import Swarm

Reduced = Callable[[PeerId, PeerId, tuple[PeerId, ...]], tuple[tuple[str, ...], str, str]]


def trained(**hooks: object) -> list[Swarm]:
    return [Swarm.trained(seed=seed, recount=1.0, **hooks) for seed in range(6)]


def reports(part: Callable[[PeerId, PeerId, PeerId], str]) -> Reduced:
    """The part of a giver, as a reader says and as the owner says; the mean seems right to both."""
    return lambda reader, owner, members: (tuple(part(reader, owner, giver) for giver in members), "mean", "mean")


def test_who_gives_the_owner_another_part_than_others_is_contradicted() -> None:
    """The mean seems right to the reader, so the owner or the giver lies."""
    swarms = trained(
        reduced=reports(lambda reader, owner, giver: f"{'x' * (giver == 'b' and reader == owner)}part of {giver}")
    )
    assert {strike.peer for swarm in swarms for strike in swarm.struck} <= {"b"}
    assert any("contradict each other about" in note for swarm in swarms for note in swarm.notes)
    assert all(swarm.end is not None for swarm in swarms)


def test_an_owner_that_says_otherwise_of_a_part_has_nobody_convicted() -> None:
    """It frames whose sum is recounted; a reader of the same slice knows better."""
    swarms = trained(reduced=reports(lambda reader, owner, giver: f"{'x' * (owner == reader == 'a')}part of {giver}"))
    assert {strike.peer for swarm in swarms for strike in swarm.struck} <= {"a"}


def test_the_word_of_one_about_a_part_convicts_nobody() -> None:
    """It frames whose sum is recounted, and the owner of the slice does not answer."""
    swarms = trained(
        reduced=reports(lambda reader, owner, giver: f"{'x' * (reader == 'a')}part of {giver}"),
        lie=lambda peer, event: None if isinstance(event, Rechecked) and peer != "a" else event,
    )
    assert [strike for swarm in swarms for strike in swarm.struck] == []
    assert any("unclear who is right" in note for swarm in swarms for note in swarm.notes)


def test_a_recounter_that_was_given_other_inputs_has_no_say() -> None:
    def lie(peer: PeerId, event: Event) -> Event:
        if isinstance(event, Checked):
            return replace(event, digests=("another", *event.digests[1:]))
        return replace(event, digest="another") if isinstance(event, Recounted) else event

    for swarm in trained(lie=lie):
        swarm.assert_finished()
        assert swarm.struck == []
        assert any("is not recounted: nobody gave an answer" in note for note in swarm.notes)
