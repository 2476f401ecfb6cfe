"""The flags of a stage server, checked without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.errors import InvalidConfig
from swarm.logs import LogFormat
from swarm.process import check_http_host, check_loopback


@dataclass(frozen=True, slots=True)
class Options:
    """The stage server's flags."""

    broker: str  # "" = none
    scheduler: str  # "" = find it through the broker
    listen: str  # "" = 127.0.0.1:7951 or the next free port
    announce: str  # "" = the address it listens at
    device: str
    stage: int  # -1 = any
    threads: int  # 0 = auto
    http_host: str
    http_port: int | None  # None = off
    data_dirs: tuple[Path, ...]  # the first that no other process uses
    connect_retry_s_max: float
    insecure: bool
    log_level: str
    log_format: LogFormat

    def check(self) -> None:
        """InvalidConfig if flags contradict each other, or open to others what is not meant for them."""
        if bool(self.broker) == bool(self.scheduler):
            raise InvalidConfig(
                "give either --broker or --scheduler",
                hint="for example --scheduler 127.0.0.1:7950, or --broker mqtt://HOST:1883 to find it there",
            )
        check_loopback(self.listen or "127.0.0.1:0", self.insecure)
        check_http_host(self.http_host, self.http_port, self.insecure)
