"""`swarm up`: a whole swarm on this machine, as child processes on loopback, or its stage servers on a Ray cluster.

broker ◀── scheduler ◀── stages x replicas stage servers          all in their own sessions, logs in DIR/logs
           scheduler ◀── the same, as children of Ray actors      with --ray
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from client.connection import dial, identity_for
from client.records import Job, record
from client.shell import DEFAULT_SCHEDULER, Shell
from client.up.actors import Cluster, connected
from client.up.between import Between, SlowLink, host_of
from client.up.demo import NAME, demo_job, free_name, report
from client.up.fleet import POLL_S, START_S_MAX, Child, Fleet, Programs
from client.up.open_jobs import go_on, going_on, left_open, saving_jobs
from client.verbs.submit import check_job
from swarm.checkpoint.storage import local_folder
from swarm.errors import DeadlinePassed, InvalidConfig, NoHome, UsageError
from swarm.home import check_writable, data_folder
from swarm.job.spec import JobSpec
from swarm.limits import ISLANDS_IN_SWARM_MAX
from swarm.listening import LOOPBACK, bind_fault, check_free
from swarm.mqtt.broker import local_broker
from swarm.pki.names import Role, scheduler_of
from swarm.pki.profiles import ENVIRONMENT, profiles_folder
from swarm.process.cores import cores
from swarm.process.lifecycle import check_listen, lock_folder
from swarm.rpc.channel import connect
from swarm.text import counted
from swarm.types import PeerState
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc
from swarm.wire import members_pb2 as pb_members

DEFAULT_PORT = int(DEFAULT_SCHEDULER.rpartition(":")[2])
HTTP_PORT = 9464
TOKEN_TTL_S, TOKEN_USES = 30 * 86400.0, 1000  # as much as a token may
SILENT_S = 4.0  # a start that takes longer says how far it is


def up(
    context: typer.Context,
    stages: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            envvar="SWARM_STAGES",
            help="Start STAGES x REPLICAS stage servers, each with its share of the cores and of the device's free "
            "memory; a job decides how they are used.",
        ),
    ] = 2,
    replicas: Annotated[int, typer.Option(min=1, max=64, envvar="SWARM_REPLICAS", help="Stage servers per stage.")] = 2,
    islands: Annotated[
        int,
        typer.Option(
            min=1,
            max=ISLANDS_IN_SWARM_MAX,
            help="Start as many for each of ISLANDS islands; a --job without islands is trained in this number.",
        ),
    ] = 1,
    between: Annotated[
        str,
        typer.Option(
            metavar="RATE,DELAY",
            help="With --islands: emulate this link between each two of them, such as 50Mbit,100ms (there and back).",
            show_default="none",
        ),
    ] = "",
    device: Annotated[
        str, typer.Option(envvar="SWARM_DEVICE", help="Device of all stage servers: auto, cpu, cuda:N or mps.")
    ] = "auto",
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Submit this job, or go on with the open one of its name; follow it, then stop everything.",
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Train a tiny built-in model, offline, and sample.")] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="SWARM_DATA_DIR",
            help="Where everything is kept. Started there again, swarm up goes on with the jobs that were open.",
            show_default="user data folder",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port of the scheduler; 0 = any free one.", show_default=f"{DEFAULT_PORT} or any"
        ),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Start the stage servers on a Ray cluster: auto, local, HOST:PORT or ray://HOST:PORT.",
            show_default="none",
        ),
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="With --ray: where the scheduler listens, an address that the cluster's nodes reach.",
            show_default="this machine's address on the way to them",
        ),
    ] = "",
) -> int:
    """Run a whole swarm on this machine: broker, scheduler and stage servers on loopback. Ctrl-C stops it, and the
    next start goes on with its open jobs."""
    shell: Shell = context.obj
    if shell.scheduler_is_flag:
        raise UsageError(
            "swarm up starts a scheduler of its own and takes no --scheduler",
            hint=f"choose a port with --port, or serve that one: swarm stage-server --scheduler {shell.scheduler}",
        )
    if demo and job is not None:
        raise UsageError("--demo and --job exclude each other", hint="swarm up --demo, or swarm up --job FILE")
    if demo and not os.access(Path.cwd(), os.W_OK):
        raise InvalidConfig(
            f"the demo leaves its model in {Path.cwd()}, which cannot be written", hint="start it in another folder: cd"
        )
    if demo and islands > 1:
        raise UsageError("--demo trains without islands", hint=f"swarm up --islands {islands} --job FILE")
    link = SlowLink.parse(between) if between else None
    if link is not None and (islands == 1 or ray):
        raise UsageError(
            "--between is a link between islands, on this machine", hint=f"swarm up --islands 2 --between {between}"
        )
    folder = data_dir
    if folder is None and not demo:
        folder = data_folder() / "up"
    if listen:
        if not ray or port is not None:
            hint = "swarm up --ray auto --listen HOST:PORT"
            raise UsageError("--listen belongs to --ray, and names the port as well", hint=hint)
        check_listen(listen)
    host, _, given_port = listen.rpartition(":")
    port = int(given_port) if given_port else port
    options = checked(UpOptions(stages, replicas, device, job, demo, folder, port, islands, between=link))
    if not ray:
        return asyncio.run(up_and_wait(shell, options))
    shell.say(f"connecting to Ray at {ray}" if ray != "local" else "starting Ray on this machine")
    with connected(ray, count=options.stage_servers, listen_host=host, device=device) as cluster:
        return asyncio.run(up_and_wait(shell, replace(options, cluster=cluster)))


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The flags of `swarm up`; no `data_dir`: a temporary folder; no `port`: the usual one, or any if it is taken."""

    stages: int
    replicas: int
    device: str
    job: Path | None
    demo: bool
    data_dir: Path | None
    port: int | None = None
    islands: int = 1
    cluster: Cluster | None = None  # where the stage servers are; None: here
    between: SlowLink | None = None
    asked: Sequence[str] = ()  # what the flags change of the job
    spec: JobSpec | None = None  # of the job with that

    @property
    def host(self) -> str:
        """Where the scheduler listens."""
        return LOOPBACK if self.cluster is None else self.cluster.listen_host

    @property
    def stage_servers(self) -> int:
        return self.stages * self.replicas * self.islands

    @property
    def shape(self) -> str:
        """The shape of the swarm, for a person."""
        islands = f" x {self.islands} islands" if self.islands > 1 else ""
        return f"{counted(self.stages, 'stage')} x {counted(self.replicas, 'replica')}{islands}"


def checked(options: UpOptions) -> UpOptions:
    """The flags with the job, before any process starts, as that can take half a minute; Ctrl-C ends it at once."""
    if options.job is None:
        return options
    asked = _asked_for(options, check_job(options.job, ())[0])
    return replace(options, asked=asked, spec=check_job(options.job, asked)[0])


async def up_and_wait(shell: Shell, options: UpOptions, programs: Programs | None = None) -> int:
    """Run a swarm until Ctrl-C, or until its job or demo ends; returns the exit code.

    The first SIGINT, SIGTERM or SIGHUP stops everything in order, a second one kills it. No process is left when this
    returns.
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
    asked, spec, cluster = options.asked, options.spec, options.cluster
    if options.port:
        check_free(f"{options.host}:{options.port}")
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_data_folder(shell, options.data_dir))
        if not shell.insecure:
            _show_profiles(shell, folder)
        fleet.logs = folder / "logs"
        fleet.logs.mkdir(exist_ok=True)
        shell.say(f"starting {options.shape}; logs in {fleet.logs}")
        broker = "none"
        if cluster is None:
            broker = await stack.enter_async_context(local_broker(log=fleet.logs / "broker.log"))
        stack.push_async_callback(fleet.end)  # before the broker ends: peers say farewell there
        roots = _checkpoint_roots(spec)
        proxies: Sequence[str] = ()
        if options.between is not None:
            wires = await stack.enter_async_context(Between(options.islands, options.between))
            proxies = wires.proxies
            stack.callback(lambda: shell.say(wires.told()))
        scheduler, servers = await _start(shell, options, programs, fleet, broker, folder, roots, proxies)
        address = scheduler.ready["address"]
        if cluster is not None:
            fleet.on_kill = cluster.kill
            stack.push_async_callback(cluster.end)
            await asyncio.to_thread(_start_on, cluster, shell, address)
        jobs = await stack.enter_async_context(_jobs(shell, address))
        if options.data_dir is not None:
            await stack.enter_async_context(saving_jobs(shell, jobs, folder))
        attached = _wait_for_peers(shell, jobs, options.stage_servers, fleet.logs, None if cluster else START_S_MAX)
        there = await fleet.guard(cluster.beside(attached) if cluster else attached)
        _show(shell, broker, scheduler, there if cluster else [server.ready for server in servers], fleet.logs)
        await fleet.guard(go_on(shell, jobs, folder))
        if options.demo:
            return await fleet.guard(_demo(shell, programs, fleet, jobs, address, folder, options), shell)
        if spec is not None:
            words = ["submit", "--managed", str(options.job)]
            words += [flag for override in asked for flag in ("--set", override)]
            if (held := await fleet.guard(left_open(shell, jobs, spec.name))) is not None:
                words, told = going_on(held)
                shell.say(told)
            code, _ = await fleet.guard(fleet.run([*programs.client, *words, *_flags(shell, address)]), shell)
            return code
        shell.say("Ctrl-C stops everything")
        await fleet.guard(asyncio.Event().wait())
        raise AssertionError("waiting ended")


def _asked_for(options: UpOptions, spec: JobSpec) -> list[str]:
    """The shape that the flags give to a job whose file leaves it open."""
    asked = []
    if spec.pipeline.stages == "auto" and spec.pipeline.split == "auto":
        asked.append(f"pipeline.stages={min(options.stages, spec.stages_max)}")
    if options.islands > 1 and spec.island_count == 1:
        asked.append(f"islands.count={options.islands}")
        asked += [] if spec.has_outer_steps else ["averaging.mode=diloco"]
    return asked


def _checkpoint_roots(spec: JobSpec | None) -> list[str]:
    """The checkpoint folder or URL of the job that is submitted here, which its scheduler may therefore write to."""
    if spec is None or not spec.checkpoint.dir:
        return []
    folder = local_folder(spec.checkpoint.dir)
    return [spec.checkpoint.dir] if folder is None or folder.is_absolute() else []


async def _start(
    shell: Shell,
    options: UpOptions,
    programs: Programs,
    fleet: Fleet,
    broker: str,
    folder: Path,
    checkpoint_roots: Sequence[str],
    proxies: Sequence[str],
) -> tuple[Child, list[Child]]:
    shared = ["--broker", broker]
    port = options.port
    if port is None:
        port = DEFAULT_PORT if bind_fault(options.host, DEFAULT_PORT) is None else 0
    http_port = HTTP_PORT if bind_fault(LOOPBACK, HTTP_PORT) is None else 0
    flags = ["--listen", f"{options.host}:{port}", "--http-port", str(http_port)]
    flags += ["--data-dir", str(folder / "scheduler")]
    flags += [flag for root in checkpoint_roots for flag in ("--checkpoint-root", root)]
    scheduler = await fleet.start("scheduler", [*programs.scheduler, *shared, *flags])
    # Stage servers find the scheduler by themselves, so they need not wait for it.
    count = options.stage_servers
    servers = []
    for index in range(count if options.cluster is None else 0):
        name, island = f"peer-{index}", index * options.islands // count
        flags = _stage_server_flags(options.device, count, folder / name, host_of(island) if proxies else LOOPBACK)
        if proxies:
            flags += ["--site", f"site-{island}", "--proxy", proxies[island]]
        servers.append(await fleet.start(name, [*programs.stage_server, *shared, *flags]))
    children = (scheduler, *servers)
    async with _telling(
        shell, lambda: f"{sum(bool(c.ready) for c in children)} of {len(children)} processes are ready"
    ):
        await asyncio.gather(*(fleet.ready(child) for child in children))
    if options.port is None and not port:
        address = scheduler.ready["address"]
        shell.say(f"port {DEFAULT_PORT} is taken: the scheduler listens at {address}; choose a port with --port")
    return scheduler, servers


def _start_on(cluster: Cluster, shell: Shell, address: str) -> None:
    """Start the stage servers of a Ray cluster, with a line that lets in all that Ray starts in a month; blocking."""
    if shell.insecure:
        cluster.start(["--scheduler", address], {"SWARM_INSECURE": "1"})
        return
    shell.scheduler = address
    request = pb_members.CreateTokenRequest(role=Role.STAGE_SERVER, ttl_s=TOKEN_TTL_S, uses=TOKEN_USES)
    with dial(shell) as scheduler:
        cluster.start([], {"SWARM_JOIN": scheduler.call("CreateToken", request).line})


def _stage_server_flags(device: str, count: int, folder: Path, host: str) -> list[str]:
    return [
        *("--listen", f"{host}:0"),
        *("--http-port", "0"),
        *("--threads", str(max(1, cores() // count))),
        *("--device", device),
        # All start at once and see the same free memory: each may have its share.
        *("--max-memory", f"{90 / count:.2f}%"),
        *("--data-dir", str(folder)),
        *("--allow-hub", "*", "--hub-token"),  # the jobs are yours
        *("--drain-timeout", "0"),  # all end together, so nobody could take over
    ]


@asynccontextmanager
async def _telling(shell: Shell, progress: Callable[[], str]) -> AsyncIterator[None]:
    """Say how far the body has come whenever that changes, once it has taken SILENT_S."""

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


async def _wait_for_peers(
    shell: Shell, jobs: Any, count: int, logs: Path, within_s: float | None
) -> list[dict[str, str]]:
    """The names and addresses of stage servers once `count` are attached; DeadlinePassed."""
    usable = (PeerState.IDLE.value, PeerState.SERVING.value)
    listed = 0
    with contextlib.suppress(TimeoutError):
        told = _telling(shell, lambda: f"{listed} of {counted(count, 'stage server')} attached")
        async with asyncio.timeout(within_s), told:
            while True:
                with contextlib.suppress(grpc.RpcError):
                    reply = await jobs.Peers(pb.PeersRequest(stage=-1), timeout=5.0)
                    listed = sum(peer.state in usable for peer in reply.peers)
                if listed >= count:
                    return [{"peer": peer.id, "address": peer.address} for peer in reply.peers if peer.state in usable]
                await asyncio.sleep(POLL_S)
    raise DeadlinePassed(
        f"{listed} of {counted(count, 'stage server')} found the scheduler in time",
        hint=f"see why in {logs}",
    )


def _show(shell: Shell, broker: str, scheduler: Child, servers: Sequence[dict[str, str]], logs: Path) -> None:
    if shell.json:
        shell.data(
            {
                "broker": broker,
                "scheduler": scheduler.ready,
                "stage_servers": list(servers),
                "logs": str(logs),
            }
        )
    if broker != "none":
        shell.say(f"  broker      {broker}")
    for name, facts in (("scheduler", scheduler.ready), *((server["peer"], server) for server in servers)):
        http, path = facts.get("http", ""), "" if facts is scheduler.ready else "metrics"  # the scheduler has a page
        process = f"  process {facts['pid']}" if "pid" in facts else ""  # it is on this machine
        page = f"  http://{http}/{path}" if http else ""
        shell.say(f"  {name:<11} {facts['address']:<18}{process}{page}")
    address = scheduler.ready["address"]
    where = "" if address == DEFAULT_SCHEDULER else f" --scheduler {address}"
    shell.say(f"  try         swarm peers{where}    swarm submit FILE{where}")


async def _demo(
    shell: Shell, programs: Programs, fleet: Fleet, jobs: Any, address: str, folder: Path, options: UpOptions
) -> int:
    """Train the built-in model, fetch it and sample from it; 1 if it learned nothing."""
    text, story = demo_job(options.stages)
    path = folder / "demo.toml"
    path.write_text(text, encoding="utf-8")
    shell.say(f"\n{story}\n")
    flags = _flags(shell, address)
    code, out = await fleet.run([*programs.client, "submit", "--managed", str(path), *flags], capture=True)
    if code:
        return code
    job_id = NAME if shell.json else (out.split() or [NAME])[0]
    view = record(Job, await jobs.Get(pb.JobRequest(job=job_id), timeout=shell.timeout_s))
    learned, words = report(view)
    shell.say(f"\n{words}\n")
    if not learned:
        return 1
    target = free_name(Path.cwd())
    code, _ = await fleet.run([*programs.client, "pull", view.id, str(target), *flags])
    if code:
        return code
    shell.say(f'\nthe model in {target} goes on after "def " (its first words on paper, at this size):\n')
    code, said = await fleet.run([*programs.sample, str(target), "--prompt", "def ", "--tokens", "200"], capture=True)
    if shell.json:
        shell.data({"model": str(target), "sample": said.strip("\n")})
    else:
        print(said.strip("\n"), flush=True)
    if code == 0:
        shell.say(f'\nmore: {sys.executable} -P -m swarm.model.sample {target} --prompt "import "')
    return code


def _flags(shell: Shell, address: str) -> list[str]:
    flags = ["--scheduler", address, "--output", shell.output, "--timeout", f"{shell.timeout_s:g}"]
    flags += ["-q"] * shell.quiet + ["--no-color"] * shell.no_color + ["-v"] * shell.verbosity
    return flags


@asynccontextmanager
async def _jobs(shell: Shell, address: str) -> AsyncIterator[Any]:
    shell.scheduler = address
    identity = identity_for(shell)
    channel = connect(address, identity, "" if identity is None else scheduler_of(identity.cluster).dns)
    try:
        yield jobs_pb2_grpc.JobsStub(channel)  # type: ignore[no-untyped-call]  # generated code
    finally:
        await channel.close()


@contextmanager
def _data_folder(shell: Shell, given: Path | None) -> Iterator[Path]:
    """The locked folder of this swarm. A temporary one is removed, or kept for its logs after an error."""
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


def _show_profiles(shell: Shell, folder: Path) -> None:
    """Where the user's own folder takes no identity of the admin, keep it with the swarm, for us and our children.

    InvalidConfig if the folder of SWARM_PROFILES cannot be written: the admin would have no identity.
    """
    try:
        check_writable(profiles_folder())
    except NoHome as error:
        if named := os.environ.get(ENVIRONMENT):
            raise InvalidConfig(
                f"{ENVIRONMENT} = {named} cannot be written, and your identity is kept there",
                hint=f"choose another folder, or leave {ENVIRONMENT} out",
            ) from None
        place = os.environ[ENVIRONMENT] = str(folder / "profiles")
        shell.say(f"{error.message}; your identity is in {place}: in other terminals, export {ENVIRONMENT}={place}")
