"""Sends sampled microbatches to an OpenTelemetry collector, with the spans that `swarm trace` shows (extra `otel`).

    microbatch ─┬─ route ─ forward ─ boundary forward ─ forward ... backward ─ boundary backward ─ backward
                └─ average (of each replica on its route) ─ row ─ commit

Steps are looked at every two seconds (jobs/series.py). Spans that the collector does not take within seconds are lost:
the scheduler never waits for a mere observer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from scheduler.brain.trace import SCHEDULER, Trace, TracedSpan
from scheduler.jobs.job import Job
from swarm.errors import InvalidConfig
from swarm.types import JobId

SEND_S_MAX = 2.0
QUEUE_SPANS = 16_384  # then spans are dropped
_NS = 1_000_000_000


class MicrobatchExporter:
    """Sends a share of all microbatches, the same ones for every job of the same id."""

    def __init__(self, url: str, ratio: float, product: str, wall_s: Callable[[], float]) -> None:
        """`url` is http://HOST:PORT or https://HOST:PORT of a collector's OTLP/gRPC; InvalidConfig."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/"):
            raise InvalidConfig(
                f'--otlp "{url[:100]}" is no collector', hint="for example: --otlp http://127.0.0.1:4317"
            )
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        exporter = OTLPSpanExporter(endpoint=url, insecure=parts.scheme == "http", timeout=SEND_S_MAX)
        about = Resource.create({"service.name": "swarm", "service.version": product})
        self._provider = TracerProvider(resource=about, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS))
        self._tracer = self._provider.get_tracer("swarm", product)
        self._ratio = ratio
        self._wall_s = wall_s
        self._sent: dict[JobId, tuple[Trace, int]] = {}  # the newest step that was looked at

    def look(self, job: Job) -> None:
        """Send what was drawn of the steps that were completed since the last look."""
        name, run = job.record.id, job.run
        if run is None:
            self._sent.pop(name, None)
            return
        found = run.driver.trace
        before, last = self._sent.get(name, (found, -1))
        last = last if before is found else -1
        newest = found.newest()
        if newest is None or newest <= last:
            return
        to_unix_s = self._wall_s() - job.clock_s()
        for step in found.steps():
            if last < step <= newest:
                self._step(name, step, found.spans(step), to_unix_s)
        self._sent[name] = found, newest

    def close(self) -> None:
        """Send what waits, or give it up; blocking, for seconds at the most."""
        self._provider.shutdown()

    def _step(self, job: JobId, step: int, spans: Sequence[TracedSpan], to_unix_s: float) -> None:
        for index in sorted({span.index for span in spans if span.index >= 0}):
            if is_drawn(job, step, index, self._ratio):
                self._microbatch(job, step, index, list(of_microbatch(spans, index)), to_unix_s)

    def _microbatch(self, job: JobId, step: int, index: int, spans: Sequence[TracedSpan], to_unix_s: float) -> None:
        def ns(at_s: float) -> int:
            return round((at_s + to_unix_s) * _NS)

        about: dict[str, str | int] = {"swarm.job_id": job, "swarm.step": step, "swarm.microbatch": index}
        begin_s, end_s = min(span.begin_s for span in spans), max(span.end_s for span in spans)
        whole = self._tracer.start_span("microbatch", Context(), start_time=ns(begin_s), attributes=about)
        inside = trace.set_span_in_context(whole, Context())
        for part in spans:
            attributes = about | ({"swarm.stage": part.stage} if part.stage >= 0 else {})
            attributes |= {"swarm.peer": part.track} if part.track != SCHEDULER else {}
            attributes |= {"swarm.attempt": part.attempt} if part.attempt else {}
            span = self._tracer.start_span(part.name, inside, start_time=ns(part.begin_s), attributes=attributes)
            span.end(ns(part.end_s))
        whole.end(ns(end_s))


def of_microbatch(spans: Iterable[TracedSpan], index: int) -> Iterable[TracedSpan]:
    """The spans of a microbatch: its own, and those in which its gradients were averaged and applied."""
    spans = list(spans)
    route = {span.track for span in spans if span.index == index}
    return (span for span in spans if span.index == index or (span.index < 0 and span.track in route | {SCHEDULER}))


def is_drawn(job: JobId, step: int, index: int, ratio: float) -> bool:
    """Whether a microbatch is among the share `ratio` that is sent."""
    drawn = int.from_bytes(blake2b(f"{job} {step} {index}".encode(), digest_size=8).digest(), "big")
    return drawn < ratio * 2**64
