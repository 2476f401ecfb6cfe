"""Who comes in: the scheduler's own certificate, the guard before every call, joins, and the audit log.

At its first start a scheduler makes an authority in DATA/pki. For the user who started it, it puts an admin's identity
into the profiles, where `swarm` and stage servers on this machine find it: nobody on one machine types anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc.aio

from scheduler.api.join import JoinEndpoint
from scheduler.api.member_service import MemberService
from scheduler.storage.database import Database
from scheduler.storage.members import Member, Members
from swarm.errors import InvalidConfig, SwarmError
from swarm.limits import Bucket
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.identity import RENEW_AT, Identity, Wallet, issue
from swarm.pki.names import Role, scheduler_of
from swarm.pki.profiles import profile_folder
from swarm.process.audit import Audit
from swarm.process.logs import Logger
from swarm.rpc.guard import Caller, Guard
from swarm.types import PeerId
from swarm.wire import members_pb2_grpc

LOCAL_ADMIN = "local"
DEFAULT_JOIN_PORT = 7949
LOOK_S = 60.0  # how often the ages of certificates are looked at
DENIALS_PER_S, DENIALS_AT_ONCE = 10.0, 100  # that are written down
# Calls that change something.
AUDITED = frozenset(
    {f"/swarm.wire.Jobs/{name}" for name in ("Submit", "Cancel", "Pause", "Resume", "Drain", "Chaos", "Pull")}
    | {f"/swarm.wire.Members/{name}" for name in ("Issue", "CreateToken", "RevokeToken", "RevokeMember")}
)


class Admission:
    """Everything about who may come in; make it with `open`, then `serve`."""

    def __init__(self, members: Members, audit: Audit, folder: Path, log: Logger) -> None:
        self.members = members
        self._audit = audit
        self._folder = folder
        self._log = log
        self._denials = Bucket(DENIALS_PER_S, DENIALS_AT_ONCE)
        self._joins: JoinEndpoint | None = None
        self._addresses: set[str] = set()
        self.wallet = Wallet(self._own_identity())
        self.guard = Guard(self._may, self._denied)

    @classmethod
    async def open(cls, data_dir: Path, database: Database, log: Logger, life_s: float = LIFE_S) -> Admission:
        """Read the book of members; at the first start, make the authority. InvalidConfig if a file cannot be used."""
        folder = data_dir / "pki"
        authority = Authority.open(folder, time.time())
        members = Members(authority, database, time.time, life_s)
        await members.load()
        return cls(members, Audit(data_dir / "audit.jsonl", time.time), folder, log)

    async def serve(
        self,
        server: grpc.aio.Server,
        listen: str,
        address: str,
        loop: asyncio.AbstractEventLoop,
        cut: Callable[[PeerId, str], None],
    ) -> str:
        """Take joins and give the address where; `listen` may be "": the host of `address`, at 7949 or a free port."""
        # A person on this machine may dial it at loopback, wherever others reach it.
        self._addresses = {address, f"127.0.0.1:{address.rpartition(':')[2]}"}
        self._joins = JoinEndpoint(self.members, lambda: address, loop, self._folder)
        identity = self.wallet.identity
        assert identity is not None
        self._joins.show(identity)
        host = (listen or address).rpartition(":")[0]
        port = self._listen(host, int(listen.rpartition(":")[2]) if listen else DEFAULT_JOIN_PORT, bool(listen))
        joins = f"{address.rpartition(':')[0]}:{port}"
        self.members.on_revoked = partial(_cut, cut)
        service = MemberService(self.members, joins)
        members_pb2_grpc.add_MembersServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        await self._show_local_admin()
        return joins

    def _listen(self, host: str, port: int, is_chosen: bool) -> int:
        assert self._joins is not None
        try:
            return self._joins.start(host, port)
        except InvalidConfig:
            if is_chosen:
                raise
            return self._joins.start(host, 0)

    async def renew(self) -> None:
        """Keep the scheduler's certificate and that of the local admin young, for ever."""
        is_shown = True
        while True:
            await asyncio.sleep(min(LOOK_S, RENEW_AT * self.members.life_s))
            if self.wallet.is_due:
                self.wallet.identity, is_shown = self._own_identity(), False
            if is_shown or self.wallet.identity is None:
                continue
            try:
                if self._joins is not None:
                    self._joins.show(self.wallet.identity)
                await self._show_local_admin()
                is_shown = True
            except SwarmError as error:
                self._log.warning("a certificate was not renewed everywhere", reason=error.message)

    def close(self) -> None:
        if self._joins is not None:
            self._joins.close()
        self._audit.close()

    def _own_identity(self) -> Identity:
        authority = self.members.authority
        return issue(authority, scheduler_of(authority.cluster), time.time(), life_s=self.members.life_s)

    async def _show_local_admin(self) -> None:
        identity = await self.members.issue_here(Role.ADMIN, LOCAL_ADMIN)
        try:
            for address in self._addresses:
                identity.save(profile_folder(address))
        except InvalidConfig as error:
            self._log.warning("no profile for the local admin", reason=error.message)

    def _may(self, caller: Caller, method: str) -> None:
        self.members.check(caller, method)
        if method in AUDITED:
            self._audit.write(caller.principal.uri, method.rpartition("/")[2], "ok")

    def _denied(self, method: str, who: str, error: SwarmError) -> None:
        if self._denials.take(time.monotonic()):
            self._audit.write(who, method.rpartition("/")[2], f"{error.code} {error.message}")
            self._log.warning("refused", method=method, who=who, reason=error.message)


def _cut(cut: Callable[[PeerId, str], None], member: Member) -> None:
    if member.role is Role.STAGE_SERVER:
        cut(PeerId(member.name), f"it was revoked: {member.reason or 'no reason given'}")
