"""A person's identities: one folder for each scheduler that the person talks to.

    ~/.config/swarm/profiles/127.0.0.1-7950/{key,cert,ca}.pem        SWARM_PROFILES names another place

A scheduler puts an admin's identity here for the user who started it; everybody else gets one with `swarm login`.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarm.errors import NoHome
from swarm.home import known_config_folder
from swarm.pki.identity import Identity
from swarm.text import is_address

ENVIRONMENT = "SWARM_PROFILES"
SCHEDULER_FILE = "scheduler"  # HOST:PORT, in profiles of `swarm login`


def profiles_folder() -> Path:
    """NoHome if SWARM_PROFILES names none and the user has no home folder."""
    named = os.environ.get(ENVIRONMENT, "")
    return Path(named) if named else known_config_folder() / "profiles"


def profile_folder(scheduler: str) -> Path:
    """The folder of the identity for the scheduler at HOST:PORT."""
    return profiles_folder() / scheduler.replace(":", "-").replace("[", "").replace("]", "")


def memberships() -> list[str]:
    """The schedulers, as HOST:PORT, for which this person has an identity."""
    try:
        folders = sorted(path for path in profiles_folder().iterdir() if (path / "cert.pem").exists())
    except (OSError, NoHome):
        return []
    return [address for address in map(_scheduler_of, folders) if is_address(address)]


def _scheduler_of(folder: Path) -> str:
    try:
        return (folder / SCHEDULER_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):  # a folder's name says it too, if the host is no IPv6 address
        host, _, port = folder.name.rpartition("-")
        return "" if "--" in host else f"{host}:{port}"


def find_profile(scheduler: str) -> Identity | None:
    """The identity for the scheduler at HOST:PORT, if there is one; InvalidConfig if it cannot be used."""
    return Identity.load(profile_folder(scheduler))
