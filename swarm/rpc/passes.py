"""Passes on the wire: signed statements of the scheduler about a stage server, shown to the peers that it dials.

scheduler ──TakePass──▶ dialler ──metadata of Exchange and Pull──▶ gate of the one that is dialled

A pass is looked at once per call. A renewal breaks no stream: the dialler begins a new one, and ends the older one when
all tensors under way on it are answered. Decision: docs/decisions/052.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from swarm.errors import NoPass, SwarmError
from swarm.pki.passes import PassKey, signed_by
from swarm.rpc.mapping import from_message, parse, to_message
from swarm.wire import frame_pb2
from swarm.wire.messages import Pass

METADATA_KEY: Final = "swarm-pass-bin"


class Gate(Protocol):
    """Decides which callers may send tensors or pull: asked once for each call."""

    def enter(self, token: bytes, name: str | None, *, pulls: bool) -> AbstractAsyncContextManager[Pass]:
        """Be inside while the call is answered; gives the content of the pass.

        `name`: in the caller's certificate; None: plaintext. Raises NoPass, Revoked or StaleMessage, also in the
        midst of the call if the caller may not stay.
        """


def issue(key: PassKey, given: Pass) -> bytes:
    """The pass as it is shown."""
    return key.sign(to_message(given).SerializeToString())


def read(token: bytes, public: bytes) -> Pass:
    """The content of the pass; NoPass unless the scheduler with this key has signed it."""
    statement = signed_by(public, token)
    try:
        return from_message(Pass, parse(frame_pb2.Pass, statement))
    except SwarmError as error:
        raise NoPass(f"what was signed is no pass: {error.message}") from None


def metadata(token: bytes) -> tuple[tuple[str, bytes], ...]:
    """The metadata of a call, with the pass."""
    return ((METADATA_KEY, token),) if token else ()


def shown(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """The pass that came with a call, b"" if none did."""
    found = next((value for key, value in metadata or () if key == METADATA_KEY), b"")
    return found if isinstance(found, bytes) else b""
