"""The bus over the broker that a scheduler starts; tests/real has Mosquitto."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiomqtt
import psutil
import pytest
import trustme

from scheduler.api.announcer import BusAnnouncer
from scheduler.app import SchedulerOptions, serve
from swarm.errors import IncompatibleVersion, InvalidConfig, NotAllowed, SchedulerUnreachable
from swarm.mqtt import presence, topics
from swarm.mqtt.broker import local_broker
from swarm.mqtt.bus import Bus
from swarm.mqtt.discovery import Announcement, find_scheduler
from swarm.mqtt.endpoint import parse_url
from swarm.mqtt.key import FOLDERS, USER, key_of
from swarm.mqtt.presence import Presence
from swarm.types import PROTOCOL_VERSION, JobId
from tests.support.neighbours import run_as

PEER = topics.peer("p1")
PEERS, JOBS = "swarm/v1/default/peers/+", "swarm/v1/default/jobs/+"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with local_broker() as url:
        yield url


@asynccontextmanager
async def _linked(url: str, name: str, **options: Any) -> AsyncIterator[Bus]:
    """A bus at work; the link is there when the block begins."""
    up = asyncio.Event()
    bus = Bus(url, name, on_connected=lambda connected: up.set() if connected else up.clear(), **options)
    running = asyncio.create_task(bus.run())
    try:
        async with asyncio.timeout(60):
            await up.wait()
            yield bus
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _port(url: str) -> int:
    return parse_url(url).port


def _brokers() -> list[psutil.Process]:
    """Brokers that this process started and that live."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile, or nobody waited for it yet
            if "swarm.mqtt.broker" in child.cmdline():
                found.append(child)
    return found


@pytest.fixture(autouse=True)
def _no_broker_is_left_behind() -> Iterator[None]:
    yield
    assert _brokers() == []


# The broker ----------------------------------------------------------------------------------------------------------


async def test_the_broker_listens_on_loopback_only_and_ends_with_its_block() -> None:
    async with local_broker() as url:
        (broker,) = _brokers()
        listening = {
            connection.laddr for connection in broker.net_connections() if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {("127.0.0.1", _port(url))}
    assert _brokers() == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", _port(url)), timeout=5).close()


async def test_a_busy_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        with pytest.raises(InvalidConfig, match="did not start"):
            async with local_broker(holder.getsockname()[1]):
                pass


def test_the_broker_does_not_outlive_a_killed_parent() -> None:
    script = textwrap.dedent("""
        import asyncio
        from swarm.process import logs
        from swarm.mqtt.broker import local_broker
        logs.configure("error")
        async def main():
            async with local_broker() as url:
                print(url, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline().startswith("mqtt://")
            children = psutil.Process(parent.pid).children(recursive=True)
            assert children
        finally:
            parent.kill()
    _, left = psutil.wait_procs(children, timeout=60)
    assert not left


async def test_a_broker_that_died_comes_back_at_its_port_and_its_clients_with_it() -> None:
    async with local_broker() as url, _linked(url, "announcer") as announcer, _linked(url, "reader") as reader:
        for number in range(2):
            announcer.announce(PEER, {"n": number})
        messages = reader.subscribe(PEERS)
        while (await anext(messages))[1] != {"n": 1}:
            pass
        (child,) = _brokers()
        child.send_signal(signal.SIGKILL)
        announcer.announce(topics.scheduler(), {"said": "while away"})
        announcer.announce(PEER, {"n": 2})
        assert await anext(messages) == (PEER, {"n": 2})
        late = reader.subscribe(topics.scheduler())
        assert await anext(late) == (topics.scheduler(), {"said": "while away"})


# Whose it is ---------------------------------------------------------------------------------------------------------

# Says who it is, asks for everything, and plants a retained message, without waiting for an answer.
_STRANGER = """
def text(value):
    return len(value).to_bytes(2, "big") + value

def packet(kind, rest):
    return bytes([kind, len(rest)]) + rest

port, topic, user, password = sys.argv[1:]
who = (text(user.encode()) + text(password.encode())) if user else b""
with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as line:
    line.settimeout(3)
    heard = b""
    try:
        flags = b"\\x04" + (b"\\xc2" if user else b"\\x02")
        line.sendall(packet(0x10, text(b"MQTT") + flags + b"\\0\\x05" + text(b"x") + who))
        line.sendall(packet(0x82, b"\\0\\x07" + text(b"#") + b"\\0"))
        line.sendall(packet(0x31, text(topic.encode()) + b'{"planted":1}'))
        while more := line.recv(65536):
            heard += more
    except OSError:
        pass
print(heard.hex())
"""


@pytest.mark.parametrize(
    ("user", "password"), [("", ""), (USER, "wrong"), (USER, ""), ("root", "root"), (USER, "None")]
)
async def test_another_login_neither_reads_nor_plants_a_message(url: str, user: str, password: str) -> None:
    """Every login of the machine could write what the scheduler announces, and read which jobs run."""
    port = str(_port(url))
    async with _linked(url, "announcer") as announcer, _linked(url, "reader") as reader:
        announcer.announce(PEER, {"secret": 1})
        messages = reader.subscribe("swarm/v1/#")
        assert await anext(messages) == (PEER, {"secret": 1})
        said = await asyncio.to_thread(run_as, _STRANGER, port, topics.scheduler(), user, password)
        heard = bytes.fromhex(said.strip())
        assert b"secret" not in heard
        assert heard[:4] != b"\x20\x02\x00\x00", "it was let in"
        announcer.announce(PEER, {"secret": 2})
        assert await anext(messages) == (PEER, {"secret": 2})
        async with _linked(url, "late") as late:
            assert await anext(late.subscribe("swarm/v1/#")) == (PEER, {"secret": 2}), "nothing is retained beside it"


async def test_another_login_cannot_read_the_key(url: str) -> None:
    key = key_of(parse_url(url))
    assert key is not None
    (folder,) = [path.parent for path in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*/{_port(url)}")]
    tries = """
found = []
for path in (sys.argv[1], sys.argv[1] + "/" + sys.argv[2]):
    try:
        os.listdir(path) if path == sys.argv[1] else open(path).read()
        found.append(path)
    except PermissionError:
        pass
print(found)
"""
    assert await asyncio.to_thread(run_as, tries, str(folder), str(_port(url))) == "[]\n"
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        assert key not in " ".join([*process.cmdline(), *process.environ().values()]), "others see command lines"


async def test_connections_of_others_leave_no_lines_on_the_disk(tmp_path: Path) -> None:
    """Each connection of any login of the machine left two lines in a file that nothing bounds."""
    log = tmp_path / "broker.log"
    async with local_broker(log=log) as url, _linked(url, "owner"):
        before = log.stat().st_size
        for number in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(url))
            if number % 2:  # the others say nothing
                writer.write(b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x05\x00\x01x")
                await reader.read()
            writer.close()
            await writer.wait_closed()
        async with _linked(url, "owner again"):  # what was said of the others has been written by now
            pass
        assert log.stat().st_size - before < 1000


async def test_the_key_of_a_broker_that_came_back_is_another_one() -> None:
    """Whoever listened at its port meanwhile has heard the one of before."""
    async with local_broker() as url, _linked(url, "any") as bus:
        first = key_of(parse_url(url))
        (child,) = _brokers()
        child.send_signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            while key_of(parse_url(url)) == first or not bus.connected:
                await asyncio.sleep(0.02)
    assert key_of(parse_url(url)) is None


# The bus -------------------------------------------------------------------------------------------------------------


async def test_what_is_cleared_is_gone_for_late_readers_and_not_repeated(url: str) -> None:
    async with _linked(url, "announcer") as announcer, _linked(url, "reader") as reader:
        hears = reader.subscribe(JOBS)
        jobs = BusAnnouncer(announcer, topics.DEFAULT_SWARM)
        for name in ("j1", "j2"):
            announcer.announce(topics.job(name), {"name": name})
        assert [(await anext(hears))[1] for _ in range(2)] == [{"name": "j1"}, {"name": "j2"}]
        jobs.job_removed(JobId("j1"))
        assert await anext(hears) == (topics.job("j1"), {})
        async with _linked(url, "late") as late:
            assert await anext(late.subscribe(JOBS)) == (topics.job("j2"), {"name": "j2"})
        assert list(announcer._announced) == [topics.job("j2")]


async def test_the_will_speaks_for_a_client_that_was_killed_or_stopped(url: str) -> None:
    will = (PEER, {"state": "gone"})
    async with _linked(url, "reader") as reader:
        messages = reader.subscribe(PEERS)
        async with _linked(url, "stopped", will=will) as stopped:
            stopped.announce(PEER, {"state": "here"})
            assert await anext(messages) == (PEER, {"state": "here"})
        assert await anext(messages) == (PEER, {"state": "gone"})

        script = textwrap.dedent(f"""
            import asyncio
            from swarm.mqtt.bus import Bus
            async def main():
                bus = Bus("{url}", "killed", will=("{PEER}", {{"state": "gone"}}))
                bus.announce("{PEER}", {{"state": "here"}})
                await bus.run()
            asyncio.run(main())
        """)
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        assert await anext(messages) == (PEER, {"state": "here"})
        killed.kill()
        await killed.wait()
        assert await anext(messages) == (PEER, {"state": "gone"})


async def test_strange_messages_are_left_out(url: str) -> None:
    parts = parse_url(url)
    known = {"username": USER, "password": key_of(parts)}
    async with aiomqtt.Client(parts.host, parts.port, **known) as stranger, _linked(url, "reader") as reader:
        messages = reader.subscribe(PEERS)
        reader.announce(PEER, {"ready": True})
        assert await anext(messages) == (PEER, {"ready": True})
        for junk in (b"\xff\xfe", b"[1]", b"7", b"{", b'{"a": "' + b"x" * (64 << 10) + b'"}', b"[" * 5000):
            await stranger.publish(PEER, junk, qos=1)
        await stranger.publish(f"{PEER}/deeper", b'{"outside": 1}', qos=1)
        await stranger.publish("elsewhere", b'{"outside": 1}', qos=1)
        await stranger.publish(PEER, b'{"good": 1}', qos=1)
        assert await anext(messages) == (PEER, {}), "what was said before is said no more"
        assert await anext(messages) == (PEER, {"good": 1})
    assert reader.refused == 6


async def test_retained_messages_of_other_topics_and_repeats_do_not_arrive(url: str) -> None:
    async with _linked(url, "announcer") as announcer:
        announcer.announce(topics.scheduler(), {"address": "elsewhere"})
        announcer.announce(topics.peer("p2"), {"n": 2})
        announcer.announce(PEER, {"n": 1})
        async with _linked(url, "reader") as reader:
            messages = reader.subscribe(PEER)
            assert await anext(messages) == (PEER, {"n": 1})
            announcer.announce(PEER, {"n": 1})
            announcer.announce(PEER, {"n": 3})
            assert await anext(messages) == (PEER, {"n": 3})


async def test_the_link_is_told_as_it_comes_and_goes(url: str) -> None:
    told: list[bool] = []
    bus = Bus(url, "told", on_connected=told.append)
    running = asyncio.create_task(bus.run())
    async with asyncio.timeout(60):
        while not told:
            await asyncio.sleep(0.01)
    assert bus.connected
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert told == [True, False]


async def test_a_broker_that_is_away_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"mqtt://127.0.0.1:{closed.getsockname()[1]}"
    bus = Bus(url, "patient")
    running = asyncio.create_task(bus.run())
    await asyncio.sleep(0.5)  # several attempts
    assert not running.done()
    assert not bus.connected
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# Finding the scheduler -----------------------------------------------------------------------------------------------


async def test_a_joiner_waits_for_a_scheduler_that_comes_later(url: str) -> None:
    finding = asyncio.create_task(find_scheduler(url, timeout_s=20))
    async with _linked(url, "scheduler") as scheduler:
        scheduler.announce(topics.scheduler(), {"address": "not an address", "epoch": 1, "protocol": 1})
        await asyncio.sleep(0.1)
        assert not finding.done()
        scheduler.announce(topics.scheduler(), Announcement("127.0.0.1:7950", epoch=1).payload())
        assert (await finding).address == "127.0.0.1:7950"


@asynccontextmanager
async def _behind_tls(url: str, server: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a listener that speaks TLS and hands on to the broker at `url`."""
    broker = parse_url(url)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(broker.host, broker.port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server) as listener:
        yield listener.sockets[0].getsockname()[1]


async def test_over_mqtts_the_broker_proves_its_name_and_may_ask_for_a_certificate(url: str, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    authority.issue_cert("peer-1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "ours.pem")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(server)
    server.verify_mode = ssl.CERT_REQUIRED
    said = Announcement("10.0.0.5:7950", epoch=3, product="0.1.0")
    async with _behind_tls(url, server) as port:
        key = key_of(parse_url(url))
        at, ours = f"{USER}:{key}@localhost:{port}", f"ca={tmp_path / 'ca.pem'}&cert={tmp_path / 'ours.pem'}"
        async with _linked(f"mqtts://{at}?{ours}", "scheduler") as scheduler:
            scheduler.announce(topics.scheduler(), said.payload())
            assert await find_scheduler(f"mqtts://{at}?{ours}", timeout_s=10) == said
        for wrong in (
            f"mqtts://{at.replace('localhost', '127.0.0.1')}?{ours}",  # another name than that in its certificate
            f"mqtts://{at}?{ours.replace('ca.pem', 'stranger.pem')}",
            f"mqtts://{at}?ca={tmp_path / 'ca.pem'}",
            f"mqtt://{at}",
        ):
            with pytest.raises(SchedulerUnreachable, match="does not answer"):
                await find_scheduler(wrong, timeout_s=1.0)


async def test_nobody_announced_is_told_apart_from_no_broker(url: str) -> None:
    with pytest.raises(SchedulerUnreachable, match="no scheduler announced itself"):
        await find_scheduler(url, timeout_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"mqtt://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(SchedulerUnreachable, match="does not answer"):
        await find_scheduler(gone, timeout_s=0.3)


async def test_another_protocol_is_refused_by_name(url: str) -> None:
    async with _linked(url, "scheduler") as scheduler:
        other = Announcement("127.0.0.1:7950", epoch=1, protocol=PROTOCOL_VERSION + 1)
        scheduler.announce(topics.scheduler(), other.payload())
        with pytest.raises(IncompatibleVersion, match=f"protocol {PROTOCOL_VERSION + 1}"):
            await find_scheduler(url, timeout_s=10)


# Who may announce ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _announces(url: str, said: Announcement, swarm: str = "default") -> AsyncIterator[None]:
    """A scheduler that holds the name until it ends in order."""
    bus = Bus(url, "scheduler", will=(topics.scheduler(swarm), {}))
    held = Presence(bus, swarm, said)
    running = [asyncio.create_task(bus.run())]
    try:
        await held.claim()
        running.append(asyncio.create_task(held.hold()))
        yield
    finally:
        for task in reversed(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_a_second_scheduler_is_refused_and_the_first_is_still_found(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's address stayed with the broker for good, and every stage server dialled it."""
    monkeypatch.setattr(presence, "AGAIN_S", 0.05)
    first, second = Announcement("10.0.0.5:1", 3, database="a"), Announcement("10.0.0.6:1", 1, database="b")
    async with _announces(url, first):
        assert await find_scheduler(url, timeout_s=20) == first
        with pytest.raises(NotAllowed, match=r"10\.0\.0\.5:1 is announced") as caught:
            async with _announces(url, second):
                raise AssertionError
        assert "--swarm" in caught.value.hint
        assert await find_scheduler(url, timeout_s=20) == first
        async with _announces(url, second, "other"):
            assert await find_scheduler(url, swarm="other", timeout_s=20) == second
            assert await find_scheduler(url, timeout_s=20) == first


async def test_the_scheduler_itself_claims_its_name_and_gives_it_back(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second scheduler took the name of a living one, and after it had ended nobody was found any more."""
    options = SchedulerOptions("127.0.0.1:0", "", "127.0.0.1", None, "sqlite", url, tmp_path, insecure=True)
    living = Announcement("10.0.0.5:1", 3, database="a")
    async with asyncio.timeout(100):
        async with _announces(url, living):
            assert await find_scheduler(url) == living
            with monkeypatch.context() as patient:
                patient.setattr(presence, "RETAINED_S", 60.0)
                patient.setattr(presence, "ANSWER_S", 60.0)
                with pytest.raises(ExceptionGroup) as caught:
                    await serve(options)
            assert caught.value.subgroup(NotAllowed) is not None
            assert await find_scheduler(url) == living

        async with _linked(url, "reader") as reader:
            serving = asyncio.create_task(serve(options))
            messages = reader.subscribe(topics.scheduler())
            while (await anext(messages))[1].get("database") in (None, "a"):
                pass
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            while (await anext(messages))[1]:
                pass


async def test_a_living_scheduler_announces_again_what_was_overwritten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "AGAIN_S", 0.05)
    said = Announcement("10.0.0.5:1", 3, database="a")
    async with _announces(url, said), _linked(url, "stranger") as stranger:
        messages = stranger.subscribe(topics.scheduler())
        assert (await anext(messages))[1]["database"] == "a"
        for wrong in ({}, {"address": "0.0.0.0:7990"}, Announcement("0.0.0.0:7990", 9).payload()):
            stranger.announce(topics.scheduler(), wrong)
            async with asyncio.timeout(60):
                while (await anext(messages))[1].get("database") != "a":
                    pass


async def test_the_announcement_of_a_dead_scheduler_holds_nobody_up_and_one_that_ends_takes_its_own_away(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "ANSWER_S", 0.2)
    async with _linked(url, "stranger") as stranger:
        stranger.announce(topics.scheduler(), Announcement("10.0.0.5:1", 3, database="a").payload())
        assert (await anext(stranger.subscribe(topics.scheduler())))[1]["database"] == "a"
    said = Announcement("10.0.0.6:1", 1, database="b")
    async with _announces(url, said):
        assert await find_scheduler(url, timeout_s=20) == said
    with pytest.raises(SchedulerUnreachable, match="no scheduler announced itself"):
        await find_scheduler(url, timeout_s=1.0)
