"""The key to a broker that a login of this machine runs for itself: its processes read the key in a file.

    /tmp/swarm-broker-RANDOM/      for its owner alone (0700), locked as long as the broker is kept up
        PORT                       the password of the user `swarm`, new each time that the broker starts

A process that dials a broker on loopback without a user's name looks whether its own login runs the broker there. So
the URL that `swarm scheduler` and `swarm up` print is all that a stage server of the same login needs, and no key is in
a command line, a variable or a log.

Not chosen: a key for all brokers of a login. Another login that listens at the port of a broker that ended would hear
it, and could use it at the next one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from swarm.mqtt.endpoint import Endpoint
from swarm.text import is_loopback

USER = "swarm"
FOLDERS = "swarm-broker-"
KEY_BYTES = 32
_CHARACTERS_MAX = 256


def new_key(folder: Path, port: int) -> str:
    """Make the key of the broker at `port`, in place of an older one; OSError."""
    key, draft = secrets.token_hex(KEY_BYTES), folder / f"{port}.new"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(key)
    draft.rename(folder / str(port))
    return key


def key_of(broker: Endpoint) -> str | None:
    """The key of the broker if this login runs it on this machine; None if it does not, or if its URL has a user."""
    if broker.username is not None or broker.tls is not None or not is_loopback(broker.host):
        return None
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(OSError):  # it is another login's, or gone
            if (key := _read(folder, str(broker.port))) is not None:
                return key
    return None


def _read(folder: Path, name: str) -> str | None:
    """The key in a folder of ours whose broker is kept up; OSError."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(place)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077 or not _is_locked(place):
            return None
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place)) as file:
            return file.read(_CHARACTERS_MAX)
    finally:
        os.close(place)


def _is_locked(folder: int) -> bool:
    """Whether the process that made the folder lives; a file system without locks does not tell."""
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
