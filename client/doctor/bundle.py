"""One ZIP file with the facts that a helper needs. It holds no secrets: no keys, no certificates, no passwords."""

from __future__ import annotations

import io
import json
import platform
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from swarm.errors import InvalidConfig
from swarm.text import without_passwords

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|JOIN", re.IGNORECASE)
HIDDEN = "(hidden)"


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without secrets."""
    return {name: HIDDEN if _SECRET.search(name) else without_passwords(value) for name, value in environment.items()}


def write_bundle(
    path: Path, findings: Sequence[Mapping[str, Any]], environment: Mapping[str, str], swarm: Mapping[str, Any]
) -> None:
    """Write the file; InvalidConfig if that cannot be."""
    packages = sorted(f"{one.name}=={one.version}" for one in metadata.distributions())
    about = {"platform": platform.platform(), "python": sys.version, "packages": packages}
    parts = {"findings": findings, "environment": shown(environment), "machine": about, **swarm}
    content = io.BytesIO()  # a device or a pipe takes bytes, but nobody can go back in it, as zipfile does
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, values in parts.items():
            bundle.writestr(f"{name}.json", without_passwords(json.dumps(values, indent=2)) + "\n")
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise InvalidConfig(
            f"{path} cannot be written: {error.strerror or error}", hint="choose another FILE"
        ) from None
