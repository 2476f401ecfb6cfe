"""Measures this machine, the scheduler and the network between them; `rules` judges the measurements.

Decision: docs/decisions/087.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from client.connection import Scheduler
from client.doctor import rules
from client.doctor.rules import Finding
from client.records import Peer
from client.shell import product
from swarm.errors import InvalidConfig, NoHome, SwarmError
from swarm.home import data_folder
from swarm.listening import LOOPBACK, bind_fault
from swarm.mqtt.endpoint import parse_url
from swarm.pki.identity import Identity
from swarm.text import is_loopback
from swarm.types import PROTOCOL_VERSION
from swarm.wire import jobs_pb2 as pb

DIAL_S_MAX = 2.0
TORCH_S_MAX = 60.0
DRIVER_S_MAX = 10.0
PROBE_BYTES = 1 << 20
PROBES = 3  # of each direction; the best counts
PEERS_DIALLED_MAX = 64
LISTEN_PORT, HTTP_PORT = 7951, 9464
WORD_BYTES = 16
_PROGRAMS = {"scheduler": "scheduler", "stage_server": "stage-server", "swarm.relay": "relay"}  # by module

# Run in a process of its own: the client has no torch.
_TORCH = """
import json, torch
cuda = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": cuda, "mps": torch.backends.mps.is_available(),
                  "threads": torch.get_num_threads()}))
"""


def machine() -> Iterator[Finding]:
    """Findings about this machine, without a scheduler."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield rules.ok("version", f"swarm {product()}, protocol {PROTOCOL_VERSION}, Python {python}")
    free = psutil.virtual_memory()
    yield rules.memory(free.available, free.total)
    try:
        folder = data_folder()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        yield rules.disk(str(folder), shutil.disk_usage(there).free)
    except NoHome as error:
        yield rules.no_home(error)
    yield rules.device(_torch(), _gpus(), has_bfloat16())
    for number, owner in ((LISTEN_PORT, "the first stage server"), (HTTP_PORT, "the metrics of the first process")):
        fault = _listen_fault(number)
        yield rules.port(number, owner, fault, _holder(number) if fault else "")


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU computes with bfloat16; True where the system does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return "flags" not in text or "avx512_bf16" in text or "amx_bf16" in text


def name(address: str) -> Finding:
    """Whether the host of HOST:PORT has an address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = sorted({str(answer[4][0]) for answer in socket.getaddrinfo(host, None)})
    except (OSError, UnicodeError) as error:  # a part of it is too long
        return rules.failed("name", f"{host} has no address: {error}", "check the name, DNS, or /etc/hosts")
    return rules.ok("name", f"{host} is {', '.join(found[:3])}")


def broker(url: str) -> Finding:
    """Whether something answers where an MQTT broker should."""
    try:
        endpoint = parse_url(url)
    except InvalidConfig as error:
        return rules.of_error("broker", error)
    address = f"{endpoint.host}:{endpoint.port}"
    fault = _dial_fault(address)
    if fault:
        return rules.failed("broker", f"{address}: {fault}", "start the broker, or check --broker and the firewall")
    return rules.ok("broker", f"something listens at {address}")


def network(scheduler: Scheduler, identity: Identity | None, port: int) -> Iterator[Finding]:
    """Clock, latency and bandwidth against the scheduler, and whether it reaches this machine."""
    if identity is not None:
        yield rules.certificate(identity.ends_unix_s, time.time())
    scheduler.probe(pb.ProbeRequest())  # what is set up once shall not count
    tries = []
    for _ in range(PROBES):
        before_s, before_unix_s = time.monotonic(), time.time()
        answer = scheduler.probe(pb.ProbeRequest())
        round_trip_s = time.monotonic() - before_s
        tries.append((round_trip_s, before_unix_s + round_trip_s / 2 - answer.unix_s))
    round_trip_s, ahead_s = min(tries)
    yield rules.clock(ahead_s, round_trip_s / 2)
    yield rules.latency(round_trip_s)
    up = _speed(scheduler, pb.ProbeRequest(payload=bytes(PROBE_BYTES)), round_trip_s)
    yield rules.bandwidth(up, _speed(scheduler, pb.ProbeRequest(answer_bytes=PROBE_BYTES), round_trip_s))
    yield _dial_back(scheduler, port)


def swarm(scheduler: Scheduler) -> Iterator[Finding]:
    """Findings about the scheduler's storage and broker, its stage servers and its jobs."""
    jobs, troubles = scheduler.jobs(all=False, limit=1000)
    for trouble in troubles:
        yield rules.failed("scheduler", trouble, "see the log of the scheduler, and of what it names")
    if not troubles:
        yield rules.ok("scheduler", "its database takes writes, and its broker, if it has one, is connected")
    views = scheduler.peers()
    yield from rules.peers(views)
    yield from rules.links(views)
    yield from _dial_peers(views)
    yield from rules.jobs(jobs)


def _dial_peers(views: list[Peer]) -> Iterator[Finding]:
    known = {view.id: view.address for view in views if view.address and " " not in view.address}
    known = dict(list(known.items())[:PEERS_DIALLED_MAX])
    if not known:
        if views:
            yield rules.skipped("way to stage servers", "their addresses are shown to admins only")
        return
    with ThreadPoolExecutor(16) as pool:
        faults = dict(zip(known, pool.map(_dial_fault, known.values()), strict=True))
    yield rules.dialled_from_here(len(known), {peer: fault for peer, fault in faults.items() if fault})


def _speed(scheduler: Scheduler, request: pb.ProbeRequest, round_trip_s: float) -> float:
    """Bytes per second of the fastest of some transfers."""
    best_s = math.inf
    for _ in range(PROBES):
        before_s = time.monotonic()
        scheduler.probe(request)
        best_s = min(best_s, time.monotonic() - before_s)
    return PROBE_BYTES / max(best_s - round_trip_s, 1e-6)


def _dial_back(scheduler: Scheduler, port: int) -> Finding:
    if is_loopback(scheduler.address.rpartition(":")[0]):
        return rules.skipped("reachable", "the scheduler is on this machine")
    word = secrets.token_bytes(WORD_BYTES)
    with _answering(port, word) as (listens, why_not):
        # Where a stage server listens already, it is enough that it answers.
        asked = word if listens else b""
        answer = scheduler.probe(pb.ProbeRequest(dial_port=port, word=asked))
    if answer.fault and not listens:
        return rules.dial_back(answer.caller, port, f"{answer.fault}; this machine says of the port: {why_not}")
    return rules.dial_back(answer.caller, port, answer.fault)


@contextmanager
def _answering(port: int, word: bytes) -> Iterator[tuple[bool, str]]:
    """Say the word to each caller; gives whether the port could be listened at, and why not."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("0.0.0.0", port))
        except OSError as error:
            yield False, error.strerror or str(error)
            return
        server.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                with connection, suppress(OSError):  # whoever it is may hang up at once
                    connection.sendall(word)

        threading.Thread(target=serve, daemon=True).start()
        yield True, ""
        server.shutdown(socket.SHUT_RDWR)


def _dial_fault(address: str) -> str:
    """Why there is no answer at HOST:PORT; empty if there is one."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_S_MAX):
            return ""
    except TimeoutError:
        return f"no answer within {DIAL_S_MAX:g} s"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _listen_fault(port: int) -> str:
    fault = bind_fault(LOOPBACK, port)
    return "" if fault is None else fault.strerror or str(fault)


def _holder(port: int) -> str:
    """The program of a swarm that listens at the port of this machine, as `swarm NAME`; empty if none is seen."""
    try:
        listening = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ""
    for connection in listening:
        if (
            connection.pid
            and connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        ):
            with suppress(psutil.Error, OSError):
                command = psutil.Process(connection.pid).cmdline()
                module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
                if module in _PROGRAMS:
                    return f"swarm {_PROGRAMS[module]}"
    return ""


def _torch() -> dict[str, Any] | str:
    """Torch's version and devices; else why it does not load, nothing if it is not installed."""
    if find_spec("torch") is None:
        return ""
    try:
        command = [sys.executable, "-P", "-c", _TORCH]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not load within {TORCH_S_MAX:g} s"
    except OSError as error:
        return f"no process can be started: {error.strerror or error}"
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        return f"{last[:300]} (exit status {done.returncode})"
    return found


def _gpus() -> list[str]:
    """The GPUs that NVIDIA's driver names, with its version; none without the driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_S_MAX, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.replace(", ", " (driver ") + ")" for line in done.stdout.splitlines() if line.strip()]


def guarded(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; an error of the swarm ends them as a failed one."""
    try:
        yield from findings
    except SwarmError as error:
        yield rules.of_error(check, error)


def environment() -> dict[str, str]:
    """The variables that a swarm reads."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("SWARM_", "CUDA_", "OMP_"))}
