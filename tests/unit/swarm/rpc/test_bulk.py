"""Tickets: which calls beside a session are its own."""

from __future__ import annotations

from typing import Any, cast

from swarm.rpc.bulk import Tickets


class Call:
    """A call of somebody, as gRPC shows it to a server."""

    def __init__(self, connection: str, certificate: bytes, *metadata: tuple[str, bytes]) -> None:
        self.connection, self.certificate, self.metadata = connection, certificate, metadata
        self.given: tuple[tuple[str, bytes], ...] = ()

    def peer(self) -> str:
        return self.connection

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"x509_pem_cert": (self.certificate,)} if self.certificate else {}

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self.metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.given = tuple(metadata)


async def test_a_ticket_is_good_for_the_same_certificate_while_the_session_lasts() -> None:
    tickets, session = Tickets(), Call("ipv4:10.0.0.5:1", b"mine")

    def belongs(call: Call) -> str:
        return tickets.connection(cast(Any, call))

    async with tickets.given(cast(Any, session)):
        assert belongs(Call("ipv4:10.0.0.5:2", b"mine", *session.given)) == "ipv4:10.0.0.5:1"
        assert belongs(Call("ipv4:10.0.0.6:2", b"other", *session.given)) == "ipv4:10.0.0.6:2"
        assert belongs(Call("ipv4:10.0.0.5:2", b"", *session.given)) == "ipv4:10.0.0.5:2"
        assert belongs(Call("ipv4:10.0.0.5:2", b"mine", ("swarm-session-bin", bytes(16)))) == "ipv4:10.0.0.5:2"
        assert belongs(Call("ipv4:10.0.0.5:2", b"mine")) == "ipv4:10.0.0.5:2"
    assert belongs(Call("ipv4:10.0.0.5:2", b"mine", *session.given)) == "ipv4:10.0.0.5:2"
