"""Two processes under one identity: a key that was copied, or stolen.

    session of an identity    ──heard────────heard────────heard────────heard──▶
    dialled by another                dial ✗        dial ✗        dial ✗          for CLONE_S: both are real

A process has one session at a time, and dials only when it has none. So a session that is heard, while somebody else
dials again and again under its name, is another process than the one that dials. Any number of restarts and changes of
address look otherwise: the older session falls silent within seconds, and is no rival from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CLONE_S = 600.0  # far longer than any overlap of a process that is moved by hand
GAP_S_MAX = 150.0  # between two dials; one that is refused dials once a minute at least
RIVALS_MAX = 8  # of one session that are remembered


@dataclass(slots=True)
class Rivals:
    """The dials by others under the identity of one session while it was heard."""

    _seen: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)  # (since, last)

    def dialled(self, incarnation: int, machine: str, now_s: float) -> bool:
        """Note a dial that was refused; whether this one has gone on for so long that its process must be another."""
        rival = (incarnation, machine)
        if rival not in self._seen and len(self._seen) >= RIVALS_MAX:
            self._seen = {one: seen for one, seen in self._seen.items() if now_s - seen[1] <= GAP_S_MAX}
            if len(self._seen) >= RIVALS_MAX:
                return False
        since_s, last_s = self._seen.get(rival, (now_s, now_s))
        if now_s - last_s > GAP_S_MAX:  # such as a scheduler that stood still: nobody was heard meanwhile
            since_s = now_s
        self._seen[rival] = since_s, now_s
        return now_s - since_s >= CLONE_S
