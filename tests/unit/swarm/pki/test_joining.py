"""Joining: whoever stands in between, or answers nonsense, learns no secret and gets no member."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import BadToken, ClocksDiffer, NotAdmitted, RetryElsewhere, SchedulerUnreachable, WrongSwarm
from swarm.pki import keys
from swarm.pki.authority import CLOCK_SLACK_S, Authority
from swarm.pki.https import Https
from swarm.pki.identity import Application, Identity, Wallet
from swarm.pki.joining import ANSWER_BYTES_MAX, join
from swarm.pki.names import Principal, Role
from swarm.pki.tokens import JoinLine, new_line
from swarm.text import utc
from tests.support.members import identity_of

OURS, THEIRS = Authority.new(1_700_000_000.0), Authority.new(1_700_000_000.0)
Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


@dataclass
class Fake:
    """Answers as the test says, and keeps all that it was sent."""

    ca: bytes
    answer: Answer = lambda asked: (200, b"{}")
    ca_answer: bytes | None = None
    heard: list[bytes] = field(default_factory=list)


@contextmanager
def answering(fake: Fake, shown: Identity, folder: Path) -> Iterator[str]:
    """The fake behind HTTPS with this certificate; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.heard.append(str(self.headers).encode())
            self._reply(200, fake.ca_answer or json.dumps({"ca": fake.ca.decode()}).encode())

        def do_POST(self) -> None:
            fake.heard.append(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(*fake.answer(json.loads(fake.heard[-1])))

        def _reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = Https(Wallet(shown), folder / "https.pem").context()
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def scheduler_of(authority: Authority) -> Identity:
    return identity_of(authority, Role.SCHEDULER, "scheduler")


def granting(role: Role = Role.STAGE_SERVER) -> Answer:
    """Whoever asks becomes a member of our swarm."""

    def answer(asked: dict[str, Any]) -> tuple[int, bytes]:
        key = keys.requested_key(asked["csr"].encode())
        principal = Principal(OURS.cluster, role, asked["name"])
        pem = OURS.certify(key, principal, 1_700_000_000.0).decode()
        return 200, json.dumps({"certificate": pem, "ca": OURS.pem.decode(), "scheduler": "10.0.0.5:7950"}).encode()

    return answer


def joining(line: JoinLine) -> Any:
    return join(line, "gpu-3", Application("gpu-3"))


def test_a_join_sends_the_secret_once_and_gives_a_member(tmp_path: Path) -> None:
    fake = Fake(OURS.pem, answer=granting())
    with answering(fake, scheduler_of(OURS), tmp_path) as address:
        line = new_line(address, OURS.pin)
        joined = joining(line)
    assert joined.scheduler == "10.0.0.5:7950"
    assert joined.identity.principal == Principal(OURS.cluster, Role.STAGE_SERVER, "gpu-3")
    assert joined.identity.ca_pem == OURS.pem
    assert [line.secret.encode() in heard for heard in fake.heard] == [False, True]
    assert b"PRIVATE KEY" not in b"".join(fake.heard)


@pytest.mark.parametrize(
    ("ca", "shown"),
    [
        (THEIRS.pem, scheduler_of(THEIRS)),
        (b"nonsense", scheduler_of(THEIRS)),
        ("\ud800ß".encode(errors="surrogatepass").decode(errors="replace").encode(), scheduler_of(THEIRS)),
        (OURS.pem, scheduler_of(THEIRS)),
        (OURS.pem + THEIRS.pem, scheduler_of(THEIRS)),
        (OURS.pem, identity_of(OURS, Role.STAGE_SERVER, "scheduler")),
        (OURS.pem, identity_of(OURS, Role.ADMIN, "scheduler")),
        (OURS.pem, identity_of(OURS, Role.SCHEDULER, "scheduler", life_s=-1.0)),
    ],
    ids=[
        *("another authority", "no certificate", "not ASCII", "our authority shown by others"),
        *("theirs beside ours", "a stage server of ours", "an admin of ours", "an ended certificate"),
    ],
)
def test_somebody_else_at_the_address_does_not_get_the_secret(tmp_path: Path, ca: bytes, shown: Identity) -> None:
    """TLS trusted all certificates of the first answer, and only the key of the first one was compared.

    Whoever sent ours and then his own was taken for us, and was told the secret.
    """
    shows = [shown]
    if shown.principal.cluster == THEIRS.cluster:  # his certificate may say what we want to hear
        alias = Principal(OURS.cluster, Role.SCHEDULER, "scheduler")
        key = keys.read_key(shown.key_pem)
        named = THEIRS.certify(key.public_key(), alias, 1_700_000_000.0, life_s=1e9)
        shows.append(Identity(shown.key_pem, named, THEIRS.pem))
    for identity in shows:
        fake = Fake(ca, answer=granting())
        with answering(fake, identity, tmp_path) as address:
            line = new_line(address, OURS.pin)
            with pytest.raises(WrongSwarm) as caught:
                joining(line)
        assert "the secret was not sent" in caught.value.hint
        assert len(fake.heard) == 1
        assert not any(line.secret.encode() in heard or line.id.encode() in heard for heard in fake.heard)


@pytest.mark.parametrize("ahead_s", [-2.5 * CLOCK_SLACK_S, 2.5 * CLOCK_SLACK_S])
def test_clocks_that_differ_are_named_before_the_secret_is_sent(tmp_path: Path, ahead_s: float) -> None:
    """A joiner whose clock was wrong was told that somebody might stand in between."""
    fake = Fake(OURS.pem, answer=granting())
    now = time.time()
    with answering(fake, scheduler_of(OURS), tmp_path) as address, pytest.raises(ClocksDiffer) as caught:
        join(new_line(address, OURS.pin), "gpu-3", Application("gpu-3"), lambda: now + ahead_s)
    assert f"here it is {utc(now + ahead_s)}, at {address} {utc(now)[:15]}" in caught.value.message
    assert "clocks differ by 2 h" in caught.value.message
    assert len(fake.heard) == 1


def test_nobody_at_the_address_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with answering(Fake(OURS.pem), scheduler_of(OURS), tmp_path) as address:
        pass
    with pytest.raises(SchedulerUnreachable, match="nobody takes joins at") as caught:
        joining(new_line(address, OURS.pin))
    assert "--join-listen" in caught.value.hint


UNREADABLE = {
    "nothing": b"",
    "not text": b"\xff",
    "a number": b"3",
    "a list": b"[]",
    "empty": b"{}",
    "wrong types": b'{"certificate": 3}',
    "cut": b'{"certificate": "x"',
    "deep": b"[" * 60_000,
    "long": b" " * ANSWER_BYTES_MAX + b"{}",
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("call", ["first", "second"])
def test_an_answer_that_cannot_be_read_is_an_error_for_people(tmp_path: Path, call: str, what: str) -> None:
    content = UNREADABLE[what]
    fake = Fake(OURS.pem, answer=lambda asked: (200, content), ca_answer=content or b" " if call == "first" else None)
    with answering(fake, scheduler_of(OURS), tmp_path) as address, pytest.raises(SchedulerUnreachable):
        joining(new_line(address, OURS.pin))


@pytest.mark.parametrize(
    ("code", "kind"),
    [("E0501", BadToken), ("E1100", RetryElsewhere), ("E9999", NotAdmitted), (["E0501"], NotAdmitted)],
)
def test_an_error_of_the_scheduler_keeps_its_class_text_and_hint(
    tmp_path: Path, code: object, kind: type[Exception]
) -> None:
    answer = {"code": code, "message": "used", "hint": "ask again"}
    fake = Fake(OURS.pem, answer=lambda asked: (403, json.dumps(answer).encode()))
    with answering(fake, scheduler_of(OURS), tmp_path) as address, pytest.raises(kind) as caught:
        joining(new_line(address, OURS.pin))
    assert type(caught.value) is kind
    assert str(caught.value) == "used (ask again)"


def test_nobody_joins_as_the_scheduler(tmp_path: Path) -> None:
    with answering(Fake(OURS.pem, answer=granting(Role.SCHEDULER)), scheduler_of(OURS), tmp_path) as address:
        with pytest.raises(NotAdmitted, match="not for a member"):
            joining(new_line(address, OURS.pin))
