"""What keeps tests of this folder apart, of which two may run at a time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from client.up.up import HTTP_PORT
from swarm.listening import LOOPBACK


@pytest.fixture(scope="session", autouse=True)
def port_of_metrics_is_taken() -> Iterator[None]:
    """Of two `swarm up` that begin together both would find it free, and one would not get it: each has its own."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the other worker holds it too
        with contextlib.suppress(OSError):  # taken by somebody else
            holder.bind((LOOPBACK, HTTP_PORT))
            holder.listen()
        yield
