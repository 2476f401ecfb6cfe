"""No text that people read counts one of a thing as several."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from client.records import Job, Peer, Stage
from client.views import job_table, peers_table
from scheduler.brain.explain.facts import JobStanding, JoinerStanding, ReplicaStanding, Situation, explain_job
from scheduler.brain.state.pool import Leave
from swarm.job.schedule import not_finite_fault
from swarm.text import counted
from swarm.types import JobId, JobState, Memory, PeerId

ROOT = Path(__file__).parents[3]
NOUNS = """
    layer replica stage peer step microbatch server job sequence sample token island member file checkpoint relay link
    thread document exchange character time hop round
"""
_SEVERAL = re.compile(
    rf"(?<![\w.,/:x-])(?<!\d )1 (?:stage )?(?:{'|'.join(counted(2, noun)[2:] for noun in NOUNS.split())})\b(?!/)"
)


def plurals(text: str) -> list[str]:
    """What counts one as several; a range such as "0 to 1 steps" does not."""
    return [found.group() for found in _SEVERAL.finditer(text) if not text[: found.start()].endswith(" to ")]


def test_one_as_several_is_found() -> None:
    assert plurals("1 layers, 16 microbatches: a; 1 replicas, 1 stage servers") == [
        "1 layers",
        "1 replicas",
        "1 stage servers",
    ]
    assert plurals("1 layer, 11 layers, 0.1 steps, 0 to 1 steps, 1 stage server, 1 replica more, 2 x 1 steps/s") == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/transcripts/*.txt")), ids=lambda path: path.stem)
def test_recorded_texts_count_one_as_one(path: Path) -> None:
    assert plurals(path.read_text()) == []


def test_documents_count_one_as_one() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    assert {page.name: found for page in pages if (found := plurals(page.read_text()))} == {}


def test_tables_and_explanations_of_one_of_each_count_one_as_one() -> None:
    """status said "1 layers", explain "with 1 replicas" and "joins stage 0 since 1.8 s"."""
    job = Job(
        "j", state="running", step=1, steps=1, lost_steps=1, microbatches_committed=1, stages=(Stage(0, 1, ("a",), 1),)
    )
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(job_table(job))
    console.print(peers_table([Peer("a", "serving", job="j", stage=0, outstanding=1, threads=1)]))
    texts = [console.export_text()]
    assert "1 layer, 1 microbatch: a" in texts[0]
    standing = JobStanding(JobId("j"), JobState.RUNNING, "trains", 1.0, "", 1, 2, 1, 1.0, (Memory(1),), 1)
    leave = Leave("asked")
    replica = ReplicaStanding(PeerId("a"), 0, 1.0, 1, 1, leave=leave, asked_s=1.0)
    situation = Situation(True, 1, 1, "waits for a", "", (replica,), (JoinerStanding(PeerId("b"), 0, 1.0, False),))
    for state in (JobState.RUNNING, JobState.PLACING):
        for of in (situation, replace(situation, replicas=()), None):
            facts = explain_job(replace(standing, state=state), of, [], 2.8)
            texts += [f"{fact.topic}: {fact.text}" for fact in facts]
    texts.append(not_finite_fault(0, 1, steps=1, most=2))
    assert any("b has been joining stage 0 for 1.8 s" in text for text in texts)
    assert any("a was asked to leave 1.8 s ago (asked): " in text for text in texts)
    assert [found for text in texts for found in plurals(text)] == []


def test_a_state_is_a_phrase() -> None:
    """pause said "job X is succeeded: it cannot be paused"."""
    phrases = {state: state.phrase for state in JobState}
    assert (phrases[JobState.SUCCEEDED], phrases[JobState.FAILED]) == ("has succeeded", "has failed")
    assert (phrases[JobState.CANCELLED], phrases[JobState.RUNNING]) == ("was cancelled", "is running")


def test_nouns_have_their_plurals() -> None:
    plurals_of = {"replica": "replicas", "microbatch": "microbatches", "copy": "copies", "relay": "relays"}
    for noun, several in (plurals_of | {"loss": "losses"}).items():
        assert (counted(1, noun), counted(2, noun), counted(0, noun)) == (f"1 {noun}", f"2 {several}", f"0 {several}")
