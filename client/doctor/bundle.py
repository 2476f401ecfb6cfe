"""One ZIP file with the facts that a helper needs. It holds no secrets: no keys, no certificates, no passwords."""

from __future__ import annotations

import io
import json
import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from swarm.errors import InvalidConfig
from swarm.text import without_passwords

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CRED|AUTH|COOKIE|JOIN", re.IGNORECASE)
_SECRET_LENGTH_MIN = 4  # of the value of a variable that is looked for elsewhere too
HIDDEN = "(hidden)"
# What follows the name of a secret, as in a command line, an assignment, a header or JSON; and what shows what it is.
_NAMED = re.compile(
    r"((?<![a-z])(?:token|secret|passw(?:or)?d|passphrase|pwd|credentials?|cookie|api[_-]?key|join)"
    r"(?:[\"']?\s{0,3}[=:]\s{0,3}[\"']?|\s{1,3}(?=[^\s\"']*[0-9]))"
    r"|authorization[\"']?\s{0,3}[=:]\s{0,3}[\"']?(?:[a-z]{1,20}\s{1,3})?|\bbearer\s{1,3})"
    r"[^\s\"',;&\\]{1,4096}",
    re.IGNORECASE | re.ASCII,
)
_TOKEN = re.compile(r"\b(swm1-|hf_|gh[a-z]_|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{6,4096}")
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,65536}(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?")


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without secrets."""
    return {name: HIDDEN if _SECRET.search(name) else value for name, value in environment.items()}


def hidden(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without what looks like a secret, and without these."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _PEM.sub(HIDDEN, without_passwords(text))
    return _NAMED.sub(rf"\1{HIDDEN}", _TOKEN.sub(rf"\1{HIDDEN}", text))


def write_bundle(
    path: Path, findings: Sequence[Mapping[str, Any]], environment: Mapping[str, str], swarm: Mapping[str, Any]
) -> None:
    """Write the file; InvalidConfig if that cannot be."""
    packages = sorted(f"{package.name}=={package.version}" for package in metadata.distributions())
    about = {"platform": platform.platform(), "python": sys.version, "packages": packages}
    parts = {"findings": findings, "environment": shown(environment), "machine": about, **swarm}
    secrets = {
        value for name, value in environment.items() if _SECRET.search(name) and len(value) >= _SECRET_LENGTH_MIN
    }
    content = io.BytesIO()  # a device or a pipe takes bytes, but nobody can go back in it, as zipfile does
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, values in parts.items():
            bundle.writestr(f"{name}.json", json.dumps(_cleared(values, sorted(secrets)), indent=2) + "\n")
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise InvalidConfig(
            f"{path} cannot be written: {error.strerror or error}", hint="choose another FILE"
        ) from None


def _cleared(value: Any, secrets: Sequence[str]) -> Any:
    """The same values with every text `hidden`; of a table's entry with the name of a secret nothing is left."""
    match value:
        case str():
            return hidden(value, secrets)
        case Mapping():
            return {
                key: HIDDEN if isinstance(item, str) and _NAMED.match(f"{key}=1") else _cleared(item, secrets)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_cleared(item, secrets) for item in value]
        case _:
            return value
