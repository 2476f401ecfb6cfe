"""The first moment of a program, while Python still imports: standard library and error codes only."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from swarm.errors import INTERRUPTED

PRIVATE_UMASK = 0o077  # texts, weights and logs are for their owner alone: folders 0700, files 0600


@contextmanager
def quiet_start() -> Iterator[None]:
    """Around the imports of a `__main__`: Ctrl-C ends the process at once with 130, without the traceback of an import.

    gRPC's own messages on stderr are switched off unless GRPC_VERBOSITY asks for them: our own errors already report a
    busy port. This must happen before gRPC is loaded. A closed stream (`>&-`) is replaced by the null device. Files
    that the process writes are for its owner alone.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  # as long as we live
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.umask(PRIVATE_UMASK)
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody wants it to be ignored: nohup, a script's "&"
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
