"""Peers that come back to a job with which a restarted scheduler goes on; and a decided step that begins over."""

from __future__ import annotations

import pytest

from scheduler.brain import inputs
from scheduler.brain.inputs import Happened, Resumed
from scheduler.brain.outputs import CommitRow, Fail, Released
from scheduler.brain.state.brain_state import Mode
from swarm.errors import OutOfMemory
from swarm.types import PeerId, Round
from swarm.wire.messages import Average, Check, Checked, Commit, Committed, Evaluate, Failed, Route
from tests.support.brain import JOB, S0, S1, A, B, C, D, Swarm, hello

E, F, G = PeerId("e"), PeerId("f"), PeerId("g")
ROWS = tuple(CommitRow(0, step, {S0: Round(3, 1), S1: Round(3, 1)}, 1.0, 1.0, 1.0, 0.1, False, 8) for step in (1, 2))


def restarted(*more: PeerId) -> Swarm:
    stages = dict.fromkeys((A, B, *more), 0) | {C: 1, D: 1}
    begin = Resumed(stages, 3, ROWS, (), 5.0)
    return Swarm(stages, begin=begin, epoch=4, steps=9, microbatches=2, recover=True)


def dials(swarm: Swarm, peer: PeerId, *, version: int = 3, digest: str = "after") -> None:
    swarm.tell(Happened(peer, hello(peer, version, swarm.stage_of[peer])))
    swarm.hear(peer, swarm.holding(peer))
    for step in (1, 2):
        swarm.hear(peer, Committed(0, step, step + 1, swarm.stage_of[peer], digest if step == 2 else "after"))


def test_a_replica_that_fails_first_ends_no_job_whose_others_are_still_to_come_back() -> None:
    swarm = restarted()
    dials(swarm, A)
    swarm.hear(A, Failed(JOB, OutOfMemory.code, "no memory left", ""))
    for peer in (B, C, D):
        dials(swarm, peer)
    assert [output.peer for output in swarm.outputs if isinstance(output, Released)] == [A]
    assert swarm.brain.mode is Mode.RUNNING


def test_no_digest_is_outvoted_before_all_are_back() -> None:
    """Two of three replicas were back, each with another digest. The job failed, as there was no majority."""
    swarm = restarted(E)
    dials(swarm, A, digest="odd")
    for peer in (B, C, D, E):
        dials(swarm, peer)
    assert not [output for output in swarm.outputs if isinstance(output, Fail)]
    assert [output.peer for output in swarm.outputs if isinstance(output, Released)] == [A]


@pytest.mark.parametrize("version", [0, 5])
def test_who_dials_again_with_another_version_is_released_before_the_others_are_back(version: int) -> None:
    """Its commits were looked for, and the job ended with a KeyError."""
    swarm = restarted()
    dials(swarm, C)
    swarm.tell(Happened(C, hello(C, version, 1)))
    for peer in (A, B, D):
        dials(swarm, peer)
    assert [output.peer for output in swarm.outputs if isinstance(output, Released)] == [C]
    assert swarm.brain.mode is Mode.RUNNING


def test_a_decided_step_that_begins_over_leaves_no_microbatch_to_a_peer_that_is_gone() -> None:
    """It had a hop that another had done, so it held nothing; the job ended with a KeyError."""
    peers = dict.fromkeys((A, B, E, F), 0) | dict.fromkeys((C, D, G), 1)
    measured = {"eval_every_steps": 1, "evaluation_microbatches": 1, "evaluation_tokens": 8}
    swarm = Swarm.loaded(peers, steps=4, microbatches=3, recover=True, **measured)
    swarm.until_written()
    swarm.write()
    commits = dict(swarm.pop(Commit))
    for peer in commits.keys() - {G}:
        swarm.obey(peer, commits[peer])
    swarm.pop(Evaluate)  # it stays under way, so step 1 is decided and not written
    before = {route.microbatch.index: route for _, route in swarm.pop(Route) if route.microbatch.step == 1}
    slow = before[0].hops[0].peer
    swarm.tell(inputs.PeerSuspect(slow, "silent", False))
    routes = before | {route.microbatch.index: route for _, route in swarm.pop(Route) if route.microbatch.step == 1}
    named = routes[0].hops[0].peer
    swarm.tell(inputs.PeerBack(slow))
    swarm.obey(slow, before[0])
    for index, route in routes.items():
        for stage, hop in enumerate(route.hops):
            if (index, stage) != (0, 0):
                swarm.obey(hop.peer, route)
    swarm.answer(Average)
    swarm.tell(inputs.PeerGone(named, "killed"))
    swarm.obey(G, commits[G], digest="odd")
    assert named not in [hop.peer for hop in swarm.brain._state.ledger.hops(1, 0) if hop is not None]
    assert swarm.brain.mode is Mode.RUNNING


def test_a_decided_step_does_not_wait_for_a_check_that_no_replica_can_be_asked_for() -> None:
    """The step waited for ever for a spot check that no replica was asked for."""
    peers = dict.fromkeys((A, B, E), 0) | dict.fromkeys((C, D, G), 1)
    swarm = Swarm.loaded(peers, steps=3, microbatches=2, recover=True, spot_check=1.0)
    routes = {route.microbatch.index: route for _, route in swarm.pop(Route)}
    slow, first = routes[0].hops[0].peer, routes[0]
    swarm.tell(inputs.PeerSuspect(slow, "silent", False))
    routes |= {route.microbatch.index: route for _, route in swarm.pop(Route)}
    named = routes[0].hops[0].peer
    swarm.tell(inputs.PeerBack(slow))
    does(swarm, slow, first, 0)
    for index, route in routes.items():
        for stage, hop in enumerate(route.hops):
            if (index, stage) != (0, 0):
                does(swarm, hop.peer, route, stage)
    for peer, check in swarm.pop(Check):
        index, stage = check.microbatch.index, check.stage
        if check.hops[stage].peer == peer and (index, stage) != (0, 0):
            done = Checked(
                check.microbatch, stage, check.number, True, float(stage * (1 + index)), digests(index, stage)
            )
            swarm.hear(peer, done)
    averages = swarm.pop(Average)
    averages.sort(key=lambda pair: pair[0] not in (slow, named))
    for peer, average in averages:
        if peer not in (slow, named):
            for silent in (slow, named):
                swarm.tell(inputs.PeerSuspect(silent, "silent", False))
        swarm.obey(peer, average)
    for silent in (slow, named):
        swarm.tell(inputs.PeerBack(silent))
    for _ in range(40):
        swarm.now_s += 5.0
        swarm.tell(inputs.Tick())
        swarm.pop(Check)
    assert "spot check" not in swarm.brain.waiting_for()


def digests(index: int, stage: int) -> tuple[str, str, str, str]:
    return (f"y{index}", "", "", f"g{index}") if stage else ("", f"y{index}", f"g{index}", "")


def does(swarm: Swarm, peer: PeerId, route: Route, stage: int) -> None:
    swarm.obey(peer, route, digests=digests(route.microbatch.index, stage))
