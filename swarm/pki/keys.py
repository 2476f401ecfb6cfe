"""Private keys, requests and certificates. All keys are ECDSA P-256, which every TLS library speaks."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.errors import InvalidConfig, Refused

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
PEM_BYTES_MAX = 16 << 10


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(pem: bytes) -> Key:
    """The key; InvalidConfig if these bytes are not a key of ours."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidConfig(f"not a private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidConfig("not a private key for ECDSA")
    return key


def request_pem(key: Key, name: str) -> bytes:
    """A request for a certificate, signed with the key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def requested_key(pem: bytes) -> PublicKey:
    """The public key of a request; Refused unless its sender has proved to hold the private key."""
    if len(pem) > PEM_BYTES_MAX:
        raise Refused(f"a request for a certificate has at most {PEM_BYTES_MAX} bytes")
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        # The kind first: signatures of others can take long to check.
        is_ours = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
        is_signed = is_ours and request.is_signature_valid
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise Refused("this is no request for a certificate") from None
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Refused("a request for a certificate needs a key for ECDSA P-256, and its signature")
    return key


def read_certificate(pem: bytes) -> x509.Certificate:
    """The certificate; InvalidConfig if these bytes are none."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise InvalidConfig(f"not a certificate: {error}") from None


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority signed the certificate, which may have ended."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def fingerprint(key: PublicKey) -> bytes:
    """sha256 of the public key as certificates hold it (SubjectPublicKeyInfo)."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest()


def public_key(certificate: x509.Certificate) -> PublicKey:
    """InvalidConfig unless it is a key for ECDSA."""
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidConfig(f"the certificate's key cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidConfig("the certificate's key is not for ECDSA")
    return key


def uris(certificate: x509.Certificate) -> list[str]:
    """The alternative names that are URIs."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def ends_unix_s(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def begins(certificate: x509.Certificate) -> datetime:
    return certificate.not_valid_before_utc


def base32(data: bytes) -> str:
    """Letters and digits that survive being read aloud: a-z, 2-7."""
    return base64.b32encode(data).decode().rstrip("=").lower()
