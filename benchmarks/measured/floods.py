"""What floods of connections cost a scheduler: TLS handshakes and slow requests at each of its ports.

    python -m benchmarks.measured.floods [--seconds 10] [--rate 1000]

A flood sends the first message of a TLS handshake, which makes the server sign, and leaves; or it opens requests and
never ends them. Meanwhile a person asks for the version and an orchestrator probes /healthz. The processor time of the
scheduler is the measure: unlike rates, it hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster

SLOW_AT_ONCE = 100


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


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds_of(what: Callable[[], object]) -> float:
    began_s = time.monotonic()
    what()
    return time.monotonic() - began_s


def measure(cluster: Cluster, name: str, flood: Flood | None, seconds: float) -> None:
    http = cluster.scheduler.ready["http"]
    began_s, before_s = time.monotonic(), cpu_s(cluster.scheduler.child.pid)
    attack = threading.Thread(target=lambda: flood.run(began_s + seconds) if flood else None)
    attack.start()
    calls: list[float] = []
    probes: list[float] = []
    failed = 0
    while time.monotonic() < began_s + seconds:
        calls.append(seconds_of(lambda: cluster.jobs.Version(pb.VersionRequest(), timeout=10)))
        try:
            probes.append(seconds_of(lambda: urllib.request.urlopen(f"http://{http}/healthz", timeout=5).read()))
        except OSError:
            failed += 1
        time.sleep(0.05)
    attack.join()
    spent_s, made = cpu_s(cluster.scheduler.child.pid) - before_s, flood.made if flood else 0
    answered = flood.answered if flood else 0
    each, median, worst, probe = (
        1000 * value for value in (spent_s / max(1, made), statistics.median(calls), max(calls), max(probes, default=0))
    )
    print(
        f"{name:30} {made:7} {answered:8} {spent_s:7.2f} {each:8.3f} {median:8.1f} {worst:8.1f} {probe:9.1f} {failed:6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=1000.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWARM_PROFILES"] = f"{folder}/profiles"
        with Cluster(Path(folder)) as cluster:
            ready = cluster.scheduler.ready
            grpc, https = client_hello("h2"), client_hello()
            print(f"{'flood':30} {'made':>7} {'answered':>8} {'cpu s':>7} {'ms each':>8} ", end="")
            print(f"{'call ms':>8} {'worst':>8} {'probe':>9} {'failed':>6}")
            measure(cluster, "none", None, options.seconds)
            for name, flood in (
                ("handshakes at --listen", Flood(ready["address"], options.rate, grpc)),
                ("handshakes at --join-listen", Flood(ready["joins"], options.rate, https)),
                ("slow requests at --join-listen", Flood(ready["joins"], options.rate, https, is_slow=True)),
                ("slow requests at /metrics", Flood(ready["http"], options.rate, b"", is_slow=True)),
            ):
                measure(cluster, name, flood, options.seconds)


if __name__ == "__main__":
    main()
