"""When an ended stage server is started again: later after each early end, and never all at once."""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
STEADY_S = 60.0  # a server that lived so long begins anew with the first pause
# Of all servers together: many starts at once are too much for a scheduler and for a file system.
STARTS_AT_ONCE = 16
STARTS_PER_S = 1.0
# Before any server was ready: one that ends so often will not do better.
ENDS_MAX = 3


class Revival:
    """The pauses before the next starts of the wanted servers."""

    def __init__(self) -> None:
        self._has_served = False
        self._ends: dict[str, int] = {}  # in a row
        self._booked_s = float("-inf")  # when starts at STARTS_PER_S would be over

    def served(self) -> None:
        """A server was ready, so servers that end from now on are started again."""
        self._has_served = True

    def ended(self, name: str, lived_s: float, now_s: float) -> float | None:
        """Seconds until `name` is started again; None if it never is, because no server has ever been ready."""
        ends = self._ends[name] = 1 if lived_s >= STEADY_S else self._ends.get(name, 0) + 1
        if not self._has_served and ends >= ENDS_MAX:
            return None
        start_s = now_s + min(PAUSE_S_MAX, FIRST_PAUSE_S * 2.0 ** min(ends - 1, 16))
        self._booked_s = max(self._booked_s, start_s) + 1.0 / STARTS_PER_S
        return max(start_s, self._booked_s - STARTS_AT_ONCE / STARTS_PER_S) - now_s
