"""What `swarm submit` asks the scheduler before it tokenises."""

from __future__ import annotations

from pathlib import Path

from client.records import Peer
from client.transfer.submission import check, slow_text
from tests.support.islands import diloco


def test_who_chooses_bfloat16_for_cpus_without_it_is_warned_before_the_job_starts() -> None:
    """Only the stage servers' logs said that the job was twenty times as slow as it could be."""
    slow, fast = Peer(id="a", state="idle", slow_bfloat16=True), Peer(id="b", state="serving")
    assert slow_text("bfloat16", [slow, fast]).startswith("1 of 2 stage servers have no bfloat16 instructions")
    assert slow_text("bfloat16", [fast]) == ""
    assert slow_text("bfloat16", [fast, Peer(id="c", state="gone", slow_bfloat16=True)]) == ""


def test_who_lets_islands_exchange_less_often_than_once_is_warned(tmp_path: Path) -> None:
    """Such a job trained as many models as it had islands, and averaged them once, at its end."""
    (tmp_path / "text.txt").write_text("islands exchange what they have learned\n" * 200)
    spec = diloco(tmp_path / "text.txt", outer__every_steps=9, training__steps=8)
    told: list[str] = []
    check(spec, told.append)
    assert told[:1] == ["outer.every_steps = 9 is more than training.steps = 8: the model is exchanged at the end only"]
    told.clear()
    check(diloco(tmp_path / "text.txt", outer__every_steps=8, training__steps=8), told.append)
    assert not any("outer.every_steps" in line for line in told)


def test_who_lets_every_exchange_be_saved_is_warned_that_patience_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("islands exchange what they have learned\n" * 200)
    told: list[str] = []
    for saved in (4, 5):
        changes = {"outer__every_steps": 4, "outer__patience": 0.5, "checkpoint__every_steps": saved}
        spec = diloco(tmp_path / "text.txt", training__steps=8, **changes)
        check(spec, told.append)
    assert [line for line in told if "patience" in line] == [
        "checkpoint.every_steps = 4 saves the job behind every exchange, each 4 steps, and then all islands are waited "
        "for: raise it if outer.patience is to help"
    ]
