"""A port of this machine is for some of its logins, and never for a page of another site."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Thread

import pytest

from swarm.errors import InvalidConfig
from swarm.process import callers as module
from swarm.process.callers import Callers, Logins, SocketAddress, login_of
from tests.support.neighbours import NOBODY, run_as

ME = os.geteuid()


class NoDiag:
    """A kernel that answers no questions about one connection."""

    answers = False

    def look(self, *_: object) -> None:
        return None


@pytest.fixture(params=["asked", "tables"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to ask it."""
    if request.param == "tables":
        monkeypatch.setattr(module, "_DIAG", NoDiag())
    else:
        monkeypatch.setattr(module, "_DIAG", module._Diag())


Ends = tuple[SocketAddress, SocketAddress]


@contextmanager
def taken(family: socket.AddressFamily, host: str, dialled: str = "") -> Iterator[tuple[socket.socket, Ends]]:
    """The near end of a connection that this process dialled to itself, and both addresses as the port sees them."""
    with socket.socket(family) as port:
        port.bind((host, 0))
        port.listen()
        with socket.create_connection((dialled or host, port.getsockname()[1])) as line:
            answering, caller = port.accept()
            with answering:
                yield line, (caller, answering.getsockname())


@pytest.mark.usefixtures("kernel")
def test_the_kernel_says_whose_a_connection_is_each_time() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.7")):
        with taken(family, host) as (_, ends):
            assert login_of(*ends) == ME, host
    with socket.create_server(("127.0.0.1", 0), backlog=256) as port, ExitStack() as lines:
        for _ in range(200):
            lines.enter_context(socket.create_connection(port.getsockname()))
        for _ in range(200):
            answering, caller = port.accept()
            with closing(answering):
                assert login_of(caller, answering.getsockname()) == ME


@pytest.mark.usefixtures("kernel")
def test_an_end_that_is_not_held_here_is_nobodys_and_not_roots() -> None:
    """The kernel gives the user id 0 for an end that no process holds: whoever hung up at once was taken for root."""
    with taken(socket.AF_INET, "127.0.0.1") as (line, (caller, here)):
        odd: list[SocketAddress] = [here, ("192.0.2.1", 7), (), ("no address", 7)]
        for ends in (*((address, here) for address in odd), (caller, ("127.0.0.1", 1)), ((), ())):
            assert login_of(*ends) is None, ends
        line.close()
        assert login_of(caller, here) is None
        assert "not known" in Logins().fault(caller, here)


@pytest.mark.usefixtures("kernel")
def test_an_address_of_version_4_is_known_in_a_socket_of_version_6() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_INET6) as line:
        line.connect(("::ffff:127.0.0.1", port.getsockname()[1]))
        answering, caller = port.accept()
        with answering:
            assert login_of(caller, answering.getsockname()) == ME
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as port:
        with socket.create_connection(("127.0.0.1", port.getsockname()[1])):
            answering, caller = port.accept()
            with answering:
                assert caller[0] == "::ffff:127.0.0.1"
                assert login_of(caller, answering.getsockname()) == ME


@pytest.mark.usefixtures("kernel")
def test_another_login_is_told_from_ours_however_much_of_its_end_it_closes() -> None:
    dials = """
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
if sys.argv[2]:
    line.shutdown(socket.SHUT_WR)
print("dialled", flush=True)
line.recv(1)
"""
    for half_closed in ("", "half"):
        with socket.create_server(("127.0.0.1", 0)) as port:
            port.settimeout(60)
            with dialling(dials, str(port.getsockname()[1]), half_closed):
                answering, caller = port.accept()
                with answering:
                    if half_closed:
                        assert answering.recv(1) == b""
                    assert login_of(caller, answering.getsockname()) == NOBODY


def fault_of(login: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "login_of", lambda *_: login)
        return Logins(own=1000).fault((), ())


@contextmanager
def dialling(script: str, *arguments: str) -> Iterator[None]:
    """Another login's program at work beside the block."""
    beside = Thread(target=run_as, args=(script, *arguments))
    beside.start()
    try:
        yield
    finally:
        beside.join()


def test_the_tables_are_not_read_where_the_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes 10 ms and more, so callers that hang up would hold the page up."""
    monkeypatch.setattr(module, "_DIAG", module._Diag())
    monkeypatch.setattr(module, "_in_tables", lambda *_: pytest.fail("they were read"))
    with taken(socket.AF_INET, "127.0.0.1") as (line, ends):
        assert login_of(*ends) == ME
        line.close()
        assert login_of(*ends) is None
        assert login_of(("127.0.0.1", 1), ends[1]) is None


def test_where_the_kernel_has_no_list_only_everybody_may_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_DIAG", NoDiag())
    monkeypatch.setattr(module, "_TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    with taken(socket.AF_INET, "127.0.0.1") as (_, ends):
        assert "--http-user '*'" in Logins().fault(*ends)
        assert Logins.named(["*"]).fault(*ends) == ""


def test_own_login_root_and_those_that_were_named_may_look_and_a_refusal_names_the_flag() -> None:
    allowed = {login for login in (0, 7, 1000, 1001, NOBODY) if not fault_of(login)}
    assert allowed == {0, 1000}
    named = Logins.named(["nobody", "0", "4711"])
    assert (named.others, named.everybody, named.own) == ({NOBODY, 0, 4711}, False, ME)
    assert f"--http-user '{pwd.getpwuid(NOBODY).pw_name}'" in fault_of(NOBODY)
    assert "login 4294967294 may not look" in fault_of(4294967294)
    for name in ("no-such-login", "", "-1", "1 2", "٣", "\0"):
        with pytest.raises(InvalidConfig, match="--http-user"):
            Logins.named([name])


HERE = {"host": "localhost:9464"}


@pytest.mark.parametrize(
    ("said", "may"),
    [
        ({}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost:9464"}, True),
        ({"origin": "http://LOCALHOST:9464"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),  # another port of this machine
        ({"sec-fetch-site": " Cross-Site "}, False),
        ({"sec-fetch-site": ""}, False),
        ({"sec-fetch-site": "anything new"}, False),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "http://localhost:9465"}, False),
        ({"origin": "http://localhost"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"sec-fetch-site": "same-origin", "origin": "http://evil.example"}, False),
        ({"host": "evil.example:9464"}, False),
        ({"host": "evil.example:9464", "origin": "http://evil.example:9464"}, False),
        ({"host": "127.0.0.1.evil.example"}, False),
    ],
)
def test_no_page_of_another_site_is_answered(said: dict[str, str], may: bool) -> None:
    headers, callers = HERE | said, Callers(is_local=True)
    assert bool(callers.site_fault(headers.get) or callers.name_fault(headers.get)) is not may


def test_off_loopback_the_certificate_decides_and_not_the_name_or_the_login() -> None:
    callers = Callers(is_local=False)
    assert callers.fault({"host": "scheduler.lan:9464"}.get, ("192.0.2.1", 7), ("192.0.2.2", 9464)) == ""
    assert callers.fault({"host": "scheduler.lan", "sec-fetch-site": "cross-site"}.get, (), ()) != ""
