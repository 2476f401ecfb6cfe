"""The claim: importing a brain loads nothing but the standard library and our own plain modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import swarm

ROOT = Path(swarm.__file__).parent.parent
HEAVY = "{'google', 'grpc', 'numpy', 'pydantic', 'sqlalchemy', 'structlog', 'torch', 'xxhash'}"


@pytest.mark.parametrize("package", ["scheduler.brain", "stage_server.brain"])
def test_a_brain_loads_no_library(package: str) -> None:
    folder = ROOT / package.replace(".", "/")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))]
    assert len(modules) > 5
    loads = f"for name in {modules}: __import__(name.removesuffix('.__init__'))"
    program = f"import sys\n{loads}\nprint({HEAVY} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
