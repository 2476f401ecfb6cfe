"""What swarm doctor packs for others has no secret in it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from client.doctor.bundle import HIDDEN, hidden, write_bundle
from swarm.errors import InvalidConfig
from tests.support.turns import cost_s, unit

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


@pytest.mark.parametrize(
    "name", ["PASS", "DB_PASSWD", "PWD_OF_DB", "CREDENTIALS", "AUTH", "COOKIE", "passphrase", "ApiKey", "SECRET"]
)
def test_a_variable_with_the_name_of_a_secret_is_hidden_wherever_its_value_stands(name: str, tmp_path: Path) -> None:
    """SWARM_MQTT_PASS, and a cookie, were packed as they are."""
    texts = [{"text": "it says hunter2!"}, {"numbers": {"a": ["x", {"b": "hunter2"}]}}]
    write_bundle(tmp_path / "b.zip", texts, {f"SWARM_{name}": "hunter2"}, {"argv": ["swarm", "--x", "hunter2"]})
    assert "hunter2" not in unpacked(tmp_path / "b.zip")


@pytest.mark.parametrize(
    "text",
    [
        "swarm up --token hunter2 --port 1",
        "swarm login --join=hunter2",
        "lab:7949#swm1-hunter2-hunter2",
        "SWARM_MQTT_PASS=x PASSWORD=hunter2",
        "password: hunter2",
        "Authorization: Basic hunter2",
        "Bearer hunter2",
        "Cookie: hunter2",
        '{"password": "hunter2"}',
        "https://me:hunter2@hub/x?y=1",
        "s3://bucket/x?X-Amz-Signature=hunter2",
        "of hf_hunter2hunter2",
        "-----BEGIN EC PRIVATE KEY-----\nhunter2\n-----END EC PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_secret_is_hidden_in_any_text(text: str, tmp_path: Path) -> None:
    """Errors and command lines tell URLs, headers and tokens."""
    in_values: dict[str, object] = {"a": [text, {"b": text}], "password": "hunter2"}
    write_bundle(tmp_path / "b.zip", [{"text": text}], {"SWARM_X": text}, {"jobs": in_values})
    assert "hunter2" not in unpacked(tmp_path / "b.zip")


def test_what_only_sounds_like_a_secret_stays(tmp_path: Path) -> None:
    texts = ["tokenizer: gpt2", "123 tokens/s", "tokens: 5", "the key of a job", "no token was given", "author: me"]
    write_bundle(tmp_path / "b.zip", [{"text": text} for text in texts], {}, {"jobs": {"tokens": 123}})
    found = unpacked(tmp_path / "b.zip")
    assert [text for text in texts if text not in found] == []
    assert '"tokens": 123' in found


def test_a_long_text_takes_no_time() -> None:
    """Expressions that look back would take hours."""
    for piece in ("token", "password ", "password=", "-----BEGIN ", "swm1-", "a", "://", "authorization: ", " "):
        assert cost_s(lambda piece=piece: hidden(piece * (300_000 // len(piece))), tries=1) / cost_s(unit) < 2000  # type: ignore[misc]


def unpacked(path: Path) -> str:
    with zipfile.ZipFile(path) as bundle:
        return "".join(bundle.read(name).decode() for name in bundle.namelist())


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be written"):
        write_bundle(tmp_path / "none" / "b.zip", [], {}, {})
