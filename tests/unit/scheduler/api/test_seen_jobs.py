"""What a caller finds, is told and is shown of jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import cast

import pytest
import sqlalchemy as sa

from scheduler.api.announcer import NoAnnouncer
from scheduler.api.seen_jobs import SeenJobs
from scheduler.api.views import guarded_view
from scheduler.brain.explain.facts import Fact
from scheduler.brain.fleet.membership import Peer
from scheduler.brain.members.projects import ANYBODY, REACH, Person
from scheduler.jobs.job import Job
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.database import Database
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.stores import Stores
from swarm.errors import NotFound, NotOwner, SwarmError
from swarm.events import Hello
from swarm.job.spec import JobSpec
from swarm.messages import PROTOCOL_VERSION
from swarm.pki.names import Role
from swarm.process.logs import get_logger
from swarm.types import JobId, JobState, PeerId, PeerState
from swarm.wire import jobs_pb2 as pb

ANN = Person(Role.SUBMITTER, "ann", "red")
BOB = Person(Role.SUBMITTER, "bob", "red")
EVE = Person(Role.SUBMITTER, "eve", "blue")
ADMIN = Person(Role.ADMIN, "root", "green")
JOBS = (("demo-a1", "demo", ANN), ("demo-b2", "demo", EVE), ("test-c3", "test", EVE), ("demo-d4", "demo", ADMIN))


def seen_by(person: Person, folder: Path, refused: list[str] | None = None) -> SeenJobs:
    ports = SchedulerPorts(
        Stores.under(folder, Database(sa.create_engine("sqlite://"), 1, None)),  # nothing here reads or writes it
        NoAnnouncer(),
        SchedulerMetrics("0", PROTOCOL_VERSION),
        Random(1),
        lambda: 0.0,
        get_logger("test"),
    )
    registry = JobRegistry(ports)
    tokens = JobTokens((), "uint16", 257, 1.0)
    for id_, name, by in JOBS:
        record = JobRecord(JobId(id_), name, JobState.PAUSED, "", 0.0, 0.0, "{}", tokens)
        record = replace(record, project=by.project, owner=by.owner)
        registry.add(Job(record, cast(JobSpec, None)))

    def note(method: str, error: SwarmError) -> None:
        if refused is not None:
            refused.append(f"{method} {error.code}")

    return SeenJobs(registry, lambda: person, note)


def words(seen: SeenJobs, method: str, reference: str) -> str:
    """What is said of a job that is not there for the caller, without the name that he gave."""
    with pytest.raises(NotFound) as caught:
        seen.find(method, reference)
    return f"{caught.value.message} {caught.value.hint}".replace(reference, "IT")


@pytest.mark.parametrize("method", sorted(REACH))
def test_a_job_of_others_is_as_one_that_never_was(method: str, tmp_path: Path) -> None:
    eve = seen_by(EVE, tmp_path)
    for there, nowhere in (("demo-a1", "demo-zz"), ("demo-a", "demo-z"), ("red/demo", "nil/demo")):
        assert words(eve, method, there) == words(eve, method, nowhere), there
    assert eve.find(method, "demo").record.id == "demo-b2"  # although two others have a job of that name
    assert eve.find(method, "d").record.id == "demo-b2"
    assert eve.find(method, "blue/test").record.id == "test-c3"
    assert words(seen_by(ANN, tmp_path), method, "test") == words(eve, method, "nothing")
    assert [job.record.id for job in eve.all()] == ["demo-b2", "test-c3"]


def test_a_colleague_sees_a_job_and_leaves_it_alone(tmp_path: Path) -> None:
    refused: list[str] = []
    bob = seen_by(BOB, tmp_path, refused)
    assert bob.find("Get", "demo").record.id == "demo-a1"
    for method in ("Cancel", "Verify"):
        with pytest.raises(NotOwner, match=f"{method} is for whoever submitted job demo-a1: submitter/ann"):
            bob.find(method, "demo")
    assert refused == ["Cancel E0509", "Verify E0509"]
    assert seen_by(ANN, tmp_path).find("Cancel", "demo").record.id == "demo-a1"


def test_an_admin_finds_every_job_and_his_own_projects_first(tmp_path: Path) -> None:
    admin = seen_by(ADMIN, tmp_path)
    assert len(admin.all()) == 4
    found = {name: admin.find("Cancel", name).record.id for name in ("demo", "blue/demo", "red/demo", "demo-b2", "te")}
    assert list(found.values()) == ["demo-d4", "demo-b2", "demo-a1", "demo-b2", "test-c3"]
    assert words(admin, "Get", "blue/nothing")
    anybody = seen_by(ANYBODY, tmp_path)
    assert anybody.find("Cancel", "test").record.id == "test-c3"
    with pytest.raises(NotFound, match="3 open jobs are named"):
        anybody.find("Cancel", "demo")


def test_no_text_names_a_job_of_others(tmp_path: Path) -> None:
    text = "gpu-1 is kept for test-c3, which waits; demo-a1 is over"
    ann = seen_by(ANN, tmp_path)
    assert ann.shown(text) == "gpu-1 is kept for a job of another project, which waits; demo-a1 is over"
    assert [fact.text for fact in ann.facts([Fact("idle", text)])] == [ann.shown(text)]
    assert seen_by(ADMIN, tmp_path).shown(text) == text


def test_who_is_no_admin_sees_no_address_and_no_work_of_others(tmp_path: Path) -> None:
    hello = Hello(PeerId("gpu-1"), 1, PROTOCOL_VERSION, "0", "10.0.0.7:7951", "10.0.0.7:9464", "cpu", 1, 1 << 30, -1)
    view = pb.PeerView(
        id="gpu-1", state="serving", reason="stage 2 of demo-a1", address=hello.address, http_address="x", device="cpu",
        job="demo-a1", stage=2, pace_s=0.5, outstanding=3,
    )  # fmt: skip
    serving = Peer(hello, PeerState.SERVING, "stage 2 of demo-a1", 0.0, 0.0, JobId("demo-a1"), 2)
    idle = Peer(hello, PeerState.IDLE, "demo-a1 is over", 0.0, 0.0)
    knows = {
        who: [seen_by(who, tmp_path).knows_all_of(peer) for peer in (serving, idle)] for who in (ANN, BOB, EVE, ADMIN)
    }
    assert knows == {ANN: [True, True], BOB: [True, True], EVE: [False, True], ADMIN: [True, True]}
    mine = guarded_view(pb.PeerView.FromString(view.SerializeToString()), seen_by(ANN, tmp_path).shown, knows_job=True)
    assert (mine.address, mine.http_address, mine.job, mine.stage) == ("", "", "demo-a1", 2)
    theirs = guarded_view(view, seen_by(EVE, tmp_path).shown, knows_job=False)
    assert theirs == pb.PeerView(id="gpu-1", state="serving", device="cpu", stage=-1)
