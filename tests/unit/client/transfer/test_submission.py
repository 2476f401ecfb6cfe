"""What `swarm submit` asks the scheduler before it tokenises."""

from __future__ import annotations

from client.records import Peer
from client.transfer.submission import slow_text


def test_who_chooses_bfloat16_for_cpus_without_it_is_warned_before_the_job_starts() -> None:
    """Only the stage servers' logs said that the job was twenty times as slow as it could be."""
    slow, fast = Peer(id="a", state="idle", slow_bfloat16=True), Peer(id="b", state="serving")
    assert slow_text("bfloat16", [slow, fast]).startswith("1 of 2 stage servers have no bfloat16 instructions")
    assert slow_text("bfloat16", [fast]) == ""
    assert slow_text("bfloat16", [fast, Peer(id="c", state="gone", slow_bfloat16=True)]) == ""
