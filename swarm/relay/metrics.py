"""The Prometheus series of a relay. Labels are of closed sets; jobs and peers are reported to the scheduler only."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter, Gauge

from swarm.process.metrics import ProcessMetrics

DIRECTIONS = ("to_listener", "from_listener")


class RelayMetrics:
    """Counts the links and bytes of a relay."""

    def __init__(self, version: str, protocol: int) -> None:
        self.process = ProcessMetrics(version, protocol)
        self.registry = registry = self.process.registry
        self._bytes = Counter("swarm_relay_bytes_total", "Bytes carried", ("direction",), registry=registry)
        self._links = Gauge("swarm_relay_links", "Links between stage servers through this relay", registry=registry)
        self._listeners = Gauge("swarm_relay_listeners", "Stage servers that listen at this relay", registry=registry)
        for direction in DIRECTIONS:
            self._bytes.labels(direction)

    def carried(self, direction: str, size_bytes: int) -> None:
        self._bytes.labels(direction).inc(size_bytes)

    def watch(self, links: Callable[[], int], listeners: Callable[[], int]) -> None:
        self._links.set_function(links)
        self._listeners.set_function(listeners)
