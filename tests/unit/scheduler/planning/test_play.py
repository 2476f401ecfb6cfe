"""The play: production's brain leads modelled stage servers, who come, die, leave and stall as real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool, PoolLink
from scheduler.planning.search import basis_of
from swarm.errors import SwarmError
from swarm.job.resolve import choose
from tests.support.pools import machine, planned_job

STAGES, MICROBATCHES = 3, 16


def fleet(speeds: Sequence[float] = (1.0, 2.0), line: float = 1e11) -> PeerPool:
    """One such peer in each stage, by number."""
    names = [(f"s{stage}-{number}", speed) for number, speed in enumerate(speeds) for stage in range(STAGES)]
    peers = tuple(machine(name, speed=3e10 * speed, line=line) for name, speed in names)
    return PeerPool(peers, {("", ""): PoolLink(0.001, 1e12)})


def play(pool: PeerPool, *, overlap: int = 4, seed: int = 0, recut: str = "off", **rules: float) -> Play:
    spec = planned_job(
        9,
        training={"global_batch_sequences": 2 * MICROBATCHES, "microbatch_sequences": 2},
        data={"sequence_length": 128},
    )
    spec = spec.having("pipeline", stages=STAGES, overlap=overlap, sync_steps=0, recut=recut)
    resolved, _ = choose(spec, basis_of(pool, spec))
    places = tuple(
        tuple(peer.name for peer in pool.peers if peer.name.startswith(f"s{stage}")) for stage in range(STAGES)
    )
    plan = Plan(resolved.split, places, 2, overlap)
    return Play(pool, plan, workload(CutBound(pool, resolved)), PlayRules(**rules), seed)  # type: ignore[arg-type]


def test_a_play_repeats_itself_and_another_seed_is_another_play() -> None:
    first, again, other = (play(fleet(), seed=seed).run() for seed in (1, 1, 2))
    assert first == again != other
    assert first.tokens_per_s == pytest.approx(other.tokens_per_s, rel=0.15)


def test_each_microbatch_of_a_committed_step_is_computed_once_in_each_stage() -> None:
    played = play(fleet())
    played.run()
    counts = played.brain.counts()
    steps = len(played.committed_s)
    assert (counts.violations, dict(counts.reroutes), counts.duplicates) == (0, {}, 0)
    assert all(steps * MICROBATCHES <= done <= (steps + 2) * MICROBATCHES for done in counts.accumulated)
    played.brain.validate()


@pytest.mark.parametrize("overlap", [0, 4, MICROBATCHES])
def test_a_play_does_less_than_devices_and_lines_could_and_least_without_overlap(overlap: int) -> None:
    whole = play(fleet(), overlap=overlap)
    rate = whole.run()
    possible = min(9e10 / work for work in whole.load.work) * whole.load.tokens
    assert 0.6 * possible < rate.tokens_per_s < possible
    assert rate.tokens_per_s >= play(fleet(), overlap=0).run().tokens_per_s
    narrow = play(fleet(line=2e6), overlap=overlap)
    carried = 2e6 * 2 / (8.0 * whole.load.boundary_bytes) * whole.load.tokens  # by the two lines of a stage, one way
    assert narrow.run().tokens_per_s < min(carried, rate.tokens_per_s)


def test_a_replica_that_falls_silent_is_replaced_and_joins_again_once_it_has_fetched_its_stage() -> None:
    played = play(fleet((1.0, 1.0, 2.0)))
    pool = fleet((1.0, 1.0, 2.0))
    victim = pool.peers[0]
    played.watch()
    played.later(40.0, played.die, victim.name)
    played.run_until(60.0)
    assert any("is gone: silent" in reason for reason in played.reasons)
    before = len(played.committed_s)
    played.come(victim)
    played.run_until(400.0)
    fetch_s = 8.0 * min(played.load.state_bytes) / victim.down_bits_per_s
    assert any("joined: it took" in reason for reason in played.reasons)
    assert fetch_s < 60.0
    assert len(played.committed_s) > before
    assert played.brain.counts().violations == 0
    played.brain.validate()


def test_one_stage_averages_its_tied_embedding_with_all_else() -> None:
    pool, job = fleet(), planned_job(2, training={"global_batch_sequences": 4, "microbatch_sequences": 1})
    job = job.having("model", config={**job.model.config, "tie_word_embeddings": True}).having("pipeline", stages=1)
    resolved, _ = choose(job, basis_of(pool, job))
    plan = Plan(resolved.split, (tuple(peer.name for peer in pool.peers),), 1, 0)
    played = Play(pool, plan, workload(CutBound(pool, resolved)))
    for _ in range(2000):
        played.turn()
    assert (played.counts["stalls"], played.brain.counts().violations) == (0, 0)
    assert len(played.committed_s) > 10


def test_a_job_that_begins_again_and_again_or_comes_to_rest_ends_its_play_with_an_error() -> None:
    """Its stage servers report a unit without elements, and the brain refuses them all, each time."""
    whole = play(fleet())
    bad = replace(whole.load, unit_bytes=dict.fromkeys(whole.load.units, 0.0))
    with pytest.raises(SwarmError, match=r"never makes 3 steps: .* it says that unit stage-\d has 0 elements"):
        Play(whole._pool, whole._plan, bad).run()
    for peer in fleet().peers:
        whole.die(peer.name)
    with pytest.raises(SwarmError, match="never makes 3 steps: nothing more happens"):
        whole.run()


def test_rounds_go_by_site_where_that_is_faster_in_a_play_and_by_the_bound_unless_the_job_checks_parts() -> None:
    """Of four members at each of two sites flat rounds send four units over the link between them, and others one."""
    peers = tuple(machine(f"{site}{at}", site, speed=3e10, line=1e11) for site in ("lyon", "oslo") for at in range(4))
    near, far = PoolLink(0.001, 1e11), PoolLink(0.01, 1e9)
    pool = PeerPool(peers, {(a, b): near if a == b else far for a in ("lyon", "oslo") for b in ("lyon", "oslo")})
    rounds_s, steps_s = list[float](), list[float]()
    for aggregate in ("mean", "centered_clip"):
        job = planned_job(
            2, training={"global_batch_sequences": 16, "microbatch_sequences": 1}, limits={"min_replicas": 4},
            averaging={"aggregate": aggregate}, pipeline={"stages": 1, "overlap": 0},
        )  # fmt: skip
        facts = CutBound(pool, choose(job, basis_of(pool, job))[0])
        plan = Plan(facts.split, (tuple(peer.name for peer in peers),), 1, 0)
        rounds_s.append(facts.of([range(8)]).round_s)
        steps_s.append(Play(pool, plan, workload(facts)).run().step_s)
    saved_s = 3.0 * facts.unit_bits[0] / 1e9
    assert rounds_s[1] - rounds_s[0] == pytest.approx(saved_s, rel=0.01)
    assert steps_s[1] - steps_s[0] == pytest.approx(saved_s, rel=0.03)


def test_a_replica_that_moves_serves_its_new_stage() -> None:
    """The order to load came with the release from the old stage, and was lost."""
    names = [("s0-0", 0.2), *((f"s{stage}-{number}", 1.0) for stage in (1, 2) for number in range(3))]
    played = play(PeerPool(tuple(machine(name, speed=3e10 * speed, line=1e11) for name, speed in names), {}))
    played.watch()
    played.run_until(400.0)
    assert played.counts["moves"] > 0
    assert sum("joined: it took" in reason for reason in played.reasons) == played.counts["moves"]
    assert all(server.stage >= 0 for server in played.servers.values())


def test_a_peer_that_leaves_hands_its_work_over_and_nothing_is_done_again() -> None:
    played = play(fleet((1.0, 1.0)))
    played.later(40.0, played.leave, "s0-1")
    played.run_until(200.0)
    assert any("s0-1 (stage 0) has handed over its work" in reason for reason in played.reasons)
    assert dict(played.brain.counts().reroutes) == {}


def test_a_job_without_a_stage_goes_back_to_its_newest_checkpoint_and_on_when_its_peers_are_back() -> None:
    pool = fleet()
    played = play(pool, checkpoint_s=60.0)
    lost = [peer for peer in pool.peers if not peer.name.startswith("s0")]
    played.watch()
    played.run_until(150.0)
    saved = len(played.committed_s)
    for peer in lost:
        played.die(peer.name)
    played.run_until(300.0)
    assert played.counts["stalls"] == 1
    assert len(played.committed_s) <= saved + 1, "two peers are too few for three stages"
    for peer in lost:
        played.come(peer)
    played.run_until(600.0)
    again = played.counts["steps_done_again"]
    assert 0 < again <= saved
    assert len(played.committed_s) > saved
    assert played.brain.settings.first_step > 0


@pytest.mark.parametrize("recut", ["stall", "off"])
def test_a_stalled_job_that_may_be_cut_anew_goes_on_with_the_stages_that_can_be_served(recut: str) -> None:
    pool = fleet()
    played = play(pool, checkpoint_s=60.0, recut=recut)
    played.watch()
    played.run_until(150.0)
    for peer in pool.peers[2:]:
        played.die(peer.name)
    played.run_until(400.0)
    before = len(played.committed_s)
    assert (played.counts["stalls"], played.counts["recuts"]) == (1, 0), "it waits for limits.no_progress_s"
    played.run_until(1200.0)
    is_cut = recut == "stall"
    assert (played.counts["recuts"], len(played.brain.settings.split)) == ((1, 2) if is_cut else (0, 3))
    assert (len(played.committed_s) > before) is is_cut
    played.brain.validate()
