"""What strangers and careless people send to a real scheduler: it refuses at once, and serves everybody else."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from swarm.data.corpus import tokenise
from swarm.job.spec import JobSpec
from swarm.limits import (
    FILES_MAX,
    FOLLOWERS_MAX,
    HASHES_ASKED_MAX,
    MANIFEST_BYTES_MAX,
    SHARDS_MAX,
    SPEC_BYTES_MAX,
    STAGES_MAX,
)
from swarm.rpc.channel import MAX_CONCURRENT_STREAMS, connect_sync
from swarm.rpc.session import GrpcSchedulerLink
from swarm.types import PROTOCOL_VERSION, JobId, PeerId
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc
from swarm.wire.messages import Event, Hello, Logged
from tests.support.processes import Cluster
from tests.support.simulated import small_spec, write_text

# Of the scheduler's own CPU time, which says the same on a busy machine: 100 ms and 50 ms where nothing else runs.
REFUSED_S_MAX = 0.5
SHARDS: list[Path] = []  # of the honest job
TURN_S_MAX = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("strangers")
    with Cluster(folder, "--insecure") as made:  # where nobody proves who he is, limits are all there is
        made.upload(tokenise(small_spec(write_text(folder)), folder / "tokens"))
        SHARDS[:] = (folder / "scheduler" / "shards").glob("*.bin")
        yield made


def request(cluster: Cluster, **changes: Any) -> pb.SubmitRequest:
    spec: JobSpec = small_spec(cluster.folder / "text.txt", **changes)
    shards = [pb.Shard(sha256=path.stem) for path in SHARDS]
    return pb.SubmitRequest(
        spec_json=spec.model_dump_json(), shards=shards, token_dtype="uint16", vocabulary_size=257, end_of_text=256
    )


def refused(cluster: Cluster, call: Callable[[], object], within_s: float = REFUSED_S_MAX) -> tuple[str, str]:
    """The code and the text with which the call is refused, at once."""
    began_s = cluster.scheduler.cpu_s()
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert cluster.scheduler.cpu_s() - began_s < within_s
    metadata = dict(caught.value.trailing_metadata() or ())
    return str(metadata["swarm-code"]), caught.value.details() or ""


def slowest(cluster: Cluster, goes_on: Callable[[], bool]) -> float:
    """The longest that the scheduler worked while the simplest question waited, as long as something went on."""
    longest_s = 0.0
    while goes_on():
        longest_s = max(longest_s, waited(cluster))
        time.sleep(0.002)
    return longest_s


def waited(cluster: Cluster) -> float:
    """How long the scheduler worked before it had answered the simplest question."""
    began_s = cluster.scheduler.cpu_s()
    cluster.jobs.Version(pb.VersionRequest(), timeout=60)
    return cluster.scheduler.cpu_s() - began_s


@pytest.mark.parametrize("scheme", ["ftp://", "simplecache::ftp://", "http://"])
def test_a_checkpoint_folder_makes_the_scheduler_dial_nobody(cluster: Cluster, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        where = f"{scheme}127.0.0.1:{trap.getsockname()[1]}/x"
        code, text = refused(cluster, lambda: cluster.jobs.Submit(request(cluster, checkpoint__dir=where), timeout=60))
        assert code == "E0300"
        assert "127.0.0.1" not in text
        with pytest.raises(TimeoutError):
            trap.accept()


def test_a_job_that_is_too_large_is_refused_before_it_is_stored(cluster: Cluster) -> None:
    good = request(cluster)
    shard, file = good.shards[0], pb.JobFile(path="model/config.json", size_bytes=1, sha256="0" * 64)

    def submit(**parts: Any) -> Callable[[], object]:
        changed = pb.SubmitRequest.FromString(good.SerializeToString())
        for name, value in parts.items():
            changed.ClearField(name)  # type: ignore[arg-type]
            changed.MergeFrom(pb.SubmitRequest(**{name: value}))
        return lambda: cluster.jobs.Submit(changed, timeout=60)

    long_spec = json.loads(good.spec_json)
    long_spec["model"]["config"]["hidden_act"] = "x" * SPEC_BYTES_MAX
    for call, words in (
        (submit(shards=[shard] * (SHARDS_MAX + 1)), f"at most {SHARDS_MAX}"),
        (submit(files=[file] * (FILES_MAX + 1)), f"at most {FILES_MAX}"),
        (submit(spec_json=json.dumps(long_spec)), f"at most {SPEC_BYTES_MAX}"),
        (submit(spec_json="[" * SPEC_BYTES_MAX), "not JSON"),
    ):
        code, text = refused(cluster, call)
        assert (code, words in text) == ("E0300", True), text
    asked = pb.ShardList(shards=[shard] * (HASHES_ASKED_MAX + 1))
    assert refused(cluster, lambda: cluster.jobs.MissingShards(asked, timeout=60))[0] == "E1200"
    assert list(cluster.jobs.List(pb.ListRequest(all=True), timeout=60).jobs) == []


def test_many_stages_are_refused_and_a_long_cut_holds_nobody_up(cluster: Cluster) -> None:
    def config(stages: int) -> pb.SubmitRequest:
        return request(cluster, config__num_hidden_layers=10_000, pipeline__stages=stages)

    with pytest.raises(ValidationError, match="less than or equal to 512"):
        config(STAGES_MAX + 1)
    changed = config(STAGES_MAX)
    changed.spec_json = changed.spec_json.replace(f'"stages":{STAGES_MAX}', f'"stages":{STAGES_MAX + 1}')
    code, text = refused(cluster, lambda: cluster.jobs.Submit(changed, timeout=60))
    assert (code, "pipeline.stages" in text) == ("E0300", True)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(cluster.jobs.Submit, config(STAGES_MAX), timeout=60) for _ in range(4)]
        late_s = slowest(cluster, lambda: not all(job.done() for job in jobs))
        for job in jobs:
            cluster.jobs.Cancel(pb.CancelRequest(job=job.result().id, no_checkpoint=True), timeout=60)
    assert late_s < TURN_S_MAX


def test_a_list_of_jobs_has_no_whole_specs(cluster: Cluster) -> None:
    job = cluster.jobs.Submit(request(cluster), timeout=60)
    try:
        assert job.spec_json
        listed = cluster.jobs.List(pb.ListRequest(), timeout=60).jobs
        assert [(row.id, row.spec_json) for row in listed] == [(job.id, "")]
        assert cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=60).spec_json == job.spec_json
    finally:
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id, no_checkpoint=True), timeout=60)


@pytest.mark.parametrize("size_bytes", [MANIFEST_BYTES_MAX, MANIFEST_BYTES_MAX + 3])
def test_a_manifest_of_many_megabytes_holds_nobody_up(cluster: Cluster, size_bytes: int) -> None:
    content = b'{"files": [' + b"{}," * ((size_bytes - 15) // 3) + b"{}]}"
    content += b" " * (size_bytes - len(content))
    sha256 = hashlib.sha256(content).hexdigest()
    bomb = request(cluster)
    bomb.files.append(pb.JobFile(path="manifest.json", size_bytes=len(content), sha256=sha256))
    cluster.put(sha256, content)
    is_read = size_bytes <= MANIFEST_BYTES_MAX
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            refused, cluster, lambda: cluster.jobs.Submit(bomb, timeout=60), 60.0 if is_read else REFUSED_S_MAX
        )
        late_s = slowest(cluster, lambda: not call.done())
    code, text = call.result()
    assert (code, "the manifest cannot be used" in text) == ("E1502", True)
    assert ("its manifest has" in text) is not is_read
    assert late_s < TURN_S_MAX


def test_log_lines_for_jobs_of_others_are_dropped_and_a_flood_holds_nobody_up(cluster: Cluster) -> None:
    job = cluster.jobs.Submit(request(cluster, limits__min_replicas=4), timeout=60)
    flood = [Logged(JobId(job.id), 0.0, "error", f"forged {number} " + "x" * 1000) for number in range(4_000)]
    hello = Hello(PeerId("forger"), time.time_ns(), PROTOCOL_VERSION, "0", "127.0.0.1:1", "", "cpu", 1, 0, -1)

    async def attack() -> None:
        link = GrpcSchedulerLink(cluster.address)

        async def events() -> AsyncIterator[Event]:
            for event in (hello, *flood):
                yield event

        async for _ in link.attach(events()):
            pass
        await link.close()

    try:
        done = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(slowest, cluster, lambda: not done.is_set())
            try:
                asyncio.run(attack())
            finally:
                done.set()
            late_s = asking.result()
        lines = list(cluster.jobs.Logs(pb.LogsRequest(job=job.id, stage=-1), timeout=60))
        assert [line.message for line in lines if "forged" in line.message] == []
        assert late_s < TURN_S_MAX
    finally:
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id, no_checkpoint=True), timeout=60)


def test_what_the_scheduler_writes_is_for_its_owner_alone(cluster: Cluster) -> None:
    cluster.jobs.Cancel(pb.CancelRequest(job=cluster.jobs.Submit(request(cluster), timeout=60).id), timeout=60)
    folder = cluster.folder / "scheduler"
    found = [folder, *folder.rglob("*")]
    assert len(found) > 5
    assert [path for path in found if path.stat().st_mode & 0o077] == []


def test_followers_are_bounded_and_nobody_else_is_held_up(cluster: Cluster) -> None:
    job = cluster.jobs.Submit(request(cluster, limits__min_replicas=4), timeout=60).id
    channels = [connect_sync(cluster.address) for _ in range(FOLLOWERS_MAX // MAX_CONCURRENT_STREAMS + 1)]
    try:
        followed = []
        for number in range(FOLLOWERS_MAX):
            stub: Any = jobs_pb2_grpc.JobsStub(channels[number % len(channels)])  # type: ignore[no-untyped-call]
            followed.append(stub.Watch(pb.JobRequest(job=job), timeout=300))
            next(followed[-1])
        code, text = refused(cluster, lambda: next(cluster.jobs.Watch(pb.JobRequest(job=job), timeout=60)))
        assert (code, f"{FOLLOWERS_MAX} calls follow" in text) == ("E1002", True)
        assert waited(cluster) < TURN_S_MAX
        followed[0].cancel()
        deadline_s = time.monotonic() + 60
        while True:
            try:
                next(cluster.jobs.Watch(pb.JobRequest(job=job), timeout=60))
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline_s
    finally:
        for channel in channels:
            channel.close()
        cluster.jobs.Cancel(pb.CancelRequest(job=job, no_checkpoint=True), timeout=60)
