"""The page is for whoever may list jobs, and of our files alone; its streams are few, calm, and drop a slow reader."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from scheduler.brain.members import places
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.web import pages as module
from scheduler.web.feed import Look
from scheduler.web.pages import Pages
from scheduler.web.site import MainLoop
from scheduler.web.snapshot import Json
from swarm.errors import NotAdmitted, Revoked
from swarm.pki.identity import Identity
from swarm.pki.names import Role
from swarm.process.callers import Logins
from swarm.rpc.members import vouched
from tests.support.members import SchedulerSide, scheduler_side
from tests.support.neighbours import ask_as
from tests.support.web import get, get_over_tls, serving, site_of

FILES = ("/", "/page.css", "/page.js")


class Shown:
    """A feed of one number that rises whenever somebody looks."""

    def __init__(self, padding: str = "") -> None:
        self.looks = 0
        self.padding = padding
        self.refusal: NotAdmitted | None = None
        self.person = ANYBODY

    async def enter(self, certificate: bytes | None) -> Person:
        if self.refusal is not None:
            raise self.refusal
        return self.person

    async def look(self, certificate: bytes | None, reference: str) -> Look:
        await self.enter(certificate)
        self.looks += 1
        state: Json = {"number": self.looks, "job": {"id": reference, "is": "the same"}}
        return Look(0.0, 1.0, 2.0, state | {f"more-{self.looks}": self.padding})


@contextmanager
def shown(feed: Shown, *, is_local: bool = True, logins: Logins | None = None) -> Iterator[int]:
    pages = Pages(MainLoop(asyncio.get_running_loop()), feed, is_local=is_local, logins=logins)
    with serving(site_of(pages=pages.routes())) as port:
        yield port


def listen(port: int, events: int, path: str = "/events?job=demo") -> list[tuple[str, Any]]:
    """The first events of a stream."""
    found: list[tuple[str, Any]] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    name = ""
    while len(found) < events and (line := answer.readline().decode()):
        if line.startswith("event: "):
            name = line.removeprefix("event: ").strip()
        elif line.startswith("data: "):
            found.append((name, json.loads(line.removeprefix("data: "))))
    connection.close()
    return found


async def test_the_files_of_the_page_come_with_a_policy_that_lets_nothing_else_in() -> None:
    def ask(port: int, path: str) -> tuple[int, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}

    with shown(Shown()) as port:
        for path in FILES:
            status, headers = await asyncio.to_thread(ask, port, path)
            assert status == 200
            policy = headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"


def test_the_page_names_nothing_from_elsewhere_and_writes_no_markup() -> None:
    folder = resources.files("scheduler.web") / "page"
    html, style, script = ((folder / name).read_text() for name in ("index.html", "page.css", "page.js"))
    assert re.findall(r"""(?:src|href)="([^"#]+)""", html) == ["/page.css", "/page.js"]
    assert re.findall(r"""\s(?:style|on\w+)=|<style|<script>""", html) == []
    assert re.findall(r"url\(|@import", style) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html + style + script) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script) == []


async def test_on_loopback_a_name_that_may_be_somebody_elses_opens_nothing() -> None:
    """A page of another site could give its name this machine's address, and read all that a browser is told."""
    with shown(Shown()) as port:
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "::"):
            for path in (*FILES, "/events"):
                assert (await asyncio.to_thread(get, port, path, "GET", host))[0] == 403, (host, path)
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert (await asyncio.to_thread(get, port, "/", "GET", host))[0] == 200, host
    with shown(Shown(), is_local=False) as port:
        assert (await asyncio.to_thread(get, port, "/", "GET", "scheduler.lan"))[0] == 200


async def test_on_loopback_another_login_opens_neither_the_page_nor_its_stream() -> None:
    """ "Local" was taken for "mine": every login of the machine saw all jobs."""
    with shown(Shown()) as port:
        for path in (*FILES, "/events", "/events?job=demo"):
            status, text = await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", path)
            assert (status, "login nobody may not look" in text) == (403, True), path
        assert (await asyncio.to_thread(get, port, "/"))[0] == 200
    with shown(Shown(), logins=Logins.named(["nobody"])) as port:
        assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/events"))[0] == 200


async def test_a_page_of_another_site_opens_no_stream_and_may_link_to_the_page() -> None:
    """Any page that a person visited opened streams at his scheduler, until there was no place left."""
    for is_local in (True, False):
        with shown(Shown(), is_local=is_local) as port:
            for said in (
                "Sec-Fetch-Site: cross-site",
                "Sec-Fetch-Site: same-site",
                "Origin: https://evil.example",
                "Origin: null",
            ):
                assert await asyncio.to_thread(_status, port, said=said) == 403, said
            assert await asyncio.to_thread(_status, port, said="Sec-Fetch-Site: same-origin") == 200
            assert (await asyncio.to_thread(get, port, "/", headers={"Sec-Fetch-Site": "cross-site"}))[0] == 200


async def test_one_visitor_leaves_streams_to_the_others_with_a_name_or_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback and with --insecure nobody has a name, and one program took the places of all; a viewer did too."""
    monkeypatch.setattr(module, "STREAMS_OF_ONE_MAX", 1)
    feed = Shown()
    feed.person = Person(Role.VIEWER, "eve")
    with shown(feed) as port:
        line = await asyncio.to_thread(open_stream, port)
        assert await asyncio.to_thread(_status, port) == 503
        feed.person = Person(Role.VIEWER, "ann")
        assert await asyncio.to_thread(_status, port) == 200
        line.close()
    with shown(Shown(), logins=Logins.named(["*"])) as port:
        line = await asyncio.to_thread(open_stream, port)
        assert await asyncio.to_thread(_status, port) == 503
        assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/events"))[0] == 200
        line.close()
    with shown(Shown(), is_local=False) as port:
        line = await asyncio.to_thread(open_stream, port)
        assert await asyncio.to_thread(_status, port) == 503
        assert await asyncio.to_thread(_status, port, "127.0.0.9") == 200
        line.close()


async def test_a_stream_says_everything_once_and_then_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_S_MIN", 0.05)
    with shown(Shown()) as port:
        first, second, _ = await asyncio.to_thread(listen, port, 3)
    state = {"number": 1, "job": {"id": "demo", "is": "the same"}, "more-1": ""}
    assert first == ("all", {"now_unix_s": 1.0, "clock_s": 2.0, "state": state})
    changes = {"number": 2, "more-1": None, "more-2": ""}
    assert second == ("change", {"now_unix_s": 1.0, "clock_s": 2.0, "state": changes})


async def test_a_stream_says_at_most_two_things_a_second() -> None:
    with shown(Shown()) as port:
        began_s = time.monotonic()
        await asyncio.to_thread(listen, port, 4)
        assert time.monotonic() - began_s >= 3 * 0.5


async def test_streams_are_few_and_one_that_ended_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_S_MIN", 0.05)
    monkeypatch.setattr(module, "STREAMS_MAX", 2)

    with shown(Shown()) as port:
        one, other = [await asyncio.to_thread(open_stream, port) for _ in range(2)]
        assert await asyncio.to_thread(_status, port) == 503
        told = await asyncio.to_thread(get, port, "/events")
        assert told == (503, "2 streams show this page already: try again in a moment\n")
        assert (await asyncio.to_thread(get, port, "/"))[0] == 200
        one.close()
        deadline_s = time.monotonic() + 60
        while await asyncio.to_thread(_status, port) == 503:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)
        other.close()


async def test_the_stream_of_who_has_most_ends_for_a_visitor_who_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four viewers opened eight pages each, and nobody else was shown any."""
    monkeypatch.setattr(module, "TELL_S_MIN", 0.05)
    monkeypatch.setattr(module, "STREAMS_MAX", 2)
    monkeypatch.setattr(places, "PLACE_WAIT_S", 0.3)
    feed = Shown()
    feed.person = Person(Role.VIEWER, "eve")
    with shown(feed) as port:
        lines = [await asyncio.to_thread(open_stream, port) for _ in range(2)]
        feed.person = Person(Role.VIEWER, "ann")
        began_s = time.monotonic()
        while await asyncio.to_thread(_status, port) == 503:
            assert time.monotonic() < began_s + 60.0
            await asyncio.sleep(0.05)
        assert time.monotonic() >= began_s + 0.3
        ended = [await asyncio.to_thread(_comes_to_its_end, line) for line in lines]
        assert ended == [True, False], "the older one"
        for line in lines:
            line.close()


def _comes_to_its_end(line: socket.socket) -> bool:
    """Whether the other side ends the stream within a second."""
    line.settimeout(1.0)
    ends_s = time.monotonic() + 1.0
    while time.monotonic() < ends_s:
        try:
            content = line.recv(1 << 16)
        except TimeoutError:
            return False
        if not content or content.endswith(b"0\r\n\r\n"):
            return True
    return False


def open_stream(port: int) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), timeout=10)
    line.sendall(f"GET /events HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
    assert line.recv(12) == b"HTTP/1.1 200"
    return line


def _status(port: int, source: str = "127.0.0.1", said: str = "X: y") -> int:
    """The status of a stream that is left again."""
    with socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0)) as line:
        line.sendall(f"GET /events HTTP/1.1\r\nHost: localhost:{port}\r\n{said}\r\n\r\n".encode())
        return int(line.recv(12).split()[1])


async def test_a_reader_that_takes_nothing_is_dropped_and_nothing_is_queued_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TELL_S_MIN", 0.01)
    monkeypatch.setattr(module, "SLOW_S_MAX", 0.3)
    monkeypatch.setattr(module, "STREAMS_MAX", 1)
    feed = Shown("x" * 1_000_000)
    with shown(feed) as port, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", port))
        line.sendall(f"GET /events HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
        while not feed.looks:
            await asyncio.sleep(0.01)
        deadline_s = time.monotonic() + 60
        while await asyncio.to_thread(_status, port) == 503:
            assert time.monotonic() < deadline_s, "it keeps its place"
            await asyncio.sleep(0.05)
        assert feed.looks < 40, "they fill the buffers of the socket and end there"


async def test_a_stream_ends_with_the_reason_once_its_visitor_may_look_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TELL_S_MIN", 0.05)
    feed = Shown()
    with shown(feed) as port:
        listening = asyncio.to_thread(listen, port, 10**6)
        task = asyncio.create_task(listening)
        while feed.looks < 2:
            await asyncio.sleep(0.01)
        feed.refusal = Revoked("viewer ann was revoked", hint="ask an admin")
        events = await task
        assert events[-1] == ("refused", {"message": "viewer ann was revoked", "hint": "ask an admin"})
        assert await asyncio.to_thread(get, port, "/") == (403, "viewer ann was revoked\nask an admin\n")


async def test_a_stream_ends_with_the_listener() -> None:
    feed = Shown()
    with shown(feed) as port:
        listening = asyncio.create_task(asyncio.to_thread(listen, port, 10**6))
        while feed.looks < 2:  # what the first one saw has left by then
            await asyncio.sleep(0.01)
    assert (await asyncio.wait_for(listening, 60.0))[0][0] == "all"


# Off loopback --------------------------------------------------------------------------------------------------------


class OfPeople(Shown):
    """A feed behind the book of members."""

    def __init__(self, side: SchedulerSide) -> None:
        super().__init__()
        self._side = side

    async def enter(self, certificate: bytes | None) -> Person:
        return self._side.admission.visitor(certificate)


@asynccontextmanager
async def off_loopback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[SchedulerSide, int]]:
    monkeypatch.setenv("SWARM_PROFILES", str(folder / "profiles"))
    folder.mkdir(exist_ok=True)
    async with scheduler_side(folder / "data") as side:
        door = side.admission.https
        pages = Pages(MainLoop(asyncio.get_running_loop()), OfPeople(side), is_local=False)
        site = site_of(door=door, pages=pages.routes(), check_member=side.admission.scraper)
        with serving(site, door) as port:
            yield side, port


async def member(side: SchedulerSide, role: Role) -> Identity:
    return await asyncio.to_thread(vouched, side.address, side.admin, role, "ann", 10.0)


async def opened(side: SchedulerSide, port: int, path: str, caller: Identity | None, folder: Path) -> tuple[int, str]:
    server = side.admission.wallet.identity
    assert server is not None
    return await asyncio.to_thread(get_over_tls, port, path, server, caller, folder)


async def test_off_loopback_the_page_is_for_people_of_the_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with off_loopback(tmp_path, monkeypatch) as (side, port):
        for role in (Role.VIEWER, Role.SUBMITTER, Role.ADMIN):
            ann = await member(side, role)
            for path in FILES:
                assert (await opened(side, port, path, ann, tmp_path))[0] == 200, (role, path)
        for caller in (None, await member(side, Role.STAGE_SERVER), await member(side, Role.METRICS)):
            for path in (*FILES, "/events"):
                status, told = await opened(side, port, path, caller, tmp_path)
                assert status == 403, (caller and caller.principal, path)
        assert "your role metrics does not allow List" in told
    side.admission._trail.flush()
    denied = [line for line in (tmp_path / "data/audit.jsonl").read_text().splitlines() if '"Page"' in line]
    assert len(denied) == 12


@pytest.mark.parametrize("path", ["/metrics", "/sd"])
async def test_whoever_is_revoked_reads_no_metrics_and_opens_no_page_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The role in a certificate opened them until it ended, up to a day after its holder was revoked."""
    async with off_loopback(tmp_path, monkeypatch) as (side, port):
        prometheus, ann = await member(side, Role.METRICS), await member(side, Role.VIEWER)
        own = Identity.load(tmp_path / "data/pki/metrics")
        for scraper in (prometheus, own):
            assert (await opened(side, port, path, scraper, tmp_path))[0] == 200
        for name, who, asked in (("metrics/ann", prometheus, path), ("viewer/ann", ann, "/")):
            await side.members.revoke(name, "left")
            status, told = await opened(side, port, asked, who, tmp_path)
            assert (status, "was revoked: left" in told) == (403, True)
        assert (await opened(side, port, path, own, tmp_path))[0] == 200, "of this machine, and in no book"


async def test_a_certificate_of_another_swarm_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with off_loopback(tmp_path / "theirs", monkeypatch) as (theirs, _):
        stranger = await member(theirs, Role.ADMIN)
    async with off_loopback(tmp_path / "ours", monkeypatch) as (side, port):
        server = side.admission.wallet.identity
        assert server is not None
        stranger = Identity(stranger.key_pem, stranger.certificate_pem, server.ca_pem)
        with pytest.raises((OSError, ssl.SSLError)):
            await opened(side, port, "/", stranger, tmp_path)
