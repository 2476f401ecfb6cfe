"""What the scheduler signs, nobody else can."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import InvalidConfig, NoPass
from swarm.pki import keys
from swarm.pki.files import write_private
from swarm.pki.passes import STATEMENT_BYTES_MAX, PassKey, signed_by


def test_the_key_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    made = PassKey.open(tmp_path / "pki")
    assert (tmp_path / "pki" / "pass.key").stat().st_mode & 0o777 == 0o600
    assert PassKey.open(tmp_path / "pki").public == made.public
    assert signed_by(made.public, PassKey.open(tmp_path / "pki").sign(b"stage 1")) == b"stage 1"


@pytest.mark.parametrize("content", [b"", b"no key", keys.key_pem(keys.new_key())], ids=["empty", "nonsense", "ECDSA"])
def test_a_file_that_is_no_such_key_is_named(tmp_path: Path, content: bytes) -> None:
    write_private(tmp_path / "pass.key", content)
    with pytest.raises(InvalidConfig, match=r"pass\.key is no"):
        PassKey.open(tmp_path)


def test_a_changed_or_foreign_statement_is_no_pass() -> None:
    key, other = PassKey.new(), PassKey.new()
    token = key.sign(b"stage 1")
    assert signed_by(key.public, token) == b"stage 1"
    for forged in (token[:-1] + b"2", bytes(64) + b"stage 1", other.sign(b"stage 1"), token + b" "):
        with pytest.raises(NoPass, match="has not signed"):
            signed_by(key.public, forged)
    for public in (other.public, b"", b"short"):
        with pytest.raises(NoPass, match="has not signed"):
            signed_by(public, token)
    with pytest.raises(NoPass, match="no pass was shown"):
        signed_by(key.public, b"")
    for odd in (token[:64], token[:5], key.sign(bytes(STATEMENT_BYTES_MAX + 1))):
        with pytest.raises(NoPass, match="is no pass"):
            signed_by(key.public, odd)
