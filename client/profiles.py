"""Connections by name, in a file of the user's, for `--profile NAME`.

    # ~/.config/swarm/config.toml; SWARM_CONFIG or --config names another one
    [profile.default]                     # used without --profile
    scheduler = "127.0.0.1:7950"

    [profile.lab]
    scheduler = "lab.example.org:7950"
    timeout = 60
    output = "json"

A flag or an environment variable wins over it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import InvalidConfig, NoHome
from swarm.home import known_config_folder
from swarm.text_file import read_small

DEFAULT = "default"
KEYS: Mapping[str, tuple[type, ...]] = {
    "scheduler": (str,),
    "output": (str,),
    "timeout": (int, float),
    "insecure": (bool,),
}


def config_file(named: str = "") -> Path:
    """The file that --config or SWARM_CONFIG names, or the usual one; NoHome."""
    named = named or os.environ.get("SWARM_CONFIG", "")
    return Path(named) if named else known_config_folder() / "config.toml"


def find_profile(config: str, name: str, *, is_named: bool) -> dict[str, Any]:
    """The values of a profile in the file that `config_file` gives.

    A user without a home folder has no file, nor has one whose HOME is another user's, or no folder: sudo keeps it.
    """
    try:
        path = config_file(config)
    except NoHome:
        if is_named:
            raise
        return {}
    is_usual = not (config or os.environ.get("SWARM_CONFIG"))
    if is_usual and not is_named and not os.access(path.parent, os.X_OK):
        return {}
    return read_profile(path, name, is_named=is_named)


def read_profile(path: Path, name: str, *, is_named: bool) -> dict[str, Any]:
    """The values of a profile: some of KEYS.

    InvalidConfig if the file or a value is wrong, or if somebody named a profile (`is_named`) that is not there.
    """
    try:
        values = tomllib.loads(read_small(path))
    except FileNotFoundError:
        if is_named:
            raise InvalidConfig(
                f'there is no profile "{name}": {path} does not exist',
                hint=f'write [profile.{name}] and scheduler = "HOST:PORT" into it',
            ) from None
        return {}
    except OSError as error:
        hint = "check who owns it; HOME may be another user's"
        raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}", hint=hint) from None
    except ValueError as error:
        raise InvalidConfig(f"{path} cannot be read: {error}", hint="it is a TOML file with [profile.NAME]") from None
    _known(values, ("profile",), str(path))
    profiles = values.get("profile", {})
    if not isinstance(profiles, dict) or not all(isinstance(one, dict) for one in profiles.values()):
        raise InvalidConfig(f"{path}: profile is no table of tables", hint="write [profile.NAME] above the values")
    if name not in profiles:
        if is_named:
            there = ", ".join(profiles) or "none"
            raise InvalidConfig(f'there is no profile "{name}" in {path}; there are: {there}')
        return {}
    where = f"{path}: profile.{name}"
    found = dict(profiles[name])
    _known(found, KEYS, where)
    for key, value in found.items():
        if not isinstance(value, KEYS[key]) or (isinstance(value, bool) and bool not in KEYS[key]):
            raise InvalidConfig(f"{where}.{key} is {value!r}", hint=f"it is {_example(key)}")
    if found.get("output", "table") not in ("table", "json"):
        raise InvalidConfig(f'{where}.output is "{found["output"]}"', hint=f"it is {_example('output')}")
    return found


def _known(values: Mapping[str, Any], keys: Any, where: str) -> None:
    for key in values:
        if key not in keys:
            near = difflib.get_close_matches(key, list(keys), n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(keys)}"
            raise InvalidConfig(f'{where} has no key "{key}"', hint=hint)


def _example(key: str) -> str:
    return {
        "scheduler": 'an address, such as "127.0.0.1:7950"',
        "output": '"table" or "json"',
        "timeout": "a number of seconds, such as 30",
        "insecure": "true or false",
    }[key]
