"""A person's identities: one folder for each scheduler that the person talks to.

    ~/.config/swarm/profiles/127.0.0.1-7950/{key,cert,ca}.pem        SWARM_PROFILES names another place

A scheduler puts an admin's identity here for the user who started it; everybody else gets one with `swarm login`.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarm.home import known_config_folder
from swarm.pki.identity import Identity

ENVIRONMENT = "SWARM_PROFILES"


def profiles_folder() -> Path:
    """NoHome if SWARM_PROFILES names none and the user has no home folder."""
    named = os.environ.get(ENVIRONMENT, "")
    return Path(named) if named else known_config_folder() / "profiles"


def profile_folder(scheduler: str) -> Path:
    """The folder of the identity for the scheduler at HOST:PORT."""
    return profiles_folder() / scheduler.replace(":", "-").replace("[", "").replace("]", "")


def find_profile(scheduler: str) -> Identity | None:
    """The identity for the scheduler at HOST:PORT, if there is one; InvalidConfig if it cannot be used."""
    return Identity.load(profile_folder(scheduler))
