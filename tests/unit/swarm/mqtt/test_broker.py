"""swarm.mqtt.broker: tests/integration/test_broker.py runs brokers."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.mqtt.broker import _free_port


def test_a_machine_without_a_loopback_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """swarm up said "unexpected error: Cannot assign requested address" on a machine whose loopback is down."""

    def refuse(self: socket.socket, address: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(InvalidConfig, match=r"this machine has no 127\.0\.0\.1 and no \[::1\]"):
        _free_port()
