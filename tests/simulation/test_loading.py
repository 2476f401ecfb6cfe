"""A stage server that is told to let go while it still loads; in simulated time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from stage_server.metrics import StageServerMetrics
from stage_server.session.server import ServerPorts, ServerSettings, StageServer
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.model import compiled
from swarm.model.stage import Stage
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, JobId, PeerId
from swarm.wire.messages import Command, Event, Failed, Hello, Loaded, LoadStage, Release, StoreHeader, Welcome
from tests.support.devices import InlineDevice
from tests.support.sim import loop as sim
from tests.support.sim.network import SimNetwork
from tests.support.simulated import SCHEDULER, Done, Tokens, run_swarm, small_spec, write_text

T = TypeVar("T")
STEP_S = 4.0  # of a build


class SlowDevice(InlineDevice):
    """Every piece of work that gives something takes its time, and cannot be interrupted."""

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        result = work()
        return asyncio.shield(asyncio.ensure_future(self._after(result, 0.0 if result is None else STEP_S)))


@dataclass
class Script:
    """A scheduler that sends these commands at these seconds, and notes when it hears what."""

    commands: Sequence[tuple[float, Command]]
    heard: list[tuple[float, Event]] = field(default_factory=list)

    async def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def listen() -> None:
            async for event in events:
                self.heard.append((loop.time() - began_s, event))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listen())
            yield 1, Welcome(PeerId("p"), 1.0)
            for at_s, command in self.commands:
                await asyncio.sleep(began_s + at_s - loop.time())
                yield 1, command
            await asyncio.sleep(3600)

    async def held(self, header: StoreHeader) -> int:
        return 0

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        raise AssertionError


def play(spec: JobSpec, commands: Sequence[tuple[float, Command]], built: list[weakref.ref[Stage]]) -> Script:
    """What the scheduler heard within 1,000 seconds; `built` gets what was built."""
    script = Script(commands)

    def build(*arguments: Any, **options: Any) -> Stage:
        made = Stage(*arguments, **options)
        built.append(weakref.ref(made))
        return made

    async def find() -> str:
        return SCHEDULER

    async def main() -> None:
        network = SimNetwork(Random(1))
        network.add_handler(SCHEDULER, script)
        try:
            async with asyncio.TaskGroup() as tasks:
                identity = Hello(PeerId("p"), 1, PROTOCOL_VERSION, "0", "p", "", "cpu", 1, 1 << 30, -1)
                ports = ServerPorts(
                    SlowDevice(lambda: STEP_S),
                    network.peer_links("p"),
                    find,
                    lambda address: network.scheduler_link("p", address),
                    tasks,
                    StageServerMetrics("0", PROTOCOL_VERSION),
                    get_logger("test"),
                )
                server = StageServer(identity, ports, ServerSettings(build=build))
                tasks.create_task(server.serve())
                await asyncio.sleep(1000)
                await network.close()
                raise Done
        except* Done:
            pass

    sim.run(main(), seed=1, limit_s=2000.0)
    return script


def _load(spec: JobSpec, job: str) -> LoadStage:
    return LoadStage(JobId(job), 0, 0, (3,), 0, spec.model_dump_json())


def test_a_job_that_is_released_while_it_loads_is_let_go_at_once(tmp_path: Path) -> None:
    """A cancelled job kept its memory until its load ended, and the next one waited behind it."""
    spec = resolve(
        small_spec(write_text(tmp_path), pipeline__stages=1),
        Basis(ByteTokenizer.vocabulary_size),
    )
    load_a, load_b = _load(spec, "a"), _load(spec, "b")
    alone = play(spec, [(1.0, load_b)], [])
    (alone_s,) = [at_s for at_s, event in alone.heard if isinstance(event, Loaded)]

    built: list[weakref.ref[Stage]] = []
    # The release comes while the stage is being built, one step after the first.
    released_s = 1.5 * STEP_S
    script = play(spec, [(1.0, load_a), (released_s, Release(JobId("a"), "cancelled")), (released_s, load_b)], built)
    loaded = {event.job: at_s for at_s, event in script.heard if isinstance(event, Loaded)}
    assert list(loaded) == ["b"]
    assert not [event for _, event in script.heard if isinstance(event, Failed)]
    # It waits for the step that was under way, not for the rest of a's load.
    assert loaded[JobId("b")] <= 1.0 + 2 * STEP_S + alone_s
    assert len(built) == 2
    assert built[0]() is None


def test_a_release_of_another_job_does_not_disturb_a_load(tmp_path: Path) -> None:
    spec = resolve(
        small_spec(write_text(tmp_path), pipeline__stages=1),
        Basis(ByteTokenizer.vocabulary_size),
    )
    script = play(spec, [(1.0, _load(spec, "a")), (2.0, Release(JobId("old"), "over"))], [])
    assert [event.job for _, event in script.heard if isinstance(event, Loaded)] == ["a"]


def test_a_job_whose_layers_are_compiled_trains_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage servers of the simulation share a process, so each new stage makes the others compile once more."""
    graphs = []

    def count(graph: Any, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "_BACKEND", count)
    spec = small_spec(write_text(tmp_path), training__reproducible=False, model__compile=True, pipeline__stages=2)
    resolved = resolve(spec, Basis(ByteTokenizer.vocabulary_size))
    run_swarm(resolved, Tokens.make(tmp_path, resolved), 4, seed=1)
    assert graphs
