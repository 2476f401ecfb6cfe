"""Answers `swarm doctor`: the time here, the speed of bytes, and whether the caller can be dialled.

Only the caller's own address is dialled, and nothing is sent there. Decision: docs/decisions/087.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from scheduler.api.sessions import host_of
from swarm.errors import InvalidConfig
from swarm.text import printable
from swarm.wire import jobs_pb2 as pb

BYTES_MAX = 1 << 20
WORD_BYTES_MAX = 64
DIAL_S_MAX = 3.0


async def answer(
    request: pb.ProbeRequest,
    peer: str,
    now_unix_s: float,
    dialling: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> pb.ProbeReply:
    """The answer to a caller with gRPC's name `peer`; InvalidConfig if the request asks for too much.

    `dialling` gives a place for the time that the caller is dialled, or raises.
    """
    if len(request.payload) > BYTES_MAX or request.answer_bytes > BYTES_MAX:
        raise InvalidConfig(f"a probe carries at most {BYTES_MAX} bytes each way")
    if request.dial_port > 65535 or len(request.word) > WORD_BYTES_MAX:
        raise InvalidConfig("a probe names a port up to 65535, and a word of at most 64 bytes")
    host = host_of(peer)
    reply = pb.ProbeReply(payload=bytes(request.answer_bytes), unix_s=now_unix_s, caller=host)
    if request.dial_port:
        with dialling():
            reply.fault = await fault_of(host, request.dial_port, request.word) if host else "your address is not known"
    return reply


async def fault_of(host: str, port: int, word: bytes) -> str:
    """Why there is no answer with the word there; empty if there is. With an empty word any connection will do."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(DIAL_S_MAX):
            reader, writer = await asyncio.open_connection(host, port)
            return "" if await reader.readexactly(len(word)) == word else "something else answers there"
    except TimeoutError:
        return f"no answer within {DIAL_S_MAX:g} s"
    except asyncio.IncompleteReadError:
        return "something else answers there"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else printable(str(error))
    finally:
        if writer is not None:
            writer.close()
