"""What strangers and members send that means nothing, or leads elsewhere: it is refused, and nobody else notices."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from swarm.data.corpus import tokenise
from swarm.errors import CorruptFrame
from swarm.rpc.channel import status_of
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster
from tests.support.simulated import small_spec, write_text

ANSWER_S_MAX = 1.0  # of the scheduler's own CPU time, which says the same on a busy machine
GARBAGE = {
    "zeros": bytes(4096),
    "plaintext": b"GET / HTTP/1.1\r\n\r\n",
    "http2 without tls": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a record that is too long": b"\x16\x03\x01\xff\xff" + b"\x01" * 70000,
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
}
PATHS = (
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//etc/passwd",
    "/page/../../app.py",
    "/%00",
    "http://10.0.0.1/",
)
HEADERS = ("Content-Length: -1", "Content-Length: 99999999999999999999", "Host: a\r\nHost: b", "X: " + "y" * 200_000)
NAMES = ("../../x", "a/b", "\x1b[31mx", "\u202eabc", "a\x00b", "", "x" * 41)
REFERENCES = (*NAMES[:5], "%", "_", "*", "' OR 1=1 --", "x" * 1_000_000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("malformed")) as made:
        yield made


@pytest.fixture(autouse=True)
def others(cluster: Cluster) -> Iterator[None]:
    """Whatever was sent, the scheduler answers others at once."""
    yield
    began_s = cluster.scheduler.cpu_s()
    cluster.jobs.Version(pb.VersionRequest(), timeout=60)
    assert cluster.scheduler.cpu_s() - began_s < ANSWER_S_MAX
    assert cluster.scheduler.child.poll() is None


def said(address: str, sent: bytes) -> bytes:
    """What a port answers before it ends the connection; nothing if it breaks it."""
    host, _, port = address.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            connection.sendall(sent)
            while chunk := connection.recv(4096):
                answer += chunk
        except ConnectionError:
            return b""
    return answer


def files_of(cluster: Cluster) -> set[Path]:
    return {path for path in cluster.folder.rglob("*") if "log" not in path.name}


def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()
    return code


@pytest.mark.parametrize("port", ["address", "joins"])
@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_handshake_ends_the_connection_without_an_answer(cluster: Cluster, port: str, sent: bytes) -> None:
    assert len(said(cluster.scheduler.ready[port], sent)) < 16, "a TLS alert at most"


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_the_page_leads_to_no_file(cluster: Cluster, path: str) -> None:
    answer = said(
        cluster.scheduler.ready["http"], f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.1 421")), answer[:100]
    assert b"root:" not in answer
    assert b"import" not in answer


@pytest.mark.parametrize("header", HEADERS)
def test_a_request_with_an_absurd_header_is_refused(cluster: Cluster, header: str) -> None:
    answer = said(cluster.scheduler.ready["http"], f"POST /healthz HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 4") or not answer, answer[:100]


def test_names_and_places_that_lead_elsewhere_are_refused(cluster: Cluster) -> None:
    spec = small_spec(write_text(cluster.folder))
    manifest = tokenise(spec, cluster.folder / "tokens")
    cluster.upload(manifest)
    shards = [pb.Shard(sha256=shard.sha256) for shard in manifest.shards]
    values = json.loads(spec.model_dump_json())

    def submit(text: str, **parts: Any) -> Any:
        facts = {"shards": shards, "token_dtype": "uint16", "vocabulary_size": 257, "end_of_text": 256} | parts
        return lambda: cluster.jobs.Submit(pb.SubmitRequest(spec_json=text, **facts), timeout=60)

    for name in NAMES:
        assert refused(submit(json.dumps(values | {"name": name}))) is grpc.StatusCode.INVALID_ARGUMENT
    for where in ("../../../etc", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd"):
        text = json.dumps(values | {"model": values["model"] | {"id": where}})
        assert refused(submit(text)) is grpc.StatusCode.INVALID_ARGUMENT
    for text in (
        '{"a":' * 80_000,
        json.dumps(values).replace("0.01", "NaN"),
        json.dumps(values).replace("0.01", "9" * 5000),
    ):
        assert refused(submit(text)) is grpc.StatusCode.INVALID_ARGUMENT
    for path in ("../../../etc/passwd", "/etc/passwd", "model/../../x"):
        file = pb.JobFile(path=path, size_bytes=1, sha256="0" * 64)
        assert refused(submit(json.dumps(values), files=[file])) is grpc.StatusCode.INVALID_ARGUMENT
    elsewhere = [pb.Shard(sha256="../../../../etc/passwd")]
    assert refused(submit(json.dumps(values), shards=elsewhere)) is grpc.StatusCode.FAILED_PRECONDITION
    assert list(cluster.jobs.List(pb.ListRequest(all=True), timeout=60).jobs) == []


@pytest.mark.parametrize("levels", range(12))
def test_a_hash_that_leads_elsewhere_is_refused_and_nothing_is_written(cluster: Cluster, levels: int) -> None:
    name = f"evil-{uuid.uuid4().hex}"
    leads = "../" * levels + name if levels else str(cluster.folder.parent / name)
    before = files_of(cluster)
    assert refused(lambda: cluster.put(leads, b"x")) is grpc.StatusCode.FAILED_PRECONDITION
    assert files_of(cluster) == before
    for above in cluster.folder.parents:
        assert not list(above.glob(f"*{name}*")), "it has left the folder"


@pytest.mark.parametrize("reference", REFERENCES, ids=range(len(REFERENCES)))
def test_a_reference_finds_no_job_by_a_pattern_a_path_or_a_query(cluster: Cluster, reference: str) -> None:
    request = pb.JobRequest(job=reference)
    assert refused(lambda: cluster.jobs.Get(request, timeout=60)) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "sent",
    [b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03\xff\xfe\xfd", b"\x0b" * 200_000, b"\x0a\xff\xff\xff\x02" + bytes(5 << 20)],
)
def test_what_is_no_message_is_an_error_for_its_sender_alone(cluster: Cluster, sent: bytes) -> None:
    call = cluster.channel.unary_unary("/swarm.wire.Jobs/Submit")
    expected = (status_of(CorruptFrame("")), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert refused(lambda: call(sent, timeout=60)) in expected
