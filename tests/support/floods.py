"""Strangers who flood ports: TLS handshakes that they never end, bytes that mean nothing, slow requests.

    python -m tests.support.floods RATE HOST:PORT ...     all three in turn at each address, RATE a second, until killed

As a program it runs with the least priority: what it costs is what those who are flooded spend.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from swarm.process.children import dying_with_parent

SLOW_AT_ONCE = 100
GARBAGE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256))


def client_hello(alpn: str = "") -> bytes:
    """The first message of a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols([alpn])
    out = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


@dataclass
class Flood:
    """Handshakes at a rate, or slow requests; the threads of this process make them."""

    address: str
    rate: float
    hello: bytes
    is_slow: bool = False
    made: int = 0
    answered: int = 0
    _held: list[socket.socket] = field(default_factory=list)

    def run(self, until_s: float) -> None:
        host, _, port = self.address.rpartition(":")
        began_s = time.monotonic()
        while time.monotonic() < until_s:
            if self.made >= (time.monotonic() - began_s) * self.rate:
                time.sleep(0.001)
                continue
            self.made += 1
            with suppress(OSError):
                line = socket.create_connection((host, int(port)), timeout=2.0)
                line.sendall(b"GET /healthz HTTP/1.1\r\nHost:" if self.is_slow else self.hello)
                if self.is_slow:
                    self._held.append(line)
                    if len(self._held) > SLOW_AT_ONCE:
                        self._held.pop(0).close()
                    continue
                self.answered += bool(line.recv(1))
                line.close()
        for line in self._held:
            line.close()


@contextmanager
def flooding(rate: float, addresses: Sequence[str]) -> Iterator[None]:
    """Another process floods these addresses meanwhile."""
    command = [sys.executable, "-m", "tests.support.floods", str(rate), *addresses]
    child = subprocess.Popen(dying_with_parent(command), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline(), "the flood did not begin"
        yield
        assert child.poll() is None, "the flood ended by itself"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def main() -> None:
    os.nice(19)
    rate, addresses = float(sys.argv[1]) / 3, sys.argv[2:]
    kinds = ((client_hello("h2"), False), (GARBAGE, False), (b"", True))
    floods = [Flood(address, rate, first, is_slow) for address in addresses for first, is_slow in kinds]
    for flood in floods:
        threading.Thread(target=flood.run, args=(float("inf"),), daemon=True).start()
    while not all(flood.made for flood in floods):
        time.sleep(0.01)
    print("floods", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
