"""How fast tensors travel between two processes on this machine, beside plain TCP in the same run.

    python -m benchmarks.measured.dataplane [--seconds 0.5] [--repeats 7] [--passes] [--beside NAME=CHECKOUT]

A child process receives. For each size the ways take turns, `repeats` times each, so that a noisy machine disturbs all
alike; with `--beside` the code of another checkout takes its turns among them, with `--passes` a receiver that lets in
only who shows a pass. GB/s counts payload bytes one way, acknowledged; cpu-s/GB is user and system time of both
processes. The figures are medians, with the range behind them; "of TCP" is the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import grpc.aio

from stage_server.brain.passes import PassSlot
from stage_server.session.gate import PassGate
from swarm.pki.identity import Wallet
from swarm.pki.passes import PassKey
from swarm.process.malloc import tune_malloc
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.rpc.passes import issue
from swarm.types import Direction, JobId, Microbatch, PeerId
from swarm.wire.messages import Boundary, Pass, TensorHeader, Welcome

ROOT = Path(__file__).parents[2]
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
IN_FLIGHT = (1, 4, 8)
TCP = 0  # in place of a number in flight
PLAIN = "TCP sendall"


@dataclass(frozen=True, slots=True)
class Measured:
    """One turn of one way of sending."""

    gigabytes_per_s: float
    cpu_s_per_gigabyte: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each size and way")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=CHECKOUT", help="another version")
    parser.add_argument("--passes", action="store_true", help="also through the gate of a stage server")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--part", choices=("send", "receive"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        tune_malloc()
        part = _receive if options.part == "receive" else _send_as_asked
        asyncio.run(part(with_passes=options.passes))
        return
    senders = [_Sender("gRPC", ROOT)]
    try:
        senders += [_Sender("gRPC and passes", ROOT, "--passes")] if options.passes else []
        senders += [
            _Sender(f"gRPC {name}", Path(path)) for name, _, path in (path.partition("=") for path in options.beside)
        ]
        turns = _measure_all(senders, options.seconds, options.repeats)
    finally:
        for sender in senders:
            sender.end()
    if options.output == "json":
        print(
            json.dumps(
                {size: {name: [asdict(run) for run in ones] for name, ones in turns[size].items()} for size in turns}
            )
        )
    else:
        _print(turns)


class _Sender:
    """A process that sends with the code of one checkout, to a receiver with the same code."""

    def __init__(self, name: str, checkout: Path, *flags: str) -> None:
        self.name = name
        self._process = _python(checkout, "send", *flags, stdin=subprocess.PIPE)

    def turn(self, size_bytes: int, in_flight: int, seconds: float) -> Measured:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps([size_bytes, in_flight, seconds])}\n")
        self._process.stdin.flush()
        return Measured(*json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        self._process.communicate()  # it ends with its input


def _python(checkout: Path, part: str, *flags: str, stdin: int | None = None) -> subprocess.Popen[str]:
    """This file, with the modules of `checkout`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part, *flags]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, env=environment)


Turns = dict[str, dict[str, list[Measured]]]  # by size and way


def _measure_all(senders: Sequence[_Sender], seconds: float, repeats: int) -> Turns:
    found: Turns = {}
    for size_name, size_bytes in SIZES.items():
        plain: list[Measured] = []
        turns: dict[str, list[Measured]] = {}
        for repeat in range(repeats):
            plain.append(senders[0].turn(size_bytes, TCP, seconds))
            for in_flight in IN_FLIGHT:
                for sender in senders if repeat % 2 else senders[::-1]:
                    name = f"{sender.name}, {in_flight} in flight"
                    turns.setdefault(name, []).append(sender.turn(size_bytes, in_flight, seconds))
        found[size_name] = {PLAIN: plain, **dict(sorted(turns.items()))}
    return found


def _print(found: Turns) -> None:
    print("| size | way | GB/s | of TCP | cpu-s/GB | of TCP |\n|---|---|---|---|---|---|")
    for size_name, turns in found.items():
        plain = turns[PLAIN]
        for name, ones in turns.items():
            pairs = list(zip(ones, plain, strict=True))
            speed = median(one.gigabytes_per_s / tcp.gigabytes_per_s for one, tcp in pairs)
            cost = median(one.cpu_s_per_gigabyte / tcp.cpu_s_per_gigabyte for one, tcp in pairs)
            speeds, costs = [run.gigabytes_per_s for run in ones], [run.cpu_s_per_gigabyte for run in ones]
            cells = (size_name, name, _spread(speeds), f"{speed:.2f}", _spread(costs), f"{cost:.1f}")
            print(f"| {' | '.join(cells)} |", flush=True)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


# Sending --------------------------------------------------------------------------------------------------------------


async def _send_as_asked(*, with_passes: bool) -> None:
    # A process of its own, so that its time can be read from /proc and none is shared.
    receiver = _python(Path(os.environ["PYTHONPATH"]), "receive", *(["--passes"] if with_passes else []))
    assert receiver.stdout is not None
    try:
        tcp_port, grpc_port, token = json.loads(receiver.stdout.readline())
        while line := await asyncio.to_thread(sys.stdin.readline):
            size_bytes, in_flight, seconds = json.loads(line)
            if in_flight == TCP:
                measured = await asyncio.to_thread(_send_tcp, tcp_port, size_bytes, receiver.pid, seconds)
            else:
                measured = await _send_grpc(grpc_port, token, size_bytes, in_flight, receiver.pid, seconds)
            print(json.dumps([measured.gigabytes_per_s, measured.cpu_s_per_gigabyte]), flush=True)
    finally:
        receiver.kill()
        receiver.wait()


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
        cpu_s, started_s, count = _cpu_s(receiver), time.perf_counter(), 0
        while time.perf_counter() - started_s < seconds:
            send()
            count += 1
        return _result(count * size_bytes, started_s, cpu_s, receiver)


async def _send_grpc(port: int, token: str, size_bytes: int, in_flight: int, receiver: int, seconds: float) -> Measured:
    address, wallet = f"127.0.0.1:{port}", Wallet()
    wallet.pass_token = bytes.fromhex(token)
    links = GrpcPeerLinks(wallet=wallet)
    payload, header = os.urandom(size_bytes), _header(size_bytes)
    await links.send(address, header, payload)
    cpu_s, started_s, count = _cpu_s(receiver), time.perf_counter(), 0

    async def keep_sending() -> None:
        nonlocal count
        while time.perf_counter() - started_s < seconds:
            await links.send(address, header, payload)
            count += 1

    await asyncio.gather(*(keep_sending() for _ in range(in_flight)))
    measured = _result(count * size_bytes, started_s, cpu_s, receiver)
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


def _result(sent_bytes: int, started_s: float, cpu_s: float, receiver: int) -> Measured:
    gigabytes = sent_bytes / 1e9
    return Measured(gigabytes / (time.perf_counter() - started_s), (_cpu_s(receiver) - cpu_s) / gigabytes)


def _cpu_s(receiver: int) -> float:
    """User and system seconds of this process and of the receiver so far."""
    of_receiver = ~receiver << 3 | 2  # as clock_getcpuclockid gives it; /proc counts in hundredths
    return time.clock_gettime(of_receiver) + time.process_time()


# Receiving ------------------------------------------------------------------------------------------------------------


class _Sink:
    def admit(self, header: TensorHeader) -> None:
        pass

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        pass


async def _receive(*, with_passes: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_receive_tcp, args=(listener,), daemon=True).start()
    server = new_server()
    if with_passes:
        token = _let_in_with_a_pass(server)
    else:
        token = b""
        add_peer_service(server, _Sink())
    port = bind(server, "127.0.0.1:0")
    await server.start()
    print(json.dumps([listener.getsockname()[1], port, token.hex()]), flush=True)
    await server.wait_for_termination()


def _let_in_with_a_pass(server: grpc.aio.Server) -> bytes:
    """Serve the tensors of one sender; gives its pass."""
    key, place = PassKey.new(), PassSlot(JobId("bench"), 0, 1, 2, is_tied=False)
    gate = PassGate(Wallet(), lambda: place)
    gate.welcomed(Welcome(PeerId("receiver"), 1.0, key.public, 0.0))
    add_peer_service(server, _Sink(), gate=gate)
    return issue(key, Pass("", place.job, 0, PeerId("bench"), 1, 0, 2, 0.0, 3600.0))


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
