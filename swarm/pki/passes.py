"""Signs passes and checks them: the scheduler signs the passes that stage servers show each other.

    signature (64 bytes) | statement

Ed25519: to check one takes a fraction of a millisecond, and no certificate has to travel. The content of a statement is
defined in swarm/rpc/passes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import InvalidConfig, NoPass
from swarm.pki.files import read_private, write_private

SIGNATURE_BYTES = 64
STATEMENT_BYTES_MAX = 2 << 10


@dataclass(frozen=True, slots=True)
class PassKey:
    """Signs; `public` is the key for checking."""

    key: Ed25519PrivateKey
    public: bytes

    @classmethod
    def new(cls) -> PassKey:
        key = Ed25519PrivateKey.generate()
        return cls(key, key.public_key().public_bytes_raw())

    @classmethod
    def open(cls, folder: Path) -> PassKey:
        """The key that is kept in the folder, or a new one; InvalidConfig if its file cannot be used."""
        file = folder / "pass.key"
        if not file.exists():
            made = cls.new()
            encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
            write_private(file, made.key.private_bytes(encoding, form, serialization.NoEncryption()))
            return made
        try:
            key = serialization.load_pem_private_key(read_private(file), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidConfig(f"{file} is no private key: {error}", hint="delete it, and a new one is made") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidConfig(f"{file} is no key for Ed25519", hint="delete it, and a new one is made")
        return cls(key, key.public_key().public_bytes_raw())

    def sign(self, statement: bytes) -> bytes:
        return self.key.sign(statement) + statement


def signed_by(public: bytes, token: bytes) -> bytes:
    """The statement in the token; NoPass unless the holder of this key signed exactly that."""
    statement = token[SIGNATURE_BYTES:]
    if not statement or len(statement) > STATEMENT_BYTES_MAX:
        raise NoPass("no pass was shown" if not token else "what was shown is no pass")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(token[:SIGNATURE_BYTES], statement)
    except (InvalidSignature, ValueError):  # ValueError: no key is known
        raise NoPass("the scheduler of this stage server has not signed the pass") from None
    return statement
