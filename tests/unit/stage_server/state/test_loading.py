"""stage_server.state.loading: a stage that compiles its layers does so while it loads, and says that it still does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest
import structlog
import torch

from stage_server.device import ThreadDevice
from stage_server.ports import Assignment
from stage_server.replica.replica import Replica
from stage_server.state import donor, loading
from stage_server.state.loading import SIGN_OF_LIFE, build_stage, load_initial
from swarm.errors import InvalidModel, OutOfMemory
from swarm.model import compiled, state
from swarm.model.stage import Places, Stage
from swarm.types import UnitName
from swarm.wire.messages import Commit, Committed, Event, FetchRequest, StateFile
from tests.support.devices import InlineDevice, noted_threads
from tests.support.long_headers import LONG
from tests.support.ports import assignment_of, ports_of
from tests.support.sim import loop as sim
from tests.support.sim.network import SimNetwork
from tests.support.turns import UNITS_MAX, event_loop
from tests.support.whole_steps import spec_of

T = TypeVar("T")
COMPILING_S = 950.0


class SlowCompiler(InlineDevice):
    """The second piece of work after the building of the stage is the compiler's, and takes ages."""

    runs = 0

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        self.runs += 1
        return asyncio.ensure_future(self._after(work(), COMPILING_S if self.runs == 2 else 0.0))


def compiling_assignment() -> Assignment:
    return assignment_of(spec_of(2, compile=True, training={"reproducible": False}), stage=1)


def loaded(backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a stage server logs that loads a stage with compiled layers."""
    monkeypatch.setattr(compiled, "_BACKEND", backend)
    assignment = compiling_assignment()

    async def main() -> None:
        network = SimNetwork(Random(0))
        async with asyncio.TaskGroup() as tasks:
            ports = ports_of(SlowCompiler(lambda: 0.0), network.peer_links("at me"), lambda _: None, tasks)
            stage, _ = await build_stage(assignment, ports)
            assert stage.version == 0
            assert asyncio.get_running_loop().time() >= COMPILING_S
            await ports.work.close()
            await network.close()

    with structlog.testing.capture_logs() as lines:
        sim.run(main(), seed=1, limit_s=2 * COMPILING_S)
    return lines


def test_a_stage_says_that_it_still_compiles_before_its_job_is_thought_to_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = loaded(lambda graph, _: graph.forward, monkeypatch)
    signs = [line for line in lines if line["event"] == "still compiling the layers"]
    limit_s = spec_of(1).limits.no_progress_s
    assert len(signs) == int(COMPILING_S / (SIGN_OF_LIFE * limit_s))
    assert not [line for line in lines if line["log_level"] == "warning"]


def test_a_stage_server_without_a_compiler_warns_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Any:
        raise OSError("no compiler")

    warnings = [line["event"] for line in loaded(missing, monkeypatch) if line["log_level"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("me cannot compile layers and computes them as they are: ")
    assert "no compiler" in warnings[0]


def test_a_fault_of_a_compiler_that_nobody_waits_for_any_more_is_retrieved(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()
    complaints: list[dict[str, Any]] = []

    def compile_layers(*_: object) -> str:
        begun.set()
        assert released.wait(60.0)
        raise OutOfMemory("no memory for the compiler")

    monkeypatch.setattr(loading, "compile_layers", compile_layers)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        network, device = SimNetwork(Random(0)), ThreadDevice(torch.device("cpu"), 1)
        async with asyncio.TaskGroup() as tasks:
            ports = ports_of(device, network.peer_links("at me"), lambda _: None, tasks)
            load = asyncio.create_task(build_stage(compiling_assignment(), ports))
            assert await asyncio.to_thread(begun.wait, 60.0)
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
            assert load.cancelled()
            released.set()
            await device.run(lambda: None)  # after the compiler, on the same thread
            await ports.work.close()
            await network.close()
        device.close()

    asyncio.run(main())
    gc.collect()
    assert complaints == []


async def test_what_takes_long_for_hundreds_of_layers_is_not_done_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of 1,024 layers held the loop up when its stage was loaded, and again with each commit."""
    cutting = noted_threads(monkeypatch, donor, "cut")
    looking = noted_threads(monkeypatch, Stage, "state_bytes")
    taking_apart = noted_threads(monkeypatch, Places, "gradients_of")
    assignment = assignment_of(spec_of(1, training={"reproducible": False}))
    device = ThreadDevice(torch.device("cpu"), 1)
    try:
        async with asyncio.TaskGroup() as tasks:
            links = SimNetwork(Random(0)).peer_links("at me")
            told: asyncio.Queue[Event] = asyncio.Queue()
            ports = ports_of(device, links, told.put_nowait, tasks)
            stage, loaded = await build_stage(assignment, ports)
            replica = Replica(assignment, stage, loaded, ports)
            means = {unit: torch.zeros(layout.elements) for unit, layout in stage.units.items()}
            monkeypatch.setattr("stage_server.replica.replica.averages", _given(means))
            await replica.handle(Commit(0, 0, 1, (), 0.1, 1.0, skip=False))
            assert isinstance(await told.get(), Committed)
            await ports.work.close()
    finally:
        device.close()
    assert len(cutting) == 1
    assert looking
    assert taking_apart
    assert threading.current_thread() not in {*cutting, *looking, *taking_apart}


@pytest.mark.parametrize("kind", ["all tensors", "in another order", "one of them twice", "nothing but a name"])
async def test_no_header_of_a_model_holds_up_the_heartbeats_of_a_stage_server(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a name twice in its header sent every stage server away for an hour: the event loop looked for it."""
    parsing = noted_threads(monkeypatch, state, "parse_header")
    header = LONG[kind]
    content = len(header).to_bytes(8, "little") + header + bytes(1 << 15)
    files = (StateFile("model/model.safetensors", len(content), ""),)
    assignment = assignment_of(spec_of(1, training={"reproducible": False}), files=files)

    async def fetch(request: FetchRequest) -> AsyncGenerator[bytes, None]:
        yield content[request.start : request.stop]

    device = ThreadDevice(torch.device("cpu"), 1)
    try:
        async with asyncio.TaskGroup() as tasks:
            links = SimNetwork(Random(0)).peer_links("at me")
            ports = replace(ports_of(device, links, lambda _: None, tasks), fetch=fetch)
            async with event_loop() as held_up:
                with pytest.raises(InvalidModel):
                    await load_initial(assignment.command, assignment.spec, ports)
    finally:
        device.close()
    assert len(parsing) == 1
    assert threading.current_thread() not in parsing
    assert held_up.units < UNITS_MAX


def _given(means: dict[UnitName, torch.Tensor]) -> Callable[[Commit], Awaitable[dict[UnitName, torch.Tensor]]]:
    async def averages(command: Commit, *_: object) -> dict[UnitName, torch.Tensor]:
        return means

    return averages
