"""What swarm doctor packs for others has no secret in it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from client.doctor.bundle import HIDDEN, write_bundle
from swarm.errors import InvalidConfig

ENVIRONMENT = {
    "SWARM_SCHEDULER": "lab:7950",
    "SWARM_BROKER": "mqtt://user:hunter2@broker:1883",
    "SWARM_DB": "postgresql://swarm:hunter2@db/swarm",
    "SWARM_TOKEN": "hunter2",
    "SWARM_JOIN": "hunter2",
}


def test_passwords_and_tokens_stay_out_of_every_file(tmp_path: Path) -> None:
    finding = {"check": "broker", "text": "mqtt://user:hunter2@broker:1883 does not answer"}
    write_bundle(tmp_path / "b.zip", [finding], ENVIRONMENT, {"jobs": [{"reason": "s3://me:hunter2@bucket is full"}]})
    with zipfile.ZipFile(tmp_path / "b.zip") as bundle:
        files = {name: bundle.read(name).decode() for name in bundle.namelist()}
    assert set(files) == {"findings.json", "environment.json", "machine.json", "jobs.json"}
    assert not [name for name, text in files.items() if "hunter2" in text]
    environment = json.loads(files["environment.json"])
    assert environment["SWARM_SCHEDULER"] == "lab:7950"
    assert environment["SWARM_TOKEN"] == HIDDEN
    assert "broker:1883" in environment["SWARM_BROKER"]


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be written"):
        write_bundle(tmp_path / "none" / "b.zip", [], {}, {})
