"""What the scheduler answers is the words of others: it is shown as text."""

from __future__ import annotations

import io

from rich.console import Console

from client.connection import printed
from client.records import Job, Peer, record
from client.views import job_table, jobs_table, peers_table
from swarm.wire import jobs_pb2 as pb

EVIL = "\x1b]0;owned\x07\x1b[2J[/x][bold]\u202e"


def test_no_text_of_a_reply_moves_the_cursor_or_is_taken_for_markup() -> None:
    job = pb.JobView(id=EVIL, name=EVIL, state=EVIL, reason=EVIL, hint=EVIL, steps=1, spec_json='{"name": "a\u202e"}')
    job.stages.add(stage=0, peers=[EVIL, "p"])
    peer = pb.PeerView(id=EVIL, state=EVIL, address=EVIL, device=EVIL, reason=EVIL, product=EVIL)
    out = io.StringIO()
    console = Console(file=out, width=200)
    jobs, peers = printed(pb.JobList(jobs=[job])), printed(pb.PeerList(peers=[peer]))
    shown_job = record(Job, jobs.jobs[0])
    for table in (jobs_table([shown_job]), job_table(shown_job), peers_table([record(Peer, peers.peers[0])])):
        console.print(table)
    shown = out.getvalue()
    assert "[/x][bold]" in shown
    assert all(line.isprintable() for line in shown.splitlines())
    assert jobs.jobs[0].spec_json == job.spec_json


def test_maps_and_numbers_of_a_reply_stay() -> None:
    explanation = pb.Explanation(kind="job", facts=[pb.Fact(topic="a\n", text="b", numbers={"x\n": 1.0})])
    shown = printed(explanation)
    assert (shown.facts[0].topic, dict(shown.facts[0].numbers)) == ("a ", {"x\n": 1.0})
