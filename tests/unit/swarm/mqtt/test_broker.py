"""swarm.mqtt.broker: tests/integration/test_broker.py runs brokers."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.mqtt.broker import _free_port, _spawn


def test_a_machine_without_a_loopback_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """swarm up said "unexpected error: Cannot assign requested address" on a machine whose loopback is down."""

    def refuse(self: socket.socket, address: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(InvalidConfig, match=r"this machine has no 127\.0\.0\.1 and no \[::1\]"):
        _free_port()


async def test_a_broker_gets_no_variable_of_its_parent_but_those_that_lead_to_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passwords of the database and the hub's token stood in the environment of a process that needs neither."""
    given: dict[str, Any] = {}

    async def start(*_: str, **named: Any) -> None:
        given.update(named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setenv("SWARM_DB", "postgresql://swarm:hunter2@db/swarm")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    await _spawn(1883, tmp_path, tmp_path / "log")
    assert given["env"].keys() <= {"PATH", "HOME", "PYTHONPATH"}
    assert given["env"]["PATH"]
