"""What a replica says by hash that it took and made."""

from __future__ import annotations

import hashlib

from stage_server.brain.commitments import NOTHING, Commitments, digest_of
from swarm.types import Direction, Microbatch
from swarm.wire.messages import Accumulated, Forwarded

MICROBATCH = Microbatch(0, 3, 1)
DONE = Accumulated(MICROBATCH, 1, 1, True, 0.0, 0.1, 0.2, 0.0)


def test_a_report_names_inputs_and_outputs_by_their_bytes() -> None:
    commitments = Commitments(is_on=True)
    assert commitments.digest(memoryview(b"x")) == digest_of(b"x") == hashlib.sha256(b"x").hexdigest()
    assert commitments.digest(None) == ""
    for direction, (took, made) in ((Direction.FORWARD, ("x", "y")), (Direction.BACKWARD, ("g", "dx"))):
        commitments.took(MICROBATCH, direction, took)
        commitments.made(MICROBATCH, direction, made)
    signed = commitments.signed(DONE)
    assert isinstance(signed, Accumulated)
    assert signed.digests == ("x", "y", "g", "dx")
    forwarded = Forwarded(MICROBATCH, 1, 1)
    assert commitments.signed(forwarded) is forwarded
    commitments.forget(MICROBATCH)
    assert len(commitments) == 0
    unknown = commitments.signed(DONE)
    assert isinstance(unknown, Accumulated)
    assert unknown.digests == NOTHING


def test_a_job_that_believes_its_replicas_hashes_and_sends_nothing() -> None:
    commitments = Commitments(is_on=False)
    assert commitments.digest(b"x") == ""
    commitments.took(MICROBATCH, Direction.FORWARD, "x")
    assert len(commitments) == 0
    assert commitments.signed(DONE) is DONE


def test_an_output_that_the_wire_could_not_carry_is_named_with_and_without_hashes() -> None:
    for is_on in (False, True):
        commitments = Commitments(is_on=is_on)
        event = Accumulated(Microbatch(0, 1, 2), 0, 1, False, 0.0, 0.0, 0.0, 0.0)
        commitments.overflowed(event.microbatch, Direction.FORWARD)
        commitments.overflowed(event.microbatch, Direction.BACKWARD)
        signed = commitments.signed(event)
        assert isinstance(signed, Accumulated)
        assert signed.overflow == "forward", "the first is the cause of the second"
        commitments.forget(event.microbatch)
        signed = commitments.signed(event)
        assert isinstance(signed, Accumulated)
        assert signed.overflow == ""
