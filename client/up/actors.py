"""Stage servers on a Ray cluster: one actor for each, which runs it as a child process on its node.

    swarm up --ray ──▶ Cluster ──▶ Host (actor) ──▶ python -m stage_server        one on each node first (SPREAD)

Each joins with the swarm's line. Ray starts an actor anew, where there is room, whose server or node has ended. If the
actor ends, the kernel ends the child; if this program ends, Ray ends the actors. Ray comes with an extra, and is loaded
on first use.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from client.up.fleet import END_S_MAX, POLL_S, how_it_ended, last_lines
from swarm.errors import IncompatibleVersion, InvalidConfig, NotAdmitted, ProcessEnded, UsageError
from swarm.listening import LOOPBACK, host_towards
from swarm.process.children import dying_with_parent, end
from swarm.process.lifecycle import own_addresses
from swarm.process.temporary import temporary_folder
from swarm.text import is_address, is_loopback, is_wildcard

PROBE_S_MAX = 5.0
CLIENT_TRIES = 3  # at ray://, each of 40 s
PAUSE_S = 3.0  # before a server that ended is started again
FINAL = [error.exit_code for error in (UsageError, InvalidConfig, NotAdmitted, IncompatibleVersion)]

Result = TypeVar("Result")


class Host:
    """The actor."""

    async def run(self, flags: list[str], environment: dict[str, str]) -> str:
        """How the server ended, if another start would not help; else this process ends, and Ray makes another."""
        with temporary_folder("swarm-ray-") as folder:
            command = [sys.executable, "-P", "-m", "stage_server", *flags, "--data-dir", str(folder / "data")]
            with (folder / "log").open("wb") as log:
                server = await asyncio.create_subprocess_exec(
                    *dying_with_parent(command), env={**os.environ, **environment}, stderr=log, start_new_session=True
                )
            try:
                code = await server.wait()
            finally:  # this was cancelled: all end
                await end(server, within_s=END_S_MAX)
            lines = last_lines(folder / "log")
        said = "\n  | ".join([f"a stage server on {socket.gethostname()} {how_it_ended(code)}", *lines])
        if code in FINAL:
            return said
        print(said, file=sys.stderr, flush=True)  # into the log that Ray keeps of the actor
        await asyncio.sleep(PAUSE_S)
        os._exit(1)


class Cluster:
    """A Ray cluster that this process is connected to, and `count` stage servers there on `device`."""

    def __init__(self, ray: Any, count: int, listen_host: str, device: str) -> None:
        self.listen_host = listen_host  # of the scheduler
        self._ray, self._count = ray, count
        if device not in ("auto", "cpu", "cuda"):
            hint = "Ray chooses the GPU: --device cuda, cpu or auto"
            raise UsageError(f"--ray cannot place --device {device}", hint=hint)
        self._gpus = int(device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) >= count))
        self._device = "cuda" if self._gpus else device.replace("auto", "cpu")
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def start(self, flags: list[str], environment: dict[str, str]) -> None:
        """Start the servers, each when a node has room. Secrets belong into the environment: others can read flags."""
        on_one_node = 1 if self._gpus else -(-self._count // sum(node["Alive"] for node in self._ray.nodes()))
        flags = [*flags, "--device", self._device, "--max-memory", f"{90 / on_one_node:.2f}%"]
        host = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=-1, max_task_retries=-1)(Host)
        host = host.options(scheduling_strategy="SPREAD")
        self._actors = [host.remote() for _ in range(self._count)]
        self._runs = [actor.run.remote(flags, environment) for actor in self._actors]

    async def beside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`; ProcessEnded if a server ends before, and another start would not help."""
        doing = asyncio.ensure_future(work)
        try:
            while not doing.done():
                ended, _ = await asyncio.to_thread(self._ray.wait, self._runs, timeout=POLL_S)
                if ended:
                    raise ProcessEnded(await asyncio.to_thread(self._ray.get, ended[0]))
            return await doing
        except self._ray.exceptions.RayError as error:
            raise ProcessEnded(f"Ray cannot run a stage server: {error}", hint="see: ray status") from error
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def end(self) -> None:
        """End the servers in order, then their actors."""
        for run in self._runs:
            self._ray.cancel(run)
        if runs := self._runs:
            await asyncio.to_thread(self._ray.wait, runs, num_returns=len(runs), timeout=END_S_MAX + 2.0)
        self.kill()

    def kill(self) -> None:
        while self._actors:
            self._ray.kill(self._actors.pop())


@contextmanager
def connected(address: str, *, count: int, listen_host: str, device: str) -> Iterator[Cluster]:
    """The Ray cluster at `address`: auto, local, HOST:PORT or ray://HOST:PORT.

    `listen_host` is where the scheduler listens, "" for an address that the nodes reach. Call it from the main thread:
    Ray replaces the handler of SIGTERM, so set your own again afterwards. Raises ModuleNotFoundError without Ray,
    InvalidConfig if no cluster answers, IncompatibleVersion if it has another Python or Ray, UsageError.
    """
    _probe(address)
    # Read by Ray when it is loaded.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    if address == "local" or is_loopback(address.rpartition(":")[0]):
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray dials another address of this machine
    import ray  # noqa: PLC0415  # an extra

    ray._private.worker.print_to_stdstream = lambda *data, **flags: None  # a paragraph for each worker that dies
    own = {"num_cpus": max(count, os.cpu_count() or 1)} if address == "local" else {}
    try:
        _connect(partial(ray.init, address, include_dashboard=False, log_to_driver=False, **own), address, ray.shutdown)
        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        yield Cluster(ray, count, listening_host(listen_host, nodes), device)
    finally:
        ray.shutdown()


def listening_host(asked: str, nodes: list[str]) -> str:
    """Where the scheduler listens: `asked`, or where all nodes reach it; UsageError if they cannot dial `asked`."""
    others = [node for node in nodes if node not in own_addresses()]
    if asked and (is_wildcard(asked) or (others and is_loopback(asked))):
        hint = f"--listen {host_towards(nodes[0])}:7950, or another address of this machine that they reach"
        raise UsageError(f"the nodes of the Ray cluster cannot dial {asked}", hint=hint)
    return asked or (host_towards(others[0]) if others else LOOPBACK)


def _probe(address: str) -> None:
    """Check that a cluster answers: Ray itself takes two minutes to find out. UsageError, InvalidConfig."""
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
    """Begin a session at a cluster; InvalidConfig if there is none, IncompatibleVersion if it has another Python.

    Ray's server for clients forks a process for each, while its other threads are at work. Now and then that process
    dies before it has begun, and the client hears of it after 40 s: it asks again.
    """
    is_client = address.startswith("ray://")
    for tries_left in reversed(range(CLIENT_TRIES if is_client else 1)):
        try:
            begin(logging_level=logging.CRITICAL)
            return
        except ConnectionError as error:
            end()
            if not is_client:
                raise _no_cluster(address) from error
            if not tries_left:
                hint = "see ray_client_server.err on its head node, or run this on one of its nodes: --ray auto"
                raise InvalidConfig(f"{address} answers, but starts no process for this client", hint=hint) from error
        except RuntimeError as error:
            if "ersion" not in str(error):
                raise
            hint = "install the Python and the Ray of the cluster here"
            raise IncompatibleVersion(" ".join(str(error).split()), hint=hint) from None


def _no_cluster(address: str) -> InvalidConfig:
    where = "on this machine" if address == "auto" else f"at {address}"
    hint = "start one with: ray start --head, or use one of your own: --ray local"
    return InvalidConfig(f"no Ray cluster answers {where}", hint=hint)
