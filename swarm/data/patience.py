"""What a person hears from a library that computes on their data for long, and how they end it.

A regular expression of a tokenizer may look back for ever, and a few bytes may unpack to many. Python hears Ctrl-C only
when the library is back. So a thread listens beside it: it says what takes long, and a second Ctrl-C ends the process
at once. Token shards that are then left are removed by the next process (swarm/process/temporary.py).

Not chosen: a process of its own with bounded memory and time, because data and tokenizer run on the machine of the
person who chose them, and no server reads them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from swarm.errors import INTERRUPTED

PIECE_S = 120.0  # for 2 Mi characters or 4,096 rows, and to read them; longer is said
HEARD_S = 1.0  # a library that is not back so long after a Ctrl-C is said to be at work


class Patience:
    """What is worked on: `doing` gives words for it, and is called only when they are needed."""

    def __init__(self) -> None:
        self.doing: Callable[[], str] = lambda: "the data"
        self._since_s = self._due_s = 0.0
        self._presses = 0

    def begin(self, doing: Callable[[], str]) -> None:
        """The work on another piece begins."""
        now_s = monotonic()
        self._due_s = now_s + PIECE_S  # first, so that the thread does not take the new piece for late
        self.doing, self._since_s = doing, now_s

    def listen(self, signals: socket.socket) -> None:
        """Speak when a piece is late; end the process at the second Ctrl-C. Returns when the other end is closed."""
        while True:
            wait_s = max(0.0, self._due_s - monotonic())
            if not select.select([signals], [], [], wait_s)[0]:
                self._speak()
            elif heard := signals.recv(64):
                self._presses += heard.count(signal.SIGINT)
                if self._presses > 1:
                    _end_at_once()
                if self._presses:
                    self._due_s = monotonic() + HEARD_S
            else:
                return

    def _speak(self) -> None:
        now_s = monotonic()
        if now_s < self._due_s:  # another piece has begun meanwhile
            return
        self._due_s = now_s + PIECE_S
        once_more = "Ctrl-C once more" if self._presses else "Ctrl-C twice"
        print(f"{self.doing()}: {now_s - self._since_s:.0f} s so far; {once_more} ends it at once", file=sys.stderr)


@contextmanager
def patience() -> Iterator[Patience]:
    """Listens as long as the block lasts. Ctrl-C is counted only where Python itself answers it, in the main thread."""
    waiting = Patience()
    waiting.begin(waiting.doing)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        counts = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False) if counts else -1
        if before != -1:  # an event loop has it
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        listener = threading.Thread(target=waiting.listen, args=(ours,), name="patience", daemon=True)
        listener.start()
        try:
            yield waiting
        finally:
            if counts and before == -1:
                signal.set_wakeup_fd(-1)
            theirs.close()
            listener.join()


def _end_at_once() -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # a progress bar hides the cursor
    os._exit(INTERRUPTED)
