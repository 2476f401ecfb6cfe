"""Who may come in, against real processes: nobody without a certificate, and members as far as their role goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from client.cli import run
from swarm.errors import Refused, Revoked
from swarm.pki.authority import Authority
from swarm.pki.identity import Identity, Wallet, issue
from swarm.pki.names import Principal, Role, scheduler_of
from swarm.pki.passes import PassKey
from swarm.pki.profiles import ENVIRONMENT, profile_folder
from swarm.rpc import passes
from swarm.rpc.channel import connect, connect_sync, translate
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.rpc.session import GrpcSchedulerLink
from swarm.types import PROTOCOL_VERSION, JobId, PeerId
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc
from swarm.wire.messages import Event, Hello, Pass, StateRequest
from tests.support.processes import Cluster, Process
from tests.support.scenes import Task
from tests.support.services import until

pytestmark = pytest.mark.timeout(300)

Swarm = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("guarded")) as made:
        made.add_servers(1)
        yield made


@pytest.fixture
def swarm(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> Swarm:
    """Run a command as somebody (a folder of profiles; the local admin by default): exit code, data or error."""

    def call(*words: str, profiles: Path | None = None) -> tuple[int, Any]:
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            if profiles is not None:
                patch.setenv(ENVIRONMENT, str(profiles))
            code = run([*words, "--scheduler", cluster.address, "-o", "json", "-q"])
        out, _ = capfd.readouterr()
        told = json.loads(out) if out else {}
        return code, told.get("data", told.get("error"))

    return call


def version_as(cluster: Cluster, identity: Identity | None, server_name: str = "") -> grpc.StatusCode:
    """What a call of Jobs.Version comes to."""
    with connect_sync(cluster.address, identity, server_name) as channel:
        stub: Any = jobs_pb2_grpc.JobsStub(channel)  # type: ignore[no-untyped-call]
        try:
            stub.Version(pb.VersionRequest(), timeout=60)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_nobody_comes_in_without_a_certificate_of_this_swarm(cluster: Cluster) -> None:
    admin = Identity.load(profile_folder(cluster.address))
    assert admin is not None
    name = scheduler_of(admin.cluster).dns
    other = Authority.new(time.time())
    # The stranger trusts our authority; ours must not trust his.
    stranger = issue(other, Principal(other.cluster, Role.ADMIN, "mallory"), time.time())
    stranger = Identity(stranger.key_pem, stranger.certificate_pem, admin.ca_pem)
    assert version_as(cluster, admin, name) is grpc.StatusCode.OK
    assert version_as(cluster, None) is grpc.StatusCode.UNAVAILABLE
    assert version_as(cluster, stranger, name) is grpc.StatusCode.UNAVAILABLE
    assert version_as(cluster, admin, "mallory.scheduler.swarm") is grpc.StatusCode.UNAVAILABLE


def test_a_person_joins_with_a_token_and_may_do_what_the_role_says(
    cluster: Cluster, swarm: Swarm, tmp_path: Path
) -> None:
    code, made = swarm("token", "create", "--role", "viewer")
    assert code == 0
    line = made["line"]
    assert swarm("login", "--join", line, "--name", "vera", profiles=tmp_path)[0] == 0
    key = next(tmp_path.glob("*/key.pem"))
    assert (stat.S_IMODE(key.stat().st_mode), stat.S_IMODE(key.parent.stat().st_mode)) == (0o600, 0o700)

    assert swarm("peers", profiles=tmp_path)[0] == 0
    for forbidden in (
        ("peers", "drain", "x", "-y"),
        ("token", "create", "--role", "admin"),
        ("identity", "revoke", "x"),
    ):
        code, error = swarm(*forbidden, profiles=tmp_path)
        assert (code, error["code"]) == (5, "E0503"), error
        assert "your role viewer does not allow" in error["message"]

    code, error = swarm("login", "--join", line, "--name", "eve", profiles=tmp_path / "eve")
    assert (code, error["code"]) == (5, "E0501"), "a token is for one"
    assert swarm("login", "--join", line[:-1], profiles=tmp_path / "eve")[0] == 2
    code, error = swarm("ls", profiles=tmp_path / "eve")
    assert (code, error["code"]) == (5, "E0500")
    assert "swarm login --join" in error["hint"]

    assert swarm("identity", "revoke", "vera", "--reason", "she left")[0] == 0
    code, error = swarm("ls", profiles=tmp_path)
    assert (code, error["code"]) == (5, "E0504")
    assert "she left" in error["message"]


def test_a_token_is_revoked_and_one_that_is_too_old_is_none(cluster: Cluster, swarm: Swarm, tmp_path: Path) -> None:
    made = swarm("token", "create", "--role", "submitter", "--uses", "5", "--name", "ci-*")[1]
    assert [token["id"] for token in swarm("token", "ls")[1]] == [made["id"]]
    code, error = swarm("login", "--join", made["line"], "--name", "laptop", profiles=tmp_path)
    assert (code, error["code"]) == (5, "E0501")
    assert 'for names like "ci-*"' in error["message"]
    assert swarm("login", "--join", made["line"], "--name", "ci-1", profiles=tmp_path)[0] == 0
    assert swarm("token", "revoke", made["id"])[0] == 0
    assert swarm("token", "ls")[1] == []
    assert swarm("login", "--join", made["line"], "--name", "ci-2", profiles=tmp_path)[0] == 5
    assert swarm("token", "create", "--role", "scheduler")[0] == 2
    assert swarm("token", "create", "--role", "viewer", "--ttl", "400d")[0] == 2


def test_a_stage_server_joins_once_with_a_token_and_comes_back_without(
    cluster: Cluster, swarm: Swarm, tmp_path: Path
) -> None:
    line = swarm("token", "create", "--role", "stage-server")[1]["line"]
    flags = ("--http-port", "none", "--threads", "1", "--data-dir", str(tmp_path / "server"), "--drain-timeout", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(tmp_path / "nobody"))  # another machine: no profile vouches
        for way in (("--join", line), ("--join", line), ()):
            process = Process.start(tmp_path / "server.log", "stage_server", *way, *flags)
            peer = process.wait_ready()["peer"]
            until("it is idle", lambda peer=peer: is_idle(cluster, peer))
            process.kill()
            process.stop()

        process = Process.start(tmp_path / "server.log", "stage_server", *flags)
        process.wait_ready()
        until("it is idle", lambda: is_idle(cluster, peer))
    assert swarm("identity", "revoke", peer, "--reason", "stolen")[0] == 0
    assert process.child.wait(timeout=60) == 5
    assert "E0504" in process.log.read_text()
    process.stop()
    assert [view.reason for view in cluster.peers() if view.id == peer] == ["it was revoked: stolen"]

    newer = swarm("token", "create", "--role", "stage-server")[1]["line"]
    process = Process.start(tmp_path / "server.log", "stage_server", "--join", newer, *flags)
    assert process.wait_ready()["peer"] == peer
    until("it is idle", lambda: is_idle(cluster, peer))
    process.stop()


def is_idle(cluster: Cluster, peer: str) -> bool:
    return any(known.id == peer and known.state == "idle" for known in cluster.peers())


def test_a_member_cannot_speak_in_the_name_of_another(cluster: Cluster, swarm: Swarm, tmp_path: Path) -> None:
    """Hello(peer=VICTIM, incarnation=2^63-1) used to take the victim's place for ever."""
    victim = next(peer for peer in cluster.servers)
    mallory = cluster.member(Role.STAGE_SERVER, "mallory")
    mallory.save(tmp_path / profile_folder(cluster.address).name)  # as nobody's command does

    async def attach() -> None:
        hello = Hello(PeerId(victim), time.time_ns(), PROTOCOL_VERSION, "x", "127.0.0.1:9", "", "cpu", 1, 1 << 30, -1)

        async def events() -> AsyncIterator[Event]:
            yield hello
            await asyncio.sleep(60)

        link = GrpcSchedulerLink(cluster.address, Wallet(mallory))
        try:
            async for _ in link.attach(events()):
                pytest.fail("the session began")
        finally:
            await link.close()

    with pytest.raises(Refused, match=f"stage-server mallory called itself {victim}"):
        asyncio.run(asyncio.wait_for(attach(), 60))
    assert is_idle(cluster, victim)
    code, error = swarm("ls", profiles=tmp_path)
    assert (code, error["code"]) == (5, "E0503"), "a stage server reads no jobs"


def test_no_key_and_no_secret_is_told_or_readable(cluster: Cluster, swarm: Swarm, tmp_path: Path) -> None:
    made = swarm("token", "create", "--role", "viewer")[1]
    assert swarm("login", "--join", made["line"], "--name", "curious", profiles=tmp_path)[0] == 0
    assert swarm("token", "ls", profiles=tmp_path)[0] == 5
    assert swarm("identity", "revoke", "curious")[0] == 0
    secret = made["line"].rpartition("-")[2][:26]
    data = cluster.folder / "scheduler"
    for path in (
        cluster.folder / "scheduler.log",
        data / "audit.jsonl",
        data / "admin.jsonl",
        data / "scheduler.db",
        data / "scheduler.db-wal",
    ):
        content = path.read_bytes() if path.exists() else b""
        assert secret.encode() not in content, path
        assert b"PRIVATE KEY" not in content, path
    for path in [*data.rglob("*"), *profile_folder(cluster.address).rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # SQLite's own come and go
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    log = str(data / "audit.jsonl")
    assert swarm("audit", log, "--verify")[0] == 2
    until("a thread has written it", lambda: swarm("audit", log, "--actor", "viewer/curious")[1])
    shown = swarm("audit", log, "--actor", "viewer/curious")[1]
    assert [record["action"] for record in shown] == ["ListTokens"]
    told = [
        json.loads(line) for name in ("audit", "admin") for line in (data / f"{name}.jsonl").read_text().splitlines()
    ]
    assert {"CreateToken", "RevokeMember"} <= {record["action"] for record in told if record["result"] == "allowed"}
    assert any(record["result"].startswith("E0503") for record in told)
    assert swarm("audit", str(tmp_path / "none"))[0] == 3


def test_a_scheduler_with_insecure_says_so_and_is_found_only_by_those_who_ask_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Cluster(tmp_path, "--insecure") as cluster:
        assert "whoever reaches this address owns the swarm" in (tmp_path / "scheduler.log").read_text()
        assert run(["peers", "--scheduler", cluster.address]) == 5
        assert "add --insecure" in capfd.readouterr().err
        assert run(["peers", "--scheduler", cluster.address, "--insecure"]) == 0
        assert not (tmp_path / "scheduler" / "pki").exists()


async def revoke_in_the_midst(cluster: Cluster, peer: str, job: str) -> None:
    """Revoke a stage server that has a stream open to another replica of its stage, and has pulled the state there."""
    (stage,) = (stage for stage in cluster.job(job).stages if peer in stage.peers)
    (address,) = (view.address for view in cluster.peers() if view.id in stage.peers and view.id != peer)
    identity = Identity.load(cluster.folder / "server-0" / "pki")
    assert identity is not None
    now = time.time()
    shown = Pass(identity.cluster, JobId(job), 0, PeerId(peer), 1, stage.stage, 2, now, now + 600)
    asked = StateRequest(JobId(job), 0, stage.stage, "state", 0, 0, 1, PeerId(peer), 1)
    wallet = Wallet(identity)
    wallet.pass_token = passes.issue(PassKey.open(cluster.folder / "scheduler" / "pki"), shown)
    links = GrpcPeerLinks(wallet=wallet)
    async with connect(address) as channel:
        _, state = await links.pull(address, asked, 1 << 30)
        assert state.nbytes
        call = channel.stream_stream("/swarm.wire.Peer/Exchange")(metadata=passes.metadata(wallet.pass_token))
        await call.wait_for_connection()
        reading = asyncio.ensure_future(call.read())
        revoke = ["identity", "revoke", peer, "--scheduler", cluster.address]
        assert await asyncio.to_thread(run, revoke) == 0
        async with asyncio.timeout(30):
            with pytest.raises(grpc.RpcError) as caught:
                await reading
        assert isinstance(translate(caught.value, address), Revoked)
        with pytest.raises(Revoked):
            await links.pull(address, asked, 1 << 30)
        async with asyncio.timeout(30):
            while any(peer in stage.peers for stage in cluster.job(job).stages):
                await asyncio.sleep(0.05)
    await links.close()


def test_certificates_change_and_a_peer_is_revoked_while_a_job_runs_to_the_weights_of_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Certificates of nine seconds: each is renewed while the job runs.

    The revoked one could pull the weights of its stage for as long as its certificate was good, and keep its streams.
    """
    task = Task.make(tmp_path, training__steps=160)
    life = ("--certificate-life", f"{9 / 3600:.6f}")
    with Cluster(tmp_path, "--grace", "8", *life) as cluster:
        peers = cluster.add_servers(4)
        job = cluster.submit(task.spec, task.tokens.manifest)
        cluster.wait_for_step(job.id, 20)
        asyncio.run(revoke_in_the_midst(cluster, peers[0], job.id))
        assert cluster.servers[peers[0]].child.wait(timeout=60) == 5
        assert cluster.succeeds(job.id).weights_sha256 == task.sha256
        until("a renewal", lambda: "certificate renewed" in (tmp_path / "server-1.log").read_text())


def test_an_older_data_folder_gets_an_authority_and_its_job_goes_on(tmp_path: Path) -> None:
    """Handing over from plaintext is one restart of each process."""
    task = Task.make(tmp_path, training__steps=40)
    with Cluster(tmp_path, "--insecure", "--grace", "60") as cluster:
        peers = cluster.add_servers(2)
        job = cluster.submit(task.spec, task.tokens.manifest)
        cluster.wait_for_step(job.id, 20)
        cluster.scheduler_flags = ("--grace", "2")
        cluster.restart_scheduler()
        for number, peer in enumerate(peers):  # one after the other: they speak plaintext until they are restarted
            cluster.servers[peer].stop()
            cluster.servers[peer] = cluster.start_server(number)
            cluster.servers[peer].wait_ready()
        assert cluster.succeeds(job.id).weights_sha256 == task.sha256
