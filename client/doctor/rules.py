"""Judges measurements: each becomes a finding, with a remedy if it is bad. Nothing here measures.

Decision: docs/decisions/087.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from client.records import Job, Peer
from swarm.errors import NoHome, NotAdmitted, SwarmError
from swarm.text import bandwidth as spoken_rate
from swarm.text import counted, listed, size, spoken_duration
from swarm.types import JobState, PeerState

GIB = 1 << 30
DISK_FAILED_BYTES, DISK_WARNING_BYTES = GIB, 10 * GIB
MEMORY_WARNING_BYTES = 2 * GIB
CLOCK_WARNING_S, CLOCK_FAILED_S = 2.0, 60.0
LATENCY_WARNING_S = 0.5
BITS_PER_S_WARNING = 10e6
CERTIFICATE_WARNING_S = 3600.0
RELAY = "relay"  # in the place of a relay's state
NOT_REACHED = "(not reached)"  # behind the address of a stage server that the scheduler cannot dial


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one measurement. `hint` gives the remedy for a warning or a failure."""

    check: str
    verdict: Grade
    text: str
    hint: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


def ok(check: str, text: str, **numbers: float) -> Finding:
    return Finding(check, Grade.OK, text, numbers=numbers)


def warning(check: str, text: str, hint: str, **numbers: float) -> Finding:
    return Finding(check, Grade.WARNING, text, hint, numbers)


def failed(check: str, text: str, hint: str, **numbers: float) -> Finding:
    return Finding(check, Grade.FAILED, text, hint, numbers)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, Grade.SKIPPED, why)


def of_error(check: str, error: SwarmError) -> Finding:
    return failed(check, error.message, error.hint)


def not_asked(error: SwarmError) -> Finding:
    """The scheduler cannot be asked: an identity is missing or useless, or nothing answers."""
    if error.code != NotAdmitted.code:
        return of_error("scheduler", error)
    hint = "the doctor asks as a person: an admin prints a line with swarm token create --role viewer; then here: "
    return failed("scheduler", error.message, f"{hint}swarm login --join LINE, which is no obstacle to a stage server")


def disk(folder: str, free_bytes: int) -> Finding:
    text = f"{size(free_bytes)} free in {folder}"
    if free_bytes < DISK_FAILED_BYTES:
        return failed("disk", text, "free some space, or choose another --data-dir", free_bytes=free_bytes)
    if free_bytes < DISK_WARNING_BYTES:
        hint = "checkpoints may need more: free some space, or see swarm gc on the scheduler"
        return warning("disk", text, hint, free_bytes=free_bytes)
    return ok("disk", text, free_bytes=free_bytes)


def no_home(error: NoHome) -> Finding:
    return failed("home", error.message, error.hint)


def memory(available_bytes: int, total_bytes: int) -> Finding:
    text = f"{size(available_bytes)} of {size(total_bytes)} are free"
    numbers = {"available_bytes": float(available_bytes), "total_bytes": float(total_bytes)}
    if available_bytes < MEMORY_WARNING_BYTES:
        return warning("memory", text, "a stage server offers 90% of what is free: end other programs", **numbers)
    return ok("memory", text, **numbers)


def device(torch: Mapping[str, Any] | str, gpus: Sequence[str], bfloat16: bool) -> Finding:
    """`torch`: its version and devices, else why it does not load, "" if it is not installed; `gpus`: the devices
    that the NVIDIA driver names."""
    if isinstance(torch, str) and torch:
        return failed("device", f"torch is installed, but does not load: {torch}", "install it again, or end programs")
    if isinstance(torch, str):
        hint = 'install it with: pip install "swarm-stages[model]"; scheduler and client do without'
        return warning("device", "torch is not installed: this machine can serve no stage", hint)
    version = torch["version"]
    if torch["cuda"]:
        return ok("device", f"torch {version} sees {listed(torch['cuda'])}")
    if gpus:
        return failed(
            "device",
            f"the driver has {listed(gpus)}, but torch {version} sees none",
            "install a torch that is built for CUDA (https://pytorch.org/get-started), or check CUDA_VISIBLE_DEVICES",
        )
    if torch["mps"]:
        return ok("device", f"torch {version} sees an Apple GPU (mps)")
    slow = "" if bfloat16 else '; it has no bfloat16 instructions: model.dtype = "float32" is about 20 times as fast'
    return ok("device", f"torch {version} on the CPU, {counted(int(torch['threads']), 'thread')}{slow}")


def port(number: int, owner: str, fault: str, holder: str = "") -> Finding:
    """`fault` says why the port cannot be listened at; empty: it is free. `holder`: the process of a swarm that has it,
    if it is one.
    """
    if not fault:
        return ok("ports", f"port {number} is free for {owner}")
    if holder:
        return ok("ports", f"port {number}, of {owner}, is that of {holder} here; the next process takes a free one")
    hint = "if that is no process of this swarm, choose another one: --listen HOST:PORT, --http-port PORT"
    return warning("ports", f"port {number}, of {owner}, cannot be used: {fault}", hint)


ALIKE_S = 0.1  # differences that nobody sees


def clock(ahead_s: float, within_s: float) -> Finding:
    """`ahead_s`: this machine's clock against the scheduler's, known to `within_s`."""
    numbers = {"ahead_s": ahead_s, "within_s": within_s}
    how = "ahead of" if ahead_s > 0 else "behind"
    text = f"{spoken_duration(abs(ahead_s))} {how} the scheduler's clock"
    if abs(ahead_s) <= max(within_s, ALIKE_S):
        text = f"as the scheduler's, as far as can be told within {spoken_duration(max(within_s, ALIKE_S))}"
    off_s = abs(ahead_s) - within_s
    hint = "set the clock: timedatectl set-ntp true, or your system's time service"
    if off_s > CLOCK_FAILED_S:
        return failed("clock", text, f"{hint}; certificates are refused when clocks differ", **numbers)
    if off_s > CLOCK_WARNING_S:
        return warning("clock", text, hint, **numbers)
    return ok("clock", text, **numbers)


def latency(round_trip_s: float) -> Finding:
    text = f"{1000 * round_trip_s:.1f} ms to the scheduler and back"
    if round_trip_s > LATENCY_WARNING_S:
        return warning("latency", text, "commands will feel slow; training is not held up", round_trip_s=round_trip_s)
    return ok("latency", text, round_trip_s=round_trip_s)


def bandwidth(up_bytes_per_s: float, down_bytes_per_s: float) -> Finding:
    numbers = {"up_bytes_per_s": up_bytes_per_s, "down_bytes_per_s": down_bytes_per_s}
    text = f"{spoken_rate(up_bytes_per_s)} to the scheduler, {spoken_rate(down_bytes_per_s)} from it"
    if 8 * min(up_bytes_per_s, down_bytes_per_s) < BITS_PER_S_WARNING:
        hint = f"data and checkpoints travel slowly: {_slowly(min(up_bytes_per_s, down_bytes_per_s))}"
        return warning("bandwidth", text, hint, **numbers)
    return ok("bandwidth", text, **numbers)


def links(seen: Sequence[Peer]) -> list[Finding]:
    """The slowest link between stage servers, if one is slow; an empty list else."""
    found = [(link.bytes_per_s, peer.id, link.to) for peer in seen for link in peer.links if link.bytes_per_s > 0.0]
    rate, sender, to = min(found, default=(inf, "", ""))
    if 8 * rate >= BITS_PER_S_WARNING:
        return []
    hint = f"tensors, saves and joins travel slowly: {_slowly(rate)}; see swarm peers --links"
    return [warning("links", f"{sender} sends {spoken_rate(rate)} to {to}", hint, bytes_per_s=rate)]


def _slowly(bytes_per_s: float) -> str:
    """What a slow line means, and what helps."""
    takes = f"8 MiB take {spoken_duration((8 << 20) / bytes_per_s)}" if bytes_per_s > 0.0 else "nothing gets through"
    return (
        f"{takes}. Save less often (checkpoint.every_steps), send fewer bytes (pipeline.compression and "
        f'averaging.compression = "int8"), or take a place with a faster line'
    )


def certificate(ends_unix_s: float, now_unix_s: float) -> Finding:
    left_s = ends_unix_s - now_unix_s
    text = f"good for another {spoken_duration(left_s)}"
    if left_s < CERTIFICATE_WARNING_S:
        hint = "it should have been renewed by now: ask an admin for a new token, then swarm login --join LINE"
        return warning("certificate", text, hint, left_s=left_s)
    return ok("certificate", f"{text}, and renewed before that", left_s=left_s)


def dial_back(caller: str, number: int, fault: str) -> Finding:
    """Whether others reach this machine at a port; `caller` is its address as the scheduler sees it."""
    if not fault:
        return ok("reachable", f"the scheduler reaches this machine at {caller}, port {number}")
    return warning(
        "reachable",
        f"the scheduler does not reach this machine at {caller}, port {number}: {fault}",
        f"open or forward the port, and start with --listen 0.0.0.0:{number} --announce HOST:{number}; or go through a "
        "relay: swarm stage-server --via-relay (docs/networks.md)",
    )


def peers(views: Sequence[Peer]) -> list[Finding]:
    """The stage servers that are here, and the ones that the scheduler cannot dial or hear; relays do not count."""
    views = [view for view in views if view.state != RELAY]
    if not views:
        return [warning("stage servers", "there are none", "start one: swarm stage-server --scheduler HOST:PORT")]
    usable = [view for view in views if view.state in (PeerState.IDLE, PeerState.SERVING)]
    found = [ok("stage servers", f"{len(usable)} of {len(views)} are idle or at work")]
    unreached = [view.id for view in views if view.address.endswith(NOT_REACHED)]
    if unreached:
        hint = "others cannot either: see swarm explain PEER; they need --announce, an open port, or --via-relay"
        found.append(warning("stage servers", f"the scheduler cannot dial {listed(unreached)}", hint))
    silent = [view.id for view in views if view.state == PeerState.SUSPECT]
    if silent:
        hint = "look at those machines and the network between; see swarm explain PEER"
        found.append(warning("stage servers", f"nothing is heard of {listed(silent)}", hint))
    return found


def dialled_from_here(tried: int, faults: Mapping[str, str]) -> Finding:
    """The stage servers that this machine reaches; `faults` by id."""
    if not faults:
        return ok("way to stage servers", f"this machine reaches {tried} of {tried}")
    name, fault = next(iter(faults.items()))
    return warning(
        "way to stage servers",
        f"this machine reaches {tried - len(faults)} of {tried}; not {listed(faults)} ({name}: {fault})",
        "a stage server here could not exchange tensors with them: docs/networks.md has the ways",
    )


def jobs(views: Sequence[Job]) -> list[Finding]:
    """Open jobs that stand still."""
    stalled = [view for view in views if view.state == JobState.STALLED]
    return [
        failed("jobs", f"{job.id} is stalled: {job.reason}", job.hint or f"see: swarm explain {job.id}")
        for job in stalled
    ] or [ok("jobs", f"{counted(len(views), 'job')} open, none stalled")]
