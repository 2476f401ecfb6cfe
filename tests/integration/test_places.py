"""Calls that give their places up to others, over gRPC: their clients go on, and nothing is lost or comes twice."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from client.connection import Scheduler
from scheduler.api.holding import Holding, Reads
from scheduler.api.job_service import JobService
from scheduler.api.uploads import Uploads
from scheduler.brain.members import places
from scheduler.brain.members.persons import Person
from scheduler.brain.members.places import CallSlots
from scheduler.storage.database import Database
from scheduler.storage.job_log import LogLine
from scheduler.storage.stores import Stores
from swarm.errors import Crowded, SwarmError
from swarm.pki.names import Role
from swarm.rpc.channel import bind, connect_sync, new_server, translate
from swarm.types import JobId, JobState
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc

JOB = JobId("job")
EVE, ANN = (Person(Role.SUBMITTER, name) for name in ("eve", "ann"))
pytestmark = pytest.mark.timeout(120)


@dataclass
class Service:
    """One service with a job that is at work, which takes two persons for its callers, each at a port."""

    stores: Stores
    ports: dict[Person, str]
    followers: Holding

    def of(self, person: Person) -> Scheduler:
        return Scheduler(self.ports[person], 10.0)

    def says(self, message: str) -> None:
        self.stores.logs.append(JOB, LogLine(1.0, "info", "", -1, message))


@asynccontextmanager
async def serving(folder: Path, monkeypatch: pytest.MonkeyPatch, most: int = 2) -> AsyncIterator[Service]:
    """With `most` places for uploads and for calls that follow; one is ended after a moment."""
    monkeypatch.setattr(places, "PLACE_WAIT_S", 0.5)
    stores = Stores.under(folder, await Database.open("sqlite://", None))
    stores.logs.open(JOB)
    one = JobService.__new__(JobService)
    one._uploads = Uploads(stores)
    one._uploads._places = Holding(CallSlots(most, most, "files are being uploaded"))
    one._followers, one._reads = Holding(CallSlots(most, most, "calls follow")), Reads()
    job = SimpleNamespace(record=SimpleNamespace(id=JOB, owner="", state=JobState.RUNNING))
    one._jobs = cast(Any, SimpleNamespace(stores=stores, registry=SimpleNamespace(find=lambda _: job)))
    async with AsyncExitStack() as servers:
        ports = {}
        for person in (EVE, ANN):
            his = copy.copy(one)
            his._asks = lambda person=person: person  # type: ignore[misc]
            server = new_server()
            jobs_pb2_grpc.add_JobsServicer_to_server(his, server)  # type: ignore[no-untyped-call]
            ports[person] = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
            await server.start()
            servers.push_async_callback(server.stop, None)
        yield Service(stores, ports, one._followers)


def shard_of(content: bytes) -> pb.Shard:
    return pb.Shard(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


async def test_a_slow_upload_makes_room_and_goes_on_at_its_next_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two persons held all places for uploads, with a byte now and then, for as long as they liked."""
    contents = [bytes([number]) * 3000 for number in range(3)]
    go_on, starts, said = threading.Event(), list[tuple[int, int]](), list[str]()

    def slowly(number: int) -> Callable[[int], Iterator[bytes]]:
        def pieces(start: int) -> Iterator[bytes]:
            starts.append((number, start))
            if start == 0:
                yield contents[number][: 1000 * (number + 1)]
                assert go_on.wait(60)
            yield contents[number][start or 1000 * (number + 1) :]

        return pieces

    async with serving(tmp_path, monkeypatch) as service:

        def send(person: Person, number: int, payload: Callable[[int], Iterator[bytes]]) -> None:
            with service.of(person) as scheduler:
                scheduler.put_shard(
                    shard_of(contents[number]), payload, said.append if person == EVE else lambda _: None
                )

        eves = [asyncio.create_task(asyncio.to_thread(send, EVE, number, slowly(number))) for number in range(2)]
        while len(starts) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(send, ANN, 2, lambda start: iter([contents[2][start:]]))
        go_on.set()
        await asyncio.gather(*eves)
        uploads = Uploads(service.stores)
        for person, number in ((EVE, 0), (EVE, 1), (ANN, 2)):
            assert uploads.path(person.owner, shard_of(contents[number]).sha256).read_bytes() == contents[number]
    assert sorted(starts) == [(0, 0), (0, 1000), (1, 0)], "the slower one was ended, and sent nothing twice"
    assert said == ["others, who had fewer, waited 30 s for this place; waiting for a place"]


async def test_who_follows_a_log_has_each_line_once_although_others_needed_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch) as service:
        seen: dict[str, list[str]] = {"eve-1": [], "eve-2": [], "ann": []}
        said = list[str]()

        def follow(person: Person, name: str) -> None:
            with service.of(person) as scheduler:
                for entry in scheduler.logs(pb.LogsRequest(job=JOB, follow=True, stage=-1), said.append):
                    seen[name].append(entry.message)

        async def all_have(last: str, *names: str) -> None:
            while any(last not in seen[name] for name in names):
                await asyncio.sleep(0.01)

        service.says("0")
        tasks = [asyncio.create_task(asyncio.to_thread(follow, EVE, f"eve-{number}")) for number in (1, 2)]
        await all_have("0", "eve-1", "eve-2")
        tasks.append(asyncio.create_task(asyncio.to_thread(follow, ANN, "ann")))
        number = 0
        while not any("waited 30 s" in line for line in said):
            service.says(str(number := number + 1))
            await asyncio.sleep(0.02)
        for _ in range(20):  # also while one of them has no place
            service.says(str(number := number + 1))
            await asyncio.sleep(0.02)
        service.stores.logs.close(JOB)
        await asyncio.gather(*tasks)
    for name, lines in seen.items():
        assert lines == [str(line) for line in range(number + 1)], name


async def test_a_caller_who_does_not_read_holds_no_place_against_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His stream stands still within gRPC, where nothing of ours asks for its place. Once he reads on, he is told."""
    async with serving(tmp_path, monkeypatch) as service:

        def begun() -> tuple[grpc.Channel, Any]:
            channel = connect_sync(service.ports[EVE])
            stub: Any = jobs_pb2_grpc.JobsStub(channel)  # type: ignore[no-untyped-call]
            stream = stub.Logs(pb.LogsRequest(job=JOB, follow=True, stage=-1))
            next(stream)
            return channel, stream

        def follow() -> list[str]:
            with service.of(ANN) as scheduler:
                request = pb.LogsRequest(job=JOB, follow=True, stage=-1, level="error")
                return [entry.message for entry in scheduler.logs(request)]

        service.says("begins")
        held = [await asyncio.to_thread(begun) for _ in range(2)]
        for number in range(64):
            service.says("x" * (1 << 18) + f"{number}")
        await asyncio.sleep(0.5)
        following = asyncio.create_task(asyncio.to_thread(follow))
        while ANN not in [place.person for place in service.followers._places._taken]:
            await asyncio.sleep(0.05)
        service.stores.logs.append(JOB, LogLine(1.0, "error", "", -1, "seen"))
        service.stores.logs.close(JOB)
        assert await following == ["seen"]
        ends = [await asyncio.to_thread(end, stream) for _, stream in held]
        assert [isinstance(end, Crowded) for end in ends] == [True, False]
        assert ends[1] is None
        for channel, _ in held:
            channel.close()


def end(stream: Any) -> SwarmError | None:
    """The error that a stream ends with, once it is read to its end."""
    try:
        deque(stream)
    except grpc.RpcError as error:
        return translate(error, "the scheduler")
    return None
