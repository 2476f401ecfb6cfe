"""Other logins of this machine: programs that a test runs as one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TypeAlias

NOBODY = 65534

# Imports are done before: the other login may be unable to read the folder of this Python.
_BECOME = """
import encodings.idna, os, socket, sys
os.setgroups([])
os.setgid({login})
os.setuid({login})
"""
_ASK = """
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as line:
    line.sendall(sys.argv[3].encode())
    if sys.argv[4]:
        line.shutdown(socket.SHUT_WR)
    answer = b""
    while b"event-stream" not in answer and (more := line.recv(65536)):
        answer += more
sys.stdout.buffer.write(answer)
"""

Answer: TypeAlias = tuple[int, str]


def run_as(script: str, *arguments: str, login: int = NOBODY) -> str:
    """What a Python program prints that another login runs; it must end well."""
    assert os.geteuid() == 0, "only root becomes another login"
    command = [sys.executable, "-I", "-c", _BECOME.format(login=login) + script, *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=120).stdout.decode(errors="replace")


def ask_as(address: str, path: str, *, login: int = NOBODY, half_closed: bool = False) -> Answer:
    """The status and the text of an HTTP answer to another login; of a stream its head alone."""
    host, _, port = address.rpartition(":")
    request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    said = run_as(_ASK, host.strip("[]"), port, request, "closed" if half_closed else "", login=login)
    head, _, text = said.partition("\r\n\r\n")
    return int(head.split()[1]), text
