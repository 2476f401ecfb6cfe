"""The claim: a replica that says otherwise than the others is expelled; the job ends as if it had not been there."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import pytest

from scheduler.brain.outputs import Fail
from swarm.errors import OutOfMemory, ReplicaDiverged
from swarm.types import PeerId
from swarm.wire.messages import Averaged, Committed, Event, Failed, Loaded, ParameterNorm
from tests.support.obedient import JOB, Swarm

NORMS = (
    (ParameterNorm("w of stage-0", math.inf),),
    (ParameterNorm("v", 4.0),),
    (),
    (ParameterNorm("w of stage-0", math.nan),),
)


def lies(
    peer: str, kind: type[Event], times: int = 1, after: int = 0, steps: Container[int] = range(9), **changes: Any
) -> Callable[[PeerId, Event], Event]:
    """One replica says something else in so many events of a kind, after the first few of them."""
    left = [after, times]

    def lie(sender: PeerId, event: Event) -> Event:
        if sender != peer or not isinstance(event, kind) or not any(left) or getattr(event, "step", 0) not in steps:
            return event
        if left[0]:
            left[0] -= 1
            return event
        left[1] -= 1
        return replace(event, **changes)  # type: ignore[type-var]

    return lie


def trained(swarm: Swarm) -> Swarm:
    swarm.start()
    swarm.run()
    return swarm


@pytest.mark.parametrize("odd", ["a replica", "a joiner"])
def test_one_whose_optimizer_gives_other_bits_is_told_that_like_machines_serve_the_stage(odd: str) -> None:
    swarm = Swarm()
    peer = PeerId("b" if odd == "a replica" else "g")
    swarm.lie = lies(peer, Loaded, probe="odd")
    swarm.start()
    swarm.run(until=lambda: bool(swarm.rows))
    if odd == "a joiner":
        swarm.join(peer, 0)
    swarm.run()
    swarm.assert_finished()
    assert swarm.released[peer].endswith("cannot be mixed: let machines of one kind serve it")


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("liar", ["a", "b", "c", "e"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Loaded, {"digest": "odd"}),
        (Averaged, {"digest": "odd"}),
        (Committed, {"digest": "odd"}),
        (Loaded, {"probe": "odd"}),
    ]
    + [(Averaged, {"norms": norms}) for norms in NORMS],
)
def test_the_odd_one_of_three_is_expelled_and_the_job_goes_on(
    liar: str, kind: type[Event], after: int, changes: dict[str, Any], staleness: int
) -> None:
    swarm = Swarm(overlap=4 * staleness)
    swarm.lie = lies(liar, kind, after=after, **changes)
    trained(swarm)
    swarm.assert_finished()
    expelled = [] if kind is Loaded and after else [liar]  # it loads once
    assert [refusal.peer for refusal in swarm.unfit] == expelled
    assert all("replicas differ" in refusal.reason or "other bits" in refusal.reason for refusal in swarm.unfit)


@pytest.mark.parametrize("changes", [{"digest": "odd"}, {"norms": NORMS[0]}])
@pytest.mark.parametrize("times", [1, 2])
def test_two_that_differ_in_an_average_average_again_and_then_compute_the_step_again(
    changes: dict[str, Any], times: int
) -> None:
    swarm = Swarm(("ab", "cd"))
    swarm.lie = lies("a", Averaged, times, steps=[0], **changes)
    trained(swarm)
    swarm.assert_finished()
    assert swarm.unfit == []
    said = [note for note in swarm.notes if "replicas differ" in note]
    assert [note.rpartition("; ")[2] for note in said] == ["averaged again", "computed again"][:times]
    assert (swarm.brain.counts().replayed > 0) == (times == 2)


def test_two_that_differ_in_an_average_even_then_stop_the_job_and_are_both_named() -> None:
    swarm = Swarm(("ab", "cd"))
    swarm.lie = lies("a", Averaged, 3, steps=[0], digest="odd")
    trained(swarm)
    assert isinstance(swarm.end, Fail)
    assert swarm.end.code == ReplicaDiverged.code
    assert "averaged gradient of unit stage-0, step 0: a, b" in swarm.end.message


@pytest.mark.parametrize("kind", [Loaded, Committed])
def test_two_whose_weights_differ_stop_the_job_and_a_person_is_told_what_to_do(kind: type[Event]) -> None:
    swarm = Swarm(("ab", "cd"))
    swarm.lie = lies("a", kind, digest="odd")
    trained(swarm)
    assert isinstance(swarm.end, Fail)
    assert ": a, b (a holds odd, b holds" in swarm.end.message
    assert "run the same release" in swarm.end.hint
    assert kind is Loaded or "swarm resume job" in swarm.end.hint


def test_members_of_two_stages_vote_together_on_what_they_share() -> None:
    swarm = Swarm(("ab", "cd", "ef"), tied=True)
    odd = lies("a", Averaged, 1, digest="odd")
    swarm.lie = lambda peer, event: odd(peer, event) if getattr(event, "unit", "") == "tied" else event
    trained(swarm)
    swarm.assert_finished()
    assert [refusal.peer for refusal in swarm.unfit] == ["a"]  # of its own stage only one other is there


def test_a_stage_does_not_lose_its_only_replica_by_a_vote() -> None:
    swarm = Swarm(("ab", "cd", "e"), tied=True)
    swarm.lie = lambda peer, event: (
        replace(event, digest="odd") if peer == "e" and isinstance(event, Averaged) and event.unit == "tied" else event
    )
    trained(swarm)
    assert isinstance(swarm.end, Fail)
    assert "unit tied, step 0: e (" in swarm.end.message


@pytest.mark.parametrize("changes", [{"version": 7}, {"stage": 1}])
def test_a_commit_made_as_something_else_costs_the_job_one_replica(changes: dict[str, Any]) -> None:
    swarm = Swarm(("ab", "cd"))
    swarm.lie = lies("a", Committed, **changes)
    trained(swarm)
    swarm.assert_finished()
    assert "a" in swarm.released


def test_what_passed_through_a_replica_with_other_weights_is_computed_again_at_all_stages() -> None:
    swarm = Swarm(overlap=0)
    swarm.lie = lies("a", Committed, digest="odd")
    swarm.start()
    swarm.run(until=lambda: bool(swarm.unfit))
    assert {stage for stage, _ in swarm.brain.counts().reroutes} == {0, 1}
    swarm.run()
    swarm.assert_finished()


# Failed while loading ------------------------------------------------------------------------------------------------


def fails_to_load(swarm: Swarm, *peers: str) -> Swarm:
    failed = Failed(JOB, OutOfMemory.code, "needs 9 GiB, has 8", "use more stages")
    swarm.lie = lambda peer, event: failed if peer in peers and isinstance(event, Loaded) else event
    return trained(swarm)


def test_the_others_start_without_a_replica_that_cannot_load() -> None:
    swarm = fails_to_load(Swarm(("ab", "cd")), "a")
    swarm.assert_finished()
    assert [(refusal.peer, refusal.incarnation, refusal.reason) for refusal in swarm.unfit] == [
        ("a", 1, "needs 9 GiB, has 8")
    ]
    assert swarm.released[PeerId("a")] == "needs 9 GiB, has 8"


def test_a_stage_whose_replicas_all_cannot_load_fails_the_job_with_their_words() -> None:
    swarm = fails_to_load(Swarm(("ab", "cd")), "a", "b")
    text = "stage server b (stage 0) cannot go on: needs 9 GiB, has 8"
    assert swarm.end == Fail(OutOfMemory.code, text, "use more stages")


def test_a_job_does_not_start_with_fewer_replicas_than_a_person_wants() -> None:
    swarm = Swarm(("ab", "cd"))
    wanted = replace(swarm.settings.rebalance, min_replicas=2)
    swarm = fails_to_load(Swarm(("ab", "cd"), rebalance=wanted), "a")
    assert isinstance(swarm.end, Fail)


def test_whoever_is_outvoted_in_two_units_at_once_is_expelled_once() -> None:
    """Both rounds were told ahead and are complete when the last microbatch is heard of, at a stage between them."""
    swarm = Swarm(("abc", "x", "def"), tied=True)
    swarm.lie = lies("a", Averaged, 2, digest="odd")
    swarm.start()
    while swarm.end is None and swarm.inbox:
        behind = next((at for at, (peer, _) in enumerate(swarm.inbox) if peer != "x"), 0)  # all others are faster
        swarm.inbox.rotate(-behind)
        swarm.obey(*swarm.inbox.popleft())
        swarm.inbox.rotate(behind)
    swarm.assert_finished()
    assert [refusal.peer for refusal in swarm.unfit] == ["a"]
