"""A stage's state on its way to the scheduler: of the version that was asked for, and as it was sent."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stage_server.device import ThreadDevice
from stage_server.ports import ReplicaId
from stage_server.state import saving
from stage_server.state.saving import ATTEMPTS, capture, hand_over, hashed
from swarm.errors import SchedulerUnreachable, StaleMessage, SwarmError
from swarm.model.stage import Stage
from swarm.process.logs import get_logger
from swarm.types import JobId, PeerId, Pieces
from swarm.wire.messages import HashStage, Saved, SaveStage, StoreHeader
from tests.support.specs import tiny_spec

JOB = JobId("job")


class Disk:
    """Stores files; the first `damaged` of them arrive with another byte."""

    def __init__(self, damaged: int = 0) -> None:
        self.headers: list[StoreHeader] = []
        self.kept: dict[str, bytes] = {}
        self._damaged = damaged

    async def __call__(self, header: StoreHeader, pieces: Pieces) -> str:
        payload = pieces[:]
        self.headers.append(header)
        if len(self.headers) <= self._damaged:
            payload = payload[:-1] + bytes([payload[-1] ^ 1])
        self.kept[header.path] = payload
        return hashlib.sha256(payload).hexdigest()


async def save(disk: Disk, version: int = 0) -> Saved:
    spec, device = tiny_spec(), ThreadDevice(torch.device("cpu"), 1)
    stage = Stage(spec, 0, device.name)
    command = SaveStage(JOB, 0, version, optimizer=False, again=3)
    me = ReplicaId(JOB, PeerId("p"), 1, 0)
    try:
        return await hand_over(command, capture(command, stage, device), spec, me, device, disk, get_logger("test"))
    finally:
        device.close()


async def test_every_file_is_handed_over_and_named_with_its_hashes() -> None:
    disk = Disk()
    saved = await save(disk)
    assert (saved.version, saved.stage, saved.fault, saved.again) == (0, 0, "", 3)
    assert [header.path for header in disk.headers] == ["model/model.safetensors"]
    assert [header.total_bytes for header in disk.headers] == [len(content) for content in disk.kept.values()]
    assert len(saved.parameters) > 3


async def test_what_is_hashed_is_what_is_handed_over() -> None:
    disk, spec, device = Disk(), tiny_spec(), ThreadDevice(torch.device("cpu"), 1)
    stage, me = Stage(spec, 0, device.name), ReplicaId(JOB, PeerId("p"), 1, 0)
    saved = await save(disk)
    try:
        for version in (0, 1):
            command = HashStage(JOB, 0, version)
            found = await hashed(command, capture(command, stage, device), spec, me, device)
            if version == 0:
                sizes = {path: (len(kept), hashlib.sha256(kept).hexdigest()) for path, kept in disk.kept.items()}
                assert {file.path: (file.size_bytes, file.sha256) for file in found.files} == sizes
                assert (found.parameters, found.fault) == (saved.parameters, "")
            else:
                assert (found.files, found.parameters) == ((), ())
                assert "asked for version 1, this replica holds 0" in found.fault
    finally:
        device.close()


async def test_a_file_that_arrived_damaged_is_sent_again_and_given_up_in_the_end() -> None:
    whole, disk = Disk(), Disk(damaged=1)
    await save(whole)
    assert (await save(disk)).fault == ""
    assert disk.kept == whole.kept
    saved = await save(Disk(damaged=ATTEMPTS))
    assert "arrived 2 times with another sha256" in saved.fault
    assert saved.parameters == ()


async def test_a_version_that_is_not_held_any_more_is_not_handed_over() -> None:
    disk = Disk()
    saved = await save(disk, version=1)
    assert "asked for version 1, this replica holds 0" in saved.fault
    assert disk.headers == []


async def test_a_file_is_stored_again_if_the_scheduler_sees_first_that_the_session_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers that there is no session, on a connection that still stands. So the stage was not saved, and the
    checkpoint failed."""
    monkeypatch.setattr(saving, "STORE_AGAIN_S", 0.0)
    answers: list[SwarmError | str] = [StaleMessage("p has no session"), SchedulerUnreachable("gone"), "sha256"]

    async def store(header: StoreHeader, payload: Pieces) -> str:
        answer = answers.pop(0)
        if isinstance(answer, SwarmError):
            raise answer
        return answer

    me = ReplicaId(JOB, PeerId("p"), 1, 0)
    assignment, ports = SimpleNamespace(me=me), SimpleNamespace(store=store, log=get_logger("test"))
    one = saving.Saving(cast(Any, assignment), cast(Any, None), cast(Any, ports))
    header = StoreHeader(JOB, PeerId("p"), 1, 0, 0, 0, 1, "model/model.safetensors", "sha256")
    assert await one._store(header, Pieces(b"1")) == "sha256"
    assert answers == []
