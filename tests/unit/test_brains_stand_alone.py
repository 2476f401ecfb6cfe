"""The claim: a brain needs nothing but the standard library and our own plain modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import swarm

ROOT = Path(swarm.__file__).parent.parent


@pytest.mark.parametrize("package", ["scheduler.brain", "stage_server.brain"])
def test_a_brain_loads_where_no_library_is_installed(package: str) -> None:
    folder = ROOT / package.replace(".", "/")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))]
    assert len(modules) > 5
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
for name in {modules}:
    __import__(name.removesuffix(".__init__"))
ours = {{"__main__", "scheduler", "stage_server", "swarm"}}
print({{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names - ours)
"""
    alone = [sys.executable, "-I", "-S", "-c", program]  # without site-packages
    ran = subprocess.run(alone, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
