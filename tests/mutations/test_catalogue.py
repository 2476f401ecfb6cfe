"""The patches of the mutation check still fit the code; whether they are caught, `make mutants` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.catalogue import ROOT, BadPatch, misfits, read, read_all

MUTANTS = read_all()


def test_the_mechanisms_that_must_be_tried_are_there() -> None:
    assert len(MUTANTS) > 100
    broken = {invariant for mutant in MUTANTS for invariant in mutant.invariants}
    assert broken == {f"I{number}" for number in range(1, 13)}


def test_the_patches_apply() -> None:
    assert misfits(MUTANTS, ROOT) == [], "make them anew: the code around them has changed"


def test_a_patch_that_does_not_fit_any_more_is_named(tmp_path: Path) -> None:
    good = MUTANTS[0]
    path = tmp_path / "old.patch"
    path.write_text(good.path.read_text().replace(good.originals()[0][1].splitlines()[0], "what was here once"))
    (fault,) = misfits([*MUTANTS[1:4], read(path)], ROOT)
    assert fault.startswith("old: ")
    assert "does not apply" in fault


def test_each_hunk_fits_at_one_place_only() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for mutant in MUTANTS for file in mutant.files}
    found = [mutant.name for mutant in MUTANTS for file, lines in mutant.originals() if texts[file].count(lines) != 1]
    assert found == [], "give them more context"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("Breaks: I1", "Breaks: I13"), "names no invariants"),
        (("Caught by: tests/unit/stage_server/brain/test_cell.py", "Caught by:"), "does not begin with"),
        (
            ("Caught by: tests/unit/stage_server/brain/test_cell.py", "Caught by: tests/unit/test_sell.py"),
            "there is no",
        ),
        (("+++ b/swarm/types.py", "+++ b/tests/support/simulated.py"), "changes something else"),
    ],
)
def test_a_header_that_says_nothing_is_refused(tmp_path: Path, change: tuple[str, str], fault: str) -> None:
    head = "Switches off: x\nBreaks: I1\nCaught by: tests/unit/stage_server/brain/test_cell.py\n"
    text = f"{head}--- a/swarm/types.py\n+++ b/swarm/types.py\n"
    path = tmp_path / "x.patch"
    path.write_text(text)
    assert read(path).mechanism == "x"
    path.write_text(text.replace(*change))
    with pytest.raises(BadPatch, match=fault):
        read(path)
