"""A replica's log of past commits, bounded in bytes: per step the averaged gradient and the Commit.

      record of step   4   5   6   7        takes a state from version 4 to 5, ..., 7 to 8
                       └ reach              a state of version 4 or newer can be brought up to date

The oldest records go when the bytes run out. This module knows only their sizes; the flow keeps their contents.
"""

from __future__ import annotations

from collections import deque


class CommitLog:
    def __init__(self, limit_bytes: int, version: int = 0) -> None:
        assert limit_bytes >= 0
        self._limit_bytes = limit_bytes
        self._sizes: deque[int] = deque()
        self._version = version
        self.size_bytes = 0

    @property
    def version(self) -> int:
        """The newest version: a replay of the whole log leads there."""
        return self._version

    @property
    def reach(self) -> int:
        """The oldest version that the log can bring up to date; equal to `version` if the log is empty."""
        return self._version - len(self._sizes)

    def append(self, step: int, size_bytes: int) -> range:
        """Remember a commit; gives the steps whose records must be dropped, perhaps the new one too."""
        assert step == self._version, f"the log is at version {self._version}, its next record is not of step {step}"
        assert size_bytes >= 0
        before = self.reach
        self._version = step + 1
        self._sizes.append(size_bytes)
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit_bytes:
            self.size_bytes -= self._sizes.popleft()
        return range(before, self.reach)

    def steps(self, start: int, stop: int) -> range | None:
        """The steps whose records bring version `start` towards `stop`; None if the log does not reach back."""
        if start < self.reach:
            return None
        return range(start, max(start, min(stop, self._version)))
