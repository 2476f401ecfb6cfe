"""A stage server that is slow, cut off or garbles frames: `python -m tests.chaos.harmed_stage_server FLAGS`.

The file DATA_DIR.harm says how, as JSON, for as long as it is there: {"slow": FACTOR}, {"corrupt": ONE_IN} of the
frames that it sends, {"cut": [PEER, ADDRESS]}. The product's own program is patched from outside and knows nothing of
it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from stage_server.lean_imports import lean_imports

with lean_imports():
    from stage_server.__main__ import cli
    from stage_server.device import ThreadDevice, _clocked
    from stage_server.session.server import StageServer
from swarm.errors import PeerUnavailable
from swarm.process.lifecycle import run_cli
from swarm.rpc.links.peers import GrpcPeerLinks

# Nobody answers what is sent into a partition. Keep-alive takes this long to break a silent connection.
UNANSWERED_S = 2.0
MET = "harm met: "  # in the log of the process, once for each fault


def harm_file(data_dir: Path) -> Path:
    """Where the harm of the stage server with this folder is written."""
    return data_dir.with_suffix(".harm")


def write_harm(data_dir: Path, **faults: object) -> Path:
    """Begin the faults; the file to remove when they are to end."""
    file = harm_file(data_dir)
    half = file.with_suffix(".half")
    half.write_text(json.dumps(faults))
    return half.rename(file)


class Harm:
    """The faults of this process that go on now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rng = Random(0)
        self._met: set[str] = set()

    def now(self, fault: str) -> Any:
        """The factor, the share or the neighbour of a fault; None while it does not go on."""
        try:
            return json.loads(self._file.read_text()).get(fault)
        except FileNotFoundError:
            return None

    def met(self, fault: str) -> None:
        """The fault has met something."""
        if fault not in self._met:
            self._met.add(fault)
            sys.stderr.write(f"{MET}{fault}\n")
            sys.stderr.flush()

    def slowly(self, work: Callable[[], Any]) -> Callable[[], Any]:
        def slow() -> Any:
            started_s = time.perf_counter()
            result = work()
            if (factor := self.now("slow")) is not None:
                self.met("slow")
                time.sleep((factor - 1.0) * (time.perf_counter() - started_s))  # on the compute thread
            return result

        return slow

    def garble(self, frame: bytes) -> bytes:
        """The frame to send; its last byte, which the checksum covers, may be changed."""
        one_in = self.now("corrupt")
        if one_in is None or self._rng.randrange(one_in):
            return frame
        self.met("corrupt")
        return frame[:-1] + bytes([frame[-1] ^ 0x10])

    async def passes(self, who: str) -> None:
        """Return, unless the address or the peer is cut off: PeerUnavailable, after a while."""
        if who in (self.now("cut") or ()):
            self.met("cut")
            await asyncio.sleep(UNANSWERED_S)
            raise PeerUnavailable(f"{who} does not answer: cut off on purpose")


def put(harm: Harm) -> None:
    """Put the harm between this process, its device and its neighbours."""
    run, begin = ThreadDevice.run, GrpcPeerLinks.__init__

    def run_slowly(self: ThreadDevice, work: Callable[[], Any]) -> Any:
        return run(self, harm.slowly(work))

    def timed_slowly(self: ThreadDevice, work: Callable[[], Any]) -> Any:
        return run(self, lambda: _clocked(harm.slowly(work)))

    def begin_garbling(self: GrpcPeerLinks, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, on_wire=harm.garble, **kwargs)

    def cut(owner: Any, name: str, whom: Callable[[Any], str]) -> None:
        original = getattr(owner, name)

        async def call(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
            await harm.passes(whom(first))
            return await original(self, first, *args, **kwargs)

        setattr(owner, name, call)

    ThreadDevice.run, ThreadDevice.timed = run_slowly, timed_slowly  # type: ignore[method-assign]
    GrpcPeerLinks.__init__ = begin_garbling  # type: ignore[method-assign]
    for name in ("send", "pull"):
        cut(GrpcPeerLinks, name, lambda address: str(address))
    for name in ("receive", "give"):
        cut(StageServer, name, lambda said: str(said.sender))


if __name__ == "__main__":
    flags = sys.argv[1:]
    put(Harm(harm_file(Path(flags[flags.index("--data-dir") + 1]))))
    sys.argv = ["stage_server", *flags]
    run_cli(cli, "swarm stage-server")
