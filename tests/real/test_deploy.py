"""The files of deploy/ are valid by the schemas and linters of their formats."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize(
    "command",
    [
        ("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose/compose.yaml"),
        *(("kubernetes-validate", "--strict", f"kubernetes/{name}.yaml") for name in ("scheduler", "stage-servers")),
        ("shellcheck", "slurm.sh"),
        ("hadolint", "Dockerfile"),
    ],
    ids=lambda command: command[-1],
)
def test_files_are_valid_by_the_schemas_and_linters_of_their_formats(command: tuple[str, ...]) -> None:
    program = Path(sysconfig.get_path("scripts")) / command[0]
    assert program.exists(), "install it with: pip install -e '.[deploy]'"
    ran = subprocess.run([program, *command[1:]], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
