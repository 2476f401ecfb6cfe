"""The documents name only what exists: files, links, programs; and their tables of states are those of the code."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from scheduler.brain.fleet.membership import PeerState
from scheduler.brain.state.brain_state import Mode
from scheduler.brain.state.step import Phase
from swarm.types import JobState

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs/decisions").glob("*.md"))
PRODUCT = ("scheduler", "stage_server", "client", "swarm")
TOPS = (*PRODUCT, "benchmarks", "deploy", "docs", "examples", "protos", "tests", "tools")
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


def test_each_folder_of_the_source_is_a_room_of_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## The rooms") : text.index("## The life of a microbatch")]
    known = {
        name.rstrip("/") for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in row.split("`")[1::2]
    }
    modules = {path for top in PRODUCT for path in (ROOT / top).rglob("*.py") if not path.stem.startswith("__")}
    folders = {path.parent.relative_to(ROOT).as_posix() for path in modules}
    assert {name for name in folders if "/migrations" not in name} - known == {"swarm/wire"}, "generated"
    assert {name for name in known if not (ROOT / name).is_dir()} == set()


# Of decisions before they had pages and files of their own. A later one takes the next number.
OLD_NUMBERS = {
    *range(1, 55),
    *range(57, 81),
    *(82, 85, 86, 87, 88, 89, 90, 91, 93),
    *range(95, 111),
    113,
    115,
    116,
    117,
}
OLD_NUMBERS |= {
    113,
    115,
    116,
    117,
    120,
    121,
    124,
    125,
    126,
    130,
    131,
    135,
    140,
    141,
    142,
    150,
    151,
    155,
    156,
    158,
    159,
    160,
    162,
}
OLD_NUMBERS |= {166, 170, 180, 185, *range(190, 203), 204, 205, 206, 207}


def test_each_number_of_a_decision_is_in_the_list_that_says_where_it_is() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", (ROOT / "docs/decisions/README.md").read_text(), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    linked = {name for _, where in rows for name in re.findall(r"\]\(([\w-]+\.md)\)", where)}
    assert {int(number) for number, _ in rows} >= OLD_NUMBERS
    assert linked == pages


def test_a_decision_names_its_files_and_each_of_them_names_the_decision() -> None:
    named, naming = set(), set()
    for page in (ROOT / "docs/decisions").glob("[0-9]*.md"):
        text = page.read_text()
        assert len(text.splitlines()) <= 25, page.name
        files = re.findall(r"`([\w/.]+\.py)`", text.partition("**Files.**")[2])
        named |= {(page.name[:3], name) for name in files}
        assert len(files) > 1, f"{page.name}: the header of the one module is the place"
    for top in PRODUCT:
        for path in (ROOT / top).rglob("*.py"):
            header = path.read_text().split("\nfrom ", 1)[0]
            for numbers in re.findall(r"docs/decisions/(\d{3}(?:,\s\d{3})*)", header):
                naming |= {(number, path.relative_to(ROOT).as_posix()) for number in re.findall(r"\d{3}", numbers)}
    assert named == naming


CODE = {"Job": JobState, "Brain": Mode, "Step": Phase, "Peer": PeerState}


@pytest.mark.parametrize("heading", CODE)
def test_the_tables_of_states_in_the_architecture_are_those_of_the_code(heading: str) -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition(f"\n### {heading} ")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(rows) == sorted(state.value for state in CODE[heading])


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
