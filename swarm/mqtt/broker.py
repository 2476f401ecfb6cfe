"""A broker on this machine, for `swarm up`, a scheduler without one, and tests: amqtt.

`python -m swarm.mqtt.broker --port P --key FILE` runs it: a child process, so that its faults and memory are not the
scheduler's. It listens on loopback only, lets in processes of this login alone (key.py), and keeps nothing on disk:
peers announce themselves again when they reconnect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from swarm.errors import InvalidConfig, SwarmError
from swarm.limits import Bucket
from swarm.listening import IPV4, IPV6, LOOPBACK
from swarm.mqtt.key import FOLDERS, USER, new_key
from swarm.process.children import dying_with_parent, end
from swarm.process.logs import get_logger
from swarm.process.temporary import temporary_folder

START_S_MAX = 20.0  # importing amqtt on a busy machine takes seconds
ATTEMPTS = 3
RESTART_S = 0.5
CONNECTIONS_MAX = 1000
LINES_PER_S, LINES_AT_ONCE = 1 / 60, 5  # of amqtt: it has one for each connection of a stranger

_ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH")  # of ours, which holds passwords: a broker needs none of them
_ACCEPTED = b"\x20\x02\x00\x00"
_DISCONNECT = b"\xe0\x00"

_log = get_logger(__name__)


@asynccontextmanager
async def local_broker(port: int = 0, *, log: Path | None = None) -> AsyncIterator[str]:
    """Start a broker on loopback and give its URL (mqtt://127.0.0.1:PORT); end it on exit.

    Processes of this login connect with the URL alone, because they find the key. Others cannot.
    Port 0 is any free one. `log` receives what the broker writes. Raises InvalidConfig if the port is busy or the
    broker does not start.
    """
    with temporary_folder(FOLDERS) as folder:
        log = log or folder / "broker.log"
        child, bound = await _start(port, folder, log)
        children = [child]
        keeper = asyncio.create_task(_keep(children, bound, folder, log))
        try:
            _log.info("broker started", broker=f"mqtt://{LOOPBACK}:{bound}")
            yield f"mqtt://{LOOPBACK}:{bound}"
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await end(*children)


async def _start(port: int, folder: Path, log: Path) -> tuple[asyncio.subprocess.Process, int]:
    # A free port is only free until someone takes it: try again with another.
    for attempt in range(1 if port else ATTEMPTS):
        bound = port or _free_port()
        child, key = await _spawn(bound, folder, log)
        try:
            if await _accepts(bound, key, child):
                return child, bound
        except BaseException:
            await end(child)
            raise
        _log.info("broker did not start", port=bound, attempt=attempt + 1)
        await end(child)
    raise InvalidConfig(
        f"the broker did not start at {LOOPBACK}:{bound}: {_last_line(log)}",
        hint="check that the port is free, or give the URL of a running broker with --broker",
    )


async def _keep(children: list[asyncio.subprocess.Process], port: int, folder: Path, log: Path) -> None:
    """Restart the broker whenever the last of `children` ends; its clients reconnect by themselves."""
    while True:
        code = await children[-1].wait()
        _log.warning("broker ended", port=port, exit_code=code)
        await asyncio.sleep(RESTART_S)
        child, _ = await _spawn(port, folder, log)
        children.append(child)


async def _spawn(port: int, folder: Path, log: Path) -> tuple[asyncio.subprocess.Process, str]:
    """The child and its key."""
    key = new_key(folder, port)
    command = [sys.executable, "-P", "-m", "swarm.mqtt.broker", "--port", str(port), "--key", str(folder / str(port))]
    with log.open("ab") as out:
        child = await asyncio.create_subprocess_exec(
            *dying_with_parent(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
    return child, key


async def _accepts(port: int, key: str, child: asyncio.subprocess.Process) -> bool:
    """Whether the child speaks MQTT at `port` before it ends and within the time that a start may take."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S_MAX):
            while child.returncode is None:
                with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                    async with asyncio.timeout(1.0):
                        if await _greets(port, key):
                            # Another broker may hold the port while our child is about to notice: give it the time.
                            await asyncio.sleep(0.05)
                            return child.returncode is None
                await asyncio.sleep(0.05)
    return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it ended without a word")


async def _greets(port: int, key: str) -> bool:
    # Not aiomqtt: it may swallow a cancellation that comes together with the answer (bus.py).
    reader, writer = await asyncio.open_connection(LOOPBACK.strip("[]"), port)
    try:
        writer.write(_connect(key))
        answer = await reader.readexactly(len(_ACCEPTED))
        writer.write(_DISCONNECT)
        return answer == _ACCEPTED
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _connect(key: str) -> bytes:
    """A CONNECT packet of MQTT 3.1.1 with a clean session, a user and a password (section 3.1)."""
    texts = b"".join(len(text).to_bytes(2, "big") + text.encode() for text in ("swarm-?", USER, key))
    rest = b"\x00\x04MQTT\x04\xc2\x00\x05" + texts
    assert len(rest) < 128, "its length is one byte"
    return b"\x10" + bytes([len(rest)]) + rest


def _free_port() -> int:
    with socket.socket(socket.AF_INET6 if LOOPBACK == IPV6 else socket.AF_INET) as probe:
        try:
            probe.bind((LOOPBACK.strip("[]"), 0))
        except OSError as error:
            raise InvalidConfig(
                f"this machine has no {IPV4} and no {IPV6}: {error.strerror}",
                hint="set its loopback up (ip link set lo up), or run swarm scheduler with --broker none",
            ) from None
        return int(probe.getsockname()[1])


async def serve_amqtt(port: int, key: str) -> None:
    """Run amqtt on loopback, for clients with the key, until SIGTERM or SIGINT; SwarmError if it does not start."""
    # amqtt warns at import about plug-ins that we do not use.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from amqtt.broker import Broker  # noqa: PLC0415  # slow to import
        from amqtt.contexts import BrokerConfig, ListenerConfig  # noqa: PLC0415
        from amqtt.errors import BrokerError  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = BrokerConfig(
        listeners={"default": ListenerConfig(bind=f"{LOOPBACK}:{port}", max_connections=CONNECTIONS_MAX)},
        plugins={"swarm.mqtt.amqtt_key.KeyPlugin": {"key": key}},
    )
    broker = Broker(config, loop=loop)
    try:
        await broker.start()
    except BrokerError as error:
        raise SwarmError(f"broker does not start at {LOOPBACK}:{port}: {error}") from error
    await stop.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await broker.shutdown()


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m swarm.mqtt.broker", description="amqtt on loopback")
    arguments.add_argument("--port", type=int, required=True)
    arguments.add_argument("--key", type=Path, required=True, help="file with the password of its user")
    options = arguments.parse_args()
    told, lines = logging.StreamHandler(), Bucket(LINES_PER_S, LINES_AT_ONCE)
    told.addFilter(lambda record: lines.take(time.monotonic()))
    logging.basicConfig(level=logging.ERROR, handlers=[told])
    try:
        asyncio.run(serve_amqtt(options.port, options.key.read_text()))
    except SwarmError as error:
        sys.exit(f"error[{error.code}]: {error.message}")


if __name__ == "__main__":
    main()
