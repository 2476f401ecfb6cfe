"""The certificate authority of a swarm. The scheduler makes it at its first start and keeps its key.

It lasts ten years, and another one begins a new swarm. Certificates of members last a day and are renewed while their
holders live. So a stolen one is soon worthless, and no list of revoked ones has to travel.

Not chosen: one authority that follows another while jobs run. A stolen key means a new swarm all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from swarm.errors import InvalidConfig
from swarm.pki import keys
from swarm.pki.files import read_private, write_private
from swarm.pki.names import CLUSTER_CHARACTERS, Principal, any_of

LIFE_S = 24 * 3600.0
AWAY_S = 30 * 86400.0  # how long after its end a certificate is still renewed
CLOCK_SLACK_S = 3600.0  # clocks of members may be behind by this much
_AUTHORITY_LIFE = timedelta(days=3653)
PIN_CHARACTERS = 26  # 130 bits
KEY_FILE, CERTIFICATE_FILE = "ca.key", "ca.crt"


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `cluster` is the swarm's name, made of the key."""

    key: keys.Key
    certificate: x509.Certificate

    @classmethod
    def new(cls, now_unix_s: float) -> Authority:
        key = keys.new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"swarm {_pin(key.public_key())[:8]}")])
        now = datetime.fromtimestamp(now_unix_s, UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(seconds=CLOCK_SLACK_S)).not_valid_after(
            now + _AUTHORITY_LIFE
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def open(cls, folder: Path, now_unix_s: float) -> Authority:
        """The authority that is kept in the folder, or a new one; InvalidConfig if its files cannot be used."""
        key_file, certificate_file = folder / KEY_FILE, folder / CERTIFICATE_FILE
        if (folder / "succession.json").exists():
            raise InvalidConfig(
                f"{folder} holds two authorities, which an earlier version left while one followed the other",
                hint="start that version until the old one has left; or begin a new one with: swarm ca new",
            )
        if not key_file.exists():
            if certificate_file.exists():
                raise InvalidConfig(
                    f"{key_file} is missing, which signs for the swarm of {certificate_file}",
                    hint="put it back; or begin a new one with swarm ca new, and all members join anew",
                )
            made = cls.new(now_unix_s)
            # The certificate last: its being there says that the key is whole.
            write_private(key_file, keys.key_pem(made.key))
            write_private(certificate_file, made.pem)
            return made
        if not certificate_file.exists():  # the first start ended between the two
            read_private(key_file)
            key_file.unlink()
            return cls.open(folder, now_unix_s)
        key = keys.read_key(read_private(key_file))
        try:
            certificate = keys.read_certificate(certificate_file.read_bytes())
        except OSError as error:
            raise InvalidConfig(f"{certificate_file} cannot be read: {error.strerror or error}") from error
        if keys.fingerprint(keys.public_key(certificate)) != keys.fingerprint(key.public_key()):
            raise InvalidConfig(f"{certificate_file} is not the certificate of {key_file}", hint="put both back")
        return cls(key, certificate)

    @property
    def pem(self) -> bytes:
        return keys.certificate_pem(self.certificate)

    @cached_property
    def pin(self) -> str:
        """The pin that names this authority in join tokens."""
        return _pin(self.key.public_key())

    @cached_property
    def cluster(self) -> str:
        return cluster_of(self.certificate)

    @property
    def ends_unix_s(self) -> float:
        return keys.ends_unix_s(self.certificate)

    def certify(self, key: keys.PublicKey, principal: Principal, now_unix_s: float, *, life_s: float = LIFE_S) -> bytes:
        """A certificate (PEM) that says who holds the key."""
        now = datetime.fromtimestamp(now_unix_s, UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, principal.name)])
        hosts = (principal.dns, any_of(principal.cluster, principal.role))
        names = [x509.UniformResourceIdentifier(principal.uri), *map(x509.DNSName, hosts)]
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.certificate.subject)
        builder = builder.public_key(key).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(seconds=CLOCK_SLACK_S))
        builder = builder.not_valid_after(now + timedelta(seconds=life_s))
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(both, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        return keys.certificate_pem(builder.sign(self.key, hashes.SHA256()))


def pin_of(certificate: x509.Certificate) -> str:
    """The pin of the authority with this certificate in join tokens; InvalidConfig if its key is not ours."""
    return _pin(keys.public_key(certificate))


def cluster_of(certificate: x509.Certificate) -> str:
    """The swarm of the authority with this certificate; one that took over from another bears the other's name."""
    named = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return str(named[0].value) if named else pin_of(certificate)[:CLUSTER_CHARACTERS]


def _pin(key: keys.PublicKey) -> str:
    return keys.base32(keys.fingerprint(key))[:PIN_CHARACTERS]


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
