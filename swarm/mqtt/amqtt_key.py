"""A plug-in of amqtt that lets in who shows the key. amqtt's own for passwords stalls the loop with slow hashes."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from amqtt.plugins.authentication import BaseAuthPlugin
from amqtt.session import Session

from swarm.mqtt.key import USER


class KeyPlugin(BaseAuthPlugin):  # type: ignore[misc]  # amqtt says no types
    """Asked once for each connection."""

    @dataclass
    class Config:
        """What the broker's configuration gives it."""

        key: str

    async def authenticate(self, *, session: Session) -> bool:
        shown = f"{session.username}:{session.password}"
        return hmac.compare_digest(shown.encode(), f"{USER}:{self.config.key}".encode())
