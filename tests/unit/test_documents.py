"""The documents name only what exists: files, links, programs; and their tables of states are those of the code."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import pytest
import yaml

from scheduler.brain.fleet import membership
from scheduler.brain.state import mode, step
from scheduler.jobs import registry

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
TOPS = ("benchmarks", "client", "deploy", "docs", "examples", "protos", "scheduler", "stage_server", "swarm", "tests")
PRODUCT = ("scheduler", "stage_server", "client", "swarm")
PATH = re.compile(r"`((?:" + "|".join(TOPS) + r")/[\w./-]*)`|pytest (tests/[\w./]+)")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
PROGRAM = re.compile(r"python -m\s+((?:" + "|".join(TOPS) + r")[\w.]*)")


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_files_that_exist(document: Path) -> None:
    named = {one or other for one, other in PATH.findall(document.read_text())}
    files = sorted(name for name in named if not name.startswith("swarm/v1/"))  # that is a topic of the broker
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    dead = []
    for name, anchor in LINK.findall(document.read_text()):
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{name}#{anchor}")
    assert dead == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_programs_that_a_document_names_exist(document: Path) -> None:
    for name in PROGRAM.findall(document.read_text()):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def rooms() -> dict[str, list[str]]:
    """What the table of rooms in ARCHITECTURE names, by top folder."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table, base = text[text.index("## The rooms") : text.index("### Imports")], ""
    found: dict[str, list[str]] = {}
    for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE):
        if row.startswith("**"):
            base = row.strip("*`/")
        elif base:
            found.setdefault(base, []).extend(re.findall(r"`([\w./]+)`", row))
    return found


def test_the_rooms_of_the_architecture_are_there_and_none_is_forgotten() -> None:
    known = {f"{base}/{name}" for base, names in rooms().items() for name in names}
    assert {name for name in known if not (ROOT / name).exists()} == set()
    modules = {path for top in PRODUCT for path in (ROOT / top).rglob("*.py") if not path.stem.startswith("__")}
    folders = {path.parent.relative_to(ROOT).as_posix() for path in modules}
    inner = {name for name in folders if name in (*PRODUCT, "scheduler/brain") or "/migrations" in name}
    assert {f"{name}/" for name in folders - inner} - known == set()


def test_the_picture_of_imports_shows_each_part_that_the_contracts_order() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    picture = text[text.index("### Imports") : text.index("## The life of a microbatch")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    ordered = [contract for contract in contracts if contract.get("exhaustive")]
    assert len(ordered) == 5
    for contract in ordered:
        for layer in contract["layers"]:
            assert re.search(rf"(?<![\w.]){re.escape(layer)}(?![\w.])", picture), f"{contract['name']}: {layer}"


def test_what_the_changelog_renamed_has_its_new_name() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    renamed = text[text.index("### Renamed") :]
    files = {path.relative_to(ROOT).with_suffix("").as_posix() for top in TOPS for path in ROOT.glob(f"{top}/**/*.py")}
    files |= {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")}
    ends = {"/".join(parts[i:]) for parts in (name.split("/") for name in files) for i in range(len(parts))}
    gone = [
        name
        for row in re.findall(r"^\|[^|]*\|[^|]*→([^|]*)\|[^|]*\|$", renamed, re.MULTILINE)
        for name in re.findall(r"`([\w/]+)`", row)
        if name not in ends
    ]
    assert gone == []


def next_states(transitions: Mapping[tuple[StrEnum, StrEnum], StrEnum | None]) -> dict[str, set[str]]:
    """From each state those that follow, as (state, event) -> state gives them; None leads back."""
    found: dict[str, set[str]] = {state.value: set() for state in type(next(iter(transitions))[0])}
    for (before, _), after in transitions.items():
        found[before.value] |= {after.value} if after is not None else set()
    return found


CODE = {
    "Job": {before.value: {after.value for after in registry.TRANSITIONS[before]} for before in registry.TRANSITIONS},
    "Brain": next_states(mode.TRANSITIONS),
    "Step": next_states(step.TRANSITIONS),
    "Peer": next_states(membership.TRANSITIONS),
}


@pytest.mark.parametrize("heading", CODE)
def test_the_tables_of_states_in_the_architecture_are_those_of_the_code(heading: str) -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition(f"\n### {heading} ")[2].partition("\n#")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    assert {row[1].strip("` "): set(re.findall(r"`(\w+)`", row[-2])) for row in rows} == CODE[heading]


def test_each_alert_has_an_entry_in_the_runbook_and_a_test_and_no_entry_is_left_over() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((ROOT / "deploy/prometheus/rules_test.yml").read_text())["tests"]
    names = [rule["alert"] for rule in rules]
    raised = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    sections = re.split(r"^## ", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)[1:]
    entries = {section.partition("\n")[0]: section for section in sections}
    assert list(entries) == names, "in the order of the rules"
    assert raised == set(names)
    assert [rule["annotations"]["runbook"] for rule in rules] == [f"docs/runbook.md#{name.lower()}" for name in names]
    for entry in entries.values():
        assert re.findall(r"^\*\*(\w+)\.\*\*", entry, re.MULTILINE) == ["Symptom", "Cause", "Fix"]


def test_the_dashboard_is_what_its_table_of_panels_says() -> None:
    made = runpy.run_path(str(ROOT / "deploy/grafana/make_dashboard.py"))
    assert json.loads(made["FILE"].read_text()) == made["dashboard"](), "python deploy/grafana/make_dashboard.py"
