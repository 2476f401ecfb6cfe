"""Where somebody without a certificate comes in: real HTTPS, and whatever strangers send to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.api.members import join as endpoints
from scheduler.api.members.join import JoinEndpoint
from scheduler.brain.members import enrolment
from scheduler.storage.database import Database
from scheduler.storage.members.book import Members
from swarm.errors import BadToken, ClocksDiffer, Crowded, InvalidConfig, Refused, RetryElsewhere, WrongSwarm
from swarm.limits import JOIN_BODY_BYTES_MAX, JOIN_FAILURES_AT_ONCE
from swarm.pki.authority import Authority
from swarm.pki.https import Https
from swarm.pki.identity import Application, Identity, Wallet
from swarm.pki.joining import Joined, join
from swarm.pki.names import Principal, Role
from swarm.pki.tokens import JoinLine, secret_hash
from tests.support.members import Clock, database_url, identity_of

AUTHORITY = Authority.new(1_700_000_000.0)
SCHEDULER = identity_of(AUTHORITY, Role.SCHEDULER, "scheduler")
GOOD = {"id": "a" * 8, "secret": "b" * 26, "name": "gpu-1", "csr": ""}


def trusting_all() -> ssl.SSLContext:
    """TLS of a client that asks for no proof."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Serving:
    """An endpoint with its book of members; asked from threads, as clients are elsewhere."""

    def __init__(self, members: Members, endpoint: JoinEndpoint, wallet: Wallet, port: int) -> None:
        self.members = members
        self.endpoint = endpoint
        self.wallet = wallet
        self.port = port

    async def token(self, uses: int = 1) -> JoinLine:
        address = f"127.0.0.1:{self.port}"
        line, _ = await self.members.create_token(Role.STAGE_SERVER, 60.0, uses, "", "admin me", address)
        return line

    async def join(self, line: JoinLine, name: str = "gpu-1", application: Application | None = None) -> Joined:
        return await asyncio.to_thread(join, line, name, application or Application(name))

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of a raw request."""

        def exchange() -> tuple[int, Any]:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=trusting_all())
            try:
                connection.request(method, path, body, headers or {})
                reply = connection.getresponse()
                return reply.status, json.loads(reply.read())
            finally:
                connection.close()

        return await asyncio.to_thread(exchange)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    database = await Database.open(database_url(tmp_path), None)
    members = Members(AUTHORITY, database, Clock(1_800_000_000.0))
    wallet = Wallet(SCHEDULER)
    door = Https(wallet, tmp_path / "https.pem")
    endpoint = JoinEndpoint(members, lambda: "10.0.0.5:7950", asyncio.get_running_loop(), door)
    try:
        yield Serving(members, endpoint, wallet, endpoint.start("127.0.0.1", 0))
    finally:
        await asyncio.to_thread(endpoint.close)
        await database.close()


async def test_whoever_has_a_token_becomes_a_member_and_shows_its_secret_to_nobody_else(
    served: Serving, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line, application = await served.token(), Application("gpu-1")
    with monkeypatch.context() as patch:
        patch.setattr(served.endpoint, "join", lambda *_: pytest.fail("it was asked"))
        with pytest.raises(WrongSwarm):
            await served.join(replace(line, pin=Authority.new(0.0).pin))
        served.wallet.identity = identity_of(AUTHORITY, Role.SCHEDULER, "scheduler", life_s=-1.0)
        with pytest.raises(WrongSwarm, match="expired"):
            await served.join(line)
        served.wallet.identity = SCHEDULER
        with pytest.raises(ClocksDiffer):
            await asyncio.to_thread(join, line, "gpu-1", Application("gpu-1"), lambda: time.time() - 7200.0)
    joined = await served.join(line, application=application)
    assert joined.scheduler == "10.0.0.5:7950"
    assert joined.identity.principal == Principal(AUTHORITY.cluster, Role.STAGE_SERVER, "gpu-1")
    again = await served.join(line, application=application)  # its answer may have been lost
    assert again.identity.key_pem == joined.identity.key_pem
    with pytest.raises(BadToken) as caught:
        await served.join(line, "gpu-2")
    said = "".join([*capfd.readouterr(), str(caught.value)])
    assert [secret for secret in (line.secret, secret_hash(line.secret)) if secret in said] == []
    assert line.id in said


async def test_guessing_is_slowed_down_and_a_good_join_forgives(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "JOIN_FAILURES_PER_S", 0.0)  # however long this takes
    line = await served.token(uses=3)
    wrong = replace(line, secret="a" * 26)
    await served.join(line, "gpu-1")
    for _ in range(2):
        with pytest.raises(BadToken):
            await served.join(wrong)
    await served.join(line, "gpu-2")  # forgiven
    for _ in range(JOIN_FAILURES_AT_ONCE + 1):
        with pytest.raises(BadToken):
            await served.join(wrong)
    with pytest.raises(RetryElsewhere, match="too many joins failed") as caught:
        await served.join(wrong, "gpu-3")
    assert caught.value.hint
    assert len(served.members.members()) == 2


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_stranger_closes_the_door_for_nobody_of_his_address(
    served: Serving, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Five failures of one machine, and for minutes nobody behind the same router joined, whatever token he had."""
    monkeypatch.setattr(endpoints, "JOIN_FAILURES_PER_S", 0.0)
    line = await served.token(uses=3)
    wrong = replace(line, secret="a" * 26) if is_known else replace(line, id="a" * len(line.id))
    for _ in range(JOIN_FAILURES_AT_ONCE + 1):
        with pytest.raises(BadToken):
            await served.join(wrong)
    with pytest.raises(RetryElsewhere):
        await served.join(wrong)
    for name in ("gpu-1", "gpu-2"):
        await served.join(line, name)
    other = await served.token()
    await served.join(other, "gpu-3")
    assert len(served.members.members()) == 3


async def test_who_comes_back_is_let_in_whatever_others_of_his_address_did_who_are_slowed_down(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "JOIN_FAILURES_PER_S", 0.0)
    joined = (await served.join(await served.token())).identity
    asked = {
        "certificate": joined.certificate_pem.decode(),
        "csr": Application("x", joined.key_pem).request_pem.decode(),
    }
    assert [(await served.ask("POST", "/v1/renew", b"{}"))[0] for _ in range(3)] == [403] * 3
    bad = json.dumps({"certificate": "x", "csr": "x"}).encode()
    stati = [(await served.ask("POST", "/v1/renew", bad))[0] for _ in range(JOIN_FAILURES_AT_ONCE + 2)]
    assert stati == [403] * (JOIN_FAILURES_AT_ONCE + 1) + [429]
    assert (await served.ask("POST", "/v1/renew", json.dumps(asked).encode()))[0] == 200


async def test_joins_that_wait_together_share_one_count_of_failures(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them brought a count of its own: of 32 at a time all were tried at first, and not five."""
    monkeypatch.setattr(endpoints, "JOIN_FAILURES_PER_S", 0.0)
    heard: list[Any] = []
    served.endpoint._heard = lambda *told: heard.append(told)
    together = asyncio.Event()

    async def waits() -> bytes:
        await together.wait()
        raise BadToken("it is unknown")

    asking = [
        asyncio.create_task(served.endpoint._answer(waits, "Join", "token a", "gpu-1", "10.0.0.5")) for _ in range(32)
    ]
    await asyncio.sleep(0)
    together.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(result) for result in results].count(BadToken) == JOIN_FAILURES_AT_ONCE + 1 == len(heard)
    assert [type(result) for result in results].count(RetryElsewhere) == 32 - len(heard)


BODIES = [
    b"",
    b"nonsense",
    b"\xff\xfe",
    b"3",
    b"null",
    b"[1, 2]",
    b'"text"',
    b"{}",
    b"[" * (JOIN_BODY_BYTES_MAX - 1),
    b'{"id":' * 2000,
    json.dumps(GOOD | {"secret": 3}).encode(),
    json.dumps(GOOD | {"name": None}).encode(),
    json.dumps(GOOD | {"csr": ["x"]}).encode(),
    json.dumps(GOOD | {"id": {"id": "x"}}).encode(),
    *(json.dumps(GOOD | {key: "\ud800"}).encode() for key in GOOD),
    json.dumps(GOOD | {"csr": "\x00" * 1000}).encode(),
    json.dumps(GOOD | {"csr": "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END"}).encode(),
]


async def test_a_body_that_is_no_join_is_refused_with_a_reason(served: Serving) -> None:
    """Half of a surrogate pair, which JSON can spell and UTF-8 cannot, ended the request without an answer."""
    for body in BODIES:
        status, answer = await served.ask("POST", "/v1/join", body)
        assert (status, answer["code"]) == (403, Refused.code), body[:80]
        assert set(answer) == {"code", "message", "hint"}
    await served.join(await served.token())


async def test_a_certificate_is_renewed_for_the_holder_of_its_key_alone(served: Serving) -> None:
    joined, other = (await served.join(await served.token())).identity, Application("gpu-1")
    csr = Application("gpu-1", joined.key_pem).request_pem
    stranger = identity_of(Authority.new(0.0), Role.STAGE_SERVER, "gpu-1")
    good = {"certificate": joined.certificate_pem.decode(), "csr": csr.decode()}
    refusals = (
        (good | {"csr": other.request_pem.decode()}, "E0500", "not signed with the key"),
        (good | {"certificate": stranger.certificate_pem.decode()}, "E0500", "not of this swarm"),
        (good | {"certificate": AUTHORITY.pem.decode()}, "E0500", "names nobody|not signed"),
        (good | {"certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END"}, Refused.code, "no certificate"),
        (good | {"csr": "x"}, Refused.code, "no request"),
        ({"csr": csr.decode()}, Refused.code, "JSON with certificate, csr"),
        (good | {"csr": 3}, Refused.code, "JSON with certificate, csr"),
    )
    for asked, code, words in refusals:
        served.endpoint._failures.clear()
        status, answer = await served.ask("POST", "/v1/renew", json.dumps(asked).encode())
        assert (status, answer["code"]) == (403, code), answer
        assert re.search(words, answer["message"]), answer
    status, answer = await served.ask("POST", "/v1/renew", json.dumps(good).encode())
    assert status == 200
    assert joined.principal == Identity(b"", answer["certificate"].encode(), b"").principal


async def test_a_body_of_an_odd_length_is_not_read(served: Serving) -> None:
    """A length that counts as digits and is no number ended the request without an answer."""
    for length in ("", "-1", "1e3", "²", "x", str(JOIN_BODY_BYTES_MAX + 1), "9" * 5000, "0x10", "1_0"):
        status, answer = await served.ask("POST", "/v1/join", None, {"Content-Length": length})
        assert (status, answer["code"]) == (400, Refused.code), length[:80]
    await served.join(await served.token())


async def test_a_page_of_another_site_joins_nothing_and_uses_up_no_try(served: Serving) -> None:
    """A page could fail for its visitor, five times, and then nobody of his address joined."""
    for said in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        for _ in range(JOIN_FAILURES_AT_ONCE + 2):
            status, answer = await served.ask("POST", "/v1/join", json.dumps(GOOD).encode(), said)
            assert (status, "another site" in answer["message"]) == (403, True)
    await served.join(await served.token())


async def test_there_is_nothing_else(served: Serving) -> None:
    for path in ("/", "/v1/join", "/v1/ca/../../etc/passwd"):
        status, answer = await served.ask("GET", path)
        assert (status, answer["code"]) == (404, Refused.code)
    assert (await served.ask("POST", "/v1/ca", b"{}"))[0] == 400
    assert await served.ask("GET", "/v1/ca") == (200, {"ca": AUTHORITY.pem.decode(), "proof": ""})


async def test_a_head_without_its_body_counts_as_silent(served: Serving) -> None:
    """31 of them took all the room that is for answers, and then each newcomer cut the one before in its handshake."""
    service = served.endpoint._listener._service  # type: ignore[union-attr]
    with ExitStack() as held:
        plaintext = held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        plaintext.sendall(b"GET /v1/ca HTTP/1.0\r\n\r\n")
        for _ in range(3):
            caller = socket.create_connection(("127.0.0.1", served.port))
            half = held.enter_context(await asyncio.to_thread(trusting_all().wrap_socket, caller))
            half.sendall(b"POST /v1/join HTTP/1.0\r\nContent-Length: 100\r\n\r\n{")
        status, _ = await served.ask("POST", "/v1/join", json.dumps(GOOD).encode())
        assert status == 403
        assert len(service.silent) == 3


async def test_a_busy_port_is_an_error_that_names_the_flag(served: Serving, tmp_path: Path) -> None:
    second = JoinEndpoint(served.members, str, asyncio.get_running_loop(), Https(served.wallet, tmp_path / "other"))
    with pytest.raises(InvalidConfig, match=f"127.0.0.1:{served.port}") as caught:
        second.start("127.0.0.1", served.port)
    assert "--join-listen" in caught.value.hint
    second.close()


@pytest.fixture
def few_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "CERTIFICATES_AT_ONCE", 2)
    monkeypatch.setattr(enrolment, "CERTIFICATES_PER_S", 0.001)


@pytest.mark.usefixtures("few_certificates")
async def test_who_asks_again_and_again_with_one_key_is_told_when_it_may(served: Serving) -> None:
    """An answer may have been lost, so the same key may ask again, and did so as often as it liked: each time for a
    row of the book, and for a line of the log that an admin's lines are in."""
    line, application = await served.token(), Application("gpu-1")
    joined = (await served.join(line, application=application)).identity
    for _ in range(2):
        await served.join(line, application=application)
    with pytest.raises(Crowded, match="stage-server gpu-1 has asked for 2 certificates") as caught:
        await served.join(line, application=application)
    assert re.fullmatch(r"try again in 1[56] min \d\d s", caught.value.hint)
    csr = Application("gpu-1", joined.key_pem).request_pem.decode()
    asked = json.dumps({"certificate": joined.certificate_pem.decode(), "csr": csr}).encode()
    status, answer = await served.ask("POST", "/v1/renew", asked)
    assert (status, answer["code"]) == (429, Crowded.code)
    await served.join(await served.token(), "gpu-2")
