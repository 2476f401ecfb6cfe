"""The Prometheus series of a scheduler, about its jobs and peers.

Labels are bounded: `job_id` to jobs that are open or ended less than an hour ago (`forget_job`), `peer` to ids that the
scheduler issued, at most 2,000 at a time and `other` beyond that (`forget_peer`), `island` to the 64 that a job may
have, the rest to closed sets. A peer's own words about itself never become a label as they are. Floats of the form
`*_unix_s` are seconds since the epoch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

from swarm.process.metrics import LONG_SECONDS_BUCKETS, SECONDS_BUCKETS, ProcessMetrics
from swarm.types import IslandState, JobState, PeerState

M = TypeVar("M", Gauge, Counter, Histogram)

PEERS_MAX = 2000
OTHER = "other"
REASONS = ("timeout", "refused", "oom", "checksum", "draining", "gone")
CHECKPOINT_FAILURES = ("disk_full", "storage", "peer", "timeout", "internal")

_PEER_STATES = tuple(state.value for state in PeerState)
OUTER_OUTCOMES = ("averaged", "failed", "aborted")
ISLAND_WAITS = {IslandState.WAITING: "others", IslandState.EXCHANGING: "exchange"}
_JOB_STATES = tuple(state.value for state in JobState)
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_VERSION = re.compile(r"^\d{1,4}(\.\d{1,4}){1,3}([a-z0-9.+-]{0,16})$")


@dataclass(frozen=True, slots=True)
class IslandFigures:
    """What is shown of an island; steps and exchanges of one that is lost mean nothing."""

    state: IslandState
    steps: int
    exchanges: int
    peers: int
    waited_s: Mapping[IslandState, float]  # at exchanges so far, by state
    relieved: int = 0  # microbatches so far
    late: int = 0  # exchanges so far


class SchedulerMetrics:
    """Counts and shows the facts about a scheduler's jobs and peers."""

    def __init__(self, version: str, protocol: int) -> None:
        self.process = ProcessMetrics(version, protocol)
        self.registry = self.process.registry
        self._by_job: list[Gauge | Counter | Histogram] = []  # those whose first label is a job
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._job_info = gauge("job_info", "Facts about a job", ("job_id", "family"))
        self._job_state = gauge("job_state", "Exactly one state is 1", ("job_id", "state"))
        self._job_step = gauge("job_step", "Steps committed")
        moved = "Time of the last commit, or when the job began to run after it"
        self._last_progress = gauge("job_last_progress_timestamp_seconds", moved)
        self._tokens = counter("job_tokens", "Tokens applied")
        self._nonfinite = counter("job_nonfinite_steps", "Steps with NaN or Inf gradients")
        self._loss = gauge("train_loss", "Loss of the last step in nats")
        self._evaluation_loss = gauge("evaluation_loss", "Validation loss in nats")
        self._evaluation_step = gauge("evaluation_step", "Steps after which the validation loss was measured")
        self._learning_rate = gauge("learning_rate", "Current learning rate")
        self._grad_norm = gauge("grad_norm", "Gradient norm before clipping")
        self._step_duration = histogram("step_duration", "Commit to commit", SECONDS_BUCKETS, ("job_id",))
        self._committed = counter("microbatches_committed", "Microbatches in committed steps, once each")
        self._in_flight = gauge("microbatches_in_flight", "Microbatches fed and not committed")
        self._violations = counter("ledger_violations", "Refused set digests; 0 in health")
        replayed = "Hops done again because their replica was lost"
        self._replayed = counter("microbatches_replayed", replayed, ("job_id", "stage"))
        self._duplicates = counter("duplicates_discarded", "Late repeats that were ignored")
        self._undone = counter("job_steps_undone", "Committed steps that a rollback or a resume gave up")
        self._reroutes = counter("reroutes", "Hops taken from a replica", ("job_id", "stage", "reason"))
        self._deadline = gauge("hop_deadline_seconds", "What a hop may take now", ("job_id", "stage", "direction"))
        share = "Share of its stage's work by measured speed"
        self._route_weight = gauge("route_weight", share, ("job_id", "stage", "peer"))
        self._speed = gauge("peer_speed_tokens_per_second", "Measured speed in the stage that it serves", ("peer",))
        self._routed = counter("route_decisions", "Times a peer was picked for a hop", ("stage", "peer"))
        of_island = ("job_id", "island")
        self._island_state = gauge("island_state", "Exactly one state is 1", (*of_island, "state"))
        self._island_step = gauge("island_step", "Steps that all stage servers of an island made", of_island)
        self._island_outer_steps = gauge("island_outer_steps", "Exchanges with other islands", of_island)
        self._island_peers = gauge("island_peers", "Stage servers of an island", of_island)
        waited = "Time at exchanges: the others have not come to it yet, or it takes this long"
        self._island_wait = counter("island_wait_seconds", waited, (*of_island, "reason"))
        relieved = "Microbatches that others train, since an island fell behind"
        self._island_relieved = counter("island_relieved_microbatches", relieved, of_island)
        self._island_late = counter("island_late", "Exchanges without an island, which keeps its steps", of_island)
        self._island_dropped = counter("island_dropped_steps", "Steps without a part of a lost island", of_island)
        self._island_forks = counter("island_forks", "Times an island began as a copy of another", of_island)
        rounds = "Rounds between islands, by outcome; an exchange has one for each unit"
        self._outer_rounds = counter("outer_rounds", rounds, ("job_id", "outcome"))
        exchange = "An exchange, from its first round until all envoys hold the mean"
        self._outer_exchange = histogram("outer_exchange", exchange, SECONDS_BUCKETS, ("job_id",))
        self._rebalances = counter("rebalances", "Replicas moved to another stage")
        self._recuts = counter("recuts", "Times a waiting job was cut anew for the stage servers that were there")
        released = "Decision to release by the old stage"
        self._rebalance_duration = histogram("rebalance_duration", released, LONG_SECONDS_BUCKETS)
        self._stored = histogram("store_operation", "Answers of the database", SECONDS_BUCKETS, ("operation",))
        self._loop_late = gauge("event_loop_late_seconds", "How late the event loop woke up last", ())
        self._free = gauge("data_free_bytes", "Free space where the data folder is", ())
        self._database_connected = gauge("database_connected", "1 while the database answers", ())
        self._peers = gauge("peers", "Peers by job, stage and state", ("job_id", "stage", "state"))
        self._peer_info = gauge("peer_info", "Facts about a peer", ("peer", "version", "device"))
        self._last_heartbeat = gauge("peer_last_heartbeat_timestamp_seconds", "Last sign of life", ("peer",))
        begun = "Start of a checkpoint to its manifest"
        self._checkpoint_duration = histogram("checkpoint_duration", begun, LONG_SECONDS_BUCKETS)
        read_back = "Time of the newest checkpoint that was read back"
        self._checkpoint_success = gauge("checkpoint_last_success_timestamp_seconds", read_back)
        self._checkpoint_failures = counter("checkpoint_failures", "Checkpoints given up", ("job_id", "reason"))
        self._checkpoint_size = gauge("checkpoint_size_bytes", "Size of the newest checkpoint")
        self.known_jobs: set[str] = set()  # those that have series
        self.known_peers: set[str] = set()
        self._peer_counts: dict[tuple[str, str, str], int] = {}  # what the series of `peers` say
        self._totals_seen: dict[tuple[str, ...], float] = {}
        self._last_commit_unix_s: dict[str, float] = {}
        self._begun: set[str] = set()  # jobs that began to run, and have committed nothing since
        self._weighed: dict[str, set[tuple[str, str]]] = {}  # (stage, peer) of a job that have a weight

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ("job_id",)) -> Gauge:
        return self._add(Gauge(f"swarm_{name}", text, labels, registry=self.registry))

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ("job_id",)) -> Counter:
        return self._add(Counter(f"swarm_{name}_total", text, labels, registry=self.registry))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return self._add(Histogram(f"swarm_{name}_seconds", text, labels, buckets=buckets, registry=self.registry))

    def _add(self, metric: M) -> M:
        if metric._labelnames[:1] == ("job_id",):
            self._by_job.append(metric)
        return metric

    def database_link(self, is_there: bool) -> None:
        """Whether the database answered when it was last asked."""
        self._database_connected.set(is_there)

    def stored(self, operation: str, seconds: float) -> None:
        """The database answered, or failed, after `seconds`; `operation` is "commit", "read" or "write"."""
        self._stored.labels(operation).observe(seconds)

    def process_health(self, loop_late_s: float, free_bytes: int) -> None:
        """How late the event loop is, and the free bytes on the disk of the data folder."""
        self._loop_late.set(loop_late_s)
        self._free.set(free_bytes)

    def speeds(
        self, job_id: str, stages: Sequence[Mapping[str, float]], deadlines_s: Mapping[tuple[int, str], float]
    ) -> None:
        """Tokens/s of each measured replica of each stage, and the deadline of a hop by (stage, direction)."""
        weighed: set[tuple[str, str]] = set()
        for stage, speeds in enumerate(stages):
            total = sum(speeds.values())
            for peer, speed in speeds.items():
                if peer in self.known_peers:
                    self._speed.labels(peer).set(speed)
                    self._route_weight.labels(job_id, str(stage), peer).set(speed / total)
                    weighed.add((str(stage), peer))
        left = self._weighed.get(job_id, set()) - weighed
        for stage_and_peer in left:
            self._route_weight.remove(job_id, *stage_and_peer)
        self._weighed[job_id] = weighed
        self._drop_speeds(left)
        for (stage, direction), seconds in deadlines_s.items():
            self._deadline.labels(job_id, str(stage), direction).set(seconds)

    def at_work_no_more(self, job_id: str) -> None:
        """The job has no replicas: no speed and no deadline holds, and none serves an island."""
        for gauge in (self._island_peers, self._island_state):
            _remove_series(gauge, job_id, 0)
        left = self._weighed.pop(job_id, None)
        if left is not None:
            for gauge in (self._route_weight, self._deadline):
                _remove_series(gauge, job_id, 0)
            self._drop_speeds(left)

    def _drop_speeds(self, left: Set[tuple[str, str]]) -> None:
        """The series of peers that have left a stage, and serve no other."""
        serving = {peer for weighed in self._weighed.values() for _, peer in weighed}
        for peer in {peer for _, peer in left} - serving:
            _remove_series(self._speed, peer, 0)

    def job_opened(self, job_id: str, family: str, step: int = 0) -> None:
        """A job exists, at this step: its counters start at zero."""
        self.known_jobs.add(job_id)
        self._job_info.labels(job_id, family).set(1)
        self._job_step.labels(job_id).set(step)
        self._in_flight.labels(job_id).set(0)
        for counter in (
            self._tokens,
            self._nonfinite,
            self._committed,
            self._violations,
            self._undone,
            self._rebalances,
            self._recuts,
        ):
            counter.labels(job_id)
        for reason in CHECKPOINT_FAILURES:
            self._checkpoint_failures.labels(job_id, reason)
        self._step_duration.labels(job_id)
        self._totals_seen = {key: total for key, total in self._totals_seen.items() if key[1] != job_id}
        self._last_commit_unix_s.pop(job_id, None)  # what passed since is no step's duration

    def job_went_back(
        self, job_id: str, undone: int, loss: float, learning_rate: float, grad_norm: float, evaluation_step: int
    ) -> None:
        """The job goes on `undone` steps before, where the rest was measured; NaN and 0: nothing was yet."""
        self._undone.labels(job_id).inc(undone)
        measured = ((self._loss, loss), (self._learning_rate, learning_rate), (self._grad_norm, grad_norm))
        for gauge, value in measured:
            if math.isnan(loss):
                _remove_series(gauge, job_id, 0)
            else:
                gauge.labels(job_id).set(value)
        if not evaluation_step:
            for gauge in (self._evaluation_loss, self._evaluation_step):
                _remove_series(gauge, job_id, 0)

    def job_state(self, job_id: str, state: JobState | str) -> None:
        """The job is in `state` and in no other."""
        for known in _JOB_STATES:
            self._job_state.labels(job_id, known).set(known == str(state))

    def job_runs(self, job_id: str, since_unix_s: float) -> None:
        """The job begins to run. That is progress, but not if it begins again and again without a commit."""
        if job_id not in self._begun:
            self._begun.add(job_id)
            self._last_progress.labels(job_id).set(since_unix_s)

    def step_committed(
        self,
        job_id: str,
        *,
        step: int,
        time_unix_s: float,
        loss: float,
        learning_rate: float,
        grad_norm: float,
        tokens: int,
        microbatches: int,
        skipped: bool = False,
    ) -> None:
        """One more step is committed; `step` counts the commits so far. A skipped step applied no tokens."""
        self._job_step.labels(job_id).set(step)
        self._last_progress.labels(job_id).set(time_unix_s)
        self._begun.discard(job_id)
        self._learning_rate.labels(job_id).set(learning_rate)
        self._committed.labels(job_id).inc(microbatches)
        if skipped:
            self._nonfinite.labels(job_id).inc()
        else:
            self._loss.labels(job_id).set(loss)
            self._grad_norm.labels(job_id).set(grad_norm)
            self._tokens.labels(job_id).inc(tokens)
        before = self._last_commit_unix_s.get(job_id)
        if before is not None:
            self._step_duration.labels(job_id).observe(max(0.0, time_unix_s - before))
        self._last_commit_unix_s[job_id] = time_unix_s

    def evaluated(self, job_id: str, *, step: int, loss: float) -> None:
        """The weights after `step` steps have this validation loss."""
        self._evaluation_loss.labels(job_id).set(loss)
        self._evaluation_step.labels(job_id).set(step)

    def in_flight(self, job_id: str, microbatches: int) -> None:
        self._in_flight.labels(job_id).set(microbatches)

    def ledger_violations(self, job_id: str, total: int) -> None:
        """The ledger counted `total` violations so far; a smaller number than before changes nothing."""
        self._raise_to(self._violations, (job_id,), total)

    def recovery(
        self, job_id: str, replayed: Sequence[int], reroutes: Mapping[tuple[int, str], int], duplicates: int
    ) -> None:
        """Totals so far: contributions done again per stage, hops moved by (stage, reason), late repeats ignored."""
        for stage, total in enumerate(replayed):
            self._raise_to(self._replayed, (job_id, str(stage)), total)
        for (stage, reason), total in reroutes.items():
            self._raise_to(self._reroutes, (job_id, str(stage), reason if reason in REASONS else OTHER), total)
        self._raise_to(self._duplicates, (job_id,), duplicates)

    def islands(self, job_id: str, islands: Sequence[IslandFigures], outer_rounds: Mapping[str, int]) -> None:
        """The islands of a job at work in order, and how many rounds between them are over, by outcome."""
        for number, one in enumerate(islands):
            of = (job_id, str(number))
            for state in IslandState:
                self._island_state.labels(*of, state.value).set(one.state is state)
            self._island_peers.labels(*of).set(one.peers)
            for gauge, value in ((self._island_step, one.steps), (self._island_outer_steps, one.exchanges)):
                if one.state is IslandState.LOST:
                    gauge.remove_by_labels({"job_id": job_id, "island": of[1]})
                else:
                    gauge.labels(*of).set(value)
            for counter in (self._island_dropped, self._island_forks):
                counter.labels(*of)
            self._raise_to(self._island_relieved, of, one.relieved)
            self._raise_to(self._island_late, of, one.late)
            for state, reason in ISLAND_WAITS.items():
                self._raise_to(self._island_wait, (*of, reason), one.waited_s.get(state, 0.0))
        for outcome in OUTER_OUTCOMES:
            self._raise_to(self._outer_rounds, (job_id, outcome), outer_rounds.get(outcome, 0))

    def exchanged(self, job_id: str, duration_s: float, begun: Iterable[int], left_out: Mapping[int, int]) -> None:
        """An exchange is durable; `begun` are the islands that begin behind it as copies of others, `left_out` says how
        many steps since the one before have no part of which islands."""
        self._outer_exchange.labels(job_id).observe(duration_s)
        for island in begun:
            self._island_forks.labels(job_id, str(island)).inc()
        for island, steps in left_out.items():
            self._island_dropped.labels(job_id, str(island)).inc(steps)

    def rebalanced(self, job_id: str, duration_s: float) -> None:
        """A replica was released by its old stage, `duration_s` after that was decided."""
        self._rebalances.labels(job_id).inc()
        self._rebalance_duration.observe(duration_s)

    def recut(self, job_id: str) -> None:
        """A waiting job was cut anew."""
        self._recuts.labels(job_id).inc()

    def _raise_to(self, counter: Counter, labels: tuple[str, ...], total: float) -> None:
        """Let a counter follow a total that is kept elsewhere; a smaller one than before changes nothing."""
        key = (counter._name, *labels)
        before = self._totals_seen.get(key)
        if before is None or total > before:
            counter.labels(*labels).inc(total - (before or 0))
            self._totals_seen[key] = total

    def checkpoint_kept(self, job_id: str, *, duration_s: float, time_unix_s: float, size_bytes: int) -> None:
        self._checkpoint_duration.observe(duration_s)
        self._checkpoint_success.labels(job_id).set(time_unix_s)
        self._checkpoint_size.labels(job_id).set(size_bytes)

    def checkpoint_failed(self, job_id: str, reason: str) -> None:
        """A checkpoint was given up; `reason` is one of CHECKPOINT_FAILURES."""
        self._checkpoint_failures.labels(job_id, reason if reason in CHECKPOINT_FAILURES else OTHER).inc()

    def route_decided(self, stage: int, peer: str) -> None:
        """`peer` was picked for a hop at `stage`."""
        self._routed.labels(str(stage), self._bounded(peer)).inc()

    def peers(self, counts: Mapping[tuple[str, int | None, str], int], stages: Mapping[str, int]) -> None:
        """How many peers are in each (job id, stage, state), or ("", None, state); an empty stage shows 0."""
        groups = {("", "")} | {(job, str(stage)) for job, count in stages.items() for stage in range(count)}
        for series in [series for series in self._peer_counts if series[:2] not in groups]:
            self._peers.remove(*series)
            del self._peer_counts[series]
        for job, stage in groups:
            key = None if stage == "" else int(stage)
            for state in _PEER_STATES:
                series, count = (job, stage, state), counts.get((job, key, state), 0)
                if self._peer_counts.get(series) != count:  # most stay as they are when one peer changes
                    self._peers.labels(*series).set(count)
                    self._peer_counts[series] = count

    def peer_attached(self, peer: str, version: str, device: str, time_unix_s: float) -> None:
        """A peer said hello; its version and device are folded into known values."""
        name = self._bounded(peer)
        if name == OTHER:
            return
        _remove_series(self._peer_info, name, 0)
        known_device = re.split("[: ]", device, maxsplit=1)[0].lower()
        self._peer_info.labels(
            name,
            version if _VERSION.match(version) else OTHER,
            known_device if known_device in _DEVICES else OTHER,
        ).set(1)
        self._last_heartbeat.labels(name).set(time_unix_s)

    def peer_heard(self, peer: str, time_unix_s: float) -> None:
        if peer in self.known_peers:
            self._last_heartbeat.labels(peer).set(time_unix_s)

    def forget_job(self, job_id: str) -> None:
        """Remove all series of a job: call it an hour after the job ended."""
        for metric in self._by_job:
            _remove_series(metric, job_id, 0)
        self.known_jobs.discard(job_id)
        self._peer_counts = {series: count for series, count in self._peer_counts.items() if series[0] != job_id}
        self._totals_seen = {key: total for key, total in self._totals_seen.items() if key[1] != job_id}
        self._last_commit_unix_s.pop(job_id, None)
        self._weighed.pop(job_id, None)
        self._begun.discard(job_id)

    def forget_peer(self, peer: str) -> None:
        """Remove all series of a peer: call it ten minutes after the peer left."""
        if peer not in self.known_peers:
            return
        self.known_peers.discard(peer)
        _remove_series(self._routed, peer, 1)
        _remove_series(self._peer_info, peer, 0)
        for gauge in (self._last_heartbeat, self._speed):
            _remove_series(gauge, peer, 0)

    def _bounded(self, peer: str) -> str:
        if peer not in self.known_peers:
            if len(self.known_peers) >= PEERS_MAX:
                return OTHER
            self.known_peers.add(peer)
        return peer


def _remove_series(metric: Gauge | Counter | Histogram, value: str, position: int) -> None:
    name = metric._labelnames[position]
    metric.remove_by_labels({name: value})
