"""A pass says exactly what the scheduler said."""

from __future__ import annotations

import pytest

from swarm.errors import NoPass
from swarm.pki.passes import PassKey
from swarm.rpc.passes import issue, metadata, read, shown
from swarm.types import JobId, PeerId
from swarm.wire.messages import Pass

KEY = PassKey.new()
GIVEN = Pass("abcdefghijklmnop", JobId("j" * 128), 3, PeerId("p" * 63), 2**63 - 1, 511, 512, 1.8e9, 1.8e9 + 600)


def test_a_pass_is_read_as_it_was_issued_and_is_small() -> None:
    token = issue(KEY, GIVEN)
    assert read(token, KEY.public) == GIVEN
    assert len(token) < 1 << 10, "8 KiB of metadata go with a call"
    assert shown([("user-agent", "grpc"), *metadata(token)]) == token


def test_without_a_pass_nothing_is_shown() -> None:
    assert metadata(b"") == ()
    assert shown(None) == shown([("user-agent", "grpc")]) == shown([("swarm-pass-bin", "text")]) == b""


def test_what_is_signed_and_is_no_pass_lets_nobody_in() -> None:
    for statement in (b"\xff\xff\xff", b"\x0a\x01a\x12\x03a/b"):  # not protobuf; a job that has no such name
        with pytest.raises(NoPass, match="what was signed is no pass"):
            read(KEY.sign(statement), KEY.public)
