"""A real Prometheus and a real fleet: what is scraped, what is answered, and what raises an alert."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from swarm.wire import jobs_pb2 as pb
from tests.support.collector import Collector
from tests.support.processes import Cluster, Process
from tests.support.scenes import resolved
from tests.support.services import Prometheus, fetch, promtool, until
from tests.support.simulated import Tokens, small_spec, write_text

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
AGAIN = KeyValue(key="swarm.attempt", value=AnyValue(int_value=2))
# Expressions that have no data in a fleet to which nothing of the kind has happened.
# Callers that are refused; and work on the stage server that is killed, which may have had none at that moment.
NEED_A_FAULT = ("swarm_auth_failures_total", "swarm_reroutes_total")
NEED_ISLANDS = ("swarm_island_", "swarm_outer_")  # tests/browser/test_islands_page.py has some


class Fleet(Cluster):
    """Stages with two replicas and more, a relay, and a job that trains for ever."""

    def begin(self) -> None:
        self.relay = Process.start(
            self.folder / "relay.log",
            "swarm.relay",
            *("--listen", "127.0.0.1:0", "--scheduler", self.address, "--http-port", "0"),
            *("--data-dir", str(self.folder / "relay")),
        )
        self.relay.wait_ready()
        self.add_servers(5)
        changes = {"pipeline__stages": 2, "training__steps": 1_000_000, "checkpoint__every_steps": 10}
        changes |= {"data__validation_ratio": 0.01, "training__eval_every_steps": 4}
        spec = resolved(small_spec(write_text(self.folder), **changes))
        self.job = self.submit(spec, Tokens.make(self.folder / "tokens", spec).manifest).id
        self.wait_for_step(self.job, 12)

    def lose_one_and_win_one(self) -> None:
        """A replica is killed, and another one joins in its place."""
        self.lost = self.jobs.Get(pb.JobRequest(job=self.job), timeout=60).stages[0].peers[0]
        self.servers[self.lost].kill(signal.SIGKILL)
        new = self.start_server(len(self.servers))
        self.servers[name := new.wait_ready()["peer"]] = new
        until("the new replica serves", lambda: any(p.id == name and p.state == "serving" for p in self.peers()))
        self.wait_for_step(self.job, self.step() + 3)

    def step(self) -> int:
        return int(self.jobs.Get(pb.JobRequest(job=self.job), timeout=60).step)

    def signal_all(self, number: signal.Signals) -> None:
        for server in self.servers.values():
            if server.child.poll() is None:
                server.kill(number)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Fleet]:
    flags = ("--grace", "8", "--otlp", collector.url, "--otlp-ratio", "0.1")
    with Fleet(tmp_path_factory.mktemp("fleet"), *flags, broker="embedded") as fleet:
        fleet.begin()
        try:
            fleet.lose_one_and_win_one()
            yield fleet
        finally:
            fleet.relay.stop()


@pytest.fixture(scope="module")
def prometheus(fleet: Fleet) -> Iterator[Prometheus]:
    """It knows the scheduler alone, and an alert that does not wait for minutes."""
    rules = RULES.read_text()
    for told, instead in (("> 300\n", "> 4\n"), ("for: 1m\n", "for: 1s\n")):
        assert told in rules
        rules = rules.replace(told, instead)
    (fleet.folder / "rules.yml").write_text(rules)
    discovery = [{"url": f"http://{fleet.scheduler.ready['http']}/sd", "refresh_interval": "1s"}]
    scrape = [{"job_name": "swarm", "http_sd_configs": discovery}]
    with Prometheus(fleet.folder / "prometheus", scrape, [fleet.folder / "rules.yml"]) as found:
        yield found


def test_the_rules_fire_when_they_should_and_only_then() -> None:
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(RULES.with_name("rules_test.yml")))


def test_promtool_has_no_fault_to_find_with_what_any_process_serves(fleet: Fleet) -> None:
    for process in (fleet.scheduler, fleet.relay, list(fleet.servers.values())[-1]):
        text = fetch(f"http://{process.ready['http']}/metrics")
        assert "swarm_build_info" in text
        assert promtool("check", "metrics", stdin=text) == ""


def test_prometheus_finds_the_fleet_and_answers_tokens_per_second(fleet: Fleet, prometheus: Prometheus) -> None:
    alive = {name for name, server in fleet.servers.items() if server.child.poll() is None}

    def up() -> bool:
        targets = {target["labels"]["instance"]: target for target in prometheus.targets() if target["health"] == "up"}
        return alive | {"scheduler"} == set(targets)

    until("every process is scraped", up)
    rate = "rate(swarm_job_tokens_total[20s])"
    until("tokens per second", lambda: any(float(sample["value"][1]) > 10.0 for sample in prometheus.query(rate)))


def test_prometheus_answers_every_expression_of_the_dashboard(fleet: Fleet, prometheus: Prometheus) -> None:
    panels = json.loads((DEPLOY / "grafana" / "swarm.json").read_text())["panels"]
    expressions = [target["expr"].replace("$job_id", ".*") for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 40

    def without_data() -> list[str]:
        elsewhere = (*NEED_A_FAULT, *NEED_ISLANDS)
        return [
            expression
            for expression in expressions
            if not prometheus.query(expression) and not any(n in expression for n in elsewhere)
        ]

    until("rates need two scrapes", lambda: prometheus.query("rate(swarm_job_tokens_total[1m])"))
    given_up_s = time.monotonic() + 120.0
    while (lacking := without_data()) and time.monotonic() < given_up_s:
        time.sleep(0.5)
    assert lacking == []


def test_a_collector_receives_the_spans_of_a_microbatch_in_order(fleet: Fleet, collector: Collector) -> None:
    def whole() -> list[Any]:
        """Those without the lost replica. What it had is done again in another order; what it did it may not commit."""
        lost = KeyValue(key="swarm.peer", value=AnyValue(string_value=fleet.lost))
        touched = {span.trace_id for span in collector.spans if AGAIN in span.attributes or lost in span.attributes}
        return [span for span in collector.spans if span.name == "microbatch" and span.trace_id not in touched]

    until("microbatches arrive", lambda: len(whole()) > 20)
    for each in whole()[:20]:
        inside = [part for part in collector.spans if part.parent_span_id == each.span_id]
        ended = sorted(inside, key=lambda part: part.end_time_unix_nano)
        names = [part.name.partition(" ")[0] for part in ended if not part.name.startswith("boundary")]
        others = [name for name in names if name != "average"]  # a stage may average while the one before it computes
        assert others == ["route", "forward", "forward", "backward", "backward", "row", "commit", "commit"]
        assert names.index("average") > names.index("backward")
        assert names[-4:] == ["average", "row", "commit", "commit"]
        assert each.end_time_unix_nano - each.start_time_unix_nano < 60e9
    assert any(part.name == "boundary forward" for part in collector.spans)


def test_a_frozen_job_raises_the_alert_and_one_that_goes_on_ends_it(fleet: Fleet, prometheus: Prometheus) -> None:
    assert "SwarmNoProgress" not in prometheus.alerts()
    fleet.signal_all(signal.SIGSTOP)
    try:
        until("SwarmNoProgress fires", lambda: prometheus.alerts().get("SwarmNoProgress") == "firing")
    finally:
        fleet.signal_all(signal.SIGCONT)
    until("the job goes on", lambda: "SwarmNoProgress" not in prometheus.alerts(), timeout_s=60.0)
    fleet.wait_for_step(fleet.job, fleet.step() + 2)
