"""The gate before tensors and state: admits callers with a pass of our scheduler, and ends the calls of revoked ones.

It judges by the scheduler's clock: the session begins with that time, and from there on it is counted here. So clocks
of machines need not agree. Decision: docs/decisions/052.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Protocol

from stage_server.brain.passes import GRACE_S, KnownPass, PassSlot, check
from swarm.errors import NoPass, Revoked, StaleMessage, SwarmError
from swarm.job.spec import spec_from_json
from swarm.pki.identity import Wallet
from swarm.rpc import passes
from swarm.types import PeerId
from swarm.wire.messages import CutOff, LoadStage, Pass, Welcome

REFUSAL = "no pass leads from the caller to what this stage server does now"  # all that a caller hears
CUT_KEPT_S = 3600.0  # no pass is good for as long


@lru_cache(maxsize=1)
def place_of(load: LoadStage) -> PassSlot:
    """The place in its job of a stage server that got this LoadStage."""
    spec = spec_from_json(load.spec_json)
    return PassSlot(load.job, load.timeline, load.stage, len(load.split), spec.tied, spec.island_count)


class HeldPasses(Protocol):
    """The session's news about passes: which are good, and which stage servers are revoked."""

    def welcomed(self, welcome: Welcome) -> None:
        """A session began: take its key for passes and its list of revoked stage servers."""

    def take(self, token: bytes) -> None:
        """Show this pass from now on."""

    def cut_off(self, order: CutOff) -> None:
        """End the calls of a stage server that was revoked, and take none with the passes that it has."""


class PassGate:
    """The gate of one stage server; `wallet` has its own pass too."""

    def __init__(
        self,
        wallet: Wallet,
        place: Callable[[], PassSlot | None],
        refused: Callable[[str, SwarmError], None] = lambda *_: None,
    ) -> None:
        """`place` gives the stage that is served now. `refused` is called with each refused caller and the reason."""
        self._wallet = wallet
        self._place = place
        self._refused = refused
        self._key = b""
        self._ahead_s = 0.0  # the scheduler's clock, beyond the event loop's
        self._cut: dict[PeerId, float] = {}
        self._inside: dict[asyncio.Timeout, Pass] = {}

    # What the scheduler says ------------------------------------------------------------------------------------

    def welcomed(self, welcome: Welcome) -> None:
        """A session began: take its key for passes, its clock and its list of revoked stage servers."""
        self._key = welcome.pass_key
        self._ahead_s = welcome.unix_s - asyncio.get_running_loop().time()
        for peer in welcome.cut_off:
            self.cut_off(peer)

    def take(self, token: bytes) -> None:
        """Show this pass from now on."""
        self._wallet.pass_token = token

    def cut_off(self, order: CutOff) -> None:
        """End the calls of a stage server that was revoked, and take none with the passes that it has."""
        now_unix_s = self._now_unix_s()
        self._cut = {peer: unix_s for peer, unix_s in self._cut.items() if now_unix_s - unix_s < CUT_KEPT_S}
        self._cut[order.peer] = max(order.unix_s, self._cut.get(order.peer, 0.0))
        for place, inside in self._inside.items():
            if inside.peer == order.peer and inside.issued_unix_s <= order.unix_s and not place.expired():
                place.reschedule(0.0)

    @property
    def inside(self) -> list[Pass]:
        """The passes of the calls that are being answered."""
        return list(self._inside.values())

    # Who comes --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def enter(self, token: bytes, name: str | None, *, pulls: bool) -> AsyncIterator[Pass]:
        """As swarm.rpc.passes.Gate; a stream outlives its pass by GRACE_S."""
        try:
            shown = passes.read(token, self._key)
            check(shown, self._place(), self._known(shown, name), pulls=pulls)
        except SwarmError as error:
            raise self._turned_away(name or "a caller over plaintext", error) from None
        inside = asyncio.timeout_at(shown.expires_unix_s + GRACE_S - self._ahead_s)
        self._inside[inside] = shown
        try:
            async with inside:
                yield shown
        except TimeoutError:
            if not inside.expired():
                raise
            if self._cut.get(shown.peer, 0.0) < shown.issued_unix_s:
                raise NoPass(REFUSAL) from None  # an idle link of an honest one ends like that, too
            raise self._turned_away(shown.peer, Revoked("revoked in the midst of a call")) from None
        finally:
            del self._inside[inside]

    def _known(self, shown: Pass, name: str | None) -> KnownPass:
        identity = self._wallet.identity
        cluster = "" if identity is None else identity.cluster
        return KnownPass(cluster, self._now_unix_s(), name, self._cut.get(shown.peer))

    def _now_unix_s(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead_s

    def _turned_away(self, who: str, error: SwarmError) -> SwarmError:
        """The error for a refused caller: no details for strangers. Honest callers that come late are not counted."""
        if not isinstance(error, StaleMessage):
            self._refused(who, error)
        return type(error)(REFUSAL)
