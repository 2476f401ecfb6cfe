"""Members of a swarm, for tests: certificates of any kind, and a scheduler's side that asks for them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scheduler.api.members.admission import Gatekeeper
from scheduler.storage.database import Database
from scheduler.storage.members.book import Members
from swarm.pki import keys
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.identity import Identity, issue
from swarm.pki.names import Principal, Role
from swarm.pki.profiles import find_profile
from swarm.pki.tokens import JoinLine
from swarm.process.logs import get_logger
from swarm.rpc.channel import bind, new_server
from swarm.rpc.guard import Caller
from swarm.types import PeerId

LOOPBACK = "127.0.0.1:0"


@dataclass
class Clock:
    """A clock that stands still until it is told the time."""

    unix_s: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.unix_s


def fingerprint_of(pem: bytes) -> str:
    """The fingerprint of a certificate's key, as the book of members has it."""
    return keys.fingerprint(keys.public_key(keys.read_certificate(pem))).hex()


def caller_of(certificate_pem: bytes) -> Caller:
    """Who calls with this certificate."""
    from_pem = Identity(b"", certificate_pem, b"")
    return Caller(from_pem.principal, fingerprint_of(certificate_pem))


def identity_of(authority: Authority, role: Role, name: str, *, life_s: float = LIFE_S) -> Identity:
    """A key and a certificate of now."""
    return issue(authority, Principal(authority.cluster, role, name), time.time(), life_s=life_s)


@cache
def _empty_tables() -> bytes:
    """A database file with all tables and no rows: to make them takes longer than most tests."""

    async def made(path: Path) -> None:
        await (await Database.open(f"sqlite:///{path}", None)).close()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
        path = Path(folder) / "a.db"
        executor.submit(asyncio.run, made(path)).result()
        return path.read_bytes()


def database_url(folder: Path) -> str:
    """Where the folder's database is; an empty one if there was none."""
    path = folder / "a.db"
    if not path.exists():
        path.write_bytes(_empty_tables())
    return f"sqlite:///{path}"


@dataclass
class SchedulerSide:
    """What of a scheduler has to do with members, served at loopback."""

    address: str
    joins: str
    admission: Gatekeeper
    cut: list[tuple[PeerId, str]] = field(default_factory=list)

    @property
    def members(self) -> Members:
        return self.admission.members

    @property
    def admin(self) -> Identity:
        """What the user who started it finds in his profiles."""
        found = find_profile(self.address)
        assert found is not None
        return found

    async def token(self, role: Role = Role.STAGE_SERVER, uses: int = 1, names: str = "") -> JoinLine:
        line, _ = await self.members.create_token(role, 600.0, uses, names, "admin me", self.joins)
        return line


@asynccontextmanager
async def scheduler_side(folder: Path) -> AsyncIterator[SchedulerSide]:
    """Members, guard, joins and the local admin's profile; the data of an earlier start are taken up again."""
    folder.mkdir(exist_ok=True)
    database = await Database.open(database_url(folder), None)
    admission = await Gatekeeper.open(folder, database, get_logger("test"))
    server = new_server(admission.guard)
    address = f"127.0.0.1:{bind(server, LOOPBACK, admission.wallet)}"
    side = SchedulerSide(address, "", admission)
    sessions: Any = SimpleNamespace(replaced=lambda _: None, revoke=lambda *told: side.cut.append(told))
    try:
        port = int(address.rpartition(":")[2])
        side.joins = await admission.serve(server, LOOPBACK, port, address, LOOPBACK, sessions)
        await server.start()
        yield side
    finally:
        await server.stop(5.0)  # as the program does: calls that were answered write their lines
        admission.close()
        await database.close()
