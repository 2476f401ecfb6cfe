"""No message of a caller holds the event loop of a scheduler or a stage server for 50 ms, whatever it says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from scheduler.app import SchedulerOptions, serve
from swarm.job.spec import CONFIG_VALUES_MAX, TEXT_CHARACTERS_MAX
from swarm.limits import COUNTS_MAX, FILES_MAX, HASHES_ASKED_MAX, SHARDS_MAX
from swarm.rpc.channel import MAX_MESSAGE_BYTES, client_options, new_server
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.mapping import to_event
from swarm.types import PROTOCOL_VERSION, JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire import frame_pb2, jobs_pb2, members_pb2, session_pb2
from swarm.wire.messages import Averaged, Heartbeat, Hello, LinkSpeed, ParameterNorm, ReportedCell
from tests.support.fields import field
from tests.support.services import free_port
from tests.support.serving import serving
from tests.support.turns import TRIES, UNITS_MAX, event_loop

ROOM_BYTES = MAX_MESSAGE_BYTES - 1024
ANSWER_S_MAX = 120.0
PAUSE_S = 5.0  # times the number of the pass
_SERVICES: list[ServiceDescriptor] = [
    jobs_pb2.DESCRIPTOR.services_by_name["Jobs"],
    session_pb2.DESCRIPTOR.services_by_name["Session"],
    *(one for name, one in members_pb2.DESCRIPTOR.services_by_name.items() if name != "Members"),
]


def nonsense(kind: Descriptor, room_bytes: int = ROOM_BYTES) -> Iterator[tuple[str, bytes]]:
    """Messages of this kind of the greatest length, each of one thing only."""

    def filled(piece: bytes) -> bytes:
        return piece * (room_bytes // len(piece))

    yield "bytes that are none", filled(b"\xff")
    yield "fields that nobody knows", filled(b"\xf8\x7f\x01")
    texts = [field for field in kind.fields if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)]
    for text in texts[:1]:
        yield f"a long {text.name}", field(text.number, b"a" * (room_bytes - 16))
        yield f"many times {text.name}", filled(field(text.number, b""))
    for each in kind.fields:
        if each.message_type is None:
            continue
        if each.message_type.GetOptions().map_entry:
            keys = (field(each.number, field(1, b"%06x" % at)) for at in range(room_bytes // 11))
            yield f"a table {each.name}", b"".join(keys)
        else:
            yield f"nothing but {each.name}", filled(field(each.number, b""))
            for what, content in nonsense(each.message_type, room_bytes - 16) if room_bytes == ROOM_BYTES else ():
                yield f"{each.name}: {what}", field(each.number, content)


def answered(
    address: str, method: str, messages: Sequence[bytes], is_stream: bool, replies_max: int | None = 1
) -> tuple[str, bytes]:
    """Send messages, as an honest client would never do; gives how that ended, and what was replied last.

    After so many replies the call is given up; None: it goes on until the other side ends it.
    """
    replies: list[bytes] = []
    with grpc.insecure_channel(address, options=client_options()) as channel:
        try:
            if is_stream:
                calls = channel.stream_stream(method)(iter(messages), timeout=ANSWER_S_MAX)
            else:
                calls = channel.unary_stream(method)(messages[0], timeout=ANSWER_S_MAX)
            replies += islice(calls, replies_max)
            calls.cancel()
        except grpc.RpcError as error:
            return str(error.code().name), b""  # type: ignore[attr-defined]
    return "OK", replies[-1] if replies else b""


async def held_up(address: str, service: ServiceDescriptor) -> list[str]:
    """The messages to a service for which the event loop of this thread was held for too long, or that were no error
    that a caller can understand.

    A message costs the least of some tries, as any cost does; the unit is measured beside each. The tries are whole
    passes with more and more seconds between them: nearly all that a message of 4 MiB costs here is fresh memory, and
    its price is high for as long as others on the machine ask for memory too.
    """
    found = []
    left = [(method, what, message) for method in service.methods for what, message in nonsense(method.input_type)]
    for tried in range(TRIES):
        await asyncio.sleep(tried * PAUSE_S)
        dear = []
        for method, what, message in left:
            path, is_stream = f"/{service.full_name}/{method.name}", method.client_streaming
            async with event_loop() as held:
                ended, _ = await asyncio.to_thread(answered, address, path, [message], is_stream)
            said = f"{method.name} of {what}: {held.units:.0f} units, {ended}"
            if ended in ("INTERNAL", "UNKNOWN"):
                found.append(said)
            elif held.units > UNITS_MAX:
                dear.append(((method, what, message), said))
        left = [message for message, _ in dear]
        if not left:
            return found
    return found + [said for _, said in dear]


@asynccontextmanager
async def scheduler(folder: Path) -> AsyncIterator[str]:
    address = f"127.0.0.1:{free_port()}"
    options = SchedulerOptions(address, "", "127.0.0.1", None, "sqlite", "none", folder, insecure=True)
    serving = asyncio.create_task(serve(options))
    try:
        while (await asyncio.to_thread(answered, address, "/swarm.wire.Jobs/Version", [b""], False))[0] != "OK":
            assert not serving.done(), serving.exception()
        yield address
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("service", _SERVICES, ids=lambda service: service.name)
async def test_no_message_to_the_scheduler_holds_its_event_loop_for_fifty_units(
    service: ServiceDescriptor, tmp_path: Path
) -> None:
    """A list of 1.4 million empty hashes took 130, and bytes that were no upload 460, most for a traceback."""
    async with scheduler(tmp_path / "data") as address:
        assert await held_up(address, service) == []


async def test_no_message_to_a_stage_server_holds_its_event_loop_for_fifty_units() -> None:
    class Receiver:
        def admit(self, header: Any) -> None:
            raise AssertionError("nonsense has no header")

    receiver: Any = Receiver()
    server = new_server()
    add_peer_service(server, receiver)
    async with serving(server) as address:
        assert await held_up(address, frame_pb2.DESCRIPTOR.services_by_name["Peer"]) == []


# Messages that are what they should be --------------------------------------------------------------------------------

TOKENS = bytes(8192)  # of a shard
BLOB = bytes(4 << 20)  # a file of a model, that one message brings
Said: TypeAlias = Callable[[str], Sequence[bytes]]  # the messages of a call that names this job


def sent(content: bytes) -> Sequence[bytes]:
    """An upload in one message."""
    shard = jobs_pb2.Shard(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    return [jobs_pb2.ShardChunk(shard=shard, payload=content).SerializeToString()]


def spec_json(steps: int) -> str:
    """A spec that says as much as one may."""
    config: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config["max_position_embeddings"] = 2048
    config |= {f"note{number}": "x" * 12 for number in range(CONFIG_VALUES_MAX - 100)}
    return json.dumps(
        {
            "name": "long",
            "model": {"id": "some/model", "family": "llama", "config": config, "init": "random"},
            "data": {"source": "x" * TEXT_CHARACTERS_MAX, "sequence_length": 16},
            "training": {"steps": steps, "global_batch_sequences": 12, "microbatch_sequences": 2, "warmup_steps": 1},
        },
        separators=(",", ":"),
    )


def longest_submit() -> bytes:
    shard, blob = (hashlib.sha256(content).hexdigest() for content in (TOKENS, BLOB))
    request = jobs_pb2.SubmitRequest(
        spec_json=spec_json(1000),
        shards=[jobs_pb2.Shard(sha256=shard)] * SHARDS_MAX,
        token_dtype="uint16",
        vocabulary_size=257,
        end_of_text=256,
        files=[
            jobs_pb2.JobFile(path=f"model/part-{number:05d}", sha256=blob, size_bytes=len(BLOB))
            for number in range(FILES_MAX)
        ],
    )
    request.tokenizer_files["tokenizer.json"] = b" " * (ROOM_BYTES - request.ByteSize() - 64)
    return request.SerializeToString()


def longest_session(job: str) -> Sequence[bytes]:
    """A Hello, then metrics and norms, each with all that it may list."""
    cell, peer = ReportedCell(Microbatch(1, 0, 1), 1, True, True, 1.0), PeerId("gpu-1")
    cells, links = COUNTS_MAX["Hello.cells"], COUNTS_MAX["Heartbeat.links"]
    hello = Hello(peer, time.time_ns(), PROTOCOL_VERSION, "0", "127.0.0.1:1", "", "cpu", 1, 1 << 30, -1, JobId(job))
    norms = tuple(ParameterNorm(f"layer.{number}.weight", 1.0) for number in range(COUNTS_MAX["Averaged.norms"]))
    events = (
        replace(hello, cells=(cell,) * cells),
        Heartbeat(1, (LinkSpeed(peer, 1e9, 0.1),) * links),
        Averaged(0, 0, UnitName("stage-0"), Round(1, 1), "mean", norms, 0.1),
    )
    return [to_event(event).SerializeToString() for event in events]


def longest_store(job: str) -> Sequence[bytes]:
    header = session_pb2.StoreHeader(
        job=job, peer="gpu-1", incarnation=1, version=1, total_bytes=len(BLOB), path="model/model.safetensors"
    )
    return [session_pb2.StoreChunk(header=header, payload=BLOB).SerializeToString()]


def of_job(kind: type[Message], **fields: object) -> Said:
    return lambda job: [kind(job=job, **fields).SerializeToString()]


# In this order, of one job; and how each ends.
VALID: dict[str, tuple[Said, str]] = {
    "Jobs/PutShard": (lambda _: sent(BLOB), "OK"),
    "Jobs/MissingShards": (
        lambda _: [jobs_pb2.ShardList(shards=[jobs_pb2.Shard(sha256="0" * 64)] * HASHES_ASKED_MAX).SerializeToString()],
        "OK",
    ),
    "Jobs/Check": (lambda _: [longest_submit()], "OK"),
    "Jobs/Submit": (lambda _: [longest_submit()], "OK"),
    "Jobs/Get": (of_job(jobs_pb2.JobRequest), "OK"),
    "Jobs/Watch": (of_job(jobs_pb2.JobRequest), "OK"),
    "Jobs/List": (lambda _: [jobs_pb2.ListRequest(all=True).SerializeToString()], "OK"),
    "Jobs/Explain": (lambda job: [jobs_pb2.ExplainRequest(about=job).SerializeToString()], "OK"),
    "Jobs/Checkpoints": (of_job(jobs_pb2.CheckpointsRequest, verify=True), "OK"),
    "Session/Attach": (longest_session, "OK"),
    "Session/Store": (longest_store, "FAILED_PRECONDITION"),  # its job is not at work
    "Jobs/Pause": (of_job(jobs_pb2.JobRequest), "OK"),
    "Jobs/Resume": (of_job(jobs_pb2.ResumeRequest, spec_json=spec_json(2000)), "OK"),
    "Jobs/Cancel": (of_job(jobs_pb2.CancelRequest, reason="x" * 1000), "OK"),
    "Jobs/Collect": (lambda _: [jobs_pb2.CollectRequest(dry_run=True).SerializeToString()], "OK"),
    "Jobs/Remove": (of_job(jobs_pb2.JobRequest), "OK"),
}
STREAMS = ("Jobs/PutShard", "Session/Attach", "Session/Store")


async def test_no_valid_message_of_the_greatest_length_holds_the_event_loop_of_a_scheduler_for_fifty_units(
    tmp_path: Path,
) -> None:
    """A submit of 14,000 files took 120 units, and 100 each later call that wrote its row or looked at its files."""
    least = dict.fromkeys(VALID, math.inf)
    async with scheduler(tmp_path / "data") as address:
        for tried in range(TRIES):
            await asyncio.sleep(tried * PAUSE_S)
            job = ""  # its removal takes its files along
            await asyncio.to_thread(answered, address, "/swarm.wire.Jobs/PutShard", sent(TOKENS), True, None)
            for name, (said, ends) in VALID.items():
                messages, is_stream = said(job), name in STREAMS
                call = partial(answered, address, f"/swarm.wire.{name}", messages, is_stream, None if is_stream else 1)
                async with event_loop() as held:
                    ended, reply = await asyncio.to_thread(call)
                assert ended == ends, f"{name}: {ended}"
                job = jobs_pb2.JobView.FromString(reply).id if name == "Jobs/Submit" else job
                least[name] = min(least[name], held.units)
            if max(least.values()) <= UNITS_MAX:
                break
    assert {name: f"{units:.0f} units" for name, units in least.items() if units > UNITS_MAX} == {}
