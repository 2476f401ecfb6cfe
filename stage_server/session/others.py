"""What the scheduler says of others: who may be believed, who relays, and who was revoked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from stage_server.session.gate import Passes
from stage_server.session.relays import KnownRelays
from swarm.process.logs import Logger
from swarm.rpc.links.peers import SHUNNED_S, PeerLinks
from swarm.wire.messages import CutOff, TakePass, UseRelays, Welcome


@dataclass(frozen=True, slots=True)
class Others:
    """Passes and relays are None where a stage server has none."""

    links: PeerLinks
    passes: Passes | None
    relays: KnownRelays | None
    log: Logger

    def welcomed(self, welcome: Welcome) -> None:
        """A session begins: learn what was said while there was none."""
        if self.passes is not None:
            self.passes.welcomed(welcome)
        for order in welcome.cut_off:
            if welcome.unix_s - order.unix_s < SHUNNED_S:
                self.links.cut_off(order.peer)
        if self.relays is not None:
            self.relays.know(welcome.relays)

    def hear(self, command: TakePass | UseRelays | CutOff) -> None:
        match command:
            case TakePass(token=token):
                if self.passes is not None:
                    self.passes.take(token)
                if self.relays is not None:
                    self.relays.passed()
            case UseRelays(relays=relays):
                if self.relays is not None:
                    self.relays.know(relays)
            case CutOff(peer=peer):
                self.log.warning("peer was revoked", peer=peer)
                self.links.cut_off(peer)
                if self.passes is not None:
                    self.passes.cut_off(command)
            case _:
                assert_never(command)
