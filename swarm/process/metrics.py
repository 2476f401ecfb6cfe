"""Prometheus series that both servers share: of the process itself, and the buckets of durations.

Base units, `_total` on counters, timestamps instead of ages. Each class of metrics owns one registry, so tests and
several processes in one interpreter do not meet. All methods may be called from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

# 1 ms to 120 s, factor 2.5.
SECONDS_BUCKETS = (*(float(f"{0.001 * 2.5**k:.3g}") for k in range(13)), 120.0)
LONG_SECONDS_BUCKETS = (*SECONDS_BUCKETS, 300.0, 900.0, 3600.0)


class ProcessMetrics:
    """The series of every process: its build, its link to the broker, `process_*` and `python_*`."""

    def __init__(self, version: str, protocol: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` doubles the number of series for nothing that we use
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._linked_before = False
        Gauge("swarm_build_info", "Build of this process", ("version", "protocol"), registry=self.registry).labels(
            version, str(protocol)
        ).set(1)
        linked = "1 while linked to the broker; NaN where none is used"
        self._mqtt_connected = Gauge("swarm_mqtt_connected", linked, registry=self.registry)
        self._mqtt_connected.set(math.nan)
        self._insecure = Gauge(
            "swarm_insecure", "1 while this process speaks plaintext with anybody (--insecure)", registry=self.registry
        )
        self._mqtt_reconnects = Counter(
            "swarm_mqtt_reconnects_total", "Links to the broker after the first", registry=self.registry
        )
        self._auth_failures = Counter(
            "swarm_auth_failures_total",
            "Callers that were turned away, by error code",
            ("code",),
            registry=self.registry,
        )
        self._handled = Counter(
            "swarm_rpc_server_handled_total", "Calls that ended", ("method", "code"), registry=self.registry
        )
        self._handling = Histogram(
            "swarm_rpc_server_handling_seconds",
            "Begin to end of a call; a stream may last for days",
            ("method",),
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )

    def auth_failed(self, code: str) -> None:
        """Count a refused caller; `code` is a code of swarm.errors."""
        self._auth_failures.labels(code).inc()

    def handled(self, method: str, code: str, seconds: float) -> None:
        """A call ended; fits `Meter`."""
        self._handled.labels(method, code).inc()
        self._handling.labels(method).observe(seconds)

    def certificate(self, ends_unix_s: Callable[[], float]) -> None:
        """When the certificate of this process ends, asked at each scrape."""
        Gauge(
            "swarm_tls_certificate_expiry_timestamp_seconds",
            "End of this process's certificate",
            registry=self.registry,
        ).set_function(ends_unix_s)

    def insecure(self, is_insecure: bool) -> None:
        """Whether this process speaks plaintext with anybody."""
        self._insecure.set(is_insecure)

    def mqtt_link(self, connected: bool) -> None:
        """The link to the broker came up or went down; fits `Bus(on_connected=...)`."""
        self._mqtt_connected.set(connected)
        if connected and self._linked_before:
            self._mqtt_reconnects.inc()
        self._linked_before |= connected
