"""What a process proves itself with: kept whole, renewed in time, and not used once it has ended."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from swarm.errors import CertificateEnded, InvalidConfig
from swarm.pki import keys
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.files import write_private
from swarm.pki.identity import Application, Identity, Wallet, issue
from swarm.pki.names import Principal, Role
from tests.support.members import Clock, fingerprint_of

NOW = 1_800_000_000.0
AUTHORITY = Authority.new(NOW)
GPU = Principal(AUTHORITY.cluster, Role.STAGE_SERVER, "gpu-3")


def test_a_certificate_is_renewed_after_two_thirds_of_its_life_however_short() -> None:
    made, clock = issue(AUTHORITY, GPU, NOW), Clock(NOW)
    assert (made.principal, made.cluster, made.ends_unix_s) == (GPU, AUTHORITY.cluster, NOW + LIFE_S)
    assert made.renews_unix_s == NOW + LIFE_S * 2 / 3
    wallet = Wallet(made, clock)
    clock.unix_s = made.renews_unix_s - 1.0
    assert not wallet.is_due
    clock.unix_s = made.renews_unix_s
    assert wallet.is_due
    assert not Wallet(None, clock).is_due
    for life_s in (1.0, 600.0, 7200.0):
        short = issue(AUTHORITY, GPU, NOW, life_s=life_s)
        assert short.renews_unix_s < short.ends_unix_s == NOW + life_s


def test_a_certificate_that_has_ended_says_what_to_do() -> None:
    made = issue(AUTHORITY, GPU, NOW)
    assert made.check(made.ends_unix_s - 1.0) is made
    with pytest.raises(CertificateEnded, match=r"stage-server gpu-3 ended 1d12h ago") as caught:
        made.check(made.ends_unix_s + 1.5 * 86400.0)
    assert "--role stage-server" in caught.value.hint


def test_an_identity_is_read_as_it_was_saved_and_is_private(tmp_path: Path) -> None:
    made = issue(AUTHORITY, GPU, NOW)
    made.save(tmp_path / "pki")
    assert Identity.load(tmp_path / "pki") == made
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "pki").iterdir()} == {0o600}


def test_a_start_of_an_identity_counts_as_none(tmp_path: Path) -> None:
    made = issue(AUTHORITY, GPU, NOW)
    assert Identity.load(tmp_path) is None
    for name, content in (("key.pem", made.key_pem), ("cert.pem", made.certificate_pem)):
        write_private(tmp_path / name, content)
        assert Identity.load(tmp_path) is None
    made.save(tmp_path)
    # A renewal that ended after its first file.
    write_private(tmp_path / "key.pem", issue(AUTHORITY, GPU, NOW).key_pem)
    assert Identity.load(tmp_path) is None


def test_an_identity_that_is_being_renewed_is_waited_for(tmp_path: Path) -> None:
    """`swarm` said that it has no certificate when it looked between two files of a renewal."""
    issue(AUTHORITY, GPU, NOW).save(tmp_path)
    newer = issue(AUTHORITY, GPU, NOW)
    write_private(tmp_path / "key.pem", newer.key_pem)
    rest = threading.Timer(0.1, newer.save, (tmp_path,))
    rest.start()
    assert Identity.load(tmp_path) == newer
    rest.join()


JANITOR = Principal(AUTHORITY.cluster, "janitor", "gpu-3")  # type: ignore[arg-type]
HELD = issue(AUTHORITY, GPU, NOW)
NOBODY = AUTHORITY.certify(keys.read_key(HELD.key_pem).public_key(), JANITOR, NOW)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("key.pem", b"nonsense", "cannot be used"),
        ("cert.pem", b"nonsense", "cannot be used"),
        ("cert.pem", HELD.certificate_pem[:99], "cannot be used"),
        ("cert.pem", NOBODY, "names nobody"),
    ],
    ids=["another key", "another certificate", "a part", "nobody's"],
)
def test_files_that_are_damaged_or_that_others_can_read_are_an_error_with_a_way_out(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    HELD.save(tmp_path)
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(InvalidConfig, match="others can read the key"):
        Identity.load(tmp_path)
    HELD.save(tmp_path)
    write_private(tmp_path / name, content)
    with pytest.raises(InvalidConfig, match=words) as caught:
        Identity.load(tmp_path)
    assert "join again" in caught.value.hint


def test_an_application_becomes_an_identity_with_its_own_key() -> None:
    application = Application("gpu-3")
    key = keys.requested_key(application.request_pem)
    made = application.granted(AUTHORITY.certify(key, GPU, NOW), AUTHORITY.pem)
    assert made.principal == GPU
    own = keys.fingerprint(keys.read_key(made.key_pem).public_key()).hex()
    assert fingerprint_of(made.certificate_pem) == own == keys.fingerprint(key).hex()
