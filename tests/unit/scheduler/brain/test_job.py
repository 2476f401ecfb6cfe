"""One job's decisions: an event in, outputs out."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from scheduler.brain.commit.rounds import ALONE_MAX, SETS_MAX
from scheduler.brain.inputs import (
    Cancel,
    CheckpointKept,
    Happened,
    Join,
    PeerBack,
    PeerGone,
    PeerSuspect,
    RelaysHere,
    ReplicaRecord,
    Resumed,
    RowDurable,
    Start,
    Tick,
    Unreached,
)
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import CommitRow, Fail, Finish, Note, PublishCheckpoint, Send, Stopped
from scheduler.brain.replicas.admission import COMPILE_S_MAX, JOIN_S_MIN
from scheduler.brain.routing.policies import POLICIES
from scheduler.brain.state.brain_state import Mode
from scheduler.brain.state.links import ROUNDS_MAX
from swarm.errors import GradientRange, OutOfMemory, PeerUnavailable
from swarm.types import TIED_UNIT, PeerId, Round, RoundFault, Routing
from swarm.wire.messages import (
    AbortRound,
    Accumulated,
    Admit,
    Average,
    Commit,
    Committed,
    Failed,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    LoadStage,
    ParameterNorm,
    Release,
    RoundFailed,
    Route,
    SaveStage,
    UnitRound,
    UnitSize,
    Void,
)
from tests.support.brain import JOB, S0, S1, A, B, C, D, Swarm, routes_in, sends


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


def test_a_job_runs_from_loading_to_saved() -> None:
    swarm = Swarm.loaded()
    for step in range(2):
        swarm.until_written()
        assert swarm.rows[-1].step == step
        swarm.commit()
    assert swarm.brain.mode is Mode.SAVING
    savers = swarm.pop(SaveStage)
    assert [(swarm.stage_of[peer], command.version) for peer, command in savers] == [(0, 2), (1, 2)]
    for peer, command in savers:
        outputs = swarm.obey(peer, command)
    move = outputs[-1]
    assert isinstance(move, PublishCheckpoint)
    assert {stage: hashes[0].name for stage, hashes in move.parameters.items()} == {0: "w0", 1: "w1"}
    assert swarm.brain.waiting_for() == "waits until the checkpoint at step 2 is written"
    outputs = swarm.tell(CheckpointKept(2))
    assert isinstance(outputs[-1], Finish)
    assert [one.peer for one in sends(outputs, Release)] == [A, B, C, D]
    assert swarm.brain.counts().microbatches == 8
    assert swarm.brain.counts().committed_steps == 2
    counts = swarm.brain.counts()
    assert (counts.replayed, counts.duplicates, counts.violations) == (0, 0, 0)
    assert swarm.hear(A, Heartbeat(1)) == swarm.tell(Cancel("enough"), 2.0) == []


def test_a_job_with_its_optimizer_on_the_host_tells_each_replica_so() -> None:
    for on_host, place in ((True, "cpu"), (False, "device")):
        swarm = Swarm(steps_on_host=on_host)
        assert [command.step_on for _, command in swarm.pop(LoadStage)] == [place] * 4


def test_a_replica_that_loads_something_else_fails_the_job(swarm: Swarm) -> None:
    swarm.hear(A, Loaded(JOB, 0, 1, 0, "x", (UnitSize(S1, 10),)))
    assert "a (stage 0) loaded stage 1, version 0, units stage-1 instead of stage 0" in swarm.failure.message


def test_replicas_that_disagree_about_the_size_of_a_unit_fail_the_job(swarm: Swarm) -> None:
    swarm.hear(A, Loaded(JOB, 0, 0, 0, "x", (UnitSize(S0, 10),)))
    swarm.hear(B, Loaded(JOB, 0, 0, 0, "x", (UnitSize(S0, 11),)))
    swarm.answer(LoadStage, peer=C)
    swarm.answer(LoadStage, peer=D)
    assert "elements of unit stage-0: a, b (a holds 10, b holds 11)" in swarm.failure.message


def test_microbatches_are_fed_in_order_to_every_hop_and_bounded_in_flight() -> None:
    swarm = Swarm.loaded(max_in_flight=2)
    routes = swarm.pop(Route)
    assert [route.microbatch.index for _, route in routes] == [0, 0, 1, 1]
    assert [peer for peer, _ in routes] == [hop.peer for _, route in routes[::2] for hop in route.hops]
    assert routes[0][1].version == 0
    assert routes[0][1].tokens == b""
    peer, route = routes[1]
    assert sends(swarm.obey(peer, route), Route) == [], "one stage has it, not all"
    peer, route = routes[0]
    fed = sends(swarm.obey(peer, route), Route)
    assert {one.command.microbatch.index for one in fed if isinstance(one.command, Route)} == {2}
    assert swarm.brain.counts().in_flight == 2


def test_every_step_is_divided_by_the_number_of_its_own_targets() -> None:
    swarm = Swarm(tokens_of=lambda step: 8 + step)
    for step in range(2):
        swarm.until_averaging()
        averages = [command for _, command in swarm.inbox if isinstance(command, Average)]
        assert {(command.step, command.tokens) for command in averages} == {(step, 8 + step)}
        swarm.answer(Average)
        assert swarm.rows[-1].tokens == 8 + step
        swarm.commit()


def test_the_row_holds_loss_norm_scale_and_rounds_and_is_written_before_any_commit() -> None:
    swarm = Swarm.written()
    (row,) = swarm.rows
    assert row == CommitRow(
        timeline=0,
        step=0,
        rounds={S0: Round(3, 1), S1: Round(3, 2)},
        loss=(1.0 + 2.0 + 3.0 + 4.0) / 8,
        norm=math.sqrt(8.0),
        scale=1.0 / (math.sqrt(8.0) + 1e-6),
        learning_rate=0.5,
        skip=False,
        tokens=8,
    )
    assert swarm.pop(Commit) == []
    commits = sends(swarm.write(), Commit)
    assert [one.peer for one in commits] == [A, B, C, D]
    assert commits[0].command == Commit(0, 0, 1, (UnitRound(S0, Round(3, 1)),), 0.5, row.scale, False)
    assert swarm.tell(RowDurable(0)) == [], "a repeat"


def test_without_overlap_the_next_step_is_fed_once_the_commit_was_sent() -> None:
    swarm = Swarm.written()
    assert swarm.brain.counts().in_flight == 0
    outputs = swarm.write()
    first_route = next(n for n, one in enumerate(outputs) if one in sends(outputs, Route))
    last_commit = max(n for n, one in enumerate(outputs) if one in sends(outputs, Commit))
    assert last_commit < first_route
    assert {one.command.version for one in sends(outputs, Route) if isinstance(one.command, Route)} == {1}


def test_with_overlap_the_first_microbatches_of_a_step_flow_while_the_one_before_averages() -> None:
    swarm = Swarm.averaging(overlap=2, sync_steps=1, steps=3, max_in_flight=100)
    made = {(route.microbatch.step, route.microbatch.index): route.version for _, route in routes_in(swarm.outputs)}
    assert made == {(0, 0): 0, (0, 1): 0, (0, 2): 0, (0, 3): 0, (1, 0): 0, (1, 1): 0}
    before = len(swarm.outputs)
    swarm.answer(Average)
    swarm.tell(RowDurable(0))
    made = {
        (route.microbatch.step, route.microbatch.index): route.version for _, route in routes_in(swarm.outputs[before:])
    }
    assert made == {(1, 2): 1, (1, 3): 1, (2, 0): 1, (2, 1): 1}, "their weights were made by this commit"


# What is not finite -------------------------------------------------------------------------------------------------


def go_not_finite(swarm: Swarm) -> None:
    swarm.answer(LoadStage)
    for peer, route in swarm.pop(Route):
        bad = route.microbatch.index == 2 and swarm.stage_of[peer] == 1
        swarm.obey(peer, route, finite=not bad)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_stages_without_a_round(swarm: Swarm) -> None:
    go_not_finite(swarm)
    assert swarm.pop(Average) == []
    (row,) = swarm.rows
    assert (row.skip, row.rounds, row.norm, row.scale, row.loss) == (True, {}, 0.0, 0.0, 10.0 / 8)
    commits = sends(swarm.write(), Commit)
    assert [one.peer for one in commits] == [A, B, C, D]
    assert all(isinstance(one.command, Commit) and one.command.skip for one in commits)
    assert any(isinstance(one, Note) and "changes no weight" in one.message for one in swarm.outputs)


def test_a_gradient_that_is_not_finite_fails_the_job_if_it_shall() -> None:
    swarm = Swarm(fail_on_nonfinite=True)
    go_not_finite(swarm)
    assert swarm.failure.code == GradientRange.code
    assert "the gradient of step 0 is not finite" in swarm.failure.message
    assert swarm.rows == []


def test_a_mean_whose_norm_is_not_finite_skips_the_step() -> None:
    swarm = Swarm.averaging()
    for peer, command in swarm.pop(Average):
        swarm.obey(peer, command, norms=(ParameterNorm("w", math.inf),))
    assert [row.skip for row in swarm.rows] == [True]


# What goes wrong -----------------------------------------------------------------------------------------------------


def test_a_stage_server_that_is_gone_fails_the_job_and_is_named() -> None:
    swarm = Swarm.loaded()
    outputs = swarm.tell(PeerGone(C, "session broke"))
    assert swarm.failure.code == PeerUnavailable.code
    assert swarm.failure.message == "stage server c (stage 1) is gone: session broke"
    assert [one.peer for one in sends(outputs, Release)] == [A, B, D]
    assert swarm.tell(PeerGone(A, "session broke"), 2.0) == []
    assert swarm.hear(A, Heartbeat(1)) == []


def test_a_stage_server_that_fails_fails_the_job_with_its_own_words(swarm: Swarm) -> None:
    swarm.hear(B, Failed(JOB, OutOfMemory.code, "needs 9 GiB, has 8", "use more stages"))
    wanted = Fail(OutOfMemory.code, "stage server b (stage 0) cannot go on: needs 9 GiB, has 8", "use more stages")
    assert swarm.failure == wanted


def test_cancel_releases_everybody_and_ends_the_brain() -> None:
    swarm = Swarm.written()
    outputs = swarm.tell(Cancel("enough"), 2.0)
    assert [one.peer for one in sends(outputs, Release)] == [A, B, C, D]
    assert swarm.write() == [], "the row that was being written changes nothing any more"
    assert swarm.brain.mode is Mode.ENDED


def test_repeated_and_foreign_events_change_nothing() -> None:
    swarm = Swarm.loaded()
    routes = swarm.pop(Route)
    for _ in range(2):
        for peer, route in routes:
            swarm.obey(peer, route)
            assert swarm.hear(PeerId("stranger"), Accumulated(route.microbatch, 0, 1, True, 0.0, 0.1, 0.2, 0.0)) == []
    averages = swarm.pop(Average)
    assert len(averages) == 4
    for peer, average in averages * 2:
        swarm.obey(peer, average)
    assert len(swarm.rows) == 1
    assert swarm.brain.counts().duplicates == 8 + 4
    assert swarm.brain.counts().violations == 0


def test_a_round_that_fails_on_a_link_is_run_again_under_the_next_number() -> None:
    swarm = Swarm.averaging()
    average = next(command for peer, command in swarm.pop(Average) if peer == A)
    failed = RoundFailed(0, 0, S0, average.round, f"{PeerUnavailable.code}: no answer", "b")
    outputs = swarm.hear(A, failed)
    assert [(one.peer, type(one.command)) for one in outputs if isinstance(one, Send)] == [
        (A, AbortRound),
        (B, AbortRound),
        (A, Average),
        (B, Average),
    ]
    again = sends(outputs, Average)[0].command
    assert isinstance(again, Average)
    assert again.round > average.round
    assert again.members == average.members
    assert swarm.obey(A, average) == [], "the old round is over"
    assert swarm.hear(B, failed) == [], "and so is its failure"


def fails(swarm: Swarm, number: int, told: str, accused: str, by: PeerId = A) -> None:
    """Each ten seconds a member says of the newest round of its stage that it failed."""
    swarm.tell(Tick(), 10.0 * number)
    average = next(command for peer, command in reversed(swarm.pop(Average)) if peer == by)
    swarm.tell(Happened(by, RoundFailed(0, 0, S0, average.round, told, accused)), 10.0 * number)


def test_of_a_pair_that_keeps_failing_one_leaves_and_its_work_is_done_again() -> None:
    swarm = Swarm.averaging(recover=True)
    for number in range(ROUNDS_MAX):
        assert not swarm.pop(Release), number
        fails(swarm, number, "E1101: no answer", "b")
        if number in range(1, ROUNDS_MAX - 1):
            assert swarm.brain.due_s > 10.0 * number, "it is not repeated at once"
    ((leaver, _),) = swarm.pop(Release)
    assert leaver in (A, B)
    assert any("cannot average with the others" in one.message for one in swarm.outputs if isinstance(one, Note))
    swarm.answer(Route)
    assert {peer for peer, _ in swarm.pop(Average)} == {A, B, C, D} - {leaver}


@pytest.mark.parametrize(("unreached", "speaks"), [(B, A), (A, B), (B, B), (A, A)])
def test_of_two_that_do_not_reach_each_other_the_one_that_the_scheduler_does_not_reach_either_leaves(
    unreached: PeerId, speaks: PeerId
) -> None:
    """The scheduler could not dial b. a accused it, did less of the step and left; b, which nobody reached, stayed."""
    swarm = Swarm.averaging(recover=True, steps=3)
    swarm.tell(Unreached((D, unreached)))
    other = B if speaks == A else A
    for number in range(2):
        assert swarm.pop(Release) == [], "both say so: twice is enough, and once is not"
        fails(swarm, number, "no link", other, speaks)
    assert [peer for peer, _ in swarm.pop(Release)] == [unreached]


def test_a_step_whose_averaging_rests_says_between_whom_and_until_when() -> None:
    """People read "waits for    step 0: waits for"."""
    swarm = Swarm.averaging(recover=True, steps=3)
    for number in range(2):
        fails(swarm, number, "no link", B)
    waits = swarm.brain.waiting_for()
    assert waits.startswith(f"step 0: waits for {C}, {D}, which average {S1}; tries the averaging again in 1 s: ")
    assert waits.endswith(f"{A} and {B} do not reach each other")


def blaming_relays(says: dict[PeerId, str], rounds: int, *before: RelaysHere, hidden: str = "") -> Swarm:
    """Rounds fail every ten seconds; who speaks up, and whom it does not reach because no relay answers."""
    records = [
        ReplicaRecord(PeerId(one), 1, "" if one in hidden else f"at {one}", "abcd".index(one) // 2) for one in "abcd"
    ]
    swarm = Swarm.averaging(begin=Start(tuple(records)), recover=True)
    for happened in before:
        swarm.tell(happened)
    for number in range(rounds):
        swarm.tell(Tick(), 10.0 * number)
        average = next(command for peer, command in reversed(swarm.pop(Average)) if peer == A)
        for peer, accused in says.items():  # the first one has the round given up
            told = f"E1302: {accused} took no part: no relay that leads to it answers"
            failed = RoundFailed(0, 0, S0, average.round, told, accused, RoundFault.RELAYS)
            swarm.tell(Happened(peer, failed), 10.0 * number)
    return swarm


def test_nobody_leaves_because_no_relay_answers() -> None:
    """Relays were out of reach for longer than four rounds, and the one that contributed less was expelled."""
    for swarm in (blaming_relays({A: "b"}, ALONE_MAX), blaming_relays({A: "b", B: "a"}, 4 * ALONE_MAX)):
        assert swarm.pop(Release) == []
        assert not any(isinstance(one, Fail) for one in swarm.outputs)


def test_who_alone_says_that_no_relay_answers_is_not_believed_for_ever() -> None:
    """A member that said so falsely held a step up until the job was taken back."""
    swarm = blaming_relays({A: "b"}, ALONE_MAX + 1)
    ((leaver, _),) = swarm.pop(Release)
    assert leaver == A, "nobody else says so, so it costs nobody else his place"


def test_nobody_leaves_while_the_scheduler_itself_sees_no_relay() -> None:
    """An outage that only one member could see cost one of the pair its place after forty seconds."""
    for hidden in "ab":
        swarm = blaming_relays({A: "b"}, 4 * ALONE_MAX, RelaysHere(False), hidden=hidden)
        assert swarm.pop(Release) == []
        swarm = blaming_relays({A: "b"}, ALONE_MAX + 1, RelaysHere(False), RelaysHere(True), hidden=hidden)
        assert [peer for peer, _ in swarm.pop(Release)] == [A]


@pytest.mark.parametrize("accused", ["b", ""])
def test_two_that_need_no_relay_are_not_excused_for_ever_by_an_outage(accused: str) -> None:
    """A liar held the job up for as long as the scheduler saw no relay, with none of the two behind one."""
    swarm = blaming_relays({A: accused}, ALONE_MAX, RelaysHere(False), hidden="cd")
    assert swarm.pop(Release) == []
    swarm = blaming_relays({A: accused}, ALONE_MAX + 1, RelaysHere(False), hidden="cd")
    assert [peer for peer, _ in swarm.pop(Release)] == [A]


def test_who_alone_blames_relays_and_has_a_stage_to_itself_costs_nobody_his_place() -> None:
    """The only replica of a stage could have one of another stage expelled, with tied weights."""
    swarm = Swarm.averaging({A: 0, C: 1, D: 1}, recover=True, units={S0: (0,), S1: (1,), TIED_UNIT: (0, 1)})
    numbers = set()
    for number in range(2 * ALONE_MAX):
        swarm.tell(Tick(), 10.0 * number)
        asked = (command for peer, command in reversed(swarm.pop(Average)) if peer == A)
        average = next(command for command in asked if command.unit == TIED_UNIT)
        owns = next(one.peer for one in average.members if one.stop > one.start and one.peer != A)
        numbers.add(average.round.number)
        failed = RoundFailed(0, 0, TIED_UNIT, average.round, "no relay answers", owns, RoundFault.RELAYS)
        swarm.tell(Happened(A, failed), 10.0 * number)
    assert swarm.pop(Release) == []
    assert not any(isinstance(one, Fail) for one in swarm.outputs)
    assert len(numbers) == 2 * ALONE_MAX, "rounds go on"


def test_words_about_relays_in_a_reason_excuse_nobody() -> None:
    """The code of an error was looked for in a text that the member writes."""
    swarm = Swarm.averaging(recover=True)
    for number in range(ROUNDS_MAX):
        fails(swarm, number, "E1302: E1102: no relay answers; E1203: its set is another", "b")
    assert len(swarm.pop(Release)) == 1


def test_who_says_again_and_again_that_its_set_is_another_leaves() -> None:
    """What it did was done again, and again, until the job was taken back."""
    swarm = Swarm.averaging(recover=True)
    for _ in range(SETS_MAX + 1):
        assert not swarm.pop(Release)
        average = next(command for peer, command in reversed(swarm.pop(Average)) if peer == A)
        swarm.hear(A, RoundFailed(0, 0, S0, average.round, "holds nothing", "", RoundFault.SET))
        swarm.answer(Route)
    assert [peer for peer, _ in swarm.pop(Release)] == [A]
    assert {peer for peer, _ in swarm.pop(Average)} == {B, C, D}


def test_a_member_is_not_blamed_for_slices_that_it_does_not_exchange() -> None:
    """The accuser, which accuses in vain, leaves: not the accused, although that one has done less."""
    third = PeerId("a3")
    swarm = Swarm.averaging({A: 0, B: 0, third: 0, C: 1}, recover=True)
    for number in range(ROUNDS_MAX + 2):
        swarm.tell(Tick(), 10.0 * number)
        average = next((command for peer, command in reversed(swarm.pop(Average)) if peer == A), None)
        if average is not None:
            failed = RoundFailed(0, 0, S0, average.round, "E1302: b took no part", "b" if number < 5 else "c")
            swarm.tell(Happened(A, failed), 10.0 * number)
    assert [peer for peer, _ in swarm.pop(Release)] == [A]


def test_two_that_cannot_reach_each_other_average_through_a_third() -> None:
    third = PeerId("a3")
    swarm = Swarm.averaging({A: 0, B: 0, third: 0, C: 1}, recover=True)
    average = next(command for peer, command in swarm.pop(Average) if peer == A)
    swarm.hear(A, RoundFailed(0, 0, S0, average.round, "E1302: b took no part", "b"))
    (again, *_) = (command for peer, command in swarm.pop(Average) if peer == A)
    assert [(member.peer, member.stop > member.start) for member in again.members] == [
        (A, False),
        (third, True),
        (B, False),
    ]


def test_a_round_that_fails_for_no_ones_link_fails_the_job_where_no_replica_can_be_spared() -> None:
    swarm = Swarm.averaging({A: 0, C: 1}, recover=True)
    for number in range(ROUNDS_MAX):
        fails(swarm, number, "E1200: sizes", "")
    assert "unit stage-0, step 0, failed: stage server a (stage 0) says E1200: sizes, 4 times" in swarm.failure.message


def test_a_member_that_refuses_its_set_is_void_and_its_work_is_done_again() -> None:
    swarm = Swarm.averaging()
    average = next(command for peer, command in swarm.pop(Average) if peer == A)
    outputs = swarm.hear(A, RoundFailed(0, 0, S0, average.round, "holds nothing", "", RoundFault.SET))
    kinds = [type(one.command) for one in outputs if isinstance(one, Send) and one.peer == A]
    assert kinds[:2] == [AbortRound, Void], "the seal is lifted, then the sums go, then new work comes"
    assert set(kinds[2:]) <= {Route}
    assert {one.peer for one in sends(outputs, AbortRound)} == {A, B, C, D}
    (void,) = sends(outputs, Void)
    assert void.command == Void(0, 0, 1)
    for one in sends(outputs, Route):
        assert isinstance(one.command, Route)
        assert one.command.hops[0].attempt > 1
        assert one.command.hops[1].attempt == 1, "the other stage keeps what it has"
    assert swarm.brain.counts().violations == 1
    assert swarm.brain.counts().replayed == 2
    swarm.answer(Route)
    swarm.answer(Average)
    assert [row.step for row in swarm.rows] == [0]


# With recovery -----------------------------------------------------------------------------------------------------


def test_with_recovery_a_decided_step_survives_the_loss_of_a_member() -> None:
    swarm = Swarm.written(recover=True)
    outputs = swarm.tell(PeerGone(A, "killed"), 2.0)
    assert sends(outputs, AbortRound, Void, Route) == []
    assert [one.peer for one in sends(swarm.write(), Commit)] == [B, C, D]
    swarm.answer(Commit)
    assert swarm.brain.counts().committed_steps == 1
    assert swarm.brain.counts().replayed == 0


def test_a_decided_step_is_done_again_if_all_of_a_stage_are_lost_who_hold_its_average() -> None:
    swarm = Swarm.loaded(overlap=4, steps=3, max_in_flight=100, recover=True)
    swarm.answer(Route)
    for peer, command in [one for one in swarm.pop(Average) if one[1].step == 1]:
        swarm.obey(peer, command)
    assert swarm.rows == [], "step 0 has not been averaged"
    new = PeerId("new")
    swarm.stage_of[new] = 0
    swarm.tell(Join(ReplicaRecord(new, 1, "at new", 0)), 2.0)
    ((_, load),) = swarm.pop(LoadStage)
    loaded = swarm.reply(new, load)
    assert isinstance(loaded, Loaded)
    swarm.hear(new, replace(loaded, join=load.join))
    assert [one.peer for one in sends(swarm.outputs, Admit)] == [new]
    swarm.tell(PeerGone(A, "killed"), 2.0)
    assert swarm.brain.counts().reroutes == {(0, "gone"): 2}, "B holds the average of step 1"
    outputs = swarm.tell(PeerGone(B, "killed"), 2.0)
    aborted = {
        (one.peer, one.command.step) for one in sends(outputs, AbortRound) if isinstance(one.command, AbortRound)
    }
    assert {(C, 1), (D, 1)} <= aborted
    while swarm.brain.mode.value != "saving":
        swarm.answer(Route)
        swarm.answer(Average)
        if len(swarm.rows) > swarm.brain.counts().committed_steps:
            swarm.write()
        swarm.answer(Commit)
    assert [row.step for row in swarm.rows] == [0, 1, 2]


def test_a_joiner_that_never_heard_that_it_was_admitted_is_told_again() -> None:
    swarm = Swarm.loaded(recover=True)
    new = PeerId("new")
    swarm.stage_of[new] = 0
    swarm.tell(Join(ReplicaRecord(new, 1, "at new", 0)), 2.0)
    ((_, load),) = swarm.pop(LoadStage)
    loaded = swarm.reply(new, load)
    assert isinstance(loaded, Loaded)
    outputs = swarm.hear(new, replace(loaded, join=load.join))
    (admitted,) = sends(outputs, Admit)
    hello = Hello(new, 1, 1, "0", "", "", "cpu", 1, 1 << 30, -1, JOB, 0, 0, stage=0, join=load.join)
    assert [one.command for one in sends(swarm.hear(new, hello), Admit, Release)] == [admitted.command]
    (released,) = sends(swarm.hear(new, replace(hello, join=load.join + 1)), Admit, Release)
    assert isinstance(released.command, Release), "that is another attempt"


def test_a_joiner_that_fetches_for_ever_is_given_up() -> None:
    swarm = Swarm.loaded(recover=True)
    swarm.tell(Join(ReplicaRecord(PeerId("new"), 1, "at new", 0)), 2.0)
    assert sends(swarm.tell(Tick(), JOIN_S_MIN), Release) == []
    assert [one.peer for one in sends(swarm.tell(Tick(), JOIN_S_MIN + 2.0), Release)] == ["new"]


def test_a_joiner_that_has_to_compile_its_layers_may_take_longer() -> None:
    swarm = Swarm.loaded(recover=True, compiles=True)
    swarm.tell(Join(ReplicaRecord(PeerId("new"), 1, "at new", 0)), 2.0)
    assert sends(swarm.tell(Tick(), COMPILE_S_MAX + JOIN_S_MIN), Release) == []
    assert [one.peer for one in sends(swarm.tell(Tick(), COMPILE_S_MAX + JOIN_S_MIN + 2.0), Release)] == ["new"]


def test_a_stage_that_is_expelled_is_lost_too() -> None:
    """It dials again with a version that nobody can go on from."""
    swarm = Swarm.loaded({A: 0, C: 1}, recover=True)
    hello = Hello(C, 1, 1, "0", "at c", "", "cpu", 1, 0, -1, JOB, 0, 7, (), 1, 0)
    *_, stopped = swarm.hear(C, hello)
    assert isinstance(stopped, Stopped)
    assert "stage server c (stage 1) is gone: it names version 7, which does not exist" in stopped.reason


def test_a_peer_that_is_gone_while_others_load_after_a_restart_is_not_compared_with() -> None:
    """Its `Loaded` stayed behind, and the next was compared with a replica that nobody knew: the scheduler ended."""
    swarm = Swarm({A: 0, B: 0, C: 1, D: 1}, recover=True)
    loaded = {peer: swarm.reply(peer, load) for peer, load in swarm.pop(LoadStage)}
    brain = JobBrain(swarm.brain.settings, Random(0))
    brain.step(Resumed(swarm.stage_of, 0, (), (), 5.0), 0.0)
    for peer, stage in swarm.stage_of.items():
        brain.step(Happened(peer, Hello(peer, 1, 1, "0", "", "", "cpu", 1, 1 << 30, -1, JOB, 0, 0, stage=stage)), 1.0)
    assert isinstance(loaded[A], Loaded)
    brain.step(Happened(A, replace(loaded[A], probe="other bits")), 1.0)
    brain.step(PeerGone(A, "killed"), 2.0)
    outputs = [one for peer in (B, C, D) for one in brain.step(Happened(peer, loaded[peer]), 3.0)]
    brain.validate()
    assert not [one for one in outputs if isinstance(one, Fail)]
    assert brain.mode is Mode.RUNNING


def test_after_a_restart_nobody_waits_for_commits_that_were_made_before_a_replica_joined() -> None:
    """It never makes them: the job waited for ever for it to say so."""
    swarm = Swarm(recover=True, steps=3)
    loaded = {peer: swarm.reply(peer, load) for peer, load in swarm.pop(LoadStage)}
    swarm.take([one for peer in (A, B, C, D) for one in swarm.brain.step(Happened(peer, loaded[peer]), 1.0)])  # type: ignore[arg-type]
    for _ in range(2):
        swarm.answer(Route)
        swarm.answer(Average)
        swarm.commit()
    brain = JobBrain(replace(swarm.brain.settings, epoch=4), Random(0))
    brain.step(Resumed(swarm.stage_of, 2, tuple(swarm.rows), (), 5.0), 0.0)
    for peer, stage in swarm.stage_of.items():
        brain.step(Happened(peer, Hello(peer, 1, 1, "0", "", "", "cpu", 1, 1 << 30, -1, JOB, 0, 2, stage=stage)), 1.0)
        event = loaded[peer]
        assert isinstance(event, Loaded)
        if peer == D:
            brain.step(Happened(peer, replace(event, version=2, digest="after", join=1)), 1.0)
            continue
        brain.step(Happened(peer, event), 1.0)
        for step in (0, 1):
            brain.step(Happened(peer, Committed(0, step, step + 1, stage, "after")), 1.0)
    brain.validate()
    assert "to commit" not in brain.waiting_for()
    assert "step 2" in brain.waiting_for()


def test_a_late_word_about_a_decided_step_changes_nothing() -> None:
    """A wrongly suspected replica says that it accumulated when its step is averaged without it."""
    swarm = Swarm.loaded({A: 0, B: 0}, microbatches=1, recover=True)
    ((first, route),) = swarm.pop(Route)
    swarm.tell(PeerSuspect(first, "silent"), 2.0)
    swarm.answer(Route)
    swarm.answer(Average)
    assert swarm.obey(first, route) == []
    assert (swarm.brain.counts().duplicates, swarm.brain.counts().violations, len(swarm.rows)) == (1, 0, 1)


def test_a_stage_of_suspects_only_waits_and_says_so() -> None:
    swarm = Swarm.loaded({A: 0, C: 1}, recover=True)
    swarm.tell(PeerSuspect(A, "silent"), 2.0)
    assert swarm.brain.waiting_for() == "step 0: 4 microbatches in flight; stage 0: no credit left at 1 replica"
    outputs = swarm.tell(PeerBack(A), 3.0)
    assert {one.peer for one in sends(outputs, Route)} == {A, C}


@pytest.mark.parametrize("routing", POLICIES)
def test_no_wiring_gives_work_to_a_suspect_until_it_is_heard_again(routing: Routing) -> None:
    swarm = Swarm.loaded(recover=True, steps=1, microbatches=24, max_in_flight=4, routing=routing)
    swarm.tell(PeerSuspect(A, "silent"), 2.0)
    swarm.tell(PeerBack(C), 2.0)  # was no suspect
    swarm.pop(Route, peer=A)
    for _ in range(3):
        swarm.answer(Route)
        assert swarm.brain.outstanding(A) == 0
    swarm.tell(PeerBack(A), 3.0)
    given = 0
    while swarm.brain.counts().in_flight:
        given += len([route for peer, route in swarm.inbox if peer == A and isinstance(route, Route)])
        swarm.answer(Route)
    assert given > 0
    swarm.answer(Average)
    assert len(swarm.rows) == 1


def test_without_recovery_a_suspect_is_only_noted() -> None:
    swarm = Swarm.loaded()
    (note,) = swarm.tell(PeerSuspect(A, "silent"), 2.0)
    assert note == Note("warning", "stage server a (stage 0) is suspect: silent")


def test_without_recovery_a_lost_session_ends_the_job_with_recovery_it_does_not() -> None:
    swarm = Swarm.loaded()
    swarm.tell(PeerSuspect(A, "session broke", session_lost=True), 2.0)
    assert swarm.failure.message == "stage server a (stage 0) is gone: session broke"
    swarm = Swarm.loaded(recover=True)
    swarm.tell(PeerSuspect(A, "session broke", session_lost=True), 2.0)
    assert swarm.brain.mode is Mode.RUNNING


def test_replicas_not_yet_measured_are_not_flooded_once_their_stage_is() -> None:
    swarm = Swarm.loaded({A: 0, B: 0, C: 0}, microbatches=60, max_in_flight=6)
    given = {A: 0, B: 0, C: 0}
    for _ in range(60):  # c never answers, and must not be believed to be a hundred times as fast as the others
        for peer, route in swarm.pop(Route):
            given[peer] += 1
            if peer != C:
                attempt = route.hops[0].attempt
                swarm.hear(peer, Accumulated(route.microbatch, 0, attempt, True, 0.0, 10.0, 0.0, 0.0))
    assert given[C] <= 3
    assert given[A] + given[B] == 60 - given[C]


def test_a_leaving_peer_is_noted(swarm: Swarm) -> None:
    (note,) = swarm.hear(A, Leaving("SIGTERM"))
    assert note == Note("warning", "stage server a (stage 0) wants to leave: SIGTERM")


def test_the_story_of_a_microbatch_names_every_transition() -> None:
    swarm = Swarm({A: 0}, microbatches=1)
    swarm.until_written()
    assert swarm.brain.story(0, 0) == [
        "1.000 s fed: stage 0 to a",
        "1.000 s stage 0 accumulated at a (attempt 1)",
        "step 0 full: averaging",
        "step 0 averaged: decided",
        "step 0 row handed to the store: writing",
    ]
