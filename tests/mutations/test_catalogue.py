"""The patches of the mutation check still fit the code; whether they are caught, `make mutants` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.catalogue import ROOT, BadPatch, Mutant, misfits, patched, read, read_all, sources

MUTANTS = read_all()


def test_the_mechanisms_that_must_be_tried_are_there() -> None:
    assert len(MUTANTS) > 100
    broken = {invariant for mutant in MUTANTS for invariant in mutant.invariants}
    assert broken == {f"I{number}" for number in range(1, 13)}


def test_the_patches_apply_each_at_one_place_only() -> None:
    assert misfits(MUTANTS, ROOT) == [], "make them anew: the code around them has changed"


BOX = "class Box:\n    def take(self):\n        self.n -= 1\n\n    def give(self):\n        self.n += 1\n"
MOVED = "\n\n" + BOX.replace("    def give(self):\n", "    @property\n    def give(self):\n        check()\n")


def mutant(tmp_path: Path, place: str, lines: str) -> Mutant:
    path = tmp_path / "x.patch"
    path.write_text(f"Switches off: x\nBreaks: I1\nCaught by: tests/conftest.py\n@@ {place}\n{lines}\n")
    return read(path)


@pytest.mark.parametrize("texts", [{"swarm/a.py": BOX}, {"swarm/a.py": "", "swarm/b.py": MOVED}, {"swarm/b.py": MOVED}])
def test_a_patch_follows_its_function_to_where_it_moves(tmp_path: Path, texts: dict[str, str]) -> None:
    tried = mutant(tmp_path, "swarm/a.py Box.give", "-        self.n += 1\n+        pass")

    (changed,) = patched(tried, texts).items()

    file = list(texts)[-1]
    assert changed == (file, texts[file].replace("self.n += 1", "pass"))


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        ({"swarm/a.py": BOX, "swarm/b.py": BOX}, ""),
        ({"swarm/b.py": BOX, "swarm/c.py": BOX}, "stand 2 times"),
        ({"swarm/a.py": BOX.replace("+= 1", "+= 2"), "swarm/b.py": BOX}, "stand 0 times in Box.give of swarm/a.py"),
        ({"swarm/a.py": BOX + "        self.n += 1\n"}, "stand 2 times"),
        ({"swarm/a.py": BOX.replace("give", "hand")}, "stand 0 times"),
    ],
)
def test_a_patch_whose_place_is_not_certain_is_named(tmp_path: Path, texts: dict[str, str], fault: str) -> None:
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    tried = mutant(tmp_path, "swarm/a.py Box.give", "-        self.n += 1")

    found = misfits([tried], tmp_path)

    assert len(found) == bool(fault)
    assert all(line.startswith("x: its lines ") and fault in line for line in found)
    assert sources(tmp_path) == texts, "nothing is changed"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("Breaks: I1", "Breaks: I13"), "names no invariants"),
        (("Caught by: tests/unit/stage_server/brain/test_cell.py", "Caught by:"), "does not begin with"),
        (
            ("Caught by: tests/unit/stage_server/brain/test_cell.py", "Caught by: tests/unit/test_sell.py"),
            "there is no",
        ),
        (("test_cell.py", "test_cell.py::test_nothing"), "there is no"),
        (("@@ swarm/types.py", "@@ tests/support/simulated.py"), "changes something else"),
        (("-x", "+x"), "changes something else"),
    ],
)
def test_a_header_that_says_nothing_is_refused(tmp_path: Path, change: tuple[str, str], fault: str) -> None:
    head = "Switches off: x\nBreaks: I1\nCaught by: tests/unit/stage_server/brain/test_cell.py\n"
    text = f"{head}@@ swarm/types.py Slot\n-x\n"
    path = tmp_path / "x.patch"
    path.write_text(text)
    assert read(path).mechanism == "x"
    path.write_text(text.replace(*change))
    with pytest.raises(BadPatch, match=fault):
        read(path)
