"""The series are those that the interface promises, and they go when what they describe is gone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from scheduler.metrics import PEERS_MAX, IslandFigures, SchedulerMetrics
from stage_server.metrics import StageServerMetrics
from swarm.process.metrics import SECONDS_BUCKETS
from swarm.types import IslandState, JobState, PeerId
from swarm.wire.messages import LinkSpeed

AT_WORK = (
    IslandFigures(IslandState.TRAINING, 4, 2, 1, {}),
    IslandFigures(IslandState.WAITING, 5, 1, 3, {}),
)


def _with_a_job() -> SchedulerMetrics:
    metrics = SchedulerMetrics("0.1.0", 1)
    metrics.job_opened("j1", "llama")
    metrics.job_state("j1", JobState.RUNNING)
    metrics.recovery("j1", (0, 2), {(1, "gone"): 3}, 1)
    metrics.recovery("j1", (0, 2), {(1, "gone"): 3}, 1)
    figures = {"loss": 2.5, "learning_rate": 1e-3, "grad_norm": 0.5, "tokens": 100, "microbatches": 4}
    for step in (1, 2):
        metrics.step_committed("j1", step=step, time_unix_s=1000.0 + step, **figures)
    metrics.evaluated("j1", step=2, loss=2.25)
    metrics.checkpoint_kept("j1", duration_s=2.0, time_unix_s=1002.0, size_bytes=100)
    metrics.rebalanced("j1", duration_s=3.0)
    metrics.checkpoint_failed("j1", "disk_full")
    metrics.peer_attached("p1", "0.1.0", "cuda:0", 1000.0)
    metrics.route_decided(1, "p1")
    metrics.peers({("j1", 0, "serving"): 2, ("", None, "idle"): 1}, {"j1": 2})
    metrics.in_flight("j1", 3)
    metrics.speeds("j1", [{}, {"p1": 100.0}], {(1, "forward"): 2.0})
    metrics.islands("j1", AT_WORK, {"averaged": 2})
    metrics.exchanged("j1", 0.5, [1], {0: 4})
    metrics.stored("commit", 0.002)
    return metrics


def test_a_stage_server_says_who_it_is_and_what_it_serves_at_each_scrape() -> None:
    """The scheduler's series named a peer, its own only an instance: nothing joined the two."""
    metrics = StageServerMetrics("0.1.0", 1)
    place: list[tuple[str, int]] = []
    metrics.identify("vm-815eb3", lambda: place[-1] if place else None)
    labels = {"peer": "vm-815eb3", "job_id": "", "stage": ""}
    for served in (None, ("a-1", 0), ("b-2", 3)):
        if served is not None:
            place.append(served)
            labels |= {"job_id": served[0], "stage": str(served[1])}
        lines = generate_latest(metrics.registry).decode().splitlines()
        assert [line for line in lines if line.startswith("swarm_stage_server_info{")] == [
            f'swarm_stage_server_info{{job_id="{labels["job_id"]}",peer="vm-815eb3",stage="{labels["stage"]}"}} 1.0'
        ]


def test_links_that_are_no_longer_used_leave_no_series_behind() -> None:
    metrics = StageServerMetrics("0.1.0", 1)
    speeds = [LinkSpeed(PeerId("p2"), 1e6, 0.002), LinkSpeed(PeerId("p3"), 2e6, 0.001)]
    metrics.watch_links(lambda: speeds)
    family = "swarm_link_bytes_per_second"
    assert _samples(metrics.registry, family) == [({"to": "p2"}, 1e6), ({"to": "p3"}, 2e6)]
    del speeds[0]
    assert _samples(metrics.registry, family) == [({"to": "p3"}, 2e6)]


def test_every_process_also_shows_itself_and_its_buckets_reach_from_a_millisecond_to_two_minutes() -> None:
    text = generate_latest(StageServerMetrics("0.1.0", 1).registry).decode()
    assert "process_resident_memory_bytes" in text
    assert "python_info" in text
    assert "_created" not in text
    assert (SECONDS_BUCKETS[0], SECONDS_BUCKETS[-1]) == (0.001, 120.0)
    ratios = [larger / smaller for smaller, larger in pairwise(SECONDS_BUCKETS[:-1])]
    assert ratios == pytest.approx([2.5] * len(ratios), rel=0.01)


def test_a_job_shows_its_state_its_steps_from_commit_to_commit_and_each_total_once() -> None:
    metrics, job = _with_a_job(), {"job_id": "j1"}
    value = metrics.registry.get_sample_value
    for total in (0, 2, 2, 1, 3):  # told again and again
        metrics.ledger_violations("j1", total)
    assert value("swarm_peers", job | {"stage": "1", "state": "serving"}) == 0, "an empty stage"
    metrics.peers({}, {})
    assert value("swarm_peers", job | {"stage": "1", "state": "serving"}) is None
    metrics.job_state("j1", JobState.FAILED)
    samples = _samples(metrics.registry, "swarm_job_state")
    assert [labels["state"] for labels, value in samples if value] == ["failed"]
    assert len(samples) == len(JobState)
    expected = {
        "swarm_step_duration_seconds_count": 1,
        "swarm_step_duration_seconds_sum": 1.0,
        "swarm_job_tokens_total": 200,
        "swarm_microbatches_committed_total": 8,
        "swarm_ledger_violations_total": 3,
        "swarm_duplicates_discarded_total": 1,
    }
    assert {name: value(name, job) for name in expected} == expected
    assert value("swarm_microbatches_replayed_total", job | {"stage": "1"}) == 2
    assert value("swarm_reroutes_total", job | {"stage": "1", "reason": "gone"}) == 3


def test_a_skipped_step_applies_no_tokens_and_leaves_the_loss() -> None:
    metrics, job, nan = _with_a_job(), {"job_id": "j1"}, math.nan
    step = {"loss": nan, "learning_rate": 1e-3, "grad_norm": nan, "tokens": 100, "microbatches": 4}
    metrics.step_committed("j1", step=3, time_unix_s=1003.0, skipped=True, **step)
    expected = {"job_nonfinite_steps_total": 1, "job_tokens_total": 200, "train_loss": 2.5, "job_step": 3}
    assert {name: metrics.registry.get_sample_value(f"swarm_{name}", job) for name in expected} == expected


def test_nothing_of_a_forgotten_job_or_peer_is_left() -> None:
    metrics = _with_a_job()
    metrics.forget_job("j1")
    metrics.forget_peer("p1")
    text = generate_latest(metrics.registry).decode()
    assert "j1" not in text
    assert "p1" not in text
    metrics.peers({("", None, "idle"): 1}, {})
    assert _samples(metrics.registry, "swarm_peers")


def test_only_present_replicas_have_a_weight_and_only_a_job_at_work_has_deadlines() -> None:
    metrics = _with_a_job()
    metrics.peer_attached("p2", "0.1.0", "cpu", 1000.0)
    metrics.speeds("j1", [{"p2": 50.0}, {"p1": 300.0, "unknown": 100.0}], {(0, "forward"): 1.5})

    def weights() -> list[tuple[str, str, float]]:
        samples = _samples(metrics.registry, "swarm_route_weight")
        return sorted((labels["stage"], labels["peer"], value) for labels, value in samples)

    assert weights() == [("0", "p2", 1.0), ("1", "p1", 0.75)]
    metrics.speeds("j1", [{"p1": 10.0}, {}], {})
    assert weights() == [("0", "p1", 1.0)]
    assert metrics.registry.get_sample_value("swarm_peer_speed_tokens_per_second", {"peer": "p2"}) is None
    assert metrics.registry.get_sample_value("swarm_peer_speed_tokens_per_second", {"peer": "p1"}) == 10.0
    metrics.at_work_no_more("j1")
    assert weights() == []
    for name in ("peers", "state"):
        assert _samples(metrics.registry, f"swarm_island_{name}") == [], "nobody serves an island"
    assert [value for _, value in _samples(metrics.registry, "swarm_island_step")] == [4.0, 5.0]
    assert _samples(metrics.registry, "swarm_peer_speed_tokens_per_second") == []
    assert _samples(metrics.registry, "swarm_hop_deadline_seconds") == []


def test_a_lost_island_has_a_state_and_what_it_waited_and_no_step() -> None:
    metrics = _with_a_job()

    def values(name: str, **labels: str) -> list[float]:
        family = name.removesuffix("_total").removesuffix("_count")
        samples = _samples(metrics.registry, f"swarm_{family}", f"swarm_{name}")
        return [value for of, value in samples if labels.items() <= of.items()]

    assert values("island_state", island="1", state="waiting") == [1.0]
    lost = IslandFigures(IslandState.LOST, 0, 0, 0, {IslandState.WAITING: 4.5})
    for _ in range(2):
        metrics.islands("j1", [AT_WORK[0], lost], {"averaged": 2, "failed": 1})
        metrics.exchanged("j1", 0.5, [], {1: 4})
    for name, found in (("step", [4.0]), ("outer_steps", [2.0]), ("peers", [1.0, 0.0])):
        assert values(f"island_{name}") == found
    assert values("island_state", island="1", state="lost") == [1.0]
    assert sum(values("island_state")) == 2.0, "each island is in one state"
    assert values("island_wait_seconds_total", reason="others") == [0.0, 4.5]
    assert values("island_wait_seconds_total", reason="exchange") == [0.0, 0.0]
    assert values("island_dropped_steps_total") == [4.0, 8.0]
    assert values("island_forks_total") == [0.0, 1.0]
    assert values("outer_rounds_total") == [2.0, 1.0, 0.0]
    assert values("outer_exchange_seconds_count") == [3.0]


def test_a_job_that_begins_to_run_has_made_progress_but_not_each_time_that_it_begins_again() -> None:
    """After a restart of the scheduler, and before its first step, no alert could say that a job stands still."""
    metrics, job = SchedulerMetrics("0.1.0", 1), {"job_id": "j1"}
    progress_s = []
    metrics.job_opened("j1", "llama")
    step = {"loss": 1.0, "learning_rate": 0.2, "grad_norm": 3.0, "tokens": 10, "microbatches": 4}
    for time_s, is_commit in ((5.0, False), (7.0, False), (8.0, True), (9.0, False), (11.0, False)):
        if is_commit:
            metrics.step_committed("j1", step=1, time_unix_s=time_s, **step)
        else:
            metrics.job_runs("j1", time_s)
        progress_s.append(metrics.registry.get_sample_value("swarm_job_last_progress_timestamp_seconds", job))
    assert progress_s == [5.0, 5.0, 8.0, 9.0, 9.0]


def test_peers_choose_no_label_value_and_beyond_the_limit_they_share_one() -> None:
    metrics = SchedulerMetrics("0.1.0", 1)
    metrics.peer_attached("p1", '1.0"} evil 1\n', "toaster", 1.0)
    labels = {"peer": "p1", "version": "other", "device": "other"}
    assert metrics.registry.get_sample_value("swarm_peer_info", labels) == 1
    metrics = SchedulerMetrics("0.1.0", 1)
    for number in range(PEERS_MAX + 5):
        metrics.route_decided(0, f"p{number}")
    samples = _samples(metrics.registry, "swarm_route_decisions", "swarm_route_decisions_total")
    assert len(samples) == PEERS_MAX + 1
    other = {"stage": "0", "peer": "other"}
    assert metrics.registry.get_sample_value("swarm_route_decisions_total", other) == 5


def test_the_first_link_to_the_broker_is_no_reconnection() -> None:
    process = SchedulerMetrics("0.1.0", 1).process
    value = process.registry.get_sample_value("swarm_mqtt_connected")
    assert math.isnan(value or 0.0), "nobody is told that a broker is away which is not used"
    for connected in (True, False, True):
        process.mqtt_link(connected)
    assert process.registry.get_sample_value("swarm_mqtt_connected") == 1
    assert process.registry.get_sample_value("swarm_mqtt_reconnects_total") == 1


def _samples(registry: CollectorRegistry, family: str, sample: str = "") -> list[tuple[dict[str, str], float]]:
    return [
        (s.labels, s.value)
        for f in registry.collect()
        if f.name == family
        for s in f.samples
        if s.name == (sample or family)
    ]


def test_a_job_that_went_back_shows_what_was_measured_there_and_counts_on() -> None:
    """What an abandoned timeline reached is no longer to be seen; what is counted only rises."""
    metrics = SchedulerMetrics("0.1.0", 1)
    metrics.job_opened("j1", "llama")
    value = metrics.registry.get_sample_value
    step = {"time_unix_s": 1.0, "learning_rate": 0.2, "grad_norm": 3.0, "tokens": 10, "microbatches": 4}
    metrics.step_committed("j1", step=5, loss=2.0, **step)
    metrics.evaluated("j1", step=5, loss=2.5)
    metrics.recovery("j1", [7], {}, 0)
    metrics.job_opened("j1", "llama", 2)
    metrics.job_went_back("j1", 3, 4.0, 0.1, 1.0, 2)
    metrics.evaluated("j1", step=2, loss=4.5)
    job = {"job_id": "j1"}
    assert [value(name, job) for name in ("swarm_job_step", "swarm_train_loss", "swarm_evaluation_loss")] == [2, 4, 4.5]
    assert value("swarm_job_tokens_total", job) == 10
    assert value("swarm_job_steps_undone_total", job) == 3
    metrics.step_committed("j1", step=3, loss=3.0, **{**step, "time_unix_s": 900.0})
    assert value("swarm_step_duration_seconds_sum", job) == 0.0, "the time that it was stalled is no step"
    metrics.recovery("j1", [2], {}, 0)
    assert value("swarm_microbatches_replayed_total", {**job, "stage": "0"}) == 9

    metrics.job_opened("j1", "llama")
    metrics.job_went_back("j1", 3, math.nan, 0.0, 0.0, 0)
    assert [value(name, job) for name in ("swarm_train_loss", "swarm_evaluation_loss")] == [None, None]
