"""Quarantine: strikes of stage servers that computed wrong numbers, after which they get no stage any more.

strike, proven by a third ──────────────────▶ quarantined ──an admin releases it──▶ no strikes
strike, not proven ──a second within a day──▶
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm.text import counted

STRIKES_MAX = 2  # that no third has proven
STRIKES_S = 24 * 3600.0  # how long one counts
KEPT_MAX = 16  # newest strikes of a stage server


@dataclass(frozen=True, slots=True)
class Strike:
    """Wrong numbers of a stage server; `checked` of its hops had been computed again by others in that job."""

    unix_s: float
    evidence: str
    is_proven: bool
    checked: int


@dataclass(frozen=True, slots=True)
class TrustRecord:
    """The strikes of one stage server, and its quarantine."""

    strikes: tuple[Strike, ...] = ()
    since_unix_s: float = 0.0  # quarantined; 0 = it is not

    @property
    def is_quarantined(self) -> bool:
        return self.since_unix_s > 0.0

    def struck(self, strike: Strike) -> TrustRecord:
        """The record with one more strike."""
        strikes = (*self.strikes, strike)[-KEPT_MAX:]
        recent = [earlier for earlier in strikes if strike.unix_s - earlier.unix_s < STRIKES_S]
        is_enough = strike.is_proven or len(recent) >= STRIKES_MAX
        since = self.since_unix_s or (strike.unix_s if is_enough else 0.0)
        return replace(self, strikes=strikes, since_unix_s=since)

    @property
    def told(self) -> str:
        """The evidence in a sentence; empty if there is none."""
        if not self.strikes:
            return ""
        newest = self.strikes[-1]
        counts = f"{counted(len(self.strikes), 'strike')}" + (", proven by a third" if newest.is_proven else "")
        return f"{newest.evidence}; {counts}; {counted(newest.checked, 'hop')} of it checked in that job"
