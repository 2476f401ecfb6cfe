"""Keys, requests and certificates of others are read with distrust."""

from __future__ import annotations

import base64
import textwrap

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from swarm.errors import InvalidConfig, Refused
from swarm.pki import keys
from swarm.pki.authority import Authority

KEY = keys.new_key()


def pem(label: str, der: bytes) -> bytes:
    lines = textwrap.wrap(base64.b64encode(der).decode(), 64)
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""]).encode()


def request_of(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    algorithm = hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM)


def forged() -> bytes:
    """A request with another signature than its key makes."""
    der = bytearray(base64.b64decode("".join(keys.request_pem(KEY, "a").decode().splitlines()[1:-1])))
    der[-1] ^= 1
    return pem("CERTIFICATE REQUEST", bytes(der))


def test_a_key_is_read_as_it_was_written() -> None:
    read = keys.read_key(keys.key_pem(KEY))
    assert keys.key_pem(read) == keys.key_pem(KEY)
    assert keys.fingerprint(read.public_key()) == keys.fingerprint(KEY.public_key())
    assert keys.fingerprint(keys.new_key().public_key()) != keys.fingerprint(KEY.public_key())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        keys.key_pem(KEY)[:100],
        pem("PRIVATE KEY", b"\0" * 100),
        KEY.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        ),
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    ],
    ids=["nothing", "text", "a part", "zeros", "encrypted", "of another kind"],
)
def test_what_is_no_key_of_ours_is_an_error(content: bytes) -> None:
    with pytest.raises(InvalidConfig, match="not a private key"):
        keys.read_key(content)


def test_a_request_gives_the_key_that_signed_it() -> None:
    found = keys.requested_key(keys.request_pem(KEY, "gpu-3"))
    assert keys.fingerprint(found) == keys.fingerprint(KEY.public_key())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\0nonsense",
        pem("CERTIFICATE REQUEST", b"\x30\x80" * 50),
        forged(),
        request_of(ec.generate_private_key(ec.SECP384R1())),
        request_of(ed25519.Ed25519PrivateKey.generate()),
        Authority.new(0.0).pem,
        keys.request_pem(KEY, "a") + b"\n" * keys.PEM_BYTES_MAX,
    ],
    ids=["nothing", "text", "not DER", "forged", "another curve", "another kind", "a certificate", "too long"],
)
def test_a_request_that_proves_nothing_is_refused(content: bytes) -> None:
    with pytest.raises(Refused):
        keys.requested_key(content)


def test_what_is_no_certificate_is_an_error_and_one_without_our_names_has_none() -> None:
    assert keys.uris(keys.read_certificate(Authority.new(0.0).pem)) == []
    for content in (b"", b"nonsense", keys.request_pem(KEY, "a"), pem("CERTIFICATE", b"\0" * 50)):
        with pytest.raises(InvalidConfig, match="not a certificate"):
            keys.read_certificate(content)


def test_a_certificate_for_a_key_of_another_kind_is_an_error() -> None:
    key, moment = ed25519.Ed25519PrivateKey.generate(), keys.begins(Authority.new(0.0).certificate)
    builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(x509.Name([]))
    builder = builder.public_key(key.public_key()).serial_number(1).not_valid_before(moment).not_valid_after(moment)
    with pytest.raises(InvalidConfig, match="not for ECDSA"):
        keys.public_key(builder.sign(key, None))


def test_base32_has_no_signs_that_look_alike() -> None:
    assert set(keys.base32(bytes(range(256)))) == set("abcdefghijklmnopqrstuvwxyz234567")
