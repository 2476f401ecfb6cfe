"""What swarm doctor looks at may be wrong in any way: each look ends in a finding."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from client.doctor import probes
from client.doctor.rules import Grade
from tests.support.services import free_port


@pytest.mark.parametrize(
    "url", ["mqtt://h:abc", "mqtt://h:65536", "http://h", "mqtt://", "h:1883", "mqtts://h?ca=/none"]
)
def test_a_broker_url_that_is_none_is_a_finding(url: str) -> None:
    """A port that is no number ended all checks."""
    found = probes.broker(url)
    assert (found.check, found.verdict) == ("broker", Grade.FAILED)
    assert "mqtt://HOST:PORT" in found.hint


def test_a_broker_that_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probes.broker(f"mqtt://ann:secret@127.0.0.1:{server.getsockname()[1]}").verdict is Grade.OK


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ImportError('libcudart.so.12')", "ImportError: libcudart.so.12 (exit status 1)"),
        ("import os; os.abort()", "it says nothing (exit status -6)"),
        ("import threading; threading.Event().wait()", "it did not load within 0.5 s"),
    ],
)
def test_a_torch_that_does_not_load_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    """Whatever went wrong was told as "torch is not installed"."""
    monkeypatch.setattr(probes, "_TORCH", program)
    if "0.5" in said:
        monkeypatch.setattr(probes, "TORCH_S_MAX", 0.5)
    assert probes._torch() == said


def test_a_torch_that_is_not_installed_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "find_spec", lambda name: None)
    assert probes._torch() == ""


def test_a_name_that_cannot_be_one_is_a_finding() -> None:
    found = probes.name(f"{'a' * 70}.org:7950")
    assert (found.check, found.verdict) == ("name", Grade.FAILED)


def test_whoever_hangs_up_while_the_scheduler_is_awaited_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reset of a port scanner ended the thread that answers, with a traceback."""
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    port = free_port()
    word = bytes(1 << 24)  # more than the kernel takes at once: the thread is still saying it
    with probes._answering(port, word) as (listens, _):
        assert listens
        with socket.create_connection(("127.0.0.1", port)) as scanner:
            scanner.recv(1)
            scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as scheduler:
            assert scheduler.recv(16) == word[:16]
    assert faults == []


def test_a_port_that_a_process_of_a_swarm_has_is_known_as_its(tmp_path: Path) -> None:
    """In a swarm that was well the doctor warned of port 9464, which its own scheduler had."""
    (tmp_path / "scheduler.py").write_text(
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    command = [sys.executable, "-m", "scheduler"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert probes._holder(port) == "swarm scheduler"
        process.stdin.close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert probes._holder(other.getsockname()[1]) == ""
