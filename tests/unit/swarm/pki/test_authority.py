"""The authority of a swarm: it is kept, its name is made of its key, and its certificates say who and how long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from swarm.errors import InvalidConfig
from swarm.pki import keys
from swarm.pki.authority import CLOCK_SLACK_S, LIFE_S, PIN_CHARACTERS, Authority, cluster_of, pin_of
from swarm.pki.files import write_private
from swarm.pki.names import Principal, Role, any_of

NOW = 1_800_000_000.0


def test_a_swarm_is_named_after_its_authoritys_key() -> None:
    one, other = Authority.new(NOW), Authority.new(NOW)
    assert one.cluster != other.cluster
    assert one.pin == pin_of(one.certificate)
    assert (len(one.pin), one.pin[:16]) == (PIN_CHARACTERS, one.cluster)


def test_an_authority_is_made_once_and_found_again_and_its_key_is_not_replaced(tmp_path: Path) -> None:
    lost = Authority.open(tmp_path, NOW)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"ca.key": 0o600, "ca.crt": 0o600}
    (tmp_path / "ca.crt").unlink()  # as a start that ended before it was written
    first, second = Authority.open(tmp_path, NOW), Authority.open(tmp_path, NOW + 9.0)
    assert (second.cluster, second.pem) == (first.cluster, first.pem)
    assert first.cluster != lost.cluster
    (tmp_path / "ca.key").unlink()
    with pytest.raises(InvalidConfig, match=r"ca.key is missing") as caught:
        Authority.open(tmp_path, NOW)
    assert "all members join anew" in caught.value.hint
    assert not (tmp_path / "ca.key").exists()


def test_files_that_do_not_belong_together_or_that_others_can_read_are_an_error(tmp_path: Path) -> None:
    Authority.open(tmp_path, NOW)
    write_private(tmp_path / "ca.key", keys.key_pem(keys.new_key()))
    with pytest.raises(InvalidConfig, match=r"is not the certificate of"):
        Authority.open(tmp_path, NOW)
    (tmp_path / "ca.key").chmod(0o644)
    with pytest.raises(InvalidConfig, match="others can read the key"):
        Authority.open(tmp_path, NOW)
    write_private(tmp_path / "ca.key", b"nonsense")
    with pytest.raises(InvalidConfig, match="not a private key"):
        Authority.open(tmp_path, NOW)


def test_a_certificate_says_who_for_how_long_and_signs_nothing() -> None:
    authority, key = Authority.new(NOW), keys.new_key()
    principal = Principal(authority.cluster, Role.STAGE_SERVER, "gpu-3")
    made = keys.read_certificate(authority.certify(key.public_key(), principal, NOW))
    made.verify_directly_issued_by(authority.certificate)
    assert keys.fingerprint(keys.public_key(made)) == keys.fingerprint(key.public_key())
    assert keys.uris(made) == [principal.uri]
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [principal.dns, any_of(authority.cluster, Role.STAGE_SERVER)]
    assert (keys.begins(made).timestamp(), keys.ends_unix_s(made)) == (NOW - CLOCK_SLACK_S, NOW + LIFE_S)
    assert made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign is False
    own = authority.certificate.extensions
    assert own.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_a_later_authority_bears_the_name_that_the_first_one_gave() -> None:
    """Earlier versions let one authority follow another while the swarm went on."""
    later = SimpleNamespace(subject=x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "abcdefghijklmnop")]))
    assert cluster_of(cast(x509.Certificate, later)) == "abcdefghijklmnop"


def test_two_authorities_of_an_earlier_version_are_refused_with_the_way_out(tmp_path: Path) -> None:
    Authority.open(tmp_path, NOW)
    (tmp_path / "succession.json").touch()
    with pytest.raises(InvalidConfig, match="holds two authorities") as caught:
        Authority.open(tmp_path, NOW)
    assert (caught.value.exit_code, "swarm ca new" in caught.value.hint) == (3, True)
