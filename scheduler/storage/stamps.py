"""Stamps: the scheduler knows a hop again that it gave to a stage server before it was restarted.

    stamp = keyed hash of (job, microbatch, stage, peer, incarnation, attempt), sent with the hop's Route

A stage server that comes back after a restart reports its cells, each with the stamp of its hop. Nothing is stored for
a hop: the key in the data folder is all that must last. If the key is lost, no cell counts, and what was not committed
is computed again. Decision: docs/decisions/021.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from swarm.errors import InvalidConfig
from swarm.pki.files import read_private, write_private
from swarm.types import Hop, JobId, Microbatch, PeerId
from swarm.wire.messages import Hello, ReportedCell, Route

STAMP_BYTES = 16
# Of one Hello: to check one takes 2 us of the event loop. Cells beyond these are computed again.
CELLS_MAX = 8192
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Stamps:
    """Stamps hops, and knows them again."""

    key: bytes

    @classmethod
    def open(cls, folder: Path) -> Stamps:
        """With the key that is kept in the folder, or a new one; InvalidConfig if its file cannot be used."""
        file = folder / "stamp.key"
        if not file.exists():
            write_private(file, secrets.token_bytes(_KEY_BYTES))
        if len(key := read_private(file)) != _KEY_BYTES:
            raise InvalidConfig(f"{file} is no key of {_KEY_BYTES} bytes", hint="delete it, and a new one is made")
        return cls(key)

    def stamped(self, job: JobId, route: Route, peer: PeerId) -> Route:
        """The route with the stamp of the peer's own hop; as it is if the peer has none."""
        own = next((stage for stage, hop in enumerate(route.hops) if hop.peer == peer), None)
        if own is None:
            return route
        return replace(route, stamp=self._stamp(job, route.microbatch, own, route.hops[own]))

    def known(self, hello: Hello) -> tuple[ReportedCell, ...]:
        """The cells in the Hello that this scheduler, or one before it, gave to the process that reports them."""
        return tuple(cell for cell in hello.cells[:CELLS_MAX] if self._is_known(hello, cell))

    def _is_known(self, hello: Hello, cell: ReportedCell) -> bool:
        hop = Hop(hello.peer, hello.incarnation, cell.attempt, "")
        return hmac.compare_digest(cell.stamp, self._stamp(hello.job, cell.microbatch, hello.stage, hop))

    def _stamp(self, job: JobId, microbatch: Microbatch, stage: int, hop: Hop) -> bytes:
        numbers = (microbatch.timeline, microbatch.step, microbatch.index, stage, hop.incarnation, hop.attempt)
        told = f"{job} {hop.peer} {numbers}"  # neither name has a blank
        return blake2b(told.encode(), key=self.key, digest_size=STAMP_BYTES).digest()
