"""How fast tensors travel between two processes on this machine, beside plain TCP in the same run.

    python -m benchmarks.measured.dataplane [--seconds 2] [--repeats 5]

A child process receives. For each size the two ways take turns, `repeats` times each, so that a noisy machine disturbs
both alike. GB/s counts payload bytes one way, acknowledged; cpu-s/GB is user and system time of both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from statistics import median

from swarm.peer_messages import Boundary, TensorHeader
from swarm.process.malloc import tune_malloc
from swarm.rpc.channel import bind, new_server
from swarm.rpc.peers import GrpcPeerLinks, add_peer_service
from swarm.types import Direction, JobId, Microbatch, PeerId

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
IN_FLIGHT = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of sending, at one size."""

    name: str
    gigabytes_per_s: float
    cpu_s_per_gigabyte: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=7, help="of each size and way")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tune_malloc()
    if options.receive:
        asyncio.run(_receive())
        return
    # A process of its own, so that its time can be read from /proc and none is shared.
    receiver = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.measured.dataplane", "--receive"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        tcp_port, grpc_port = map(int, receiver.stdout.readline().split())
        asyncio.run(_measure_all(tcp_port, grpc_port, receiver.pid, options.seconds, options.repeats))
    finally:
        receiver.kill()
        receiver.wait()


async def _measure_all(tcp_port: int, grpc_port: int, receiver: int, seconds: float, repeats: int) -> None:
    print(f"{'size':8} {'way':22} {'GB/s':>6} {'spread':>13} {'cpu-s/GB':>9} {'of TCP':>7}")
    for size_name, size_bytes in SIZES.items():
        runs: dict[str, list[Measured]] = {}
        for _ in range(repeats):
            measured = [await asyncio.to_thread(_send_tcp, tcp_port, size_bytes, receiver, seconds)]
            for in_flight in IN_FLIGHT:
                measured.append(await _send_grpc(grpc_port, size_bytes, in_flight, receiver, seconds))
            for one in measured:
                runs.setdefault(one.name, []).append(one)
        plain = median(one.gigabytes_per_s for one in runs["TCP sendall"])
        for name, ones in runs.items():
            speeds = [one.gigabytes_per_s for one in ones]
            cost = median(one.cpu_s_per_gigabyte for one in ones)
            spread = f"{min(speeds):.2f}-{max(speeds):.2f}"
            print(
                f"{size_name:8} {name:22} {median(speeds):6.2f} {spread:>13} {cost:9.2f} {median(speeds) / plain:7.2f}"
            )


# Sending --------------------------------------------------------------------------------------------------------------


def _send_tcp(port: int, size_bytes: int, receiver: int, seconds: float) -> Measured:
    """One tensor after the other, each acknowledged with one byte."""
    payload = memoryview(os.urandom(size_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(struct.pack("<Q", size_bytes))

        def send() -> None:
            connection.sendall(payload)
            connection.recv(1)

        send()
        return _timed("TCP sendall", send, size_bytes, receiver, seconds)


def _timed(name: str, send: object, size_bytes: int, receiver: int, seconds: float) -> Measured:
    assert callable(send)
    cpu_s, started_s, count = _cpu_s(receiver), time.perf_counter(), 0
    while time.perf_counter() - started_s < seconds:
        send()
        count += 1
    return _result(name, count * size_bytes, started_s, cpu_s, receiver)


async def _send_grpc(port: int, size_bytes: int, in_flight: int, receiver: int, seconds: float) -> Measured:
    address = f"127.0.0.1:{port}"
    links = GrpcPeerLinks()
    payload, header = os.urandom(size_bytes), _header(size_bytes)
    await links.send(address, header, payload)
    cpu_s, started_s, count = _cpu_s(receiver), time.perf_counter(), 0

    async def keep_sending() -> None:
        nonlocal count
        while time.perf_counter() - started_s < seconds:
            await links.send(address, header, payload)
            count += 1

    await asyncio.gather(*(keep_sending() for _ in range(in_flight)))
    measured = _result(f"gRPC, {in_flight} in flight", count * size_bytes, started_s, cpu_s, receiver)
    await links.close()
    return measured


def _header(size_bytes: int) -> Boundary:
    return Boundary(
        job=JobId("bench"),
        microbatch=Microbatch(0, 0, 0),
        direction=Direction.FORWARD,
        stage=1,
        attempt=0,
        sender=PeerId("bench"),
        incarnation=1,
        dtype="float32",
        shape=(size_bytes // 4,),
        codec="none",
        total_bytes=size_bytes,
    )


def _result(name: str, sent_bytes: int, started_s: float, cpu_s: float, receiver: int) -> Measured:
    gigabytes = sent_bytes / 1e9
    return Measured(name, gigabytes / (time.perf_counter() - started_s), (_cpu_s(receiver) - cpu_s) / gigabytes)


def _cpu_s(receiver: int) -> float:
    """User and system seconds of this process and of the receiver so far."""
    with open(f"/proc/{receiver}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    ours = os.times()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + ours.user + ours.system


# Receiving ------------------------------------------------------------------------------------------------------------


class _Sink:
    def admit(self, header: TensorHeader) -> None:
        pass

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        pass


async def _receive() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_receive_tcp, args=(listener,), daemon=True).start()
    server = new_server()
    add_peer_service(server, _Sink())
    port = bind(server, "127.0.0.1:0")
    await server.start()
    print(listener.getsockname()[1], port, flush=True)
    await server.wait_for_termination()


def _receive_tcp(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            (size_bytes,) = struct.unpack("<Q", connection.recv(8, socket.MSG_WAITALL))
            buffer = memoryview(bytearray(size_bytes))
            held_bytes = 0
            while read_bytes := connection.recv_into(buffer[held_bytes:]):
                held_bytes += read_bytes
                if held_bytes == size_bytes:
                    connection.sendall(b"\1")
                    held_bytes = 0


if __name__ == "__main__":
    main()
