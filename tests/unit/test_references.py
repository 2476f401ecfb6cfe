"""The pages of docs/reference are those that the code gives, and every command in a document is one that exists."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

from client.cli import VERBS
from scheduler.api.announcer import BusAnnouncer
from scheduler.jobs.job import JobProgress
from scheduler.storage.job_record import JobRecord, JobTokens
from swarm.mqtt import topics
from swarm.mqtt.discovery import Announcement
from swarm.types import JobId, JobState
from tests.support.references import FOLDER, PAGES, flags_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(swarm [a-z][^`]*)`")


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run: make references"


def test_nothing_of_this_machine_is_in_a_reference() -> None:
    assert not [name for name in PAGES if str(Path.home()) in (FOLDER / name).read_text()]


def test_a_flag_is_taken_from_the_variable_of_its_name() -> None:
    text = (FOLDER / "commands.md").read_text()
    found = re.findall(r"^\| `--([a-z-]+)`[^|]*\|[^|]*\| `SWARM_(\w+)`", text, re.MULTILINE)
    assert len(found) > 30
    assert {name: flag for flag, name in found if flag.upper().replace("-", "_") != name} == {}


def test_the_man_page_names_every_command_and_every_flag_and_is_without_a_fault() -> None:
    text = (FOLDER / "swarm.1").read_text()
    plain = text.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    assert all(f".SS swarm {verb}\n" in plain for verb in VERBS)
    listed = re.findall(r"^\| `(--?[a-zA-Z][\w-]*)`", (FOLDER / "commands.md").read_text(), re.MULTILINE)
    assert len(listed) > 100
    assert set(listed) <= set(re.findall(r"--?[a-zA-Z][\w-]*", plain))
    assert text.isascii(), "troff reads other bytes as Latin-1"
    assert not [line for line in text.splitlines() if line.startswith("'")], "troff would take it as a request"
    requests = {line.split()[0] for line in text.splitlines() if line.startswith(".")}
    assert requests == {'.\\"', ".TH", ".SH", ".SS", ".TP"}


def commands_in(text: str) -> list[list[str]]:
    """All `swarm ...` that a document tells its reader to type, as words."""
    blocks = "".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    lines = [line.strip().removeprefix("exec ") for line in blocks] + INLINE.findall(text)
    return [shlex.split(line, comments=True) for line in lines if line.startswith("swarm ")]


@cache
def known(verb: str) -> frozenset[str]:
    return flags_of(verb)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_of_a_document_exist_with_their_flags(document: Path) -> None:
    wrong = []
    for _, *words in commands_in(document.read_text()):
        verb = next((word for word in words if not word.startswith("-")), "")
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        if verb and verb.islower() and not flags <= known(verb):
            wrong.append((verb, sorted(flags - known(verb))))
    assert wrong == []


def test_the_topics_of_the_broker_are_those_of_the_code() -> None:
    class Heard:
        def announce(self, topic: str, payload: dict[str, object]) -> None:
            said[topic] = set(payload)

    said = {topics.scheduler("NAME"): set(Announcement("h:1", 1).payload())}
    tokens = JobTokens((), "uint16", 257, 1.0, 0)
    record = JobRecord(JobId("JOB"), "n", JobState.RUNNING, "", 0.0, 0.0, "{}", tokens)
    BusAnnouncer(cast(Any, Heard()), "NAME").job_changed(record, JobProgress())
    rows = [line.split("|") for line in (ROOT / "docs" / "broker.md").read_text().splitlines() if "| `swarm/v1" in line]
    told = {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[3])) for row in rows}
    peer = told.pop(topics.peer("PEER", "NAME"))
    assert told == said
    assert {"peer", "state", "incarnation", "address", "http", "device"} <= peer


def test_a_flag_that_does_not_exist_would_be_found() -> None:
    text = "```sh\nswarm submit job.toml --nonsense   # a comment\n```\nand `swarm ls --all`"
    assert commands_in(text) == [["swarm", "submit", "job.toml", "--nonsense"], ["swarm", "ls", "--all"]]
    assert "--nonsense" not in known("submit")
    assert {"--all", "-a", "--output", "-o"} <= known("ls")


def test_each_series_that_rules_the_dashboard_and_documents_name_is_in_the_reference() -> None:
    """Series that a collector makes at each scrape, or that exist only with a certificate, were left out."""
    known = set(re.findall(r"^\| `(swarm_\w+)`", (FOLDER / "metrics.md").read_text(), re.MULTILINE))
    series = re.compile(r"\b(swarm_[a-z_]+?)(?:_bucket|_sum|_count)?(?=[^\w.]|$)")
    files = [*(ROOT / "deploy" / "prometheus").glob("*.yml"), *(ROOT / "deploy" / "grafana").glob("*.json")]
    for path in [*files, *(ROOT / "docs").glob("*.md")]:
        named = set(series.findall(path.read_text())) - {"swarm_stages", "swarm_island_"}
        assert named <= known, (path.name, sorted(named - known))
