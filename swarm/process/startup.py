"""The first moment of a program, while Python still imports: standard library and error codes only."""

from __future__ import annotations

import codecs
import io
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from swarm.errors import INTERRUPTED

FILES_WANTED = 1 << 16
FILES_OF_MACOS = 10_240  # it lets nobody have more, whatever limit it shows
PLAIN = dict(zip("▁▂▃▄▅▆▇█…", ".:-=+*#@~", strict=True))  # what stands for them where ASCII alone is known
_PLAINLY = "swarm.plainly"
PRIVATE_UMASK = 0o077  # texts, weights and logs are for their owner alone: folders 0700, files 0600


def files_max() -> int:
    """How many files, connections among them, this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return FILES_WANTED if soft == resource.RLIM_INFINITY else soft


def open_more_files() -> None:
    """Raise that as far as the system lets us: many shells begin with 1024, which one stranger can dial."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    for limit in (wanted, FILES_OF_MACOS):
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def take_any_text() -> None:
    """Let stdout and stderr write what they cannot encode as `PLAIN` says, or as "?": a terminal may know ASCII alone,
    and the name of a file may be no text at all."""
    codecs.register_error(_PLAINLY, _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAINLY)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "the streams are written to"
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


@contextmanager
def quiet_start() -> Iterator[None]:
    """Around the imports of a `__main__`: Ctrl-C ends the process at once with 130, without the traceback of an import.

    gRPC's own messages on stderr are switched off unless GRPC_VERBOSITY asks for them: our own errors already report a
    busy port. This must happen before gRPC is loaded. The streams take any text; a closed one (`>&-`) is replaced by
    the null device. Files that the process writes are for its owner alone. It may open as many as the system lets it.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  # as long as we live
    take_any_text()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.umask(PRIVATE_UMASK)
    open_more_files()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody wants it to be ignored: nohup, a script's "&"
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
