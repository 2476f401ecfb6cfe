"""What swarm doctor makes of what it sees: each measurement on both sides of its limit."""

from __future__ import annotations

import pytest

from client.doctor import rules
from client.doctor.rules import GIB, Finding, Grade
from client.records import Job, Link, Peer
from swarm.errors import NotAdmitted, SchedulerUnreachable

TORCH = {"version": "2.13.0", "cuda": [], "mps": False, "threads": 2}
CASES = [
    (rules.disk("/data", 20 * GIB), "ok"),
    (rules.disk("/data", 5 * GIB), "warning"),
    (rules.disk("/data", GIB - 1), "failed"),
    (rules.memory(4 * GIB, 8 * GIB), "ok"),
    (rules.memory(GIB, 8 * GIB), "warning"),
    (rules.device("", [], True), "warning"),
    (rules.device("ImportError: libcudart.so.12 (exit status 1)", [], True), "failed"),
    (rules.device(TORCH, [], True), "ok"),
    (rules.device(TORCH, ["H200 (driver 570)"], True), "failed"),
    (rules.device(TORCH | {"cuda": ["H200"]}, ["H200 (driver 570)"], True), "ok"),
    (rules.port(7951, "the first stage server", ""), "ok"),
    (rules.port(7951, "the first stage server", "Address already in use"), "warning"),
    (rules.port(9464, "the metrics", "Address already in use", "swarm scheduler"), "ok"),
    (rules.not_asked(NotAdmitted("no certificate")), "failed"),
    (rules.not_asked(SchedulerUnreachable("nobody answers", hint="start one")), "failed"),
    (rules.clock(-1.5, 0.01), "ok"),
    (rules.clock(-30.0, 0.01), "warning"),
    (rules.clock(90.0, 0.01), "failed"),
    (rules.clock(90.0, 89.0), "ok"),
    (rules.latency(0.01), "ok"),
    (rules.latency(1.0), "warning"),
    (rules.bandwidth(1e8, 1e8), "ok"),
    (rules.bandwidth(1e8, 1e5), "warning"),
    (rules.certificate(90_000.0, 1000.0), "ok"),
    (rules.certificate(1010.0, 1000.0), "warning"),
    (rules.dial_back("192.0.2.7", 7951, ""), "ok"),
    (rules.dial_back("192.0.2.7", 7951, "no answer within 3 s"), "warning"),
    (rules.dialled_from_here(3, {}), "ok"),
    (rules.dialled_from_here(3, {"vm-1": "refused"}), "warning"),
    (rules.peers([])[0], "warning"),
    (rules.peers([Peer(id="a", state="idle")])[0], "ok"),
    (rules.peers([Peer(id="a", state="idle", address="h:1 (not reached)")])[1], "warning"),
    (rules.peers([Peer(id="a", state="suspect")])[1], "warning"),
    (rules.jobs([Job(id="j", state="running")])[0], "ok"),
    (rules.jobs([Job(id="j", state="stalled", reason="stage 1 is lost")])[0], "failed"),
]


@pytest.mark.parametrize(("finding", "verdict"), CASES, ids=lambda one: getattr(one, "text", one))
def test_a_measurement_is_judged_by_its_limit(finding: Finding, verdict: str) -> None:
    assert finding.verdict == verdict
    assert bool(finding.hint) == (finding.verdict in (Grade.WARNING, Grade.FAILED)), "whoever is warned is told more"


def test_a_cpu_without_bfloat16_is_said_to_be_slow_at_it() -> None:
    assert "about 20 times" in rules.device(TORCH, [], False).text
    assert "about 20 times" not in rules.device(TORCH, [], True).text


def test_a_slow_link_is_named_with_what_takes_long_and_what_helps() -> None:
    slow, quick = Link("b", 125_000.0, 0.2), Link("a", 125e6, 0.01)
    (found,) = rules.links([Peer(id="a", links=(slow,)), Peer(id="b", links=(quick,))])
    assert (str(found.verdict), found.text) == ("warning", "a sends 1.0 Mbit/s to b")
    assert "8 MiB take 67 s" in found.hint or "8 MiB take 1 min" in found.hint
    assert "averaging.compression" in found.hint
    assert rules.links([Peer(id="b", links=(quick,)), Peer(id="c")]) == []
    own = rules.bandwidth(125_000.0, 125e6)
    assert own.text.startswith("1.0 Mbit/s to the scheduler")
    assert "8 MiB take" in own.hint


def test_a_relay_is_no_stage_server_that_idles() -> None:
    """In a swarm of two stage servers and a relay the doctor said that 2 of 3 are idle or at work."""
    seen = [Peer(id="a", state="idle"), Peer(id="b", state="serving"), Peer(id="r", state="relay")]
    assert rules.peers(seen)[0].text == "2 of 2 are idle or at work"
    assert rules.peers([seen[2]])[0].text == "there are none"


def test_whoever_has_not_joined_is_told_that_the_doctor_asks_as_a_person() -> None:
    assert "--role viewer" in rules.not_asked(NotAdmitted("no certificate", hint="join first")).hint
    assert rules.not_asked(SchedulerUnreachable("nobody answers", hint="start one")).hint == "start one"
