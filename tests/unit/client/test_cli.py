from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.cli import VERBS

ROOT = Path(__file__).parents[3]
PROGRAMS = [name for name, verb in VERBS.items() if verb.program]
FOUND_FIRST = ("scheduler", "stage_server", "client", "swarm", "random", "typing", "json")


@pytest.mark.parametrize("program", PROGRAMS)
def test_files_in_the_working_folder_are_not_run_in_the_place_of_a_program(program: str, tmp_path: Path) -> None:
    """In a folder with a scheduler.py, `swarm scheduler` ran that file and ended with 0; a random.py of the user's was
    imported by whatever needs random numbers."""
    for name in FOUND_FIRST:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the working folder ran')\n")
    command = [sys.executable, "-P", "-m", "client", program, "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"swarm {program}" in done.stdout


def test_no_program_of_ours_looks_for_a_module_in_the_working_folder() -> None:
    starts = 0
    for folder in ("client", "scheduler", "stage_server", "swarm"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.List | ast.Tuple) or not node.elts:
                    continue
                words = [ast.unparse(word) for word in node.elts]
                if words[0] == "sys.executable" and words[1:2] != ["'-I'"]:
                    assert words[1] == "'-P'", f"{path}:{node.lineno}"
                    starts += 1
    assert starts > 5
