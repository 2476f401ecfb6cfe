"""The processes of benchmarks, and where they run: on loopback, or each at a host behind emulated links."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.process.children import dying_with_parent
from tests.chaos.relay import Relay

STOP_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Hosts:
    """Where processes run: all on loopback, or each at a host of its own, with this process at host 0."""

    relay: Relay | None = None

    def address(self, host: int) -> str:
        return "127.0.0.1" if self.relay is None else self.relay.hosts[host]

    def at(self, host: int) -> Sequence[str]:
        """The command that runs another one there."""
        return () if self.relay is None else self.relay.at(host)

    @property
    def device(self) -> str:
        """The network device that leads to the others."""
        return "lo" if self.relay is None else "tun0"


@contextlib.contextmanager
def hosts_behind(count: int, mbit_per_s: float, rtt_s: float) -> Iterator[Hosts]:
    """So many hosts; each pair is joined by a link of its own. This process is at host 0 from then on, for good.

    The hosts are namespaces of processes that end with this one: nothing is left of them, however it ends.
    """
    with Relay(count, seed=0) as relay:
        relay.everywhere(delay_s=rtt_s / 2.0, bytes_per_s=mbit_per_s * 1e6 / 8.0)
        relay.move_here(0)
        yield Hosts(relay)


class Fleet:
    """Child processes that speak lines; all end with this one. They run what is in `tree`."""

    def __init__(self, folder: Path, tree: Path | None = None) -> None:
        self._folder = folder
        self._tree = tree
        self._children: list[subprocess.Popen[str]] = []

    def start(
        self,
        name: str,
        module: str,
        *arguments: str,
        before: Sequence[str] = (),
        python: Path = Path(sys.executable),
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Run `python -m module`; `before` is a command that runs it."""
        with (self._folder / f"{name}.log").open("w") as log:
            child = subprocess.Popen(
                dying_with_parent([*before, str(python), "-m", module, *arguments]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                cwd=self._tree,
                env=os.environ | environment,
            )
        self._children.append(child)
        return child

    def line(self, child: subprocess.Popen[str]) -> str:
        """The child's next line; with the end of all logs, RuntimeError if it ended instead."""
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            logs = [f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self._folder.glob("*.log"))]
            raise RuntimeError("\n".join([f"a process ended with {child.wait()}", *logs]))
        return line

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            try:
                child.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it started and has not ended
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
