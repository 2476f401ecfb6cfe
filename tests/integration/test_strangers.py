"""What strangers and careless people send to a real scheduler: it refuses at once, and serves everybody else."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from swarm.data.shards import tokenise
from swarm.job.spec import JobSpec
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster
from tests.support.simulated import small_spec, write_text

pytestmark = pytest.mark.timeout(120)

REFUSED_S_MAX = 0.5  # 100 ms where nothing else runs; these tests share their cores


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("strangers")
    with Cluster(folder) as made:
        made.upload(tokenise(small_spec(write_text(folder)), folder / "tokens"))
        made.jobs.Version(pb.VersionRequest(), timeout=10)
        yield made


def request(cluster: Cluster, **changes: Any) -> pb.SubmitRequest:
    spec: JobSpec = small_spec(cluster.folder / "text.txt", **changes)
    shards = [pb.Shard(sha256=path.stem) for path in (cluster.folder / "scheduler" / "shards").glob("*.bin")]
    return pb.SubmitRequest(
        spec_json=spec.model_dump_json(), shards=shards, token_dtype="uint16", vocabulary_size=257, end_of_text=256
    )


def refused(call: Callable[[], object]) -> tuple[str, str]:
    """The code and the text with which the call is refused, at once."""
    began_s = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert time.monotonic() - began_s < REFUSED_S_MAX
    metadata = dict(caught.value.trailing_metadata() or ())
    return str(metadata["swarm-code"]), caught.value.details() or ""


@pytest.mark.parametrize("scheme", ["ftp://", "simplecache::ftp://", "http://"])
def test_a_checkpoint_folder_makes_the_scheduler_dial_nobody(cluster: Cluster, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        where = f"{scheme}127.0.0.1:{trap.getsockname()[1]}/x"
        code, text = refused(lambda: cluster.jobs.Submit(request(cluster, checkpoint__dir=where), timeout=20))
        assert code == "E0300"
        assert "127.0.0.1" not in text
        with pytest.raises(TimeoutError):
            trap.accept()


def test_a_checkpoint_folder_is_below_those_of_the_scheduler(cluster: Cluster, tmp_path: Path) -> None:
    code, text = refused(lambda: cluster.jobs.Submit(request(cluster, checkpoint__dir=str(tmp_path)), timeout=20))
    assert (code, "may keep checkpoints" in text) == ("E0300", True)
    assert list(tmp_path.iterdir()) == []
