"""A relay's budget: bits a second for all together, and bytes for each job."""

from __future__ import annotations

import re
from collections import Counter

from swarm.errors import NoWay, UsageError
from swarm.text import parse_size, size
from swarm.types import JobId

BURST_S = 0.1  # what may go at once after a pause, in seconds of the rate
RATE_BITS_PER_S_MIN = 1e6  # below that, pings of links that share the relay come back too late
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(kbit|Mbit|Gbit)\s*")
_FACTOR = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}


class Budget:
    """The rest of the budget since the relay's start; 0 is no limit. Time is an argument."""

    def __init__(self, bits_per_s: float = 0.0, job_bytes_max: int = 0) -> None:
        self._bytes_per_s = bits_per_s / 8
        self._job_bytes_max = job_bytes_max
        self._carried: Counter[JobId] = Counter()
        self._free_s = 0.0  # when all that was taken has gone

    def check(self, job: JobId) -> None:
        """NoWay if the job has had all that this relay carries for it."""
        if self._job_bytes_max and self._carried[job] >= self._job_bytes_max:
            raise NoWay(f"this relay carries {size(self._job_bytes_max)} for a job and no more")

    def take(self, job: JobId, size_bytes: int, now_s: float) -> float:
        """Seconds to wait before these bytes may go on; NoWay as `check`."""
        self.check(job)
        if self._job_bytes_max:
            self._carried[job] += size_bytes
        if not self._bytes_per_s:
            return 0.0
        self._free_s = max(self._free_s, now_s - BURST_S) + size_bytes / self._bytes_per_s
        return max(0.0, self._free_s - now_s)


def budget_of(rate: str, bytes_per_job: str) -> Budget:
    """The budget as flags say it; "" is no limit. UsageError."""
    bits_per_s, job_bytes_max = 0.0, 0
    if rate:
        found = _RATE.fullmatch(rate)
        bits_per_s = float(found[1]) * _FACTOR[found[2]] if found else 0.0
        if bits_per_s < RATE_BITS_PER_S_MIN:
            raise UsageError(f'--max-rate is at least 1Mbit, not "{rate[:40]}"', hint="for example --max-rate 200Mbit")
    if bytes_per_job:
        try:
            job_bytes_max = parse_size(bytes_per_job)
        except ValueError:
            job_bytes_max = 0
        if job_bytes_max < 1:
            raise UsageError(
                f'--max-bytes-per-job is a size, not "{bytes_per_job[:40]}"', hint="for example: 500GiB, or 2TiB"
            )
    return Budget(bits_per_s, job_bytes_max)
