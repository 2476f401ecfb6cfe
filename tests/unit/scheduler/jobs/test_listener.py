"""What jobs hear, and what they are told beside it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.brain.fleet.membership import Membership
from scheduler.brain.inputs import Input, RelaysHere, Unreached
from scheduler.jobs.listener import JobTransfer, PeerListener
from swarm.errors import Refused
from swarm.events import Event, Hello, Saved
from swarm.job.partition import resolve
from swarm.job.spec import parse_job
from swarm.messages import FetchRequest, StoreHeader
from swarm.types import JobId, JobState, PeerId


def test_jobs_at_work_hear_that_no_relay_is_here() -> None:
    heard: list[Input] = []
    at_work = SimpleNamespace(run=SimpleNamespace(driver=SimpleNamespace(tell=heard.append)))
    registry: Any = SimpleNamespace(all=lambda: [SimpleNamespace(run=None), at_work], relays_here=True)
    ports: Any = SimpleNamespace(metrics=None, wall_s=None, stores=SimpleNamespace(logs=None))
    none: Any = None
    listener = PeerListener(ports, registry, none, none, none, none, none)
    listener.on_relays(False)
    assert not registry.relays_here, "for those that begin later"
    listener.on_relays(True)
    assert heard == [RelaysHere(False), RelaysHere(True)]


def test_jobs_at_work_and_those_that_begin_later_hear_whom_the_scheduler_cannot_dial() -> None:
    heard: list[Input] = []
    at_work = SimpleNamespace(run=SimpleNamespace(driver=SimpleNamespace(tell=heard.append)))
    registry: Any = SimpleNamespace(all=lambda: [SimpleNamespace(run=None), at_work], unreached=())
    ports: Any = SimpleNamespace(metrics=None, wall_s=None, stores=SimpleNamespace(logs=None))
    none: Any = None
    PeerListener(ports, registry, none, none, none, none, none).on_reach((PeerId("a"),))
    assert (registry.unreached, heard) == ((PeerId("a"),), [Unreached((PeerId("a"),))])


@pytest.mark.parametrize(("stage", "has_room"), [(0, True), (1, True), (2, False), (-1, False)])
def test_a_returning_peer_may_name_any_stage(stage: int, has_room: bool) -> None:
    """The brain drops a Hello with a stage that the job does not have; its session ended with an error of ours."""
    values: dict[str, Any] = {
        "model": {"family": "llama", "config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}},
        "data": {"source": "x", "sequence_length": 64},
        "pipeline": {"split": (1, 1)},
    }
    spec = resolve(parse_job({"name": "x", **values}), vocabulary_size=300, stages_if_auto=2)
    heard: list[int] = []
    driver = SimpleNamespace(on_event=lambda peer, event, room=0: heard.append(room))
    brain = SimpleNamespace(admits=lambda hello: True)
    job = SimpleNamespace(spec=spec, run=SimpleNamespace(brain=brain, driver=driver))
    hello = Hello(PeerId("p"), 1, 13, "", "127.0.0.1:1", "", "cpu", 1, 1 << 34, -1, job=JobId("x-1"), stage=stage)
    membership = Membership()
    membership.hello(hello, 0.0)
    none: Any = None
    registry: Any = SimpleNamespace(get=lambda name: job if name == "x-1" else None)
    peers: Any = SimpleNamespace(is_stopping=False, may_return=lambda job, hello: True, adopt=lambda job, hello: None)
    drains: Any = SimpleNamespace(reason=lambda hello: "", is_over=lambda hello: False)
    metrics = SimpleNamespace(peer_heard=lambda *_: None, peer_attached=lambda *_: None)
    ports: Any = SimpleNamespace(metrics=metrics, wall_s=lambda: 0.0, stores=SimpleNamespace(logs=None))
    PeerListener(ports, registry, membership, peers, none, drains, none).on_event(hello.peer, hello)
    assert [room > 0 for room in heard] == [has_room]


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_a_chunk_of_a_checkpoint_is_progress_once_it_is_taken_if_the_job_waits_for_it(is_awaited: bool) -> None:
    """Each chunk was progress as it came, refused or not. And a checkpoint that was on its way over a slow link for
    hours, while the job trained, kept an island that hung in the job for as long."""
    made: list[str] = []

    async def put(header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        assert await anext(chunks) == b"1"
        made.append("the first is taken")
        assert await anext(chunks) == b"2"
        raise Refused("it was given up")

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"1", b"2", b"3"):
            yield chunk

    def awaits(peer: PeerId, event: Event) -> bool:
        assert (peer, event) == ("p", Saved(JobId("x-1"), 5, 9, 1, ()))
        return is_awaited

    driver = SimpleNamespace(made_progress=lambda: made.append("progress"))
    run = SimpleNamespace(sink=SimpleNamespace(put=put), driver=driver, brain=SimpleNamespace(awaits=awaits))
    spec: Any = {"model": {"config": {"num_hidden_layers": 2}}, "data": {"source": "x"}, "pipeline": {"split": (1, 1)}}
    job = SimpleNamespace(
        run=run, spec=resolve(parse_job({"name": "x", **spec}), vocabulary_size=300, stages_if_auto=2)
    )
    registry: Any = SimpleNamespace(get=lambda name: job)
    stores: Any = None
    header = StoreHeader(JobId("x-1"), PeerId("p"), 1, 5, 9, 1, 3, "model/x.safetensors")
    with pytest.raises(Refused):
        await JobTransfer(stores, registry).store(header, chunks())
    assert made == ["the first is taken", *["progress"] * is_awaited]


@pytest.mark.parametrize(("state", "is_awaited"), [(JobState.LOADING, True), (JobState.RUNNING, False)])
async def test_a_chunk_of_the_state_that_a_job_starts_from_is_progress_only_while_it_loads(
    state: JobState, is_awaited: bool
) -> None:
    """A guest for whom an exchange waited, or a copy of an island, could read the files of the start over and over, a
    chunk now and then, and so hold up all islands for ever: the limit of `limits.no_progress_s` never came."""
    made: list[str] = []

    async def read(request: FetchRequest, threads: object) -> AsyncGenerator[bytes, None]:
        for chunk in (b"1", b"2"):
            yield chunk

    driver = SimpleNamespace(made_progress=lambda: made.append("progress"))
    record = SimpleNamespace(state=state, timeline=0)
    spec: Any = SimpleNamespace(island_count=1)
    job = SimpleNamespace(run=SimpleNamespace(driver=driver), record=record, spec=spec, start=None, brain=None)
    registry: Any = SimpleNamespace(get=lambda name: job)
    stores: Any = SimpleNamespace(files=SimpleNamespace(state=lambda *_: SimpleNamespace(read=read)), threads=None)
    request = FetchRequest(JobId("x-1"), 0, "model/x.safetensors", 0, 2)
    chunks = [chunk async for chunk in JobTransfer(stores, registry).fetch(request)]
    assert chunks == [b"1", b"2"]
    assert made == ["progress"] * (2 * is_awaited)
