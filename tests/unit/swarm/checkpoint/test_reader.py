"""swarm.checkpoint.reader: which files of a checkpoint an island loads."""

from __future__ import annotations

import pytest

from swarm.checkpoint.reader import OPTIMIZER_FOLDER, WEIGHTS_FOLDER, files_for, island_folder, without_island
from swarm.wire.messages import StateFile

SHARED = ("model/model.safetensors", "outer/embed.safetensors", "manifest.json")


def listed(*paths: str) -> list[StateFile]:
    return [StateFile(path, 1, "") for path in paths]


@pytest.mark.parametrize(
    ("kind", "folders"),
    [
        (OPTIMIZER_FOLDER, ["optimizer", "islands/01/optimizer"] * 2),  # in turn that of another
        (WEIGHTS_FOLDER, ["weights", "islands/01/weights", "", ""]),
    ],
)
def test_an_island_loads_what_all_share_and_its_own_and_weights_of_no_other(kind: str, folders: list[str]) -> None:
    own = [f"{island_folder(number, kind)}/embed.safetensors" for number in range(2)]
    for island, folder in enumerate(folders):
        found = [file.path for file in files_for(listed(*SHARED, *own), island)]
        assert found == [*SHARED, *([f"{folder}/embed.safetensors"] if folder else [])]


def test_a_checkpoint_without_islands_is_loaded_whole_by_each() -> None:
    files = listed(*SHARED, "optimizer/embed.safetensors")
    assert list(files_for(files, 0)) == list(files_for(files, 3)) == files


def test_the_files_of_an_island_are_those_of_a_job_without_islands() -> None:
    assert without_island("islands/01/optimizer/layer-0003.safetensors") == "optimizer/layer-0003.safetensors"
    assert without_island("islands/01/weights/embed.safetensors") == "weights/embed.safetensors"
    for path in (*SHARED, "islands/1/optimizer/x", "model/islands/01/optimizer/x"):
        assert without_island(path) == path
