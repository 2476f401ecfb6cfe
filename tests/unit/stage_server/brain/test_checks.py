"""Which microbatches a replica computes again, and to whom it lends what it made."""

from __future__ import annotations

from stage_server.brain.checks import CHECKS_MAX, CheckTable
from swarm.messages import Check
from swarm.types import Direction, Hop, Microbatch, PeerId

HERE = PeerId("here")


def command(index: int = 0, number: int = 1, *, stage: int = 1, version: int = 4, step: int = 5) -> Check:
    hops = [Hop(PeerId(f"p{at}"), 1, 2, "") for at in range(3)]
    hops[stage] = Hop(HERE, 1, 3, "")
    return Check(Microbatch(0, step, index), version, stage, number, tuple(hops))


def test_a_check_is_ready_once_its_inputs_are_here_from_whom_the_scheduler_named_and_its_weights_are_held() -> None:
    table = CheckTable(1)
    assert table.take(command())
    microbatch = command().microbatch
    assert not table.wants(microbatch, Direction.FORWARD, PeerId("p2"), 1)
    assert not table.wants(microbatch, Direction.FORWARD, PeerId("p0"), 2)
    for direction, peer in ((Direction.FORWARD, "p0"), (Direction.BACKWARD, "p2")):
        assert table.ready(lambda version: True) is None
        assert table.wants(microbatch, direction, PeerId(peer), 1)
        table.arrived(microbatch, direction)
        assert not table.wants(microbatch, direction, PeerId(peer), 1), "once is enough"
    assert table.ready(lambda version: version < 4) is None
    assert table.ready(lambda version: version == 4) == command()
    assert len(table) == 0


def test_the_ends_of_the_pipeline_need_one_input_only() -> None:
    first, last = CheckTable(0), CheckTable(2)
    assert first.take(command(stage=0))
    assert [one.direction for one in first.lacking(command().microbatch)] == [Direction.BACKWARD]
    assert last.take(command(stage=2))
    assert [one.direction for one in last.lacking(command().microbatch)] == [Direction.FORWARD]


def test_a_newer_check_replaces_an_older_one_and_not_the_other_way_round() -> None:
    table = CheckTable(1)
    assert table.take(command(number=2))
    assert not table.take(command(number=1))
    assert table.is_open(command(number=2))
    table.arrived(command().microbatch, Direction.FORWARD)
    assert table.take(command(number=3))
    assert len(table.lacking(command().microbatch)) == 2, "what came for the older one is not known to be the same"


def test_what_does_not_come_by_itself_is_asked_for_at_the_second_look() -> None:
    table = CheckTable(1)
    table.take(command())
    assert table.overdue() == []
    assert [(one.direction, one.of.peer) for one in table.overdue()] == [
        (Direction.FORWARD, "p0"),
        (Direction.BACKWARD, "p2"),
    ]


def test_an_output_is_lent_to_the_named_checker_only_and_until_the_step_is_over() -> None:
    before, behind, far = CheckTable(0), CheckTable(2), CheckTable(3)
    assert before.lend(command()) is Direction.FORWARD
    assert behind.lend(command()) is Direction.BACKWARD
    assert far.lend(command()) is None
    microbatch = command().microbatch
    assert before.may_ask(microbatch, Direction.FORWARD, HERE, 1)
    assert not before.may_ask(microbatch, Direction.BACKWARD, HERE, 1)
    assert not before.may_ask(microbatch, Direction.FORWARD, PeerId("stranger"), 1)
    assert not before.may_ask(microbatch, Direction.FORWARD, HERE, 2)
    before.forget(lambda one: one.step <= 5)
    assert not before.may_ask(microbatch, Direction.FORWARD, HERE, 1)


def test_checks_are_forgotten_with_their_step_and_bounded() -> None:
    table = CheckTable(1)
    table.take(command(0))
    table.take(command(1, step=6))
    assert table.forget(lambda one: one.step == 5) == [command(0).microbatch]
    assert table.drop(lambda one: one.index == 1) == [command(1, step=6).microbatch]
    for index in range(CHECKS_MAX):
        assert table.take(command(index))
    assert not table.take(command(CHECKS_MAX))
