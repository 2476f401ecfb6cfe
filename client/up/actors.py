"""Stage servers on a Ray cluster: one actor for each, which runs it as a child process on its node.

    swarm up --ray ──▶ Crew ──▶ Host (actor) ──▶ python -m stage_server          one on each node first (SPREAD)
                        ▲          │
                        └──────────┘  is ready, has ended with its last lines, or died with its node

If the actor ends, the kernel ends the child. If this program ends, Ray ends the actors. Ray comes with an extra, and is
loaded on first use.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from client.connection import dial
from client.shell import Shell
from client.up.fleet import END_S_MAX, POLL_S, START_S_MAX, TAIL_LINES, how_it_ended, ready_line
from client.up.revival import Revival
from swarm.errors import DeadlinePassed, IncompatibleVersion, InvalidConfig, ProcessEnded, SwarmError, UsageError
from swarm.listening import LOOPBACK, host_towards
from swarm.pki.names import Role
from swarm.process.children import dying_with_parent, end
from swarm.process.lifecycle import lock_folder
from swarm.text import counted, duration, is_address, is_loopback, is_wildcard
from swarm.types import PROTOCOL_VERSION
from swarm.wire import members_pb2 as pb

PRODUCT = "swarm-stages"
PROBE_S_MAX = 5.0
CLIENT_TRIES = 3  # at ray://, each of 40 s
FOLDER_PREFIX = "swarm-ray-"
TOKEN_S = 900.0
HANG_UP_S_MAX = 2.0  # beyond the time that a server has to end
FREE_MEMORY_PERCENT = 90.0

Result = TypeVar("Result")


class Host:
    """The actor: runs one stage server on its node, in a folder of its own that goes with it."""

    def __init__(self) -> None:
        self._folder = Path()
        self._lock: IO[str] | None = None  # held for as long as this process lives
        self._process: asyncio.subprocess.Process | None = None

    async def about(self) -> dict[str, str]:
        """The node of this actor, and the versions installed there."""
        import ray  # noqa: PLC0415  # an extra

        node = ray.util.get_node_ip_address()
        return {"node": node, "product": metadata.version(PRODUCT), "protocol": str(PROTOCOL_VERSION)}

    async def start(self, flags: list[str], environment: dict[str, str]) -> dict[str, str]:
        """Start it; the facts of its ready line, or none if it ended before."""
        remove_stale(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._lock = lock_folder(self._folder)
        log, out = self._folder / "log", self._folder / "out"
        command = [sys.executable, "-P", "-m", "stage_server", *flags, "--data-dir", str(self._folder / "data")]
        with log.open("wb") as stderr, out.open("wb") as stdout:
            process = self._process = await asyncio.create_subprocess_exec(
                *dying_with_parent(command),
                env=dict(os.environ) | environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        while process.returncode is None:
            if said := ready_line(out):
                return said | {"pid": str(process.pid)}
            await asyncio.sleep(POLL_S)
        return {}

    async def ended(self) -> tuple[int, str]:
        """How it ended, once it has: exit code, and the last lines of its log."""
        assert self._process is not None
        code = await self._process.wait()
        lines = (self._folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        shutil.rmtree(self._folder, ignore_errors=True)
        return code, "\n".join(lines)

    async def stop(self, within_s: float) -> None:
        """End it in order."""
        if self._process is not None:
            await end(self._process, within_s=within_s)
            shutil.rmtree(self._folder, ignore_errors=True)


def remove_stale(root: Path) -> None:
    """Remove the folders below `root`, with keys in them, that an actor of this user left when it was killed."""
    # An actor holds the lock before its server makes data: what has data and no holder is left.
    for folder in {data.parent for data in root.glob(f"{FOLDER_PREFIX}*/data")}:
        with suppress(OSError, SwarmError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with lock_folder(folder):
                shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster that this process is connected to."""

    ray: Any
    count: int  # stage servers that are wanted
    listen_host: str  # where the scheduler listens for it
    device: str  # of each stage server: cpu or cuda

    @property
    def is_local(self) -> bool:
        return is_loopback(self.listen_host)

    def host(self) -> Any:
        """A new actor; it waits until a node has room for it."""
        gpus = 1 if self.device == "cuda" else 0
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        return self.ray.remote(Host).options(**options).remote()

    def room(self) -> str:
        """The resources that the cluster lacks for all servers, in words; "" if none."""
        what = "GPU" if self.device == "cuda" else "CPU"
        there = int(self.ray.cluster_resources().get(what, 0))
        if there >= self.count:
            return ""
        return f"the cluster has {counted(there, what)} and each stage server takes one: some wait for more nodes"


@contextmanager
def connected(address: str, *, count: int, listen_host: str, device: str) -> Iterator[Cluster]:
    """The Ray cluster at `address`: auto, local, HOST:PORT or ray://HOST:PORT.

    `listen_host` is where the scheduler listens, "" for an address that the nodes reach. Call it from the main thread:
    Ray replaces the handler of SIGTERM, so set your own again afterwards.

    Raises ModuleNotFoundError without Ray, InvalidConfig if no cluster answers, IncompatibleVersion if it has another
    Python or Ray, UsageError if the flags do not fit it.
    """
    _probe(address)
    # Read by Ray when it is loaded.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local" or is_loopback(address.rpartition(":")[0]):
        # Or Ray listens at, and dials, another address of this machine instead.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray  # noqa: PLC0415  # an extra

    # Whatever log_to_driver says, Ray prints a paragraph on stdout for each worker that dies; a Crew says it in a line.
    ray._private.worker.print_to_stdstream = lambda *data, **flags: None
    own = {"num_cpus": max(count, os.cpu_count() or 1)} if address == "local" else {}
    try:
        _connect(partial(ray.init, address, include_dashboard=False, log_to_driver=False, **own), address, ray.shutdown)
    except RuntimeError as error:
        if "ersion" not in str(error):
            raise
        words = " ".join(str(error).split())
        raise IncompatibleVersion(words, hint="install the Python and the Ray of the cluster here") from None
    try:
        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        host = listening_host(listen_host, nodes, _own_addresses(), host_towards)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        yield Cluster(ray, count, host, device_for(device, count, gpus))
    finally:
        ray.shutdown()


def listening_host(asked: str, nodes: list[str], own: set[str], towards: Any) -> str:
    """Where the scheduler listens so that all nodes reach it: `asked`, loopback if all nodes are this machine, or this
    machine's address on the way to them. UsageError if they cannot reach what was asked for."""
    others = [node for node in nodes if node not in own]
    if not asked:
        return towards(others[0]) if others else LOOPBACK
    if is_wildcard(asked) or (others and is_loopback(asked)):
        raise UsageError(
            f"the nodes of the Ray cluster cannot dial {asked}",
            hint=f"--listen {towards(nodes[0])}:7950, or another address of this machine that they reach",
        )
    return asked


def device_for(asked: str, count: int, gpus: int) -> str:
    """cpu or cuda; "auto" is cuda if the cluster has a GPU for each stage server. UsageError for anything else."""
    if asked == "auto":
        return "cuda" if gpus >= count else "cpu"
    if asked not in ("cpu", "cuda"):
        raise UsageError(f"--ray cannot place --device {asked}", hint="Ray chooses the GPU: --device cuda, cpu or auto")
    return asked


def _probe(address: str) -> None:
    """Check that a cluster answers: Ray itself takes two minutes to find out."""
    place = address.removeprefix("ray://")
    if place in ("auto", "local"):
        return
    if not is_address(place):
        raise UsageError(f'--ray is auto, local, HOST:PORT or ray://HOST:PORT, not "{address}"', hint="--ray local")
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S_MAX).close()
    except OSError:
        raise _no_cluster(address) from None


def _connect(begin: Callable[..., object], address: str, end: Callable[[], None]) -> None:
    """Begin a session at a cluster that answers; InvalidConfig if there is none.

    Ray's server for clients forks a process for each, while its other threads are at work. Now and then that process
    dies before it has begun, and the client hears of it after 40 s: it asks again.
    """
    tries = CLIENT_TRIES if address.startswith("ray://") else 1
    for tried in range(1, tries + 1):
        try:
            begin(logging_level=logging.CRITICAL)
        except ConnectionError as error:
            end()
            if tries == 1:
                raise _no_cluster(address) from error
            if tried == tries:
                raise InvalidConfig(
                    f"the Ray cluster at {address} answers, but starts no process for this client",
                    hint="see ray_client_server.err on its head node, or run this on one of its nodes: --ray auto",
                ) from error
        else:
            return


def _no_cluster(address: str) -> InvalidConfig:
    where = "on this machine" if address == "auto" else f"at {address}"
    return InvalidConfig(
        f"no Ray cluster answers {where}", hint="start one with: ray start --head, or use one of your own: --ray local"
    )


def _own_addresses() -> set[str]:
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries} | {LOOPBACK.strip("[]")}


class Crew:
    """The wanted stage servers, each started again when it, its actor or its node ends."""

    def __init__(self, cluster: Cluster, shell: Shell, scheduler: str, logs: Path, more: list[str]) -> None:
        """`more`: flags for each stage server."""
        self._cluster = cluster
        self._shell = shell
        self._scheduler = scheduler
        self._logs = logs
        self._more = more
        self._revival = Revival()
        self._actors: dict[str, Any] = {}
        self._started: set[str] = set()  # whose actors have a child
        self._keepers: list[asyncio.Task[None]] = []
        self._ready: dict[str, dict[str, str]] = {}
        self._complete = asyncio.Event()  # all have served at a time

    @property
    def ready(self) -> list[dict[str, str]]:
        """The facts of the actors that serve now."""
        return [self._ready[name] for name in sorted(self._ready)]

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Start them and keep them; afterwards all have ended in order, or were ended."""
        if lack := self._cluster.room():
            self._shell.say(lack)
        width = len(str(self._cluster.count - 1))
        names = [f"peer-{number:0{width}}" for number in range(self._cluster.count)]
        self._keepers = [asyncio.ensure_future(self._keep(name)) for name in names]
        try:
            yield
        finally:
            for keeper in self._keepers:
                keeper.cancel()
            await asyncio.gather(*self._keepers, return_exceptions=True)
            await self._end()

    async def beside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`; if a server is given up before, its error is raised."""
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait({doing, *self._keepers}, return_when=asyncio.FIRST_COMPLETED)
            for keeper in self._keepers:
                if keeper.done():
                    keeper.result()
            return await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def complete(self) -> None:
        """Wait until all serve."""
        await self._complete.wait()

    def kill(self) -> None:
        """End all at once."""
        while self._actors:
            _, actor = self._actors.popitem()
            self._cluster.ray.kill(actor)

    async def _keep(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await self._live(name)
            except SwarmError as error:
                self._started.discard(name)
                self._ready.pop(name, None)
                self._cluster.ray.kill(self._actors.pop(name))
                pause_s = self._revival.ended(name, loop.time() - began_s, loop.time())
                if pause_s is None:
                    raise
                self._shell.say(f"{name} {error.message}; it is started again in {duration(pause_s)}")
                await asyncio.sleep(pause_s)

    async def _live(self, name: str) -> None:
        """One life of a server; ends with a SwarmError that says how it ended."""
        node = ""
        actor = self._actors[name] = self._cluster.host()
        try:
            about = await answer(actor.about.remote())
            node = f"on {about['node']} "
            check_versions(about)
            flags, environment = self._flags(about["node"]), await self._environment()
            self._started.add(name)
            try:
                async with asyncio.timeout(START_S_MAX):
                    facts = await answer(actor.start.remote(flags, environment))
            except TimeoutError:
                raise DeadlinePassed(f"{node}is not ready after {START_S_MAX:.0f} s") from None
            if facts:
                self._revival.served()
                self._ready[name] = facts if self._cluster.is_local else facts | {"http": ""}
                if len(self._ready) == self._cluster.count:
                    self._complete.set()
            code, tail = await answer(actor.ended.remote())
            raise ProcessEnded(f"{node}{how_it_ended(code)}{self._noted(name, tail)}")
        except self._cluster.ray.exceptions.RayError as error:
            if "ModuleNotFoundError" in str(error):
                raise InvalidConfig(f"cannot start: a node lacks {PRODUCT}", hint=_same_version()) from None
            raise ProcessEnded(f"{node}was lost with its actor or node") from error

    def _flags(self, node: str) -> list[str]:
        nodes = sum(one["Alive"] for one in self._cluster.ray.nodes())
        shared_by = math.ceil(self._cluster.count / nodes) if self._cluster.device == "cpu" else 1
        return [
            *("--scheduler", self._scheduler),
            *("--listen", f"{LOOPBACK if self._cluster.is_local else node}:0"),
            *("--http-port", "0"),
            *("--device", self._cluster.device),
            *("--max-memory", f"{FREE_MEMORY_PERCENT / shared_by:.2f}%"),
            *self._more,
        ]

    async def _environment(self) -> dict[str, str]:
        """The child's environment. Secrets go here, since other users can read flags."""
        if self._shell.insecure:
            return {"SWARM_INSECURE": "1"}
        return {} if self._cluster.is_local else {"SWARM_JOIN": await asyncio.to_thread(self._token)}

    def _token(self) -> str:
        request = pb.CreateTokenRequest(role=Role.STAGE_SERVER, ttl_s=TOKEN_S, uses=1)
        with dial(self._shell) as scheduler:
            return str(scheduler.call("CreateToken", request).line)

    def _noted(self, name: str, tail: str) -> str:
        """Keep the end of a log here; where."""
        if not tail:
            return ", silently"
        log = self._logs / f"{name}.log"
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{tail}\n")
        return f", see {log}"

    async def _end(self) -> None:
        stopping = [asyncio.ensure_future(_stopped(self._actors[name])) for name in self._started & set(self._actors)]
        if stopping:
            _, late = await asyncio.wait(stopping, timeout=END_S_MAX + HANG_UP_S_MAX)
            for task in late:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)
        self.kill()


async def _stopped(actor: Any) -> None:
    await answer(actor.stop.remote(END_S_MAX))


async def answer(asked: Any) -> Any:
    """What an actor gives, once it does. Whoever waits can be cancelled and Ray does not notice: its client for
    ray://HOST:PORT prints a traceback about futures that were."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[Any] = loop.create_future()

    def deliver(given: Future[Any]) -> None:
        if waiter.done():
            return
        if (error := given.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(given.result())

    def given(future: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, future)

    asked.future().add_done_callback(given)
    return await waiter


def check_versions(about: dict[str, str]) -> None:
    """IncompatibleVersion if a node has another version of us."""
    ours = metadata.version(PRODUCT)
    if (about["product"], about["protocol"]) != (ours, str(PROTOCOL_VERSION)):
        raise IncompatibleVersion(
            f"on {about['node']} cannot start: {PRODUCT} is {about['product']} (protocol {about['protocol']}) there, "
            f"{ours} (protocol {PROTOCOL_VERSION}) here",
            hint=_same_version(),
        )


def _same_version() -> str:
    return f'install this on each node: pip install "{PRODUCT}[model,ray]=={metadata.version(PRODUCT)}"'
