"""`swarm up`: a whole swarm on this machine, as child processes on loopback.

    broker ◀── scheduler ◀── stages x replicas stage servers          all in their own sessions, logs in DIR/logs

Children get SIGTERM when this process ends, SIGKILL when they do not end within seconds, and die with it if it is
killed. Each says that it is ready with one JSON line on stdout ("swarm.ready/1").
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import grpc

from client.shell import DEFAULT_SCHEDULER, Shell
from client.up.demo import demo_job, free_name, report
from client.verbs.submit import check_job
from swarm.errors import DeadlinePassed, ProcessEnded
from swarm.mqtt.broker import local_broker
from swarm.process.children import dying_with_parent, end, kill
from swarm.process.lifecycle import lock_folder
from swarm.rpc.channel import connect
from swarm.types import PeerState
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc

HOST = "127.0.0.1"
HTTP_PORT = 9464
START_S_MAX = 180.0  # importing torch four times on two busy cores takes a while
POLL_S = 0.1
END_S_MAX = 8.0  # stage servers at work take a few seconds to close their links
# When a process died under a running job: so long may the scheduler take to say what that means for the job.
VERDICT_S_MAX = 20.0
TAIL_LINES = 15
SILENT_S = 4.0  # a start that takes longer says how far it is
# A stage server that ends is started again, unless it does so this often within this time.
ENDS_MAX = 3
ENDS_WITHIN_S = 60.0
READY_SCHEMA = "swarm.ready/1"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The flags of `swarm up`; no `data_dir`: a temporary folder."""

    stages: int
    replicas: int
    device: str
    job: Path | None
    demo: bool
    data_dir: Path | None
    allow_chaos: bool = False


@dataclass(frozen=True, slots=True)
class Programs:
    """The command lines of the children, without their flags."""

    # -P: a file of the user's that happens to be called scheduler.py must not run instead.
    scheduler: tuple[str, ...] = (sys.executable, "-P", "-m", "scheduler")
    stage_server: tuple[str, ...] = (sys.executable, "-P", "-m", "stage_server")
    client: tuple[str, ...] = (sys.executable, "-P", "-m", "client")
    sample: tuple[str, ...] = (sys.executable, "-P", "-m", "swarm.model.sample")


@dataclass(slots=True)
class Child:
    """A process, where it logs, and what it said when it was ready."""

    name: str
    command: Sequence[str]
    process: asyncio.subprocess.Process
    log: Path
    out: Path
    ready: dict[str, str] = field(default_factory=dict)
    ended_s: list[float] = field(default_factory=list)  # when it ended lately


async def up_and_wait(shell: Shell, options: UpOptions, programs: Programs | None = None) -> int:
    """Run a swarm until Ctrl-C, or until its job or demo ends; gives the exit code.

    The first SIGINT, SIGTERM or SIGHUP stops everything in order, a second one kills it. Whatever happens, no process
    is left when this returns.
    """
    fleet = Fleet(shell)
    work = asyncio.ensure_future(_up(shell, options, programs or Programs(), fleet))
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            shell.say("\nstopping; once more kills")
            work.cancel()
        else:
            fleet.kill()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _up(shell: Shell, options: UpOptions, programs: Programs, fleet: Fleet) -> int:
    # Checked before half a minute of starting things.
    spec = None if options.job is None else check_job(options.job, ())[0]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_data_folder(shell, options.data_dir))
        fleet.logs = folder / "logs"
        fleet.logs.mkdir(exist_ok=True)
        shell.say(f"starting {options.stages} stages x {options.replicas} replicas; logs in {fleet.logs}")
        broker = await stack.enter_async_context(local_broker(log=fleet.logs / "broker.log"))
        stack.push_async_callback(fleet.end)  # before the broker ends: peers say farewell there
        scheduler, servers = await _start(shell, options, programs, fleet, broker, folder)
        address = scheduler.ready["address"]
        jobs = await stack.enter_async_context(_jobs(address))
        await fleet.guard(_wait_for_peers(shell, jobs, servers, fleet))
        _show(shell, broker, scheduler, servers, fleet.logs)
        if options.demo:
            return await fleet.guard(_demo(shell, programs, fleet, jobs, address, folder, options), shell)
        if spec is not None:
            submit = [*programs.client, "submit", "--managed", str(options.job), *_flags(shell, address)]
            if spec.pipeline.stages == "auto" and spec.pipeline.split == "auto":
                submit += ["--set", f"pipeline.stages={min(options.stages, spec.layers)}"]  # as asked for
            code, _ = await fleet.guard(fleet.run(submit), shell)
            return code
        shell.say("Ctrl-C stops everything")
        await fleet.guard(asyncio.Event().wait())
        raise AssertionError("waiting ended")


async def _start(
    shell: Shell, options: UpOptions, programs: Programs, fleet: Fleet, broker: str, folder: Path
) -> tuple[Child, list[Child]]:
    """Start scheduler and stage servers; all are ready when this returns."""
    scheduler = await fleet.start(
        "scheduler",
        [
            *programs.scheduler,
            *("--listen", f"{HOST}:{_port(int(DEFAULT_SCHEDULER.rpartition(':')[2]))}"),
            *("--http-port", str(_port(HTTP_PORT))),
            *("--broker", broker),
            *("--data-dir", str(folder / "scheduler")),
            *(["--allow-chaos"] * options.allow_chaos),
        ],
    )
    # Stage servers find the scheduler by themselves, so they need not wait for it.
    count = options.stages * options.replicas
    threads = max(1, _cores() // count)
    servers = [
        await fleet.start(
            f"peer-{index}",
            [
                *programs.stage_server,
                *("--broker", broker),
                *("--listen", f"{HOST}:0"),
                *("--http-port", "0"),
                *("--threads", str(threads)),
                *("--device", options.device),
                # All start at once and see the same free memory: each may have its share.
                *("--max-memory", f"{90 / count:.2f}%"),
                *("--data-dir", str(folder / f"peer-{index}")),
                *("--drain-timeout", "0"),  # all end together: there is nobody to hand over to
                *(["--allow-chaos"] * options.allow_chaos),
            ],
        )
        for index in range(count)
    ]
    children = (scheduler, *servers)
    async with _telling(
        shell, lambda: f"{sum(bool(c.ready) for c in children)} of {len(children)} processes are ready"
    ):
        await asyncio.gather(*(fleet.ready(child) for child in children))
    return scheduler, servers


@asynccontextmanager
async def _telling(shell: Shell, progress: Callable[[], str]) -> AsyncIterator[None]:
    """Say how far the body is, if it takes longer than SILENT_S, and when that changes."""

    async def tell() -> None:
        await asyncio.sleep(SILENT_S)
        said = ""
        while True:
            if (text := progress()) != said:
                said = text
                shell.say(text)
            await asyncio.sleep(POLL_S)

    telling = asyncio.ensure_future(tell())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})


async def _wait_for_peers(shell: Shell, jobs: Any, servers: Sequence[Child], fleet: Fleet) -> None:
    """Until the scheduler lists all stage servers."""
    usable = (PeerState.IDLE.value, PeerState.SERVING.value)
    listed = 0
    with contextlib.suppress(TimeoutError):
        told = _telling(shell, lambda: f"{listed} of {len(servers)} stage servers attached")
        async with asyncio.timeout(START_S_MAX), told:
            while True:
                with contextlib.suppress(grpc.RpcError):
                    reply = await jobs.Peers(pb.PeersRequest(stage=-1), timeout=5.0)
                    listed = sum(peer.state in usable for peer in reply.peers)
                if listed >= len(servers):
                    return
                await asyncio.sleep(POLL_S)
    raise DeadlinePassed(
        f"{listed} of {len(servers)} stage servers found the scheduler within {START_S_MAX:.0f} s",
        hint=f"see why in {fleet.logs}",
    )


def _show(shell: Shell, broker: str, scheduler: Child, servers: Sequence[Child], logs: Path) -> None:
    if shell.json:
        shell.data(
            {
                "broker": broker,
                "scheduler": scheduler.ready,
                "stage_servers": [server.ready for server in servers],
                "logs": str(logs),
            }
        )
    shell.say(f"  broker      {broker}")
    for name, child in (("scheduler", scheduler), *((_peer(server), server) for server in servers)):
        http = child.ready.get("http", "")
        shell.say(f"  {name:<11} {child.ready['address']:<18}" + (f"  http://{http}/metrics" if http else ""))
    where = _where(scheduler.ready["address"])
    shell.say(f"  try         swarm peers{where}    swarm submit FILE{where}")


def _peer(server: Child) -> str:
    return str(server.ready.get("peer", server.name))


def _where(address: str) -> str:
    return "" if address == DEFAULT_SCHEDULER else f" --scheduler {address}"


async def _demo(
    shell: Shell, programs: Programs, fleet: Fleet, jobs: Any, address: str, folder: Path, options: UpOptions
) -> int:
    """Train the built-in model, fetch it, let it write; 1 if it learned nothing."""
    job = demo_job(options.stages)
    path = folder / "demo.toml"
    path.write_text(job.text, encoding="utf-8")
    shell.say(f"\n{job.story}\n")
    flags = _flags(shell, address)
    code, out = await fleet.run([*programs.client, "submit", "--managed", str(path), *flags], capture=True)
    if code:
        return code
    job_id = _first_word(out) if not shell.json else ""
    view: pb.JobView = await jobs.Get(pb.JobRequest(job=job_id or job.name), timeout=shell.timeout_s)
    learned, words = report(view)
    shell.say(f"\n{words}\n")
    if not learned:
        return 1
    target = free_name(Path.cwd())
    code, _ = await fleet.run([*programs.client, "pull", view.id, str(target), *flags])
    if code:
        return code
    shell.say(f'\nthe model in {target} goes on after "def " (its first words on paper, at this size):\n')
    code, text = await fleet.run([*programs.sample, str(target), "--prompt", "def ", "--tokens", "200"], capture=True)
    print(text.strip("\n"), flush=True)
    if code == 0:
        shell.say(f'\nmore: {sys.executable} -m swarm.model.sample {target} --prompt "import "')
    return code


def _first_word(text: str) -> str:
    return (text.split() or [""])[0]


def _flags(shell: Shell, address: str) -> list[str]:
    flags = ["--scheduler", address, "--output", shell.output, "--timeout", f"{shell.timeout_s:g}"]
    flags += ["-q"] * shell.quiet + ["--no-color"] * shell.no_color + ["-v"] * shell.verbosity
    return flags


@asynccontextmanager
async def _jobs(address: str) -> AsyncIterator[Any]:
    channel = connect(address)
    try:
        yield jobs_pb2_grpc.JobsStub(channel)  # type: ignore[no-untyped-call]  # generated code
    finally:
        await channel.close()


@contextmanager
def _data_folder(shell: Shell, given: Path | None) -> Iterator[Path]:
    """The folder of this swarm, locked; a temporary one goes when all went well and stays for its logs when not."""
    folder = Path(tempfile.mkdtemp(prefix="swarm-up-")) if given is None else given.absolute()
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_folder(folder))
        try:
            yield folder
        except (asyncio.CancelledError, GeneratorExit):
            if given is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except BaseException:
            if given is None:
                shell.say(f"the logs stay in {folder / 'logs'}")
            raise
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)


def _port(preferred: int) -> int:
    """The preferred port if it is free, else 0 for any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ended connections do not matter
        try:
            probe.bind((HOST, preferred))
        except OSError:
            return 0
    return preferred


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Fleet:
    """The child processes of one `swarm up`."""

    def __init__(self, shell: Shell) -> None:
        self.logs = Path()
        self._shell = shell
        self._servers: list[Child] = []  # run until they are told to end
        self._tools: list[asyncio.subprocess.Process] = []  # run until they are done

    async def start(self, name: str, command: Sequence[str]) -> Child:
        """A process that serves until it is told to end."""
        log, out = self.logs / f"{name}.log", self.logs / f"{name}.out"
        log.write_bytes(b"")
        child = Child(name, command, await self._serve(command, log, out), log, out)
        self._servers.append(child)
        return child

    async def _serve(self, command: Sequence[str], log: Path, out: Path) -> asyncio.subprocess.Process:
        with log.open("ab") as stderr, out.open("wb") as stdout:
            return await self._spawn(command, stdout=stdout, stderr=stderr)

    async def run(self, command: Sequence[str], *, capture: bool = False) -> tuple[int, str]:
        """Run a program to its end, its messages on our stderr; gives its exit code and, captured, its stdout."""
        process = await self._spawn(command, stdout=asyncio.subprocess.PIPE if capture else None, stderr=None)
        self._tools.append(process)
        out, _ = await process.communicate()
        assert process.returncode is not None
        code = process.returncode
        return code if code >= 0 else 128 - code, (out or b"").decode(errors="replace")

    async def ready(self, child: Child) -> None:
        """Until the child said that it is; ProcessEnded or DeadlinePassed if it does not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S_MAX):
                while child.process.returncode is None:
                    if said := _ready_line(child.out):
                        child.ready = said
                        return
                    await asyncio.sleep(POLL_S)
                raise _ended(child)
        raise DeadlinePassed(f"{child.name} is not ready after {START_S_MAX:.0f} s", hint=f"see why in {child.log}")

    async def guard(self, work: Coroutine[Any, Any, Result], shell: Shell | None = None) -> Result:
        """Do `work`, and start stage servers again that end meanwhile.

        ProcessEnded if the scheduler ends, or a stage server again and again. With a `shell` the work is a job: then
        the scheduler is given time to say what a lost stage server means for it, and the work's own end is what counts.
        """
        doing = asyncio.ensure_future(work)
        lost: ProcessEnded | None = None
        last: Child | None = None  # the one that is not started again
        try:
            while last is None and not doing.done():
                await self._until_an_end(doing)
                for child in self._servers:
                    if child.process.returncode is not None:
                        lost = _ended(child)
                        if not await self._start_again(child):
                            last = child
                            break
            if last is not None and last.name != "scheduler" and shell is not None:
                await asyncio.wait({doing}, timeout=VERDICT_S_MAX)
            if not doing.done():
                assert lost is not None
                raise lost
            if lost is not None and shell is not None and (doing.exception() is not None or doing.result()):
                shell.error(lost)
            return await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _until_an_end(self, doing: asyncio.Future[Result]) -> None:
        """Until the work is done or a server has ended."""
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(child.process.wait()) for child in self._servers]
        try:
            await asyncio.wait({doing, *ends}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _start_again(self, child: Child) -> bool:
        """Whether the child that has ended runs again."""
        if child.name == "scheduler":
            return False
        now_s = asyncio.get_running_loop().time()
        child.ended_s = [end_s for end_s in child.ended_s if now_s - end_s < ENDS_WITHIN_S] + [now_s]
        if len(child.ended_s) >= ENDS_MAX:
            self._shell.say(f"{child.name} ended {ENDS_MAX} times within {ENDS_WITHIN_S:.0f} s")
            return False
        self._shell.say(f"{child.name} {_how_it_ended(child)}, see {child.log}; it is started again")
        child.process = await self._serve(child.command, child.log, child.out)
        return True

    async def end(self) -> None:
        """Tools first, then servers: SIGTERM, some seconds, SIGKILL."""
        await end(*self._all(), within_s=END_S_MAX)

    def kill(self) -> None:
        """All at once."""
        kill(*self._all())

    def _all(self) -> list[asyncio.subprocess.Process]:
        return [*self._tools, *(child.process for child in self._servers)]

    async def _spawn(
        self, command: Sequence[str], *, stdout: IO[bytes] | int | None, stderr: IO[bytes] | None
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *dying_with_parent(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _ready_line(out: Path) -> dict[str, str]:
    """What a child's first complete line says; empty while there is none."""
    for line in out.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            said = json.loads(line) if line.endswith("\n") else None
            if isinstance(said, dict) and said.get("schema") == READY_SCHEMA and isinstance(said.get("address"), str):
                return {key: str(value) for key, value in said.items() if key != "schema"}
    return {}


def _ended(child: Child) -> ProcessEnded:
    lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    tail = "".join(f"\n  | {line}" for line in lines)
    how = f"{child.name} {_how_it_ended(child)}"
    return ProcessEnded(f"{how}; the end of its log:{tail}" if tail else f"{how}, silently")


def _how_it_ended(child: Child) -> str:
    code = child.process.returncode
    assert code is not None
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
