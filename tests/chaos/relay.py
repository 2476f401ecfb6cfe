"""Hosts in network namespaces, joined by a relay that loses, delays, repeats and reorders their packets.

    host 0 [namespace, tun] ─┐
    host 1 [namespace, tun] ─┼─▶ relay: one heap of packets by time of delivery ─▶ the tun of the host that is meant
    host n [namespace, tun] ─┘

Each host is a network of its own: nothing that is sent there leaves this machine, or meets its other traffic. Links are
set one way at a time, so that a partition can be one-way. Equal seeds draw equal fates for the same packets; when those
come is up to the kernel. A flipped byte would only be loss, as TCP has a checksum, so there is none here.

Needs root and /dev/net/tun; `why_not` says what is missing. Run as a program it is the relay's own process: commands on
stdin, one JSON line each, and an answer for each on stdout.

Not chosen: netem, because many kernels lack the module. Price: the relay takes processor time from what is measured,
and carries no more than about a gigabit per second.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Self

NET = "10.213.0."  # host n is NET + (n + 1)
HOSTS_MAX = 64
MTU_BYTES = 9000
QUEUE_PACKETS = 5000
AT_ONCE = 64  # packets read from one host before others have their turn
BACKLOG_S_MAX = 1.0  # what a narrow link holds back; more is dropped at its tail

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP_RUNNING = 0x41


@dataclass(frozen=True, slots=True)
class Link:
    """What happens to packets from one host to another."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # up to so much more, drawn for each packet: later ones overtake
    loss: float = 0.0  # share
    duplicate: float = 0.0  # share
    bytes_per_s: float = 0.0  # 0 = as fast as it goes
    cut: bool = False
    closed: bool = False  # nobody begins a TCP connection this way: there is a NAT, or a firewall that keeps state


class Fates:
    """Draws when packets arrive; pure, `now_s` is the caller's."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = Random(seed)
        self._links: dict[tuple[int, int], Link] = {}
        self._access: dict[tuple[int, str], float] = {}  # by host and direction
        self._free_s: dict[tuple[int, int | str], float] = {}  # when a narrow link or access has sent what it holds

    def set(self, source: int, target: int, **changes: Any) -> None:
        """Change a link, one way."""
        self._links[source, target] = replace(self._links.get((source, target), Link()), **changes)

    def set_access(self, host: int, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """What a host can send and receive, all its links together."""
        self._access |= {(host, "up"): up_bytes_per_s, (host, "down"): down_bytes_per_s}

    def lets_in(self, source: int, target: int, packet: bytes) -> bool:
        """Whether the target's side of the link takes the packet."""
        link = self._links.get((source, target))
        if link is None or not link.closed or not _begins_connection(packet):
            return True
        self.counts["not let in"] += 1
        return False

    def arrivals(self, source: int, target: int, size_bytes: int, now_s: float) -> list[float]:
        """When copies of a packet arrive: none if it is lost, two if it is repeated."""
        link = self._links.get((source, target), Link())
        if link.cut or self._rng.random() < link.loss:
            self.counts["cut" if link.cut else "lost"] += 1
            return []
        leaves_s = self._leaves_s(source, target, link.bytes_per_s, size_bytes, now_s)
        if leaves_s is None:
            self.counts["overflowed"] += 1
            return []
        copies = 1 + (self._rng.random() < link.duplicate)
        self.counts["relayed"] += 1
        self.counts["duplicated"] += copies - 1
        return [leaves_s + link.delay_s + self._rng.uniform(0.0, link.jitter_s) for _ in range(copies)]

    def _leaves_s(self, source: int, target: int, bytes_per_s: float, size_bytes: int, now_s: float) -> float | None:
        """When the packet has passed all that is narrow on its way, one after the other; None: there is no room."""
        up, down = (source, "up"), (target, "down")
        way = ((up, self._access.get(up)), ((source, target), bytes_per_s), (down, self._access.get(down)))
        leaves_s, free_s = now_s, dict[tuple[int, int | str], float]()
        for key, rate in way:
            if rate:
                begins_s = max(leaves_s, self._free_s.get(key, 0.0))
                if begins_s - now_s > BACKLOG_S_MAX:
                    return None
                leaves_s = free_s[key] = begins_s + size_bytes / rate
        self._free_s |= free_s
        return leaves_s


def why_not() -> str:
    """What keeps this machine from having such hosts; empty if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    child = os.fork()
    if child == 0:
        try:
            _own_network()
            os.close(_open_tun())
        except OSError:
            os._exit(1)
        os._exit(0)
    return "" if os.waitpid(child, 0)[1] == 0 else "the kernel refuses a network namespace with a tun device"


class Relay:
    """Hosts and the relay between them, as a context manager."""

    def __init__(self, hosts: int, seed: int) -> None:
        assert 1 <= hosts <= HOSTS_MAX
        self.hosts = [f"{NET}{number + 1}" for number in range(hosts)]
        self._seed = seed

    def __enter__(self) -> Self:
        command = [
            sys.executable,
            "-m",
            "tests.chaos.relay",
            "--hosts",
            str(len(self.hosts)),
            "--seed",
            str(self._seed),
        ]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._namespaces = [f"/proc/{pid}/ns/net" for pid in self._answer()["holders"]]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(timeout=20)
        self._child.stdout.close()

    def at(self, host: int) -> list[str]:
        """The command that runs another one at a host."""
        return ["nsenter", f"--net={self._namespaces[host]}", "--"]

    def move_here(self, host: int) -> None:
        """Let this thread, and all threads and processes that it starts from now on, be at a host."""
        with open(self._namespaces[host]) as namespace:
            _called(_libc().setns(namespace.fileno(), _CLONE_NEWNET))

    def set(self, source: int, target: int, **changes: Any) -> None:
        """Change the link from one host to another, as `Link` names it."""
        self._say({"from": source, "to": target, **changes})

    def between(self, one: int, other: int, **changes: Any) -> None:
        """The same in both directions."""
        self.set(one, other, **changes)
        self.set(other, one, **changes)

    def everywhere(self, **changes: Any) -> None:
        """The same between all."""
        for host in range(len(self.hosts)):
            for other in range(host):
                self.between(host, other, **changes)

    def access(self, host: int, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Bound what a host can send and receive, all its links together; 0: as fast as it goes."""
        self._say({"host": host, "up_bytes_per_s": up_bytes_per_s, "down_bytes_per_s": down_bytes_per_s})

    def counts(self) -> dict[str, float]:
        """Packets by fate so far, and the relay's CPU seconds."""
        return self._say({})

    def _say(self, words: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(words) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, f"the relay ended with {self._child.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


# The relay's own process ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    holders, tuns = [], []
    for number in range(options.hosts):
        pid, tun = _make_host(number)
        holders.append(pid)
        tuns.append(tun)
    print(json.dumps({"holders": holders}), flush=True)
    _relay(tuns, Fates(options.seed))


def _relay(tuns: list[int], fates: Fates) -> None:
    heap: list[tuple[float, int, int, bytes]] = []
    counter = 0
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        for number, tun in enumerate(tuns):
            os.set_blocking(tun, False)
            selector.register(tun, selectors.EVENT_READ, number)
        commands = _Lines()
        while True:
            wait_s = max(0.0, heap[0][0] - time.monotonic()) if heap else None
            for key, _ in selector.select(wait_s):
                if key.data is None:
                    if not commands.read(fates):
                        return
                    continue
                now_s = time.monotonic()
                for packet in _packets(key.fd):
                    target = packet[19] - 1
                    here = packet[0] >> 4 == 4 and 0 <= target < len(tuns)
                    if here and fates.lets_in(key.data, target, packet):
                        for at_s in fates.arrivals(key.data, target, len(packet), now_s):
                            counter += 1
                            heapq.heappush(heap, (at_s, counter, target, packet))
            now_s = time.monotonic()
            while heap and heap[0][0] <= now_s:
                _, _, target, packet = heapq.heappop(heap)
                try:
                    os.write(tuns[target], packet)
                except OSError:  # its queue is full: as with any wire, the tail is dropped
                    fates.counts["overflowed"] += 1


def _packets(tun: int) -> Iterator[bytes]:
    for _ in range(AT_ONCE):
        try:
            packet = os.read(tun, MTU_BYTES + 64)
        except BlockingIOError:
            return
        if len(packet) >= 20:
            yield packet


def _begins_connection(packet: bytes) -> bool:
    """Whether it is TCP with SYN and without ACK."""
    header_bytes = (packet[0] & 15) * 4
    return packet[9] == 6 and len(packet) >= header_bytes + 14 and packet[header_bytes + 13] & 0x12 == 0x02


class _Lines:
    """Commands from stdin, which may come in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, fates: Fates) -> bool:
        """Carry out what has come; False at its end."""
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            words = json.loads(line)
            if "host" in words:
                fates.set_access(**words)
            elif words:
                fates.set(words.pop("from"), words.pop("to"), **words)
            print(json.dumps({**fates.counts, "cpu_s": time.process_time()}), flush=True)
        return bool(data)


def _make_host(number: int) -> tuple[int, int]:
    """A process that holds a namespace until this one ends, and the tun device in there."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _libc().prctl(_PR_SET_PDEATHSIG, 9)
        _own_network()
        tun = _open_tun()
        _configure("tun0", f"{NET}{number + 1}")
        _configure("lo", "127.0.0.1", mask="255.0.0.0")
        socket.send_fds(theirs, [b"t"], [tun])
        os.close(tun)
        theirs.recv(1)  # until the relay ends
        os._exit(0)
    theirs.close()
    _, tuns, _, _ = socket.recv_fds(ours, 1, 1)
    if not tuns:
        raise OSError(f"no network for host {number}")
    _KEPT.append(ours)
    return pid, tuns[0]


_KEPT: list[socket.socket] = []  # closed, they end the hosts


def _own_network() -> None:
    _called(_libc().unshare(_CLONE_NEWNET))


def _open_tun() -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
    return tun


def _configure(device: str, address: str, *, mask: str = "255.255.255.0") -> None:
    name = device.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:

        def tell(request: int, form: str, *values: Any) -> None:
            fcntl.ioctl(door, request, struct.pack(f"16s{form}", name, *values).ljust(40, b"\0"))

        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, mask)):
            tell(request, "HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
        if device != "lo":
            tell(_SIOCSIFMTU, "i", MTU_BYTES)
            tell(_SIOCSIFTXQLEN, "i", QUEUE_PACKETS)
        tell(_SIOCSIFFLAGS, "H", _IFF_UP_RUNNING)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
