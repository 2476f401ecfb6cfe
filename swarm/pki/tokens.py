"""The line that lets somebody join: HOST:PORT#swm1-PIN-ID-SECRETcc.

PIN names the authority by its key, so a man in the middle is noticed before the secret is sent. ID finds the
token, SECRET opens it, and the two characters at the end tell a line that was cut or mistyped from a false one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from swarm.errors import UsageError
from swarm.pki.authority import PIN_CHARACTERS
from swarm.pki.keys import base32
from swarm.text import is_address
from swarm.text_file import read_small

PREFIX = "swm1"
ID_CHARACTERS = 8
SECRET_CHARACTERS = 26  # 130 bits
CHECK_CHARACTERS = 2
_LINE = re.compile(
    rf"(?P<address>[^#\s]{{1,300}})#{PREFIX}-(?P<pin>[a-z2-7]{{{PIN_CHARACTERS}}})-(?P<id>[a-z2-7]{{{ID_CHARACTERS}}})"
    rf"-(?P<secret>[a-z2-7]{{{SECRET_CHARACTERS}}})(?P<check>[a-z2-7]{{{CHECK_CHARACTERS}}})"
)


@dataclass(frozen=True, slots=True)
class JoinLine:
    """The parts of a join line: address, pin of the authority to trust there, secret that proves the invitation."""

    address: str
    pin: str
    id: str
    secret: str = field(repr=False)

    def __str__(self) -> str:
        body = f"{self.address}#{PREFIX}-{self.pin}-{self.id}-{self.secret}"
        return body + _check(body)


def new_line(address: str, pin: str) -> JoinLine:
    return JoinLine(address, pin, _random(ID_CHARACTERS), _random(SECRET_CHARACTERS))


def parse_line(text: str) -> JoinLine:
    """UsageError for anything but a whole line; the text is not repeated, as it is a secret."""
    found = _LINE.fullmatch(text.strip())
    if found is None or not is_address(found["address"]):
        raise UsageError(
            f"this is no line to join with: HOST:PORT#{PREFIX}-…", hint="an admin prints one: swarm token create"
        )
    line = JoinLine(found["address"], found["pin"], found["id"], found["secret"])
    if str(line) != text.strip():
        raise UsageError("the line to join with was cut or mistyped", hint="copy the whole line, from HOST to its end")
    return line


def read_line(text: str, path: Path | None = None) -> JoinLine | None:
    """The line as given, or from a file; None if there is neither. UsageError."""
    if path is not None:
        try:
            text = read_small(path)
        except UnicodeDecodeError:
            text = ""  # no line, either
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_line(text) if text or path is not None else None


def secret_hash(secret: str) -> str:
    """The hash that the scheduler keeps of a secret. A secret is random, so it needs no salt and no slow hash."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _check(body: str) -> str:
    return base32(hashlib.sha256(body.encode()).digest())[:CHECK_CHARACTERS]


def _random(characters: int) -> str:
    return base32(secrets.token_bytes(characters))[:characters]
