"""swarm.checkpoint.reader: which files of a checkpoint an island loads."""

from __future__ import annotations

import pytest

from swarm.checkpoint.reader import OPTIMIZER_FOLDER, WEIGHTS_FOLDER, files_for, island_folder, without_island
from swarm.wire.messages import StateFile

SHARED = ("model/model.safetensors", "outer/embed.safetensors", "manifest.json")


def listed(*paths: str) -> list[StateFile]:
    return [StateFile(path, 1, "") for path in paths]


@pytest.mark.parametrize(
    ("island", "folder"), [(0, "optimizer"), (1, "islands/01/optimizer"), (2, "optimizer"), (3, "islands/01/optimizer")]
)
def test_an_island_loads_what_all_share_and_its_own_or_in_turn_that_of_another(island: int, folder: str) -> None:
    own = [f"{island_folder(number, OPTIMIZER_FOLDER)}/embed.safetensors" for number in range(2)]
    files = listed(*SHARED, *own)
    assert [file.path for file in files_for(files, island)] == [*SHARED, f"{folder}/embed.safetensors"]


@pytest.mark.parametrize(("island", "folder"), [(0, "weights"), (1, "islands/01/weights"), (2, ""), (3, "")])
def test_weights_are_loaded_by_the_island_that_trained_them_alone(island: int, folder: str) -> None:
    own = [f"{island_folder(number, WEIGHTS_FOLDER)}/embed.safetensors" for number in range(2)]
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
