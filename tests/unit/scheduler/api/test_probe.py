"""What a scheduler tells a machine that asks how it is reached."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest

from scheduler.api import probe
from scheduler.brain.members.persons import Person
from scheduler.brain.members.places import CallSlots
from swarm.errors import Crowded, InvalidConfig
from swarm.pki.names import Role
from swarm.wire import jobs_pb2 as pb

HERE = "ipv4:127.0.0.1:41234"


@pytest.mark.parametrize(
    ("peer", "host"),
    [(HERE, "127.0.0.1"), ("ipv6:%5B2001:db8::1%5D:41234", "2001:db8::1"), ("unix:/run/socket", ""), ("", "")],
)
def test_the_caller_is_dialled_where_his_call_came_from(peer: str, host: str) -> None:
    assert probe.host_of(peer) == host


async def test_a_probe_answers_with_time_and_bytes_and_dials_nobody_unasked() -> None:
    reply = await probe.answer(pb.ProbeRequest(payload=bytes(9), answer_bytes=7), HERE, 12.5)
    assert (len(reply.payload), reply.unix_s, reply.caller, reply.fault) == (7, 12.5, "127.0.0.1", "")


@pytest.mark.parametrize(
    "request_",
    [
        pb.ProbeRequest(answer_bytes=probe.BYTES_MAX + 1),
        pb.ProbeRequest(payload=bytes(probe.BYTES_MAX + 1)),
        pb.ProbeRequest(dial_port=65536),
        pb.ProbeRequest(dial_port=1, word=bytes(65)),
    ],
)
async def test_a_probe_that_asks_for_too_much_is_refused(request_: pb.ProbeRequest) -> None:
    with pytest.raises(InvalidConfig):
        await probe.answer(request_, HERE, 0.0)


@pytest.mark.parametrize(
    ("said", "asked", "fault"),
    [
        (b"word", b"word", ""),
        (b"drow", b"word", "something else answers there"),
        (b"", b"word", "something else answers there"),
        (b"", b"", ""),
    ],
)
async def test_only_the_callers_own_word_shows_that_he_is_reached(said: bytes, asked: bytes, fault: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reply = await probe.answer(pb.ProbeRequest(dial_port=port, word=asked), HERE, 0.0)
    assert reply.fault == fault


async def test_a_closed_and_a_silent_port_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert "refused" in (await probe.fault_of("127.0.0.1", closed.getsockname()[1], b"")).lower()
    monkeypatch.setattr(probe, "DIAL_S_MAX", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "no answer" in await probe.fault_of("127.0.0.1", silent.getsockname()[1], b"word")


async def test_a_caller_is_dialled_only_while_he_has_a_place() -> None:
    """One viewer could have the scheduler dial a thousand ports at a time, for three seconds each."""
    places = CallSlots(3, 2, "calls have the scheduler dial")
    ann, eve = Person(Role.VIEWER, "ann"), Person(Role.VIEWER, "eve")
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        asked = pb.ProbeRequest(dial_port=server.sockets[0].getsockname()[1], word=b"word")

        def probing(person: Person) -> Coroutine[Any, Any, pb.ProbeReply]:
            return probe.answer(asked, HERE, 0.0, partial(places.taken, person, 0.0))

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(probing(eve)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Crowded, match="2 of your calls"):
                await probing(eve)
            reply = await probe.answer(pb.ProbeRequest(), HERE, 1.0, partial(places.taken, eve, 0.0))
            assert reply.unix_s == 1.0, "who asks for no dial needs no place"
            waiting.append(tasks.create_task(probing(ann)))
            await asyncio.sleep(0)
            with pytest.raises(Crowded, match="3 calls"):
                await probing(ann)
            released.set()
        assert [task.result().fault for task in waiting] == ["something else answers there"] * 3
    assert (await probe.answer(asked, HERE, 0.0, partial(places.taken, eve, 0.0))).fault
