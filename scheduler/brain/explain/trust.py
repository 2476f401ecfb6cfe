"""Why a stage server is quarantined, for people."""

from __future__ import annotations

from scheduler.brain.explain.facts import Fact
from scheduler.brain.fleet.quarantine import TrustRecord
from swarm.text import counted, spoken_duration


def explain_trust(record: TrustRecord, now_unix_s: float) -> list[Fact]:
    """The facts against a stage server: its quarantine, and each strike."""
    facts = []
    if record.is_quarantined:
        for_s = max(0.0, now_unix_s - record.since_unix_s)
        facts.append(Fact("quarantined", f"for {spoken_duration(for_s)}: {record.told}", {"for_s": for_s}))
    for strike in record.strikes:
        ago_s = max(0.0, now_unix_s - strike.unix_s)
        how = "proven by a third" if strike.is_proven else "not proven by a third"
        checked = f"{counted(strike.checked, 'hop')} of it had been checked in that job"
        text = f"{spoken_duration(ago_s)} ago: {strike.evidence}; {how}; {checked}"
        facts.append(Fact("strike", text, {"ago_s": ago_s, "checked": float(strike.checked)}))
    return facts
