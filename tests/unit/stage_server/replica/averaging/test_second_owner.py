"""A slice that is reduced once more: what that costs the thread that computes, and the event loop."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stage_server.device import ThreadDevice
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import Deadline, Reduction
from stage_server.replica.averaging.mailbox import Mailbox
from stage_server.replica.averaging.second_owner import reduce_again, send_part
from swarm.model.exact_sums import mean_of_parts
from swarm.model.state import raw_bytes
from swarm.rpc.links.peers import Moved
from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Average, Member, Recheck, Slice
from tests.support.devices import noted_threads

UNIT, TOKENS, ELEMENTS = UnitName("stage-0"), 7, 16 * 256
OWNER, VERIFIER, THIRD = (PeerId(name) for name in "abc")
MEMBERS = tuple(
    Member(peer, 1, f"at {peer}", *span, "")
    for peer, span in ((OWNER, (0, ELEMENTS)), (VERIFIER, (ELEMENTS, ELEMENTS)), (THIRD, (ELEMENTS, ELEMENTS)))
)
AVERAGE = Average(0, 0, UNIT, Round(1, 1), MEMBERS, TOKENS, 10.0)
COMMAND = Recheck(0, 0, UNIT, Round(1, 1), 1, OWNER, VERIFIER)
PARTS = {
    member.peer: torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed, member in enumerate(MEMBERS)
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDevice]:
    monkeypatch.setattr("stage_server.brain.slices.CHUNK_ELEMENTS_MIN", 256)
    made = ThreadDevice(torch.device("cpu"), 1)
    yield made
    made.close()


class ToVerifier:
    """Links of which one leads to the verifier's mailbox."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.sent: list[Slice] = []

    async def send(
        self, address: str, header: Slice, payload: memoryview, *, to: PeerId, moved: Moved | None = None
    ) -> None:
        assert to == VERIFIER
        self.sent.append(header)
        self.mailbox.put(header, payload)


async def test_parts_are_read_once_and_put_together_beside_the_event_loop(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part was read once for each of its 16 chunks, each time as a copy of the whole unit if it lies on a GPU."""
    mailbox = Mailbox(VERIFIER, 0, 1)
    mailbox.begin(AVERAGE)
    mailbox.expect(AVERAGE, OWNER)
    table = ToVerifier(mailbox)
    links: Any = table
    read: list[PeerId] = []

    def part(peer: PeerId) -> Tensor:
        read.append(peer)
        return PARTS[peer]

    def me(peer: PeerId) -> ReplicaId:
        return ReplicaId(JobId("job"), peer, 1, 0)

    joining = noted_threads(monkeypatch, torch, "cat")
    held = mean_of_parts([PARTS[member.peer] for member in MEMBERS], TOKENS, None)
    for peer in (OWNER, THIRD):
        await send_part(AVERAGE, COMMAND, me(peer), device, links, lambda peer=peer: part(peer))
    answer = await reduce_again(
        AVERAGE, COMMAND, me(VERIFIER), Reduction(None), device, mailbox, Deadline(10.0), lambda: part(VERIFIER), held
    )
    assert len(table.sent) == 2 * 16
    assert read == [OWNER, THIRD, VERIFIER]
    assert answer.took == tuple(hashlib.sha256(raw_bytes(PARTS[member.peer])).hexdigest() for member in MEMBERS)
    assert answer.computed == answer.held
    assert joining
    assert threading.main_thread() not in joining
