"""The identity of a process: its key, its certificate, and the authority that it trusts.

    FOLDER/key.pem   FOLDER/cert.pem   FOLDER/ca.pem      written in this order, so a certificate never lacks its key

An `Identity` is immutable. A renewal makes another one; a process keeps the present one in its `Wallet`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography import x509

from swarm.errors import CertificateEnded, InvalidConfig, NotAdmitted
from swarm.pki import keys
from swarm.pki.authority import CLOCK_SLACK_S, LIFE_S, Authority, pin_of
from swarm.pki.files import read_private, write_private
from swarm.pki.names import Principal, principal_of
from swarm.text import duration

RENEW_AT = 2 / 3  # of a certificate's life
LOOKS_MAX, LOOK_S = 20, 0.05  # at a folder that is being written to


@dataclass(frozen=True)
class Identity:
    """All three as PEM."""

    key_pem: bytes
    certificate_pem: bytes
    ca_pem: bytes

    @cached_property
    def principal(self) -> Principal:
        return principal_of(keys.uris(self._certificate))

    @property
    def cluster(self) -> str:
        return self.principal.cluster

    @cached_property
    def pin(self) -> str:
        """The pin of the authority that is trusted."""
        return pin_of(keys.read_certificate(self.ca_pem))

    @cached_property
    def ends_unix_s(self) -> float:
        return keys.ends_unix_s(self._certificate)

    @cached_property
    def life_s(self) -> float:
        return self.ends_unix_s - keys.begins(self._certificate).timestamp() - CLOCK_SLACK_S

    @cached_property
    def renews_unix_s(self) -> float:
        """From when on a newer certificate should be asked for."""
        return self.ends_unix_s - (1.0 - RENEW_AT) * self.life_s

    @cached_property
    def _certificate(self) -> x509.Certificate:
        return keys.read_certificate(self.certificate_pem)

    def check(self, now_unix_s: float) -> Identity:
        """This identity, if its certificate is still good; CertificateEnded otherwise."""
        if now_unix_s >= self.ends_unix_s:
            raise CertificateEnded(
                f"the certificate of {self.principal} ended {duration(now_unix_s - self.ends_unix_s)} ago",
                hint=f"ask for a new token: swarm token create --role {self.principal.role} --name "
                f"{self.principal.name}; then join again",
            )
        return self

    def save(self, folder: Path) -> None:
        write_private(folder / "key.pem", self.key_pem)
        write_private(folder / "cert.pem", self.certificate_pem)
        write_private(folder / "ca.pem", self.ca_pem)

    @classmethod
    def load(cls, folder: Path) -> Identity | None:
        """The identity that `save` wrote; None if there is none, or only a part of it. InvalidConfig if it cannot be
        used.

        Somebody may be renewing it just now, so two files that do not belong together are looked at again; blocking.
        """
        try:
            if not (folder / "ca.pem").exists() or not (folder / "key.pem").exists():
                return None
        except OSError as error:
            raise InvalidConfig(
                f"{folder} cannot be looked into: {error.strerror or error}",
                hint="check who owns it, and the folders around it; HOME may be another user's",
            ) from None
        for _ in range(LOOKS_MAX):
            if (found := cls._load(folder)) is not None:
                return found
            time.sleep(LOOK_S)
        return None  # ended between the two files: the key is newer, and no certificate names it

    @classmethod
    def _load(cls, folder: Path) -> Identity | None:
        """None: key and certificate do not belong together."""
        found = cls(*(read_private(folder / name) for name in ("key.pem", "cert.pem", "ca.pem")))
        try:
            own = keys.fingerprint(keys.public_key(found._certificate))
            if own != keys.fingerprint(keys.read_key(found.key_pem).public_key()):
                return None
            found.principal  # noqa: B018  # raises
        except (InvalidConfig, NotAdmitted) as error:
            raise InvalidConfig(
                f"the identity in {folder} cannot be used: {error}", hint="delete that folder and join again"
            ) from error
        return found


class Application:
    """A key for which no certificate exists yet."""

    def __init__(self, name: str, key_pem: bytes = b"") -> None:
        """With a new key, unless there is one that was kept."""
        self._key = keys.read_key(key_pem) if key_pem else keys.new_key()
        self.key_pem = keys.key_pem(self._key)
        self.request_pem = keys.request_pem(self._key, name)

    def granted(self, certificate_pem: bytes, ca_pem: bytes) -> Identity:
        return Identity(self.key_pem, certificate_pem, ca_pem)


def issue(authority: Authority, principal: Principal, now_unix_s: float, *, life_s: float = LIFE_S) -> Identity:
    """An identity made where the authority is: key and certificate at once."""
    key = keys.new_key()
    certificate = authority.certify(key.public_key(), principal, now_unix_s, life_s=life_s)
    return Identity(keys.key_pem(key), certificate, authority.pem)


class Wallet:
    """The present identity of a process; None: it speaks plaintext."""

    def __init__(self, identity: Identity | None = None, wall_s: Callable[[], float] = time.time) -> None:
        self.identity = identity
        self.is_alone = True  # a stage server that listens on loopback is on this machine, if it is named here
        self.pass_token = b""  # what a stage server shows its neighbours; none: it has no job, or there are no passes
        self._wall_s = wall_s

    @property
    def ends_unix_s(self) -> float:
        """When the certificate ends; nan if there is none."""
        return math.nan if self.identity is None else self.identity.ends_unix_s

    @property
    def is_due(self) -> bool:
        """Whether the certificate should be renewed."""
        return self.identity is not None and self._wall_s() >= self.identity.renews_unix_s
