"""Real processes on loopback: a scheduler, stage servers, and a client that speaks to them."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import grpc
import psutil

from swarm.data.shards import TokenManifest
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.spec import JobSpec
from swarm.pki.identity import Application, Identity
from swarm.pki.joining import join
from swarm.pki.names import Role, scheduler_of
from swarm.pki.profiles import find_profile
from swarm.pki.tokens import parse_line
from swarm.process.children import dying_with_parent
from swarm.rpc.channel import connect_sync
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc, members_pb2, members_pb2_grpc

READY_S_MAX = 300.0
JOB_S_MAX = 600.0
CHUNK_BYTES = 1 << 20


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.preloaded"])


class Forked:
    """A process that begins with its imports done, behind the part of subprocess.Popen that the tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path | None,
        *,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Run a module, or a file whose name ends with .py; without `log` its stderr is its stdout."""
        self.args = arguments
        reader, writer = FORKS.Pipe(duplex=False)
        where = str(folder) if folder is not None else os.getcwd()
        values = (list(arguments), writer, log, dict(os.environ if environ is None else environ), where)
        self._process = FORKS.Process(target=_run, args=values, daemon=True)
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What is left of its stdout, once it has ended and whoever shares its stdout with it."""
        killer = threading.Timer(timeout, self.kill) if timeout is not None else None
        if killer is not None:
            killer.start()
        out = self.stdout.read()
        self.wait(timeout)
        if killer is not None:
            killer.cancel()
        self.stdout.close()
        return out, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: list[str], stdout: Connection, log: Path | None, environ: dict[str, str], folder: str) -> None:
    """As `python` runs it: its own session, streams, environment and folder; it dies with its parent."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.dup2(stdout.fileno(), 1)
    if log is None:
        os.dup2(stdout.fileno(), 2)
    else:
        with log.open("a") as err:
            os.dup2(err.fileno(), 2)
    stdout.close()
    # Made anew, as those of the fork server know what its descriptors were.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # as long as the process lives
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = arguments
    if arguments[0].endswith(".py"):
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def code_changes() -> bool:
    """Whether this is the mutation check, where each process has to import the code as it is then."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("tests.mutations")


@dataclass(slots=True)
class Process:
    """One process of ours with its log; ended by its id."""

    child: subprocess.Popen[str] | Forked
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, log: Path, module: str, *flags: str, before: Sequence[str] = ()) -> Process:
        """Run `python -m module`; `before` is a command that runs it. A log that is there is gone on with."""
        if not before and not code_changes():
            return cls(Forked([*module.split(), *flags], log), log)
        with log.open("a") as err:
            child = subprocess.Popen(
                dying_with_parent([*before, sys.executable, "-m", *module.split(), *flags]),
                stdout=subprocess.PIPE,
                stderr=err,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        return cls(child, log)

    def wait_ready(self) -> dict[str, Any]:
        """The line that the process prints when it can be used."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line.endswith("\n"), f"{self.child.args} ended with {self.child.wait()}:\n{self.log.read_text()[-4000:]}"
        self.ready = json.loads(line)
        return self.ready

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.child.pid, number)

    def probe(self) -> int:
        """What its /healthz says: 200, or 503 if its loop took longer to turn than a probe waits."""
        try:
            with urllib.request.urlopen(f"http://{self.ready['http']}/healthz", timeout=60) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    def cpu_s(self) -> float:
        """The CPU time that it has used."""
        used = psutil.Process(self.child.pid).cpu_times()
        return used.user + used.system

    def stop(self) -> int:
        """End the process as an operator would; gives its exit code."""
        self.terminate()
        return self.ended()

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.child.terminate()

    def ended(self) -> int:
        """Its exit code, once it has ended by itself or was killed for lingering."""
        try:
            code = self.child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            code = self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()
        return code


class Cluster:
    """A scheduler and its stage servers; use as a context manager."""

    def __init__(self, folder: Path, *scheduler_flags: str, broker: str = "none") -> None:
        self.folder = folder
        self.scheduler_flags = scheduler_flags
        self.broker = broker
        self.servers: dict[str, Process] = {}
        self._started: list[Process] = []  # all stage servers, whether they became ready or not
        self.before_scheduler: Sequence[str] = ()
        self.before_servers: Sequence[Sequence[str]] = ()  # commands that run them, by number
        self.scheduler_host = "127.0.0.1"
        self.server_hosts: Sequence[str] = ()  # by number; the rest on loopback

    def __enter__(self) -> Self:
        self._start_scheduler(f"{self.scheduler_host}:0")
        return self

    def _start_scheduler(self, listen: str, module: str = "scheduler") -> None:
        self.scheduler = Process.start(
            self.folder / "scheduler.log",
            module,
            *("--listen", listen, "--http-port", "0", "--broker", self.broker),
            *("--data-dir", str(self.folder / "scheduler")),
            *self.scheduler_flags,
            before=self.before_scheduler,
        )
        self.address = self.scheduler.wait_ready()["address"]
        self.redial()

    def redial(self) -> None:
        """Speak as the local admin, whose profile the scheduler has written."""
        identity = None if "--insecure" in self.scheduler_flags else find_profile(self.address)
        server_name = "" if identity is None else scheduler_of(identity.cluster).dns
        self.channel = connect_sync(self.address, identity, server_name)
        self.jobs = jobs_pb2_grpc.JobsStub(self.channel)  # type: ignore[no-untyped-call]

    def restart_scheduler(self, module: str = "scheduler") -> None:
        """Kill the scheduler and start it again at the same address, on the same data."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            self.scheduler.kill()
        self.scheduler.stop()
        self._start_scheduler(self.address, module)

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.ended()
        self.scheduler.stop()

    def add_servers(self, count: int, *flags: str, module: str = "stage_server") -> list[str]:
        """Start stage servers, wait until the scheduler lists them, and give their ids."""
        first = len(self.servers)
        started = [self.start_server(number, *flags, module=module) for number in range(first, first + count)]
        peers = [process.wait_ready()["peer"] for process in started]
        self.servers |= dict(zip(peers, started, strict=True))
        deadline_s = time.monotonic() + READY_S_MAX
        while not set(peers) <= {peer.id for peer in self.peers() if peer.state == "idle"}:
            assert time.monotonic() < deadline_s, [(peer.id, peer.state) for peer in self.peers()]
            time.sleep(0.1)
        return peers

    def start_server(self, number: int, *flags: str, module: str = "stage_server") -> Process:
        """Start stage server `number` (again), without waiting for it."""
        broker = self.scheduler.ready["broker"] if self.broker == "embedded" else self.broker
        where = ("--scheduler", self.address) if broker == "none" else ("--broker", broker)
        host = self.server_hosts[number] if number < len(self.server_hosts) else "127.0.0.1"
        process = Process.start(
            self.folder / f"server-{number}.log",
            module,
            *where,
            *("--listen", f"{host}:0", "--http-port", "0", "--threads", "1", "--device", "cpu"),
            *("--data-dir", str(self.folder / f"server-{number}"), "--drain-timeout", "0"),
            *(flag for flag in self.scheduler_flags if flag == "--insecure"),
            *flags,
            before=self.before_servers[number] if number < len(self.before_servers) else (),
        )
        self._started.append(process)
        return process

    def member(self, role: Role, name: str) -> Identity:
        """The identity of a new member, who joins with a token of the local admin."""
        stub: Any = members_pb2_grpc.MembersStub(self.channel)  # type: ignore[no-untyped-call]
        token = stub.CreateToken(members_pb2.CreateTokenRequest(role=role, ttl_s=60.0, uses=1, names=name))
        return join(parse_line(token.line), name, Application(name)).identity

    def job(self, job: str) -> Any:
        """The job's view now."""
        return self.jobs.Get(pb.JobRequest(job=job), timeout=60)

    def peers(self) -> list[Any]:
        return list(self.jobs.Peers(pb.PeersRequest(stage=-1), timeout=60).peers)

    def upload(self, manifest: TokenManifest) -> None:
        for shard in manifest.shards:
            self.put(shard.sha256, shard.path.read_bytes())

    def put(self, sha256: str, content: bytes) -> None:
        """Upload one file."""

        def chunks() -> Iterator[pb.ShardChunk]:
            yield pb.ShardChunk(shard=pb.Shard(sha256=sha256, size_bytes=len(content)))
            for start in range(0, len(content), CHUNK_BYTES):
                yield pb.ShardChunk(payload=content[start : start + CHUNK_BYTES])

        deque(self.jobs.PutShard(chunks(), timeout=60))

    def submit(self, spec: JobSpec, manifest: TokenManifest) -> Any:
        self.upload(manifest)
        return self.jobs.Submit(
            pb.SubmitRequest(
                spec_json=spec.model_dump_json(),
                shards=[pb.Shard(sha256=shard.sha256) for shard in manifest.shards],
                token_dtype=manifest.token_dtype,
                vocabulary_size=manifest.vocabulary_size,
                unigram_entropy=manifest.unigram_entropy,
                end_of_text=manifest.end_of_text,
                tokenizer_files=ByteTokenizer().tokenizer_files(),
            ),
            timeout=60,
        )

    def wait(self, job: str, timeout_s: float = JOB_S_MAX) -> Any:
        """The job's last view, once it has ended."""
        return deque(self.jobs.Watch(pb.JobRequest(job=job), timeout=timeout_s), maxlen=1).pop()

    def succeeds(self, job: str) -> Any:
        """The last view of a job that has trained to its end."""
        view = self.wait(job)
        assert view.state == "succeeded", f"{view.reason}\n{self.tails()}"
        return view

    def wait_for_step(self, job: str, step: int) -> None:
        """Return when the job has committed so many steps."""
        call = self.jobs.Watch(pb.JobRequest(job=job), timeout=JOB_S_MAX)
        for view in call:
            if view.step >= step:
                break
        call.cancel()

    def pull(self, job: str, folder: Path) -> None:
        """Write the job's model folder, checking every file."""
        folder.mkdir()
        files: list[tuple[pb.FileHeader, bytes]] = []
        for chunk in self.jobs.Pull(iter([pb.PullRequest(job=job)]), timeout=60):
            if chunk.HasField("header"):
                files.append((chunk.header, b""))
            else:
                header, content = files[-1]
                files[-1] = (header, content + chunk.payload)
        for header, content in files:
            assert hashlib.sha256(content).hexdigest() == header.sha256
            (folder / header.path).write_bytes(content)

    def tails(self) -> str:
        """The ends of all logs, for a failing test."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


RpcError = grpc.RpcError
