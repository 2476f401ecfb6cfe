"""Floods below gRPC: pings, settings and calls that are taken back, as fast as a port takes them.

Between machines only members come that far, since TLS is in the way. Whoever asks is answered meanwhile, the stage
server is still there, and memory that the flood has left goes back to the system.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.wire import jobs_pb2 as pb
from tests.support.http2 import ATTACKS, misusing
from tests.support.processes import Cluster

pytestmark = pytest.mark.timeout(300)

SECONDS, FLOOD_BYTES = 6.0, 1 << 20  # at least
ANSWER_S_MAX = 60.0
GREW_MIB_MAX, STAYS_MIB_MAX = 768, 256  # of one or two thousand that are sent


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("http2")) as made:
        made.add_servers(1)
        yield made


def memory_mib(pid: int) -> int:
    """What a process holds now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_flood_below_grpc_keeps_nobody_from_an_answer_and_fills_no_memory(cluster: Cluster, kind: str) -> None:
    """At the scheduler as a member, and at a stage server as a stranger, at the same time."""
    (peer,) = cluster.peers()
    flooded = (cluster.scheduler, cluster.servers[peer.id])
    before_mib, grew_mib = [memory_mib(process.child.pid) for process in flooded], 0

    def grown_mib() -> int:
        now_mib = [memory_mib(process.child.pid) for process in flooded]
        return max(now - before for before, now in zip(before_mib, now_mib, strict=True))

    with misusing(kind, cluster.address, cluster.address) as first, misusing(kind, peer.address) as second:
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s or min(first.sent_bytes, second.sent_bytes) < FLOOD_BYTES:
            cluster.jobs.Version(pb.VersionRequest(), timeout=ANSWER_S_MAX)
            if kind != "continuations":
                assert {process.probe() for process in flooded} <= {200, 503}
            grew_mib = max(grew_mib, grown_mib())
            time.sleep(0.1)
    assert grew_mib < GREW_MIB_MAX
    while grown_mib() >= STAYS_MIB_MAX:
        time.sleep(0.1)  # until what was in use when the flood ended has gone back too
    assert all(process.child.poll() is None for process in flooded)
    cluster.jobs.Version(pb.VersionRequest(), timeout=60.0)
    assert [peer.id for peer in cluster.peers()] == [peer.id]
    for process in flooded:
        log = process.log.read_text()
        assert "Traceback" not in log
        assert len(log) < 1 << 20, "nobody fills the disk with logs"
