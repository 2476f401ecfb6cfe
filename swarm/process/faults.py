"""The words for an exception that no code on its way answered.

A full disk, a missing right, a port in use: the machine says so at any call, and these words are right at each. They
name the file, and what to do. Everything else is a bug, and is reported as a bug, with its type, its text and its
place.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Mapping
from types import MappingProxyType

from swarm.errors import InvalidConfig, OutOfMemory, SwarmError, leaves, unforeseen
from swarm.listening import FILES_HINT
from swarm.text import first_line, printable

# Which extra of the distribution brings a package that not everybody needs.
EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors"), "model"),
    **dict.fromkeys(("datasets", "pyarrow", "tokenizers"), "data"),
    "ray": "ray",
}
_FULL = "free some space, or write elsewhere"
_RIGHTS = "check who owns it and what its mode allows, or choose another place"
_ADDRESS = "choose an address of this machine; it may have only IPv4 or only IPv6"
_LIBRARY = "it needs memory (ulimit -v), a disk that is not mounted noexec, and the system that it was built for"
_SHARED_LIBRARY = re.compile(r"\.(so|dylib)\b.*(cannot|failed|undefined|not found|not loaded|no such|invalid)", re.I)
_PROCESSES = "raise the limit of processes and threads (ulimit -u, or the container's), or start fewer"
HINTS: Mapping[int, str] = MappingProxyType(
    {
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
        **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHTS),
        errno.EROFS: "choose a place that can be written",
        errno.EISDIR: "name a file: this is a folder",
        errno.ENOTDIR: "a part of the path is a file, not a folder",
        errno.ENOENT: "check the path",
        errno.EEXIST: "choose another name, or remove what is there",
        errno.ENOTEMPTY: "choose another name, or remove what is there",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ELOOP: "its symbolic links lead to each other",
        errno.EBUSY: "it is a mounted volume, or in use: choose another place",
        errno.EXDEV: "it is on another disk: choose another place",
        errno.EFBIG: "the file system takes no file of this size: write elsewhere",
        errno.EIO: "the disk fails: see what the system's log says of it",
        errno.ESTALE: "the network disk lost the file: try again",
        **dict.fromkeys((errno.EMFILE, errno.ENFILE), FILES_HINT),
        errno.ENOMEM: "end other programs, or raise the memory limit",
        errno.EAGAIN: _PROCESSES,
        errno.EADDRINUSE: "choose another port, or 0 for any free one",
        errno.EADDRNOTAVAIL: _ADDRESS,
        errno.EAFNOSUPPORT: _ADDRESS,
        **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH), "check this machine's network"),
    }
)


def told(error: BaseException) -> SwarmError:
    """The error for a person: one of ours as it is, the machine's in its words, an unforeseen one as a bug.

    In a group, a bug comes first: nothing else explains it.
    """
    found = list(map(_told, leaves(error)))
    return next(filter(is_bug, found), found[0])


def is_bug(error: SwarmError) -> bool:
    """Whether this is no cause that a person can mend."""
    return type(error) is SwarmError


def missing_package(error: ModuleNotFoundError) -> InvalidConfig | None:
    """The error for a person whose installation lacks an extra; None for any other module."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    return InvalidConfig(
        f"this needs the Python package {package}", hint=f'install it with: pip install "swarm-stages[{extra}]"'
    )


def _told(error: BaseException) -> SwarmError:
    match error:
        case SwarmError():
            return error
        case ModuleNotFoundError():
            return missing_package(error) or unforeseen(error)
        case MemoryError():
            return OutOfMemory("this process got no more memory", hint=HINTS[errno.ENOMEM])
        case socket.gaierror():
            return InvalidConfig(
                f"a host's name is not known here: {error.strerror}", hint="check the name, and this machine's DNS"
            )
        case ImportError() | OSError(errno=None) if _SHARED_LIBRARY.search(str(error)):
            return InvalidConfig(f"a library of this installation cannot be loaded: {first_line(error)}", hint=_LIBRARY)
        case FileNotFoundError(filename=None):
            return _nowhere(error)
        case OSError(errno=int(number)) if number in HINTS:
            return InvalidConfig(_words(error, number), hint=HINTS[number])
        case UnicodeEncodeError() if any("\ud800" <= character <= "\udfff" for character in error.object):
            return InvalidConfig(
                f'"{printable(error.object[:200])}" is no UTF-8', hint="name it otherwise, or set LC_ALL=C.UTF-8"
            )
        case RuntimeError() if str(error) == "can't start new thread":
            return InvalidConfig("this machine gives the process no more threads", hint=_PROCESSES)
    return unforeseen(error)


def _nowhere(error: FileNotFoundError) -> SwarmError:
    """What is missing where the error names no file."""
    if "temporary directory" in str(error):
        return InvalidConfig(
            "this user can write no folder for temporary files, nor the folder that he is in",
            hint="name one that can be written, with space in it: TMPDIR",
        )
    try:
        os.getcwd()
    except FileNotFoundError:
        return InvalidConfig("the folder that you are in is gone", hint="change to one that is there: cd")
    return InvalidConfig(_words(error, errno.ENOENT), hint=HINTS[errno.ENOENT])


def _words(error: OSError, number: int) -> str:
    full = number in (errno.ENOSPC, errno.EDQUOT)
    what = "the disk is full" if full else os.strerror(number)
    files = (error.filename, error.filename2)
    names = [printable(os.fsdecode(file)) for file in files if isinstance(file, str | bytes) and file]
    return f"{' and '.join(names)}: {what}" if names else what


def show(error: BaseException) -> SwarmError:
    """Print the traceback of a bug, and return the words for any error."""
    shown = told(error)
    if is_bug(shown):
        sys.excepthook(type(error), error, error.__traceback__)
    return shown
