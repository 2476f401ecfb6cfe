"""One caller, or one stranger, takes everything that there is a number of: the others are served all the same."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from swarm.errors import NotAllowed
from swarm.limits import FOLLOWED_BY_ONE_MAX, HANDSHAKE_S_MAX
from swarm.pki.names import Role, scheduler_of
from swarm.rpc.channel import MAX_CONCURRENT_STREAMS, connect_sync, translate
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text

FILES_MAX = 300


def test_a_stranger_who_dials_without_end_leaves_files_and_ears_to_everybody_else(tmp_path: Path) -> None:
    """Silent connections took all file descriptors: no probe, no call and no checkpoint got through."""
    cluster = Cluster(tmp_path)
    cluster.before_scheduler = ("prlimit", f"--nofile={FILES_MAX}:{FILES_MAX}")
    with cluster, contextlib.ExitStack() as dialled:
        cluster.jobs.Version(pb.VersionRequest(), timeout=60)
        host, _, port = cluster.address.rpartition(":")
        for _ in range(2 * FILES_MAX):
            line = dialled.enter_context(socket.socket())
            line.settimeout(1.0)
            with contextlib.suppress(OSError):
                line.connect((host, int(port)))
        assert _open_files(cluster.scheduler.child.pid) < FILES_MAX - 50
        assert cluster.scheduler.probe() in (200, 503)
        cluster.jobs.Version(pb.VersionRequest(), timeout=60)  # over a connection that is there
        deadline_s = time.monotonic() + 3 * HANDSHAKE_S_MAX + 60.0
        cluster.redial()
        while True:  # whoever says nothing is sent away, and makes room
            try:
                cluster.jobs.Version(pb.VersionRequest(), timeout=10)
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline_s


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_one_viewer_who_follows_without_end_leaves_places_to_the_others(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path), pipeline__stages=1, limits__min_replicas=1)
    spec = resolved(spec)
    with Cluster(tmp_path) as cluster, contextlib.ExitStack() as channels:
        job = cluster.submit(spec, Tokens.make(tmp_path / "tokens", spec).manifest).id
        watches = _watches(cluster, "eve", channels)
        for _ in range(FOLLOWED_BY_ONE_MAX):
            next(next(watches)(job))
        with pytest.raises(NotAllowed, match=f"{FOLLOWED_BY_ONE_MAX} of your calls"):
            next(next(watches)(job))
        assert next(next(_watches(cluster, "ann", channels))(job)).id == job


def _watches(cluster: Cluster, name: str, channels: contextlib.ExitStack) -> Iterator[Any]:
    """Without end, a function that begins to watch a job as a new viewer of this name."""
    identity = cluster.member(Role.VIEWER, name)

    def watch(channel: grpc.Channel, job: str) -> Iterator[Any]:
        stub: Any = jobs_pb2_grpc.JobsStub(channel)  # type: ignore[no-untyped-call]
        try:
            yield from stub.Watch(pb.JobRequest(job=job), timeout=60)
        except grpc.RpcError as error:
            raise translate(error, cluster.address) from None

    kept = []
    while True:
        channel = channels.enter_context(connect_sync(cluster.address, identity, scheduler_of(identity.cluster).dns))
        for _ in range(MAX_CONCURRENT_STREAMS // 2):

            def begin(job: str, channel: grpc.Channel = channel) -> Iterator[Any]:
                kept.append(watch(channel, job))  # a stream that nobody holds is ended
                return kept[-1]

            yield begin
