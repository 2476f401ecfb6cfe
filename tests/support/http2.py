"""Connections that misuse HTTP/2 below gRPC: frames are made by hand, so nothing holds them back.

    python -m tests.support.http2 KIND HOST:PORT [SCHEDULER]     until killed, with the least priority

One connection reads what it is answered, another one does not; each is dialled anew when it breaks. Every second a line
says how much was sent and how often it was dialled. A member alone comes past the handshake of a port with TLS: the
one whose profile for SCHEDULER is here.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swarm.pki.identity import Identity
from swarm.pki.profiles import find_profile
from swarm.process.children import dying_with_parent

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 1, 3, 4, 6, 9
END_HEADERS = 4
CANCEL = struct.pack(">I", 8)
METHOD = "/swarm.wire.Jobs/Version"
STREAMS_MAX = (1 << 31) - 1
FRAMES_AT_ONCE = 64


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(path: str) -> bytes:
    """The headers of a call, as literals without an index (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(b"\x00" + b"".join(bytes([len(text)]) + text.encode() for text in pair) for pair in fields.items())


def pings() -> Iterator[bytes]:
    """Pings that each ask for an answer."""
    while True:
        yield frame(PING, bytes(8)) * FRAMES_AT_ONCE


def settings() -> Iterator[bytes]:
    """Settings that each ask for an answer."""
    while True:
        yield frame(SETTINGS) * FRAMES_AT_ONCE


def resets() -> Iterator[bytes]:
    """Calls that are taken back as soon as they are made: none counts as open, so no bound on streams holds them."""
    block = header_block(METHOD)
    for first in range(1, STREAMS_MAX, 2 * FRAMES_AT_ONCE):
        yield b"".join(
            frame(HEADERS, block, END_HEADERS, stream) + frame(RST_STREAM, CANCEL, stream=stream)
            for stream in range(first, first + 2 * FRAMES_AT_ONCE, 2)
        )


def continuations() -> Iterator[bytes]:
    """Headers that never end."""
    yield frame(HEADERS, header_block(METHOD), 0, 1)
    field = b"\x00\x01x\x64" + b"y" * 100
    while True:
        yield frame(CONTINUATION, field, 0, 1) * FRAMES_AT_ONCE


ATTACKS: dict[str, Callable[[], Iterator[bytes]]] = {
    "pings": pings,
    "settings": settings,
    "resets": resets,
    "continuations": continuations,
}


def dialled(address: str, identity: Identity | None) -> socket.socket:
    """A connection on which HTTP/2 has begun."""
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=10)
    if identity is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with tempfile.TemporaryDirectory() as folder:
            pair = Path(folder) / "pair.pem"
            pair.write_bytes(identity.key_pem + identity.certificate_pem)
            context.load_cert_chain(pair)
        line = context.wrap_socket(line)
    line.sendall(PREFACE + frame(SETTINGS))
    return line


@dataclass
class Misuse:
    """One connection at a time that sends frames as fast as they are taken."""

    kind: str
    address: str
    identity: Identity | None
    reads: bool
    sent_bytes: int = 0
    dialled: int = 0

    def run(self) -> None:
        while True:
            with suppress(OSError):
                self._misuse(dialled(self.address, self.identity))
            time.sleep(0.01)

    def _misuse(self, line: socket.socket) -> None:
        self.dialled += 1
        line.setblocking(False)
        with line:
            for content in ATTACKS[self.kind]():
                while content:
                    sent = self._tried(lambda rest=content: line.send(rest))
                    self.sent_bytes += sent
                    content = content[sent:]
                    answered = self.reads and self._tried(lambda: len(line.recv(1 << 16)) or -1)
                    if answered == -1:
                        return
                    if not sent and not answered:
                        time.sleep(0.001)

    def _tried(self, what: Callable[[], int]) -> int:
        try:
            return what()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0


@dataclass
class Told:
    """What an attack said last."""

    sent_bytes: int = 0
    dialled: int = 0


@contextmanager
def misusing(kind: str, address: str, scheduler: str = "") -> Iterator[Told]:
    """Another process misuses the port meanwhile."""
    command = [sys.executable, "-m", "tests.support.http2", kind, address, *([scheduler] if scheduler else [])]
    child = subprocess.Popen(dying_with_parent(command), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = Told()

    def listen() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            told.sent_bytes, told.dialled = map(int, line.split())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        while not told.sent_bytes:
            assert child.poll() is None, "the attack did not begin"
            time.sleep(0.05)
        yield told
        assert child.poll() is None, "the attack ended by itself"
    finally:
        child.kill()
        child.wait()
        listener.join()
        child.stdout.close()


def main() -> None:
    os.nice(19)
    kind, address, *more = sys.argv[1:]
    identity = find_profile(more[0]) if more else None
    attacks = [Misuse(kind, address, identity, reads) for reads in (True, False)]
    for attack in attacks:
        threading.Thread(target=attack.run, daemon=True).start()
    while True:
        time.sleep(1.0)
        sent_bytes, dials = sum(attack.sent_bytes for attack in attacks), sum(attack.dialled for attack in attacks)
        # One write: the parent ends this process at any moment, and print writes word by word with PYTHONUNBUFFERED.
        sys.stdout.write(f"{sent_bytes} {dials}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
