"""A collector gets the spans of microbatches that were drawn, once each, and a scheduler does without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

from scheduler.brain.inputs import Happened, RowDurable
from scheduler.brain.outputs import CommitRow, Output, Send, WriteCommit
from scheduler.brain.trace import Trace
from scheduler.otlp import MicrobatchExporter, is_drawn
from swarm.errors import InvalidConfig
from swarm.types import Hop, JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire.messages import Accumulated, Averaged, Commit, Committed, Event, Forwarded, Route
from tests.support.collector import Collector
from tests.support.devices import noted_threads

JOB, A, B = JobId("j-1"), PeerId("vm-a"), PeerId("vm-b")
WALL_S = 1_800_000_000.0


class Job(SimpleNamespace):
    """What an exporter asks of a job; its clock stands at 100."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(
            record=SimpleNamespace(id=JOB),
            run=SimpleNamespace(driver=SimpleNamespace(trace=trace)),
            clock_s=lambda: 100.0,
        )


def play(trace: Trace, step: int, microbatches: int) -> None:
    """One step of two stages with one replica each, as a driver would see it."""
    decided: list[Output] = []
    watched = trace.watching(lambda happened, now_s: list(decided))

    def hear(peer: PeerId, event: Event, at_s: float) -> None:
        watched(Happened(peer, event), at_s)

    for index in range(microbatches):
        microbatch = Microbatch(0, step, index)
        hops = tuple(Hop(peer, 1, attempt=1, address=f"{peer}:1") for peer in (A, B))
        decided[:] = [Send(peer, Route(microbatch, step, hops)) for peer in (A, B)]
        at_s = step + index / 10
        hear(A, Forwarded(microbatch, 9, 1), at_s)  # of nothing that is known
        decided.clear()
        hear(A, Forwarded(microbatch, 0, 1), at_s + 0.02)
        hear(B, Accumulated(microbatch, 1, 1, True, 1.0, 0.01, 0.02, 0.0), at_s + 0.06)
        hear(A, Accumulated(microbatch, 0, 1, True, 0.0, 0.01, 0.02, 0.0), at_s + 0.09)
    for peer, unit in ((A, "stage-0"), (B, "stage-1")):
        hear(peer, Averaged(0, step, UnitName(unit), Round(1, 1), "d", (), 0.05), step + 0.8)
    row = CommitRow(0, step, {}, 1.0, 1.0, 1.0, 1e-3, False, 8)
    decided[:] = [WriteCommit(row)]
    watched(RowDurable(-1), step + 0.81)
    decided[:] = [Send(peer, Commit(0, step, step + 1, (), 1e-3, 1.0, False)) for peer in (A, B)]
    watched(RowDurable(step), step + 0.82)
    decided.clear()
    for stage, peer in enumerate((A, B)):
        hear(peer, Committed(0, step, step + 1, stage, "d"), step + 0.9)


@contextmanager
def exporting(url: str, ratio: float = 1.0) -> Iterator[MicrobatchExporter]:
    exporter = MicrobatchExporter(url, ratio, "0.1.0", lambda: WALL_S)
    try:
        yield exporter
    finally:
        exporter.close()


def test_a_microbatch_arrives_with_its_spans_in_order() -> None:
    trace = Trace()
    play(trace, 3, 1)
    with Collector() as collector:
        with exporting(collector.url) as exporter:
            exporter.look(Job(trace))  # type: ignore[arg-type]
        (whole,) = [span for span in collector.spans if span.name == "microbatch"]
        inside = [span for span in collector.spans if span.parent_span_id == whole.span_id]
    parts = sorted(inside, key=lambda one: one.end_time_unix_nano)
    assert [part.name for part in parts] == [
        *("route", "forward", "boundary forward", "forward", "backward", "boundary backward", "backward"),
        *("average stage-0", "average stage-1", "row", "commit", "commit"),
    ]
    assert {span.trace_id for span in collector.spans} == {whole.trace_id}
    assert all(whole.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano for part in parts)
    assert whole.start_time_unix_nano == pytest.approx((WALL_S - 97.0) * 1e9, abs=1e6)
    assert whole.end_time_unix_nano == max(part.end_time_unix_nano for part in parts)
    second = {
        attribute.key: attribute.value.string_value or attribute.value.int_value for attribute in parts[3].attributes
    }
    named = {"swarm.job_id": JOB, "swarm.step": 3, "swarm.microbatch": 0, "swarm.stage": 1, "swarm.peer": B}
    assert second == named | {"swarm.attempt": 1}
    assert collector.services == {"swarm"}


def test_what_was_drawn_is_sent_once_and_the_draw_is_by_share() -> None:
    trace = Trace()
    with Collector() as collector, exporting(collector.url, 0.25) as exporter:
        for step in range(12):
            play(trace, step, 8)
            for _ in range(2):
                exporter.look(Job(trace))  # type: ignore[arg-type]
        exporter.close()
        sent = [
            tuple(value.value.int_value for value in span.attributes if value.key != "swarm.job_id")
            for span in collector.spans
            if span.name == "microbatch"
        ]
    drawn = [(step, index) for step in range(12) for index in range(8) if is_drawn(JOB, step, index, 0.25)]
    assert sorted(sent) == drawn
    assert 12 <= len(drawn) <= 36
    assert not any(is_drawn(JOB, 0, index, 0.0) for index in range(100))
    assert all(is_drawn(JOB, 0, index, 1.0) for index in range(100))


def test_without_a_collector_nothing_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, threads = Trace(), noted_threads(monkeypatch, OTLPSpanExporter, "export")
    began_s = time.monotonic()
    with exporting("http://127.0.0.1:9") as exporter:
        for step in range(2):
            play(trace, step, 8)
            exporter.look(Job(trace))  # type: ignore[arg-type]
    assert threads
    assert threading.current_thread() not in threads, "it looks, and others send"
    assert time.monotonic() - began_s < 60.0


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "grpc://host:4317", "http://", "http://host:4318/v1/traces"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="is no collector"):
        MicrobatchExporter(url, 1.0, "0", lambda: 0.0)
