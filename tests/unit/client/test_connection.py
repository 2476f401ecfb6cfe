"""What the scheduler answers is the words of others: it is shown as text."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from client import connection
from client.connection import Scheduler, identity_for, printed
from client.records import Job, Peer, record
from client.shell import Shell
from client.views import job_table, jobs_table, peers_table
from swarm.errors import Crowded, SchedulerUnreachable
from swarm.pki import joining
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.identity import Application, Identity, issue
from swarm.pki.joining import JOINS_FILE, join
from swarm.pki.names import Principal, Role
from swarm.pki.profiles import profile_folder
from swarm.wire import jobs_pb2 as pb
from tests.support.members import Clock, caller_of, identity_of, scheduler_side

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


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setattr(connection, "REDIAL_S", 0.0)
    with Scheduler("127.0.0.1:1", 1.0) as made:
        yield made


def test_a_file_waits_for_a_place_and_is_sent_from_its_start(scheduler: Scheduler) -> None:
    """Of a sweep that submits all at once, the seventeenth job ended with an error."""
    tries, said = [], list[str]()

    def put(chunks: Iterator[pb.ShardChunk], timeout: float) -> Iterator[pb.PutShardReply]:
        assert next(chunks).resumes
        if len(tries) < 2:
            tries.append(b"")
            raise Crowded("16 of your files are being uploaded already")
        yield pb.PutShardReply(held_bytes=0)
        tries.append(b"".join(chunk.payload for chunk in chunks))
        yield pb.PutShardReply(sha256="a")

    scheduler._jobs = SimpleNamespace(PutShard=put)
    scheduler.put_shard(pb.Shard(size_bytes=2), lambda start: iter([b"a", b"b"]), said.append)
    assert tries == [b"", b"", b"ab"]
    assert said == ["16 of your files are being uploaded already; waiting for a place"]


def test_whoever_follows_waits_for_a_place_as_the_job_goes_on(scheduler: Scheduler) -> None:
    tries, said = [], list[str]()

    def watch(request: Any, timeout: float | None) -> Iterator[pb.JobView]:
        tries.append(request.job)
        if len(tries) < 3:
            raise Crowded("64 of your calls follow jobs already")
        yield pb.JobView(id="job", state="succeeded")

    scheduler._jobs = SimpleNamespace(Watch=watch)
    assert [view.id for view in scheduler.follow("job", said.append)] == ["job"]
    assert len(tries) == 3
    assert said == ["64 of your calls follow jobs already; waiting for a place"]


def test_a_log_is_followed_behind_its_last_line_however_often_the_call_ends(scheduler: Scheduler) -> None:
    """Others needed the place of `swarm logs -f`, and it ended with an error."""
    asked, said = [], list[str]()
    errors = [
        Crowded("others, who had fewer, waited 30 s for this place"),
        SchedulerUnreachable("the line broke"),
        None,
    ]

    def logs(request: pb.LogsRequest, timeout: float | None) -> Iterator[pb.LogEntry]:
        first = request.after + 1
        asked.append((request.follow, request.after, timeout))
        yield from (pb.LogEntry(number=number, message=f"{number}\n") for number in range(first, first + 2))
        if (error := errors[len(asked) - 1]) is not None:
            raise error

    scheduler._jobs = SimpleNamespace(Logs=logs)
    request = pb.LogsRequest(job="job", follow=True, tail=1)
    assert [log.message for log in scheduler.logs(request, said.append)] == [f"{number} " for number in range(1, 7)]
    assert asked == [(True, 0, None), (True, 2, None), (True, 4, None)]
    assert request.after == 0, "what the caller asked for stays his"
    assert said == [
        "others, who had fewer, waited 30 s for this place; waiting for a place",
        "the scheduler does not answer; trying again for 1 s",
    ]


def test_a_log_that_is_not_followed_tells_at_once_that_nobody_answers(scheduler: Scheduler) -> None:
    def logs(request: pb.LogsRequest, timeout: float | None) -> Iterator[pb.LogEntry]:
        yield pb.LogEntry(number=1)
        raise SchedulerUnreachable("the line broke")

    scheduler._jobs = SimpleNamespace(Logs=logs)
    with pytest.raises(SchedulerUnreachable):
        list(scheduler.logs(pb.LogsRequest(job="job")))


def test_a_pull_that_gave_its_place_up_goes_on_at_the_next_byte(scheduler: Scheduler) -> None:
    starts, said = [], list[str]()

    def pull(requests: Iterator[pb.PullRequest]) -> Iterator[pb.FileChunk]:
        starts.append(next(requests).start)
        if len(starts) == 1:
            raise Crowded("256 calls follow jobs or pull weights already")
        yield pb.FileChunk(header=pb.FileHeader(path="a", size_bytes=4, step=3))
        yield pb.FileChunk(payload=b"abcd"[starts[-1] :][:2])
        if len(starts) == 2:
            raise Crowded("others, who had fewer, waited 30 s for this place")

    scheduler._jobs = SimpleNamespace(Pull=pull)
    chunks = list(scheduler.pull("job", say=said.append))
    assert b"".join(chunk.payload for chunk in chunks) == b"abcd"
    assert sum(chunk.HasField("header") for chunk in chunks) == 1
    assert starts == [0, 0, 2]
    assert said == [
        "256 calls follow jobs or pull weights already; waiting for a place",
        "others, who had fewer, waited 30 s for this place; waiting for a place",
    ]


def test_steps_and_a_drain_go_on_behind_what_has_come(scheduler: Scheduler) -> None:
    asked = []

    def history(request: pb.HistoryRequest, timeout: float) -> Iterator[pb.StepList]:
        asked.append(request.after)
        first = request.after + 1
        yield pb.StepList(steps=[pb.StepView(step=first), pb.StepView(step=first + 1)])
        if len(asked) < 3:
            raise Crowded("others, who had fewer, waited 30 s for this place")

    drains = []

    def drain(request: pb.DrainRequest, timeout: float) -> Iterator[pb.DrainView]:
        drains.append(timeout)
        yield pb.DrainView(waits_for=f"{len(drains)}")
        if len(drains) < 2:
            raise Crowded("others, who had fewer, waited 30 s for this place")

    scheduler._jobs = SimpleNamespace(History=history, Drain=drain)
    assert [record.step for record in scheduler.history("job", after=4)] == [5, 6, 7, 8, 9, 10]
    assert asked == [4, 6, 8]
    assert [view.waits_for for view in scheduler.drain("peer", "", 60.0)] == ["1", "2"]
    assert 0.0 < drains[1] <= drains[0] <= 60.0


def test_a_call_that_cannot_say_that_it_waits_for_a_place_ends_with_the_cause(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`swarm history` waited without a word, and for ever, beside 64 calls of the same person."""
    monkeypatch.setattr(connection, "CROWDED_S_MAX", 0.0)

    def history(request: pb.HistoryRequest, timeout: float) -> Iterator[pb.StepList]:
        raise Crowded("64 of your calls follow jobs or pull weights already")

    scheduler._jobs = SimpleNamespace(History=history)
    with pytest.raises(Crowded, match="64 of your calls"):
        list(scheduler.history("job"))


async def test_a_person_who_was_away_for_a_week_goes_on_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a day without use a person had to ask an admin for a new token."""
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))
    clock = Clock(time.time() - 8 * 86400.0)
    async with scheduler_side(tmp_path / "data") as side:
        monkeypatch.setattr(side.members, "_wall_s", clock)
        monkeypatch.setattr(joining, "_date", lambda text: clock.unix_s)
        line = await side.token(Role.SUBMITTER)
        joined = await asyncio.to_thread(join, line, "ann", Application("ann"), clock)
        folder = profile_folder("127.0.0.1:1")
        joined.identity.save(folder)
        (folder / JOINS_FILE).write_text(line.address)
        clock.unix_s = time.time()
        assert joined.identity.ends_unix_s < clock.unix_s - 6 * 86400.0
        shell = Shell(scheduler="127.0.0.1:1")
        renewed_now = await asyncio.to_thread(identity_for, shell)
        assert renewed_now is not None
        side.members.check(caller_of(renewed_now.certificate_pem), "/swarm.wire.Jobs/List")
        assert await asyncio.to_thread(identity_for, shell) == renewed_now
    joined.identity.save(folder)
    monkeypatch.setattr(joining, "DEFAULT_JOIN_PORT", 1)
    with pytest.raises(SchedulerUnreachable, match=r"no scheduler answers at 127.0.0.1:1"):
        await asyncio.to_thread(identity_for, shell)


def test_of_many_commands_after_an_absence_those_that_are_too_many_take_what_another_one_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script that starts forty commands at once would have seen ten of them fail."""
    monkeypatch.setattr(connection, "REDIAL_S", 0.0)
    authority = Authority.new(time.time())
    ended = issue(authority, Principal(authority.cluster, Role.SUBMITTER, "ann"), time.time() - 2 * LIFE_S)
    younger = identity_of(authority, Role.SUBMITTER, "ann")
    asked: list[str] = []

    def renew_ended(address: str, *_: Any) -> Identity:
        asked.append(address)
        raise Crowded("30 certificates in a short time", hint="try again in 1.0 s")

    monkeypatch.setattr(connection, "renew_ended", renew_ended)
    profiles = [ended, ended, younger]
    monkeypatch.setattr(connection, "find_profile", lambda address: profiles.pop(0))
    assert identity_for(Shell(scheduler="127.0.0.1:1")) is younger
    assert asked == ["127.0.0.1:1"] * 2
    monkeypatch.setattr(connection, "find_profile", lambda address: ended)
    with pytest.raises(Crowded):
        identity_for(Shell(scheduler="127.0.0.1:1", timeout_s=0.05))


def test_who_names_a_scheduler_that_does_not_answer_is_told_of_those_that_he_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = ["127.0.0.1:1", "10.77.0.1:7950", "10.77.0.2:7950"]
    monkeypatch.setattr(connection, "memberships", lambda: joined)
    with pytest.raises(SchedulerUnreachable) as caught:
        identity_for(Shell(scheduler="127.0.0.1:1"))
    assert "--scheduler 10.77.0.1:7950 or --scheduler 10.77.0.2:7950" in caught.value.hint
    joined.clear()
    with pytest.raises(SchedulerUnreachable) as caught:
        identity_for(Shell(scheduler="127.0.0.1:1"))
    assert "--scheduler HOST:PORT" in caught.value.hint
