"""Why a stage server is quarantined, for people."""

from __future__ import annotations

from scheduler.brain.explain.trust import explain_trust
from scheduler.brain.fleet.quarantine import Strike, TrustRecord


def test_the_evidence_is_told_in_a_sentence() -> None:
    assert explain_trust(TrustRecord(), 9.0) == []
    single = TrustRecord().struck(Strike(4.0, "y was wrong", False, 1))
    (strike,) = explain_trust(single, 9.0)
    assert strike.text == "5.0 s ago: y was wrong; not proven by a third; 1 hop of it had been checked in that job"
    quarantined, *strikes = explain_trust(single.struck(Strike(6.0, "dx was wrong", True, 214)), 9.0)
    assert quarantined.topic == "quarantined"
    assert quarantined.text == (
        "for 3.0 s: dx was wrong; 2 strikes, proven by a third; 214 hops of it checked in that job"
    )
    assert len(strikes) == 2
