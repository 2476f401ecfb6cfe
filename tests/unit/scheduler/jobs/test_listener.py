"""What jobs hear, and what they are told beside it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.brain.fleet.membership import Membership
from scheduler.brain.inputs import Input, PeerGone, RelaysHere, Unreached
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.jobs.listener import JobTransfer, PeerListener
from scheduler.jobs.peers import Peers
from scheduler.storage.stamps import Stamps
from swarm.errors import Refused
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import parse_job
from swarm.types import NO_JOB, Hop, JobId, JobState, Microbatch, PeerId
from swarm.wire.messages import Event, FetchRequest, Hello, Release, ReportedCell, Route, Saved, StoreHeader


def test_jobs_at_work_and_later_ones_hear_of_relays_and_of_whom_the_scheduler_cannot_dial() -> None:
    heard: list[Input] = []
    at_work = SimpleNamespace(run=SimpleNamespace(driver=SimpleNamespace(tell=heard.append)))
    of_jobs = SimpleNamespace(all=lambda: [SimpleNamespace(run=None), at_work], relays_here=True, unreached=())
    registry: Any = of_jobs
    ports: Any = SimpleNamespace(metrics=None, wall_s=None, stores=SimpleNamespace(logs=None))
    none: Any = None
    listener = PeerListener(ports, registry, none, none, none, none, none)
    listener.on_relays(False)
    assert not registry.relays_here, "for those that begin later"
    listener.on_relays(True)
    listener.on_reach((PeerId("a"),))
    assert heard == [RelaysHere(False), RelaysHere(True), Unreached((PeerId("a"),))]
    assert registry.unreached == (PeerId("a"),)


KEY = Stamps(b"a key")
CELL = ReportedCell(Microbatch(0, 3, 1), 2, True, True, 0.5)


def _greeted(
    hello: Hello, record: dict[PeerId, int], *, is_back: bool = False, islands: int = 1, brain: Any = None
) -> list[Any]:
    """What the peers and the brain of a job with that record hear of a Hello; `is_back`: the peer serves the job."""
    values: dict[str, Any] = {
        "model": {"family": "llama", "config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}},
        "data": {"source": "x", "sequence_length": 64},
        "pipeline": {"split": (1, 1)},
    }
    if islands > 1:
        values |= {"islands": {"count": islands}, "averaging": {"mode": "diloco"}}
    spec = resolve(parse_job({"name": "x", **values}), Basis(300, stages=2))
    heard: list[Any] = []

    def on_event(peer: PeerId, event: Hello, room: int = 0, *, doubted: bool = False) -> None:
        heard.append((event.cells, room > 0, doubted))

    brain = brain or SimpleNamespace(admits=lambda hello: True)
    run = SimpleNamespace(brain=brain, driver=SimpleNamespace(on_event=on_event, tell=heard.append))
    job: Any = SimpleNamespace(spec=spec, run=run, record=SimpleNamespace(peers=record))
    membership = Membership()
    membership.hello(hello, 0.0)
    if is_back:
        membership.adopt(hello.peer, hello.job, hello.stage, 0.0)
    none: Any = None
    registry: Any = SimpleNamespace(get=lambda name: job if name == "x-1" else None, all=lambda: [job])
    peers: Any = SimpleNamespace(
        is_stopping=False,
        is_of=partial(Peers.is_of, none),
        may_return=lambda job, hello: True,
        adopt=lambda job, hello: heard.append("adopted"),
        send=lambda peer, command: heard.append(type(command)),
    )
    drains: Any = SimpleNamespace(reason=lambda hello: "", is_over=lambda hello: False)
    metrics = SimpleNamespace(peer_heard=lambda *_: None, peer_attached=lambda *_: None)
    stores = SimpleNamespace(logs=None, stamps=KEY)
    ports: Any = SimpleNamespace(metrics=metrics, wall_s=lambda: 0.0, stores=stores)
    PeerListener(ports, registry, membership, peers, none, drains, none).on_event(hello.peer, hello)
    return heard


def _hello(stage: int, timeline: int = 0, *cells: ReportedCell) -> Hello:
    return Hello(
        PeerId("p"), 1, 13, "", "127.0.0.1:1", "", "cpu", 1, 1 << 34, -1, JobId("x-1"), timeline, 3, cells, stage
    )


@pytest.mark.parametrize(
    ("stage", "record"),
    [
        (0, {}),
        (0, {PeerId("other"): 0}),
        (0, {PeerId("p"): 1}),
        (1, {PeerId("p"): 0}),
        (2, {PeerId("p"): 1}),
        (-1, {PeerId("p"): 1}),
        (-1, {PeerId("p"): -1}),
    ],
)
def test_a_job_takes_nobody_back_whom_its_record_does_not_name_in_that_stage(
    stage: int, record: dict[PeerId, int]
) -> None:
    """Any idle stage server whose Hello named a job at work was made a replica of the stage that it named, with a pass
    for it: no allocation, and no digest of what it held."""
    assert _greeted(_hello(stage), record) == [Release]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_job_takes_back_whom_its_record_names(stage: int) -> None:
    assert _greeted(_hello(stage), {PeerId("p"): stage}) == ["adopted", ((), True, False)]


def test_a_place_in_another_island_is_another_place() -> None:
    """Stage 2 of two in the first island has the number of the first stage in the second."""
    record = {PeerId("p"): 2}
    assert _greeted(_hello(0, 1), record, islands=2) == ["adopted", ((), True, False)]
    assert _greeted(_hello(0, 0), record, islands=2) == [Release]
    assert _greeted(_hello(2, 0), record, islands=2) == [Release]


class Away(IslandsBrain):
    """Nobody is back since the scheduler was restarted."""

    def __init__(self) -> None: ...

    def awaits_back(self, peer: PeerId) -> bool:
        return True


def test_an_island_hears_of_a_stage_server_that_is_back_without_its_stage() -> None:
    fresh, gone = replace(_hello(0), job=NO_JOB), PeerGone(PeerId("p"), "it came back without its stage")
    assert _greeted(fresh, {PeerId("p"): 0}, islands=2, brain=Away()) == [gone]
    assert _greeted(fresh, {PeerId("q"): 0}, islands=2, brain=Away()) == []
    assert _greeted(_hello(1), {PeerId("p"): 0}, islands=2, brain=Away()) == [Release, gone]


@pytest.mark.parametrize("is_back", [False, True])
def test_a_job_hears_only_of_cells_that_the_scheduler_gave_to_the_one_who_reports_them(is_back: bool) -> None:
    """After a restart of the scheduler whatever a peer said that it had added was in the ledger."""
    hops = (Hop(PeerId("p"), 1, 2, "at p"), Hop(PeerId("q"), 1, 2, "at q"))
    given = replace(CELL, stamp=KEY.stamped(JobId("x-1"), Route(CELL.microbatch, 3, hops), PeerId("p")).stamp)
    made_up = replace(given, microbatch=Microbatch(0, 3, 2))
    (*_, told) = _greeted(_hello(0, 0, given), {PeerId("p"): 0}, is_back=is_back)
    assert told == ((given,), not is_back, False)
    for cells in ((given, made_up), (made_up, given), (given, replace(CELL, microbatch=Microbatch(0, 4, 0)))):
        (*_, told) = _greeted(_hello(0, 0, *cells), {PeerId("p"): 0}, is_back=is_back)
        assert told == ((given,), not is_back, True)


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
    job = SimpleNamespace(run=run, spec=resolve(parse_job({"name": "x", **spec}), Basis(300, stages=2)))
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
