"""The units of systemd are ones that systemd itself takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.services import program

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    assert "ExecStart=/opt/swarm/bin/swarm " in text
    here = tmp_path / unit.name
    here.write_text(text.replace("/opt/swarm/bin/swarm", "/bin/true"))
    ran = subprocess.run(
        [program("systemd-analyze"), "verify", "--man=no", here], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    here.write_text(here.read_text().replace("TimeoutStopSec", "TimeoutStopSecs"))
    ran = subprocess.run(
        [program("systemd-analyze"), "verify", "--man=no", here], capture_output=True, text=True, check=False
    )
    assert "'TimeoutStopSecs'" in ran.stderr, "it looks at the keys"
