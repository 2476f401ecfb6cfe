"""The Prometheus series of a stage server: the use of its device and its links.

One series, `swarm_stage_server_info`, names the stage server and its stage; the others are joined with it by
`instance`. So they need no label for the peer or the job, and none is left behind when another job is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from swarm.process.metrics import LONG_SECONDS_BUCKETS, SECONDS_BUCKETS, ProcessMetrics
from swarm.types import Memory
from swarm.wire.messages import LinkSpeed

TRAFFIC_DIRECTIONS = ("sent", "received")
TRAFFIC_KINDS = ("activation", "gradient", "state")
TRANSFER_OUTCOMES = ("complete", "failed")
ROUND_OUTCOMES = ("averaged", "failed", "aborted")


class StageServerMetrics:
    """Counts the use of a stage server's device and its links."""

    def __init__(self, version: str, protocol: int) -> None:
        self.process = ProcessMetrics(version, protocol)
        self.registry = registry = self.process.registry
        hop, traffic = ("stage", "direction"), ("direction", "kind")
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, buckets=SECONDS_BUCKETS, registry=registry)
        self._compute = seconds("swarm_stage_compute_seconds", "Device time per microbatch", hop)
        self._queue_depth = gauge("swarm_queue_depth", "Computations waiting for the device", hop)
        self._queue_wait = seconds("swarm_queue_wait_seconds", "Wait of a computation for the device", hop)
        self._busy = counter("swarm_device_busy_seconds_total", "Seconds the device computed; its rate is utilisation")
        self._memory_used = gauge("swarm_device_memory_used_bytes", "Device memory that this process holds")
        self._memory_capacity = gauge("swarm_device_memory_capacity_bytes", "Device memory that it may use")
        self._host_capacity = gauge("swarm_host_memory_capacity_bytes", "Host memory that it may use beside the device")
        self._exceeded = counter("swarm_device_memory_exceeded_total", "Times this process held more than it may use")
        self._oom = counter("swarm_oom_total", "Times the device had no memory left")
        self._network = counter("swarm_network_bytes_total", "Tensor bytes on the wire", traffic)
        self._uncompressed = counter(
            "swarm_network_uncompressed_bytes_total", "The same tensors before compression", traffic
        )
        self._encoded = counter(
            "swarm_boundary_tensors_total", "Boundary tensors encoded, by codec", ("direction", "codec")
        )
        self._averaging = seconds("swarm_averaging_duration_seconds", "Completed averaging rounds", ("stage",))
        self._rounds = counter("swarm_averaging_rounds_total", "Averaging rounds by outcome", ("stage", "outcome"))
        carried = "Sites that added up their parts in the newest complete averaging round; 0: it was flat"
        self._round_groups = gauge("swarm_round_groups", carried, ("stage",))
        told = "Proposals in complete rounds between islands"
        self._proposed = counter("swarm_outer_bytes_total", told, ("direction",))
        fetched = "Download of a stage's state by a joiner, from its first question to its report"
        self._transfer = Histogram(
            "swarm_state_transfer_seconds", fetched, ("outcome",), buckets=LONG_SECONDS_BUCKETS, registry=registry
        )
        self._evicted = counter("swarm_outputs_evicted_total", "Held outputs dropped for memory", ("stage",))
        for direction in TRAFFIC_DIRECTIONS:
            self._proposed.labels(direction)
            for kind in TRAFFIC_KINDS:
                self._network.labels(direction, kind)
                self._uncompressed.labels(direction, kind)

    def identify(self, peer: str, place: Callable[[], tuple[str, int] | None]) -> None:
        """Name the peer; `place` gives the job and the stage that are served now, None if there are none."""
        self.registry.register(_IdentitySeries(peer, place))

    def watch_links(self, speeds: Callable[[], Iterable[LinkSpeed]]) -> None:
        """Show how fast the links are that `speeds` gives, and no others."""
        self.registry.register(_LinkSeries(speeds))

    def computed(self, stage: int, direction: str, seconds: float) -> None:
        """The device computed one microbatch "forward" or "backward"."""
        self._compute.labels(str(stage), direction).observe(seconds)
        self._busy.inc(seconds)

    def device_busy(self, seconds: float) -> None:
        """The device was busy with something that is no microbatch, such as an optimizer step."""
        self._busy.inc(seconds)

    def memory(self, used_bytes: Callable[[], int], capacity: Memory) -> None:
        """What the process holds on its device, and what it may use; of the host's memory 0 if that is the device's."""
        self._memory_used.set_function(used_bytes)
        self._memory_capacity.set(capacity.device_bytes)
        self._host_capacity.set(capacity.host_bytes)

    def memory_exceeded(self) -> None:
        self._exceeded.inc()

    def out_of_memory(self) -> None:
        self._oom.inc()

    def state_fetched(self, outcome: str, seconds: float) -> None:
        """A joiner has its stage's state ("complete"), or cannot get it ("failed")."""
        assert outcome in TRANSFER_OUTCOMES, outcome
        self._transfer.labels(outcome).observe(seconds)

    def queue_depth(self, stage: int, *, forward: int, backward: int) -> None:
        self._queue_depth.labels(str(stage), "forward").set(forward)
        self._queue_depth.labels(str(stage), "backward").set(backward)

    def waited(self, stage: int, direction: str, seconds: float) -> None:
        self._queue_wait.labels(str(stage), direction).observe(seconds)

    def output_evicted(self, stage: int) -> None:
        """A boundary tensor that was held for a neighbour was dropped to save memory."""
        self._evicted.labels(str(stage)).inc()

    def encoded(self, direction: str, codec: str) -> None:
        """An activation ("forward") or a gradient ("backward") was encoded for a neighbour."""
        self._encoded.labels(direction, codec).inc()

    def sent(self, address: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        """As swarm.rpc.links.peers.Traffic; `kind` is "activation", "gradient" or "state"."""
        self._network.labels("sent", kind).inc(wire_bytes)
        self._uncompressed.labels("sent", kind).inc(tensor_bytes)

    def received(self, peer: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        self._network.labels("received", kind).inc(wire_bytes)
        self._uncompressed.labels("received", kind).inc(tensor_bytes)

    def round_finished(self, stage: int, outcome: str, duration_s: float, sites: int | None = None) -> None:
        """An averaging round ended as "averaged", "failed" or "aborted"; only complete ones count as durations."""
        assert outcome in ROUND_OUTCOMES, outcome
        self._rounds.labels(str(stage), outcome).inc()
        if outcome == "averaged":
            self._averaging.labels(str(stage)).observe(duration_s)
            if sites is not None:
                self._round_groups.labels(str(stage)).set(sites)

    def exchanged(self, sent_bytes: int, received_bytes: int) -> None:
        """Count the bytes of proposals that a complete round between islands sent and received."""
        self._proposed.labels("sent").inc(sent_bytes)
        self._proposed.labels("received").inc(received_bytes)


class _IdentitySeries(Collector):
    """Asked at each scrape, so it is never of an earlier job."""

    def __init__(self, peer: str, place: Callable[[], tuple[str, int] | None]) -> None:
        self._peer = peer
        self._place = place

    def collect(self) -> Iterator[GaugeMetricFamily]:
        words = "Who this is, and the job and stage that it serves; both empty if it serves none"
        family = GaugeMetricFamily("swarm_stage_server_info", words, labels=("peer", "job_id", "stage"))
        place = self._place()
        family.add_metric((self._peer, *(("", "") if place is None else (place[0], str(place[1])))), 1.0)
        yield family


class _LinkSeries(Collector):
    """Asked at each scrape, so links that are no longer used leave nothing behind."""

    def __init__(self, speeds: Callable[[], Iterable[LinkSpeed]]) -> None:
        self._speeds = speeds

    def collect(self) -> Iterator[GaugeMetricFamily]:
        rate = "Best rate of the newest boundary tensors to a neighbour"
        receipt = "Shortest time from sending one of them to its receipt"
        rates = GaugeMetricFamily("swarm_link_bytes_per_second", rate, labels=("to",))
        receipts = GaugeMetricFamily("swarm_link_receipt_seconds", receipt, labels=("to",))
        for link in self._speeds():
            rates.add_metric((link.to,), link.bytes_per_s)
            receipts.add_metric((link.to,), link.receipt_s)
        yield from (rates, receipts)
