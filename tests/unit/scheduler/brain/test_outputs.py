"""The claim: outputs come out once, in the order in which they were decided; commands go to replicas only."""

from __future__ import annotations

from scheduler.brain.outputs import Note, Outbox, Send
from swarm.types import JobId, PeerId
from swarm.wire.messages import Release

A, B = PeerId("a"), PeerId("b")
RELEASE = Release(JobId("job"), "over")


def test_outputs_come_out_once_and_in_order() -> None:
    replicas = {A}
    outbox = Outbox(JobId("job"), replicas)
    outbox.send(A, RELEASE)
    outbox.note("info", "now")
    outbox.send(B, RELEASE)
    outbox.put(Send(B, RELEASE))
    replicas.clear()
    outbox.send(A, RELEASE)
    assert outbox.take() == [Send(A, RELEASE), Note("info", "now"), Send(B, RELEASE)]
    assert outbox.take() == []
