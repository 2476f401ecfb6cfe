"""A stage server loads less of the libraries than they load by themselves, and computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.families import MODELS, train

LEAN = """
import json, sys
from pathlib import Path
from stage_server.lean_imports import UNUSED, lean_imports
with lean_imports():
    import stage_server.app
from tests.support.families import train
hashes = train(Path(sys.argv[1]))
loaded = [name for name in UNUSED if name in sys.modules]
from transformers.utils.import_utils import define_import_structure
import torch._dynamo
print(json.dumps([hashes, loaded, torch._dynamo.is_compiling(), define_import_structure.__module__]))
"""


@pytest.mark.timeout(900)
def test_every_family_trains_to_the_same_weights_without_what_is_left_out(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAN, str(tmp_path / "lean")]
    lean = subprocess.run(command, capture_output=True, text=True, check=False)
    assert lean.returncode == 0, lean.stderr[-3000:]
    hashes, loaded, compiling, catalogue = json.loads(lean.stdout)
    assert loaded == [], "what is left out at the start is loaded later all the same"
    assert compiling is False, "after the imports the real module is to be had"
    assert catalogue == "transformers.utils.import_utils", "and the real function"
    assert len(set(hashes.values())) == len(MODELS)
    assert hashes == train(tmp_path / "full")


# What takes the client long to import, and what no list of commands needs.
HEAVY = (
    "grpc",
    "google.protobuf",
    "pydantic",
    "numpy",
    "sqlalchemy",
    "cryptography",
    "huggingface_hub",
    "torch",
    "starlette",
    "structlog",
)


def test_help_and_version_load_none_of_the_heavy_libraries() -> None:
    """`swarm --help` once took two thirds of a second of CPU."""
    program = "import sys; from client.cli import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    for flag in ("--help", "--version"):
        command = [sys.executable, "-c", program, flag]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "swarm" in done.stdout
        assert set(HEAVY) & set(done.stderr.split()) == set()
