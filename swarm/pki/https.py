"""HTTPS with the certificate that a process has at the moment: joins, and metrics that other machines scrape."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm.errors import InvalidConfig, NotAdmitted
from swarm.pki.files import write_private
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Role, principal_of

_SCRAPERS = (Role.METRICS, Role.ADMIN)


class Https:
    """The TLS of one listener. It asks for a certificate and takes callers without one: probes have none."""

    def __init__(self, wallet: Wallet, file: Path) -> None:
        """`file` holds key and certificate for OpenSSL, which reads them from files only."""
        self._wallet = wallet
        self._file = file
        self._shown: Identity | None = None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # proves nothing, so every handshake fails

    def context(self) -> ssl.SSLContext:
        """The TLS context of the next handshake; with the older certificate if the new one cannot be written."""
        identity = self._wallet.identity
        if identity is not None and identity is not self._shown:
            with suppress(InvalidConfig):
                write_private(self._file, identity.key_pem + identity.certificate_pem)
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self._file)
                context.verify_mode = ssl.CERT_OPTIONAL
                context.load_verify_locations(cadata=identity.ca_pem.decode())
                self._context, self._shown = context, identity
        return self._context

    def admits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether the caller may read metrics; `certificate` as ssl's getpeercert gives it."""
        names = [value for _, value in (certificate or {}).get("subjectAltName", ())]
        try:
            return principal_of(names).role in _SCRAPERS
        except NotAdmitted:
            return False
