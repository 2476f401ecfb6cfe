"""A broker as a process of its own, so that it can be killed: `python -m tests.chaos.broker PORT`."""

from __future__ import annotations

import asyncio
import sys

from swarm.mqtt.broker import local_broker
from swarm.process.lifecycle import say_ready
from swarm.process.logs import configure


async def main(port: int) -> None:
    async with local_broker(port) as url:
        say_ready("broker", broker=url)
        await asyncio.Event().wait()


if __name__ == "__main__":
    configure("info", "json")
    asyncio.run(main(int(sys.argv[1])))
