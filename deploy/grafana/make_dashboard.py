"""Writes swarm.json beside it, the Grafana dashboard of a fleet: `python deploy/grafana/make_dashboard.py`.

Here are the panels, row by row; the rest of what Grafana wants to read is alike for all of them. Import the file, or
provision it, with a Prometheus that scrapes the fleet as docs/operations.md says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("swarm.json")
ACROSS, WIDTH, HEIGHT = 3, 8, 8  # panels side by side, and the units of Grafana's grid that each takes
JOB = 'job_id=~"$job_id"'
SOURCE = {"type": "prometheus", "uid": "${source}"}


def _p(quantile: float, name: str, by: str, which: str = "") -> str:
    buckets = f"sum by (le, {by}) (rate({name}_bucket{{{which}}}[1m]))"
    return f"histogram_quantile({quantile}, {buckets})"


def _rate(name: str, by: str, which: str = "") -> str:
    return f"sum by ({by}) (rate({name}{{{which}}}[1m]))"


# Row: title, unit, and the lines of the panel: legend -> expression.
ROWS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "Overview": [
        ("Tokens per second", "short", {"{{job_id}}": f"rate(swarm_job_tokens_total{{{JOB}}}[1m])"}),
        (
            "Loss",
            "short",
            {"{{job_id}}": f"swarm_train_loss{{{JOB}}}", "{{job_id}} validation": f"swarm_evaluation_loss{{{JOB}}}"},
        ),
        ("Steps committed", "short", {"{{job_id}}": f"swarm_job_step{{{JOB}}}"}),
        (
            "Step, commit to commit",
            "s",
            {
                "{{job_id}} p50": _p(0.5, "swarm_step_duration_seconds", "job_id", JOB),
                "{{job_id}} p95": _p(0.95, "swarm_step_duration_seconds", "job_id", JOB),
            },
        ),
        (
            "Time since the last commit",
            "s",
            {
                "{{job_id}}": f"time() - swarm_job_last_progress_timestamp_seconds{{{JOB}}} and on (job_id) "
                'swarm_job_state{state=~"running|stalled"} == 1'
            },
        ),
        ("Jobs by state", "short", {"{{state}}": "sum by (state) (swarm_job_state) > 0"}),
        ("Stage servers by state", "short", {"{{state}}": "sum by (state) (swarm_peers) > 0"}),
        (
            "Learning rate and gradient norm",
            "short",
            {
                "{{job_id}} rate": f"swarm_learning_rate{{{JOB}}}",
                "{{job_id}} norm": f"swarm_grad_norm{{{JOB}}}",
            },
        ),
        (
            "Lost time: share of the last hour stalled, steps undone, steps skipped",
            "short",
            {
                "{{job_id}} stalled": f'avg_over_time(swarm_job_state{{state="stalled", {JOB}}}[1h])',
                "{{job_id}} undone": f"swarm_job_steps_undone_total{{{JOB}}}",
                "{{job_id}} skipped": f"swarm_job_nonfinite_steps_total{{{JOB}}}",
            },
        ),
    ],
    "Stages": [
        ("Replicas", "short", {"{{job_id}} stage {{stage}}": f'swarm_peers{{state="serving", {JOB}}}'}),
        (
            "Device time per microbatch",
            "s",
            {
                "stage {{stage}} {{direction}}": f"{_rate('swarm_stage_compute_seconds_sum', 'stage, direction')} / "
                f"{_rate('swarm_stage_compute_seconds_count', 'stage, direction')}"
            },
        ),
        (
            "Wait for the device, p95",
            "s",
            {"stage {{stage}} {{direction}}": _p(0.95, "swarm_queue_wait_seconds", "stage, direction")},
        ),
        ("Queue", "short", {"stage {{stage}} {{direction}}": "sum by (stage, direction) (swarm_queue_depth)"}),
        ("Averaging round, p95", "s", {"stage {{stage}}": _p(0.95, "swarm_averaging_duration_seconds", "stage")}),
        (
            "Islands: steps, exchanges, stage servers",
            "short",
            {
                "{{job_id}} island {{island}} step": f"swarm_island_step{{{JOB}}}",
                "{{job_id}} island {{island}} exchanges": f"swarm_island_outer_steps{{{JOB}}}",
                "{{job_id}} island {{island}} stage servers": f"swarm_island_peers{{{JOB}}}",
            },
        ),
        (
            "Islands: share of the time at exchanges, for others and for the exchange",
            "percentunit",
            {
                "{{job_id}} island {{island}} {{reason}}": f"rate(swarm_island_wait_seconds_total{{{JOB}}}[5m])",
                "{{job_id}} island {{island}} lost": f'swarm_island_state{{state="lost", {JOB}}}',
            },
        ),
        (
            "Exchanges between islands, p95",
            "s",
            {"{{job_id}}": _p(0.95, "swarm_outer_exchange_seconds", "job_id", JOB)},
        ),
        (
            "Proposals between islands",
            "Bps",
            {"{{instance}} {{direction}}": _rate("swarm_outer_bytes_total", "instance, direction")},
        ),
        (
            "Averaging rounds per second",
            "short",
            {"stage {{stage}} {{outcome}}": _rate("swarm_averaging_rounds_total", "stage, outcome")},
        ),
    ],
    "Peers": [
        ("Utilisation of the device", "percentunit", {"{{instance}}": "rate(swarm_device_busy_seconds_total[1m])"}),
        ("Speed in its stage", "short", {"{{peer}}": "swarm_peer_speed_tokens_per_second"}),
        (
            "Device memory, of what is allowed",
            "percentunit",
            {"{{instance}}": "swarm_device_memory_used_bytes / swarm_device_memory_capacity_bytes"},
        ),
        ("Tensors", "Bps", {"{{instance}} {{direction}}": _rate("swarm_network_bytes_total", "instance, direction")}),
        ("Links: best rate of the newest tensors", "Bps", {"{{instance}} to {{to}}": "swarm_link_bytes_per_second"}),
        (
            "Links: shortest time to a receipt",
            "s",
            {"{{instance}} to {{to}}": "swarm_link_receipt_seconds"},
        ),
        (
            "Compression: bytes before, for each on the wire",
            "short",
            {
                "{{kind}}": f"{_rate('swarm_network_uncompressed_bytes_total', 'kind')} / "
                f"({_rate('swarm_network_bytes_total', 'kind')} > 0)"
            },
        ),
        (
            "Time since the last sign of life",
            "s",
            {"{{peer}}": "time() - swarm_peer_last_heartbeat_timestamp_seconds"},
        ),
        (
            "What each serves",
            "short",
            {"{{instance}} job {{job_id}} stage {{stage}}": "swarm_stage_server_info"},
        ),
        (
            "Downloads of a stage's state, p95",
            "s",
            {"{{outcome}}": "histogram_quantile(0.95, sum by (le, outcome) (swarm_state_transfer_seconds_bucket))"},
        ),
        ("Resident memory", "bytes", {"{{instance}}": "process_resident_memory_bytes"}),
    ],
    "Routing": [
        (
            "Hops given per second",
            "short",
            {"stage {{stage}} {{peer}}": _rate("swarm_route_decisions_total", "stage, peer")},
        ),
        ("Share of the stage, by speed", "percentunit", {"stage {{stage}} {{peer}}": f"swarm_route_weight{{{JOB}}}"}),
        (
            "What a hop may take",
            "s",
            {"{{job_id}} stage {{stage}} {{direction}}": f"swarm_hop_deadline_seconds{{{JOB}}}"},
        ),
        ("Microbatches in flight", "short", {"{{job_id}}": f"swarm_microbatches_in_flight{{{JOB}}}"}),
        (
            "Hops given to another replica",
            "short",
            {"{{job_id}} stage {{stage}} {{reason}}": f"swarm_reroutes_total{{{JOB}}}"},
        ),
        (
            "Done twice: hops of lost replicas, late repeats",
            "short",
            {
                "{{job_id}} stage {{stage}} again": f"swarm_microbatches_replayed_total{{{JOB}}}",
                "{{job_id}} repeats": f"swarm_duplicates_discarded_total{{{JOB}}}",
            },
        ),
        (
            "Violations and moves",
            "short",
            {
                "{{job_id}} violations": f"swarm_ledger_violations_total{{{JOB}}}",
                "{{job_id}} moves": f"swarm_rebalances_total{{{JOB}}}",
            },
        ),
    ],
    "Checkpoints and the scheduler": [
        (
            "Age of the newest checkpoint",
            "s",
            {"{{job_id}}": f"time() - swarm_checkpoint_last_success_timestamp_seconds{{{JOB}}}"},
        ),
        ("Checkpoint, begin to end, p95", "s", {"p95": _p(0.95, "swarm_checkpoint_duration_seconds", "instance")}),
        (
            "Size of a checkpoint, free disk",
            "bytes",
            {"{{job_id}}": f"swarm_checkpoint_size_bytes{{{JOB}}}", "free": "swarm_data_free_bytes"},
        ),
        ("Checkpoints given up", "short", {"{{job_id}} {{reason}}": f"swarm_checkpoint_failures_total{{{JOB}}}"}),
        ("Database, p95", "s", {"{{operation}}": _p(0.95, "swarm_store_operation_seconds", "operation")}),
        ("Lateness of the scheduler", "s", {"late": "swarm_event_loop_late_seconds"}),
        (
            "Calls per second",
            "short",
            {"{{method}} {{code}}": _rate("swarm_rpc_server_handled_total", "method, code", 'role="scheduler"')},
        ),
        (
            "Links: database, broker",
            "short",
            {"database": "swarm_database_connected", "broker {{instance}}": "swarm_mqtt_connected"},
        ),
        (
            "Callers turned away per second, and when certificates end",
            "short",
            {
                "{{instance}} {{code}}": _rate("swarm_auth_failures_total", "instance, code"),
                "{{instance}} hours": "(swarm_tls_certificate_expiry_timestamp_seconds - time()) / 3600",
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for name, row in ROWS.items():
        where = {"x": 0, "y": top, "w": ACROSS * WIDTH, "h": 1}
        panels.append({"type": "row", "title": name, "gridPos": where, "collapsed": False, "panels": []})
        for number, panel in enumerate(row):
            down, right = divmod(number, ACROSS)
            where = {"x": WIDTH * right, "y": top + 1 + HEIGHT * down, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(*panel, where))
        top += 1 + HEIGHT * -(-len(row) // ACROSS)
    return {
        "title": "swarm",
        "uid": "swarm",
        "tags": ["swarm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _jobs()]},
        "panels": [{"id": number} | panel for number, panel in enumerate(panels, 1)],
    }


def _panel(title: str, unit: str, lines: dict[str, str], where: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"fillOpacity": 5}}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(lines.items())
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _jobs() -> dict[str, Any]:
    query = "label_values(swarm_job_info, job_id)"
    choice = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    asked = {"type": "query", "datasource": SOURCE, "query": {"query": query, "refId": "jobs"}, "refresh": 2}
    return {"name": "job_id", "label": "Job"} | asked | choice


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
