"""A folder goes with all that is in it, and nothing that links in it lead to."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.storage.trees import remove_tree, tree_bytes
from swarm.errors import StorageError


def filled(folder: Path, name: str = "job") -> Path:
    (folder / name / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / name / "log.jsonl").write_bytes(b"x" * 10)
    (folder / name / "checkpoints" / "step-1" / "weights").write_bytes(b"x" * 1000)
    return folder / name


def test_a_folder_goes_whole_and_its_neighbours_stay(tmp_path: Path) -> None:
    filled(tmp_path), filled(tmp_path, "job-2")
    assert tree_bytes(tmp_path, "job") == 1010
    assert remove_tree(tmp_path, "job") == 1010
    assert [path.name for path in tmp_path.iterdir()] == ["job-2"]
    assert tree_bytes(tmp_path, "job-2") == 1010
    assert remove_tree(tmp_path, "job") == tree_bytes(tmp_path, "job") == 0, "once more changes nothing"
    assert remove_tree(tmp_path / "none", "job") == tree_bytes(tmp_path / "none", "job") == 0


def test_what_links_lead_to_stays(tmp_path: Path) -> None:
    outside = filled(tmp_path / "outside")
    job = filled(tmp_path / "data")
    (job / "checkpoints" / "planted").symlink_to(outside)
    (job / "one").symlink_to(outside / "log.jsonl")
    assert remove_tree(tmp_path / "data", "job") < 1500
    assert not job.exists()
    assert tree_bytes(tmp_path / "outside", "job") == 1010


@pytest.mark.parametrize("linked", ["job", "data"])
def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path, linked: str) -> None:
    outside = filled(tmp_path / "outside").parent
    if linked == "job":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "job").symlink_to(outside / "job")
    else:
        (tmp_path / "data").symlink_to(outside)
    with pytest.raises(StorageError):
        remove_tree(tmp_path / "data", "job")
    assert tree_bytes(outside, "job") == 1010


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("")
    with pytest.raises(StorageError, match="is no folder"):
        remove_tree(tmp_path, "job")
    assert (tmp_path / "job").exists()
