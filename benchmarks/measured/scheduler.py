"""How many hops per second one scheduler routes, and what a hop costs it, with up to thousands of stage servers.

    python -m benchmarks.measured.scheduler [--peers 64,256,1000] [--stages 32] [--level brain|sessions] ...

A hop is one microbatch at one stage, forward and backward together. The stage servers are modelled, in virtual time:
they compute `--rate` hops per second at the most. The scheduler is the real one, at two levels:

brain     `JobBrain.step` alone, in a play (scheduler/planning/play.py)
sessions  the whole scheduler as `assemble` makes it: sessions, listener, driver, brain, database in memory; every
          message is encoded and decoded as on the wire, but passes no socket and no gRPC; the stage servers
          (modelled_fleet.py) send heartbeats too

Measured are whole steps, averaging and commit included. The time is processor time of this thread, less what the
modelled stage servers need: other processes on the machine disturb it little. The last two columns say how many hops
per second the fleet computed, and what share of one core its scheduler needed for that.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import itertools
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.measured.modelled_fleet import COMMIT_S, SPREAD, Fleet
from scheduler.api import sessions
from scheduler.assembly import assemble
from scheduler.brain.inputs import Input
from scheduler.brain.outputs import Output
from scheduler.jobs.job import Announcer
from scheduler.jobs.ports import SchedulerPorts
from scheduler.metrics import SchedulerMetrics
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, PlayRules, Workload
from scheduler.planning.pool import PeerPool, PoolPeer
from scheduler.storage.database import Database
from scheduler.storage.stores import Stores
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.partition import unit_names
from swarm.process.logs import configure, get_logger
from swarm.rpc.mapping import from_command, to_event
from swarm.rpc.session import SERVICE, add_session_service, parts
from swarm.types import PROTOCOL_VERSION, Hop, Microbatch, PeerId
from swarm.wire import session_pb2
from swarm.wire.messages import Event, Heartbeat, Hello
from tests.support.sim import loop as sim
from tests.support.simulated import Done, Tokens, small_spec, write_text

WARM_UP_STEPS = 1
HEARTBEAT_S = 1.0
DIALS_PER_S = 1000.0
LINE_BITS_PER_S = 1e10


@dataclass(frozen=True, slots=True)
class Shape:
    """One measurement; a step has as many microbatches as there are peers unless `microbatches` says otherwise."""

    peers: int
    stages: int = 32
    microbatches: int = 0
    steps: int = 2  # measured ones
    rate: float = 2000.0  # hops per second that the fleet can compute
    seed: int = 1

    @property
    def per_step(self) -> int:
        return self.microbatches or self.peers

    @property
    def hop_s(self) -> float:
        return self.peers / self.rate

    @property
    def all_steps(self) -> int:
        return WARM_UP_STEPS + self.steps + 1  # the last one only keeps the fleet busy

    def names(self) -> list[PeerId]:
        return [PeerId(f"vm-{number:06x}") for number in range(self.peers)]


@dataclass(slots=True)
class Measured:
    """What was counted between two commits."""

    level: str
    shape: Shape
    hops: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)  # of processor time, of each `JobBrain.step`

    @property
    def hop_us(self) -> float:
        return self.cpu_s / self.hops * 1e6

    @property
    def hops_per_s(self) -> float:
        return self.hops / self.cpu_s

    @property
    def busy(self) -> float:
        """The share of a core that the fleet kept busy."""
        return self.cpu_s / self.virtual_s

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.steps_s)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] * 1e3 if ordered else math.nan


class Window:
    """Begins when the warm-up is committed, ends with the last measured step; `is_over` from then on."""

    def __init__(self, shape: Shape, profile: cProfile.Profile | None) -> None:
        self.is_open = self.is_over = False
        self._first, self._last = WARM_UP_STEPS - 1, WARM_UP_STEPS + shape.steps - 1
        self._profile = profile
        self._began = (0, 0.0, 0.0)

    def look(self, committed: int, hops: int, measured: Measured, cpu_s: float, now_s: float) -> None:
        """See whether a commit began or ended the window; so many steps and hops are done."""
        if not self.is_open and committed > self._first:
            gc.collect()
            self.is_open, self._began = True, (hops, cpu_s, now_s)
            if self._profile is not None:
                self._profile.enable()
        elif self.is_open and not self.is_over and committed > self._last:
            self.is_over = True
            if self._profile is not None:
                self._profile.disable()
            began_hops, began_cpu_s, began_s = self._began
            measured.hops, measured.cpu_s, measured.virtual_s = hops - began_hops, cpu_s - began_cpu_s, now_s - began_s


# The brain alone ------------------------------------------------------------------------------------------------------


class Alone:
    """A play of a brain and the fleet that it leads; the time of the brain alone is measured."""

    def __init__(self, shape: Shape, profile: cProfile.Profile | None = None) -> None:
        self.measured = Measured("brain", shape)
        self._window = Window(shape, profile)
        self._cpu_s = 0.0
        rng, stages = Random(shape.seed), shape.stages
        peers = tuple(
            PoolPeer(
                name, "cpu", 0, "", 1.0 / rng.uniform(1.0 - SPREAD, 1.0 + SPREAD), LINE_BITS_PER_S, LINE_BITS_PER_S
            )
            for name in shape.names()
        )
        units = unit_names(stages, False)
        load = Workload(
            shape.per_step, tokens=1, work=(shape.hop_s,) * stages, boundary_bytes=1.0, units=units,
            unit_bytes=dict.fromkeys(units, 4e6), state_bytes=(1,) * stages, apply_s=(COMMIT_S,) * stages,
        )  # fmt: skip
        places = tuple(tuple(peer.name for peer in peers[stage::stages]) for stage in range(stages))
        plan = Plan((1,) * stages, places, 1, shape.per_step // 2)
        self.play = Play(PeerPool(peers), plan, load, PlayRules(noise=0.0), shape.seed, self._timed)

    def run(self) -> Measured:
        while not self._window.is_over:
            self.play.turn()
            self._window.look(len(self.play.committed_s), self.play.hops, self.measured, self._cpu_s, self.play.now_s)
        return self.measured

    def _timed(self, door: Callable[..., list[Output]]) -> Callable[..., list[Output]]:
        def step(happened: Input, now_s: float) -> list[Output]:
            before_s = time.thread_time()
            outputs = door(happened, now_s)
            door.__self__.due_s  # noqa: B018 a driver asks for it after each input
            took_s = time.thread_time() - before_s
            self._cpu_s += took_s
            if self._window.is_open:
                self.measured.steps_s.append(took_s)
            return outputs

        return step


# The whole scheduler --------------------------------------------------------------------------------------------------


class Line:
    """The connection of one modelled stage server: the two ends that gRPC would give its session's handler."""

    def __init__(self, swarm: Whole, peer: PeerId, port: int) -> None:
        self._swarm, self._peer, self._port = swarm, peer, port
        self._events: asyncio.Queue[bytes] = asyncio.Queue()
        self._beats = itertools.count()

    def say(self, event: Event) -> None:
        self._events.put_nowait(to_event(event).SerializeToString())

    async def requests(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._events.get()

    def beat(self) -> None:
        """Say that the peer is there, and again after a second."""
        with self._swarm.apart:
            self.say(Heartbeat(next(self._beats)))
            loop = asyncio.get_running_loop()
            loop.call_later(HEARTBEAT_S, self.beat)

    # What a session asks of its gRPC context.

    def peer(self) -> str:
        return f"ipv4:10.0.0.1:{self._port}"

    def done(self) -> bool:
        return False

    async def send_initial_metadata(self, metadata: object) -> None:
        """The ticket for bulk, which no modelled stage server sends."""

    async def write(self, data: bytes) -> None:
        with self._swarm.apart:
            self._swarm.arrived(self._peer, data)

    async def abort(self, code: grpc.StatusCode, details: str, *_: object) -> None:
        raise AssertionError(f"the session of {self._peer} was ended: {code} {details}")


class Apart:
    """Processor seconds of the modelled fleet: the time of this thread while one is within it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._began_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._began_s = time.thread_time()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.thread_time() - self._began_s


class Whole:
    """A scheduler with its sessions, and the fleet, on one virtual event loop."""

    def __init__(self, shape: Shape, profile: cProfile.Profile | None = None) -> None:
        self.apart = Apart()
        self.measured = Measured("sessions", shape)
        self._shape = shape
        self._window = Window(shape, profile)
        self._lines: dict[PeerId, Line] = {}
        self._over = asyncio.Event()

    async def run(self, folder: Path) -> Measured:
        shape, loop = self._shape, asyncio.get_running_loop()
        spec = small_spec(
            write_text(folder), config__num_hidden_layers=shape.stages, training__steps=shape.all_steps,
            training__global_batch_sequences=shape.per_step, training__microbatch_sequences=1,
            pipeline__stages=shape.stages, pipeline__overlap=shape.per_step // 2, pipeline__sync_steps=0,
            checkpoint__every_steps=0, checkpoint__every_s=0.0,
        )  # fmt: skip
        tokens = Tokens.make(folder, spec)
        units = unit_names(shape.stages, spec.tied)
        self._fleet = Fleet(shape.hop_s, units, loop.time, self._later, self._say, Random(shape.seed))
        database = await Database.open("sqlite://", None)
        metrics = SchedulerMetrics("0", PROTOCOL_VERSION)
        log = get_logger("bench")
        try:
            async with asyncio.TaskGroup() as tasks:
                stores = Stores.under(folder, database)
                ports = SchedulerPorts(stores, Announcer(), metrics, Random(shape.seed), time.time, log)
                scheduler = assemble(ports, tasks)
                await scheduler.load()
                attach = _attach_of(scheduler.sessions)
                scheduler.start()
                for port, peer in enumerate(shape.names()):
                    line = self._lines[peer] = Line(self, peer, port)
                    hello = Hello(peer, 1, PROTOCOL_VERSION, "0", f"10.0.0.1:{1024 + port}", "", "cpu", 1, 1 << 40, -1)
                    line.say(hello)
                    line.beat()
                    tasks.create_task(attach(line.requests(), line))
                    await asyncio.sleep(1.0 / DIALS_PER_S)
                while len(scheduler.membership.idle_peers()) < shape.peers:  # noqa: ASYNC110 no event says so
                    await asyncio.sleep(0.1)
                await scheduler.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
                await self._over.wait()
                scheduler.stop()
                raise Done
        except* Done:
            pass
        await database.close()
        return self.measured

    def arrived(self, peer: PeerId, data: bytes) -> None:
        """A stage server got commands; the hops of a route are read once for all that are on it."""
        for command in parts(session_pb2.Command, data):
            if not command.HasField("route"):
                self._fleet.obey(peer, from_command(command)[1])
            elif command.route.hops[0].peer == peer:
                where = command.route.microbatch
                hops = [Hop(PeerId(hop.peer), hop.incarnation, hop.attempt, "") for hop in command.route.hops]
                self._fleet.route(Microbatch(where.timeline, where.step, where.index), hops)
        self._look()

    def _later(self, at_s: float, act: Callable[[], None]) -> None:
        def apart() -> None:
            with self.apart:
                act()

        asyncio.get_running_loop().call_at(at_s, apart)

    def _say(self, peer: PeerId, event: Event) -> None:
        self._lines[peer].say(event)

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        fleet, cpu_s = self._fleet, time.thread_time() - self.apart.seconds
        self._window.look(len(fleet.committed), fleet.hops, self.measured, cpu_s, now_s)
        if self._window.is_over:
            self._over.set()


def _attach_of(handler: Any) -> Callable[[AsyncIterator[bytes], Any], Any]:
    """What a gRPC server would call for each session."""
    found: list[grpc.GenericRpcHandler] = []

    class Server:
        def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
            found.extend(handlers)

    class Call:
        method = f"/{SERVICE}/Attach"
        invocation_metadata = ()

    add_session_service(Server(), handler)  # type: ignore[arg-type]
    method: Any = found[0].service(Call())  # type: ignore[arg-type]
    return method.stream_stream  # type: ignore[no-any-return]


def measure(level: str, shape: Shape, profile: cProfile.Profile | None = None) -> Measured:
    gc.collect()
    gc.freeze()  # a scheduler has no torch, through which the collector would look again and again
    if level == "brain":
        return Alone(shape, profile).run()
    # More stage servers than a scheduler takes are let in, to see what they would need, and none waits to dial.
    limits: Any = sessions
    limits.PEERS_MAX = max(limits.PEERS_MAX, shape.peers)
    limits.SESSIONS_PER_S = max(limits.SESSIONS_PER_S, 2 * DIALS_PER_S)

    async def main() -> Measured:
        return await Whole(shape, profile).run(Path(folder))

    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        return sim.run(main(), seed=shape.seed)


def table(rows: list[Measured]) -> Table:
    shown = Table(
        "level", "peers", "hops", "hops/s", "us/hop", "step p50 ms", "p99 ms", "longest ms", "fleet", "of a core"
    )
    for row in rows:
        times = [f"{row.quantile_ms(share):.2f}" if row.steps_s else "" for share in (0.5, 0.99, 1.0)]
        fleet = f"{row.hops / row.virtual_s:.0f}/s"
        shown.add_row(
            row.level, str(row.shape.peers), str(row.hops), f"{row.hops_per_s:.0f}", f"{row.hop_us:.0f}", *times, fleet,
            f"{row.busy:.0%}",
        )  # fmt: skip
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", default="64,256,1000", help="how many stage servers, separated by commas")
    parser.add_argument("--stages", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=0, help="of a step; as many as peers by default")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that is not")
    parser.add_argument("--rate", type=float, default=2000.0, help="hops per second that the fleet can compute")
    parser.add_argument("--level", choices=("brain", "sessions", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement; the fastest is shown")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--profile", type=Path, help="where to write what cProfile saw")
    options = parser.parse_args()
    configure(level="error")
    profile = cProfile.Profile() if options.profile else None
    levels = ("brain", "sessions") if options.level == "both" else (options.level,)
    rows, all_tries = [], []
    for level in levels:
        for peers in map(int, options.peers.split(",")):
            shape = Shape(peers, options.stages, options.microbatches, options.steps, options.rate)
            tries = [measure(level, shape, profile) for _ in range(options.repeats)]
            rows.append(min(tries, key=lambda row: row.cpu_s))
            all_tries += tries
    if options.output == "json":
        print(
            json.dumps(
                [{"level": row.level, "peers": row.shape.peers, "hops_per_s": row.hops_per_s} for row in all_tries]
            )
        )
    else:
        Console(width=120).print(table(rows))
    if profile is not None:
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    main()
