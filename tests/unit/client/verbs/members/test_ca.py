"""`swarm ca new`: the keys of a scheduler that stands still are put aside, and of no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.cli import run
from swarm.pki.authority import Authority
from swarm.process.lifecycle import lock_folder


def test_the_next_start_after_ca_new_makes_another_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Authority.open(tmp_path / "pki", 0.0)
    command = ["ca", "new", "--data-dir", str(tmp_path), "-y", "-o", "json"]
    with lock_folder(tmp_path):  # a scheduler runs
        assert run(command) == 10
    assert "another process" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert run(command) == 0
    aside = Path(json.loads(capsys.readouterr().out)["data"]["aside"])
    assert Authority.open(tmp_path / "pki", 0.0).pin != old.pin == Authority.open(aside, 0.0).pin
    assert run([*command[:3], str(tmp_path / "other"), "-y"]) == 3
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("action", ["rotate", "retire"])
def test_what_earlier_versions_did_to_an_authority_in_flight_is_named_with_what_stands_instead(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ca", action]) == 2
    assert "swarm ca new" in capsys.readouterr().err
