"""The flags of a stage server, checked without loading torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from swarm.errors import InvalidConfig, UsageError
from swarm.listening import LOOPBACK
from swarm.pki.tokens import JoinLine
from swarm.process.callers import Logins
from swarm.process.lifecycle import check_announce, check_listen, own_addresses
from swarm.process.logs import LogFormat
from swarm.text import counted, is_address, is_loopback, is_wildcard, parse_size, size

DEFAULT_SHARE = "90%"
THREADS_PER_CORE_MAX = 8


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The memory that this server offers: in bytes, or as a share of the free memory at its start."""

    size_bytes: int | None
    ratio: float

    @classmethod
    def parse(cls, text: str) -> MemoryShare:
        """A size such as "20GiB" or a share such as "45%"; UsageError for anything else."""
        try:
            if text.endswith("%"):
                ratio = float(text[:-1]) / 100.0
                if not 0.0 < ratio <= 1.0:
                    raise ValueError
                return cls(None, ratio)
            size_bytes = parse_size(text)
        except ValueError:
            size_bytes = 0
        if size_bytes < 1:
            raise UsageError(
                f'--max-memory is a size or a share of what is free, not "{text}"',
                hint=f"for example --max-memory 20GiB, or --max-memory {DEFAULT_SHARE}",
            )
        return cls(size_bytes, 1.0)

    def of(self, free_bytes: int, total_bytes: int) -> int:
        """The bytes that are offered where `free_bytes` of `total_bytes` are free; InvalidConfig for more than all.

        More than is free is allowed, because another process may give it back.
        """
        if self.size_bytes is None:
            return int(self.ratio * free_bytes)
        if self.size_bytes > total_bytes:
            raise InvalidConfig(
                f"--max-memory {size(self.size_bytes)} is more than the {size(total_bytes)} of the device",
                hint=f"{size(free_bytes)} are free now; without --max-memory {DEFAULT_SHARE} of them are offered",
            )
        return self.size_bytes

    def of_host(self, free_bytes: int) -> int:
        """The bytes of the host's memory that are offered beside a device: a size says nothing of them."""
        ratio = self.ratio if self.size_bytes is None else MemoryShare.parse(DEFAULT_SHARE).ratio
        return int(ratio * free_bytes)


@dataclass(frozen=True, slots=True)
class StageServerOptions:
    broker: str  # "" = none
    scheduler: str  # "" = find it through the broker
    swarm: str  # the scheduler's name at the broker
    listen: str  # "" = port 7951 of `host`, or the next free one
    announce: str  # "" = the address it listens at
    device: str
    stage: int  # -1 = any
    threads: int  # 0 = auto
    max_memory: MemoryShare
    http_host: str
    http_port: int | None  # None = off
    data_dirs: tuple[Path, ...]  # the first that no other process uses
    connect_retry_s_max: float
    orphan_timeout_s: float
    drain_timeout_s: float  # 0 = end at once
    insecure: bool
    join: JoinLine | None
    allow_hub: tuple[str, ...]  # patterns of model ids
    hub_token: bool
    log_level: str
    log_format: LogFormat
    via_relay: bool = False  # others cannot dial it
    site: str = ""  # where it is; those of one site have fast links to each other
    logins: Logins = field(default_factory=Logins)  # that may read metrics on loopback
    proxy: str = ""  # an HTTP proxy on the way to all hosts but the own
    host: str = LOOPBACK  # where it listens without `listen`

    @property
    def listens(self) -> str:
        """HOST:PORT where it listens; port 0: any."""
        return self.listen or f"{self.host}:0"

    @property
    def is_beside_scheduler(self) -> bool:
        """Whether no flag says where others dial it, so that it listens where the scheduler finds it. In plaintext it
        stays closed unless asked."""
        return not (self.listen or self.announce or self.via_relay or self.insecure)

    @property
    def is_alone(self) -> bool:
        """Whether only this machine can reach it. Tensors then travel in plaintext, because that is faster."""
        hosts = [address.rpartition(":")[0] for address in (self.listens, self.announce) if address]
        return not self.via_relay and all(map(is_loopback, hosts))

    def address(self, port: int) -> str:
        """The address at which others dial this server, given its own port; empty: through relays alone."""
        host = self.listens.rpartition(":")[0]
        if self.via_relay and not self.announce and (is_loopback(host) or is_wildcard(host)):
            return ""
        return self.announce or f"{host}:{port}"

    def is_forwarded(self, port: int) -> bool:
        """Whether others dial this server at a port of another machine or process, given its own port."""
        host, _, announced = self.announce.rpartition(":")
        return bool(host) and (announced != str(port) or host.strip("[]") not in own_addresses())

    def check(self) -> None:
        """InvalidConfig if flags contradict each other, or open to others what is not meant for them."""
        joined_before = any((folder / "pki" / "scheduler").exists() for folder in self.data_dirs)
        if not (self.broker or self.scheduler or self.join or joined_before):
            raise InvalidConfig(
                "say where the scheduler is: --scheduler, --broker or --join",
                hint="for example --scheduler 127.0.0.1:7950; an admin prints LINE for --join: swarm token create",
            )
        if self.broker and self.scheduler:
            raise InvalidConfig(
                "give either --broker or --scheduler, not both",
                hint="for example --scheduler 127.0.0.1:7950, or --broker mqtt://HOST:1883 to find it there",
            )
        if self.scheduler and not is_address(self.scheduler):
            raise InvalidConfig(
                f'--scheduler is HOST:PORT, not "{self.scheduler}"', hint="for example --scheduler 127.0.0.1:7950"
            )
        cores = os.cpu_count() or 1
        if self.threads > THREADS_PER_CORE_MAX * cores:
            raise InvalidConfig(
                f"--threads {self.threads} is too many for {counted(cores, 'core')}",
                hint="--threads auto takes one for each core",
            )
        if not re.fullmatch(r"[A-Za-z0-9_.-]{0,63}", self.site):
            raise UsageError(
                f'--site is a name of letters, digits, "_", "." and "-", not "{self.site[:80]}"', hint="--site berlin"
            )
        if self.proxy and not is_address(self.proxy):
            raise UsageError(f'--proxy is HOST:PORT, not "{self.proxy}"', hint="--proxy 127.0.0.1:3128")
        if self.via_relay and self.insecure:
            raise UsageError("--via-relay needs certificates", hint="leave out --insecure")
        check_listen(self.listens)
        if not self.via_relay:
            check_announce(self.listens, self.announce)
