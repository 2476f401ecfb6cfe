"""The claims: a replica's record lives as long as it serves; suspects and those who leave get no work, and stay members
of what they had begun."""

from __future__ import annotations

import pytest

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.leaves import Leave
from scheduler.brain.state.pool import Pool, Trust
from swarm.types import JobId, PeerId
from swarm.wire.messages import Loaded

A, B, C, D = (PeerId(name) for name in "abcd")
REPORT = Loaded(JobId("job"), 0, 0, 3, "digest", ())


@pytest.fixture
def pool() -> Pool:
    made = Pool(2)
    for peer, stage in ((B, 0), (A, 0), (C, 1)):
        made.add(ReplicaRecord(peer, 1, f"at {peer}", stage))
    made.validate()
    return made


def test_replicas_are_kept_in_the_order_in_which_they_came(pool: Pool) -> None:
    assert list(pool) == [B, A, C]
    assert pool.by_stage == [[B, A], [C]]
    pool.sort()
    assert pool.by_stage == [[A, B], [C]]
    assert pool.name(C) == "stage server c (stage 1)"


def test_what_was_known_of_a_replica_goes_with_it(pool: Pool) -> None:
    pool[A].trust, pool[A].loaded, pool[A].since = Trust.DETACHED, REPORT, 3
    assert pool.remove(A).stage == 0
    pool.validate()
    assert A not in pool
    assert pool.was_lost(A)
    pool.add(ReplicaRecord(A, 2, "at a", 0))
    assert (pool[A].trust, pool[A].loaded, pool[A].since) == (Trust.TRUSTED, None, 0)
    assert pool.was_lost(A), "to come back is not to join: what it held is void"


def test_a_joiner_was_not_lost(pool: Pool) -> None:
    pool.remove(A)
    pool.joined(ReplicaRecord(A, 2, "at a", 1), REPORT, 5.0)
    assert not pool.was_lost(A)
    assert (pool[A].loaded, pool[A].joined_s, pool.stage_of(A)) == (REPORT, 5.0, 1)


def test_stages_without_replicas_are_named(pool: Pool) -> None:
    assert pool.empty_stages() == []
    pool.remove(C)
    assert pool.empty_stages() == [1]


def test_a_suspect_gets_no_work_and_is_a_member_still(pool: Pool) -> None:
    for trust in (Trust.SUSPECT, Trust.DETACHED):
        pool[A].trust = trust
        assert pool.suspects() == [A]
        assert not pool.may_work(A)
        assert A in pool.members(7)
    assert pool.spare() == {A}, "B is all that its stage has"


def test_a_leaving_replica_stays_a_member_of_the_open_steps(pool: Pool) -> None:
    pool.leaves.ask(A, Leave("drained"))
    assert pool.may_work(A), "it was only asked"
    assert pool.leaves.begin(pool.by_stage[0], pool.suspects(), 7) == [A]
    assert not pool.may_work(A)
    assert A in pool.members(6)
    assert A not in pool.members(7)


def test_donors_have_the_records_and_are_not_suspect(pool: Pool) -> None:
    pool.add(ReplicaRecord(D, 4, "at d", 0))
    pool[D].since = 5
    assert [one.peer for one in pool.donors(0, 4, C)] == [B, A]
    assert [one.peer for one in pool.donors(0, 5, C)] == [B, A, D]
    pool[B].trust = Trust.SUSPECT
    assert [(one.peer, one.incarnation, one.address) for one in pool.donors(0, 5, A)] == [(D, 4, "at d")]
