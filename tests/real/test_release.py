"""The package that is released, outside of the checkout: built, installed, started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("client", "scheduler", "stage_server", "swarm")
BUILD = "import sys, setuptools.build_meta as made; print(getattr(made, sys.argv[1])(sys.argv[2]))"
JOB = """\
name = "tiny"
[model]
tokenizer = "byte"
dtype = "float32"
config = { hidden_size = 16, intermediate_size = 32, num_hidden_layers = 2, num_attention_heads = 2 }
[data]
source = "text.txt"
sequence_length = 8
[training]
steps = 3
warmup_steps = 1
global_batch_sequences = 4
"""


def tracked() -> list[str]:
    """The files of the checkout, those that are new included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def built(kind: str, source: Path, folder: Path) -> Path:
    """What a build of `source` makes."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, env=clean(source))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / done.stdout.splitlines()[-1]


def clean(home: Path) -> Mapping[str, str]:
    """An environment that names no checkout and nobody's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SWARM_", "XDG_"))}
    return kept | {"HOME": str(home)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as package indexes do it."""
    folder = tmp_path_factory.mktemp("release")
    for name in tracked():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "tree" / name)
    sdist = built("sdist", folder / "tree", folder / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    assert {"CHANGELOG.md", "README.md", "constraints.txt", "protos"} <= {path.name for path in unpacked.iterdir()}
    return built("wheel", unpacked, folder / "dist")


def test_a_wheel_holds_every_file_of_the_packages_the_man_page_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if ".dist-info/" not in name}
        (manual,) = (name for name in there if name.endswith(".data/data/share/man/man1/swarm.1"))
        assert archive.read(manual) == (ROOT / "docs" / "reference" / "swarm.1").read_bytes()
    there.remove(manual)
    assert there == {name for name in tracked() if name.partition("/")[0] in PACKAGES}
    assert {f"{name}/py.typed" for name in PACKAGES} <= there


@pytest.mark.timeout(900)
def test_an_installed_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of the tests; a path that is named in a .pth brings no editable install with it."""
    home = tmp_path / "home"
    home.mkdir()
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = str(home / "venv" / "bin" / "python")

    def call(*words: str) -> str:
        command = [python, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=clean(home), check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert Path(call("-c", "import client; print(client.__file__)").strip()).is_relative_to(site)
    assert call("-m", "client", "--version").startswith("swarm ")
    assert "[training]" in call("-m", "client", "submit", "--example")
    assert "--listen" in call("-m", "client", "scheduler", "--help")
    assert "client.api" in call("-c", "import swarm; print(swarm.Client)")
    (home / "job.toml").write_text(JOB)
    (home / "text.txt").write_text("some words to learn from, " * 100)
    up = ("up", "--stages", "1", "--replicas", "1", "--port", "0", "--job", "job.toml", "--data-dir", "data")
    assert call("-m", "client", *up).startswith("tiny-")
