"""Submits: how often one person may submit a job.

Each job leaves rows, a folder and series behind, also if it is cancelled at once. A scheduler that starts again has
forgotten the submits before. A submit that is refused for what is in it counts too, since it was looked at.
"""

from __future__ import annotations

from swarm.errors import QuotaReached
from swarm.limits import SUBMITS_OF_ONE_AT_ONCE, SUBMITS_OF_ONE_PER_S, Bucket
from swarm.text import spoken_duration


class Submits:
    """Over plaintext nobody is known, and nothing is counted."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}  # as many as there are members at most

    def check(self, owner: str, now_s: float) -> None:
        """QuotaReached, with the time until the next one, if the person may submit nothing now."""
        bucket = self._buckets.get(owner)
        if bucket is not None and (wait_s := bucket.wait_s(now_s)) > 0:
            raise QuotaReached(
                f"you have submitted {SUBMITS_OF_ONE_AT_ONCE} jobs in a short time, and may submit "
                f"{SUBMITS_OF_ONE_PER_S * 3600:.0f} an hour from there on",
                hint=f"the next one may come in {spoken_duration(wait_s)}",
            )

    def take(self, owner: str, now_s: float) -> None:
        """Count a submit; QuotaReached as in `check`."""
        if owner:
            self.check(owner, now_s)
            self._buckets.setdefault(owner, Bucket(SUBMITS_OF_ONE_PER_S, SUBMITS_OF_ONE_AT_ONCE)).take(now_s)
