"""Admission: the scheduler's own certificate, the guard before every call, joins, and the audit log.

At its first start a scheduler makes an authority in DATA/pki. For the user who started it, it puts an admin's identity
into the profiles. `swarm` and stage servers on this machine find it there, so no flags are needed on one machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc.aio

from scheduler.api.members.audit_trail import AuditTrail
from scheduler.api.members.join import JoinEndpoint
from scheduler.api.members.passes import Issuer
from scheduler.api.members.relays import RelayDesk
from scheduler.api.members.service import MemberService
from scheduler.api.sessions import Sessions
from scheduler.brain.members.enrolment import Member
from scheduler.brain.members.persons import Person
from scheduler.storage.database import Database
from scheduler.storage.members.book import Members
from swarm.errors import InvalidConfig, SwarmError
from swarm.listening import LOOPBACK
from swarm.pki.authority import AWAY_S, CERTIFICATE_FILE, LIFE_S, Authority
from swarm.pki.files import write_private
from swarm.pki.https import Https
from swarm.pki.identity import RENEW_AT, Identity, Wallet, issue
from swarm.pki.joining import DEFAULT_JOIN_PORT
from swarm.pki.names import Principal, Role, scheduler_of
from swarm.pki.passes import PassKey
from swarm.pki.profiles import SCHEDULER_FILE, profile_folder
from swarm.process.audit import Audit
from swarm.process.logs import Logger
from swarm.rpc.guard import CALLER, Guard, caller_with
from swarm.text import is_wildcard
from swarm.types import PeerId
from swarm.wire import members_pb2_grpc
from swarm.wire.messages import CutOff

LOCAL_ADMIN, LOCAL_SCRAPER = "local", "local"
LIST_JOBS = "/swarm.wire.Jobs/List"  # who may call it may see the page
LOOK_S = 60.0  # how often the ages of certificates are looked at


class Gatekeeper:
    """All parts of admission; make it with `open`, then `serve`."""

    def __init__(
        self,
        members: Members,
        audit: Audit,
        admins: Audit,
        folder: Path,
        log: Logger,
        denied: Callable[[str], None] = lambda code: None,
    ) -> None:
        """`denied` hears the error code of each call and join that is refused."""
        self.members = members
        self._trail = AuditTrail(audit, admins, log, time.monotonic, denied)
        self._folder = folder
        self._log = log
        self._joins: JoinEndpoint | None = None
        self._addresses: set[str] = set()
        self.wallet = Wallet(self._own_identity())
        self.https = Https(self.wallet, folder / "https.pem")
        self.guard = Guard(members.check, self._trail.denied, self._trail, members.check_stays)
        revoked = [known for known in members.members() if known.is_revoked and known.role is Role.STAGE_SERVER]
        cut_off = tuple(CutOff(PeerId(known.name), known.revoked_unix_s) for known in revoked)
        self.issuer = Issuer(PassKey.open(folder), members.authority.cluster, cut_off)

    @classmethod
    async def open(
        cls,
        data_dir: Path,
        database: Database,
        log: Logger,
        life_s: float = LIFE_S,
        denied: Callable[[str], None] = lambda code: None,
        grace_s: float = AWAY_S,
    ) -> Gatekeeper:
        """Read the book of members; at the first start, make the authority. InvalidConfig if a file cannot be used."""
        folder = data_dir / "pki"
        if not (folder / CERTIFICATE_FILE).exists():  # before it is made: a start that ends in between does it again
            await Members.clear(database)
        authority = await asyncio.to_thread(Authority.open, folder, time.time())
        members = Members(authority, database, time.time, life_s, grace_s)
        await members.load()
        audit, admins = (Audit(data_dir / name, time.time) for name in ("audit.jsonl", "admin.jsonl"))
        return cls(members, audit, admins, folder, log, denied)

    async def serve(
        self,
        server: grpc.aio.Server,
        listen: str,
        bound: int,
        address: str,
        join_listen: str,
        sessions: Sessions,
        relays: RelayDesk | None = None,
    ) -> str:
        """Take joins and give the address where; `sessions` and `relays` end when their member is revoked.

        `join_listen` may be "": the host of `listen`, at port 7949 or any free one. `address` is where others reach us.
        """
        host, _, port = listen.rpartition(":")
        # Wherever others reach it, a person on this machine dials where it listens.
        self._addresses = {address, f"{LOOPBACK if is_wildcard(host) else host}:{bound}"}
        loop = asyncio.get_running_loop()
        self._joins = JoinEndpoint(self.members, lambda: address, loop, self.https, self._trail.joined)
        if join_listen:
            host, _, port = join_listen.rpartition(":")
        joins = f"{address.rpartition(':')[0]}:{self._listen(host, int(port) if join_listen else None)}"
        self.members.on_replaced = sessions.replaced
        self.members.on_revoked = partial(self._revoked, sessions, relays)
        service = MemberService(self.members, joins)
        members_pb2_grpc.add_MembersServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        await self._show_here()
        self._trail.started(scheduler_of(self.members.authority.cluster), address=address, joins=joins)
        return joins

    def _listen(self, host: str, port: int | None) -> int:
        assert self._joins is not None
        try:
            return self._joins.start(host, DEFAULT_JOIN_PORT if port is None else port)
        except InvalidConfig:
            if port is not None:
                raise
            return self._joins.start(host, 0)

    async def renew(self) -> None:
        """Keep the certificates of the scheduler and of those on this machine young, for ever."""
        is_shown = True
        while True:
            await asyncio.sleep(min(LOOK_S, (1.0 - RENEW_AT) / 2 * self.members.life_s))
            if self.wallet.is_due:
                self.wallet.identity, is_shown = self._own_identity(), False
            if is_shown or self.wallet.identity is None:
                continue
            try:
                await self._show_here()
                is_shown = True
            except (SwarmError, OSError) as error:
                self._log.warning("a certificate was not renewed everywhere", reason=str(error))

    def close(self) -> None:
        if self._joins is not None:
            self._joins.close()
        self._trail.close()

    @property
    def _own_scraper(self) -> Principal:
        return Principal(self.members.authority.cluster, Role.METRICS, LOCAL_SCRAPER)

    def _own_identity(self) -> Identity:
        return self._issue(scheduler_of(self.members.authority.cluster))

    def _issue(self, principal: Principal) -> Identity:
        """An identity that is in no book: it is for this machine, and may call nothing that asks the book."""
        return issue(self.members.authority, principal, time.time(), life_s=self.members.life_s)

    async def _show_here(self) -> None:
        """Put the identities of the local admin and of a Prometheus on this machine where they look for them."""
        scraper = self._issue(self._own_scraper)
        await asyncio.to_thread(scraper.save, self._folder / "metrics")
        identity = await self.members.issue_here(Role.ADMIN, LOCAL_ADMIN)
        try:
            for address in self._addresses:
                await asyncio.to_thread(identity.save, profile_folder(address))
                write_private(profile_folder(address) / SCHEDULER_FILE, address.encode())
        except InvalidConfig as error:
            self._log.warning("no profile for the local admin", reason=error.message)

    def asks(self) -> Person:
        """Whose call is being answered."""
        caller = CALLER.get()
        assert caller is not None, "the guard stands before every call"
        return Person(caller.principal.role, caller.principal.name)

    def visitor(self, certificate_der: bytes | None) -> Person:
        """The page's visitor with this certificate; an error, logged for audit, if the role may not list jobs."""
        who = "nobody"
        try:
            caller = caller_with(certificate_der)
            who = caller.principal.uri
            self.members.check(caller, LIST_JOBS)
        except SwarmError as error:
            self._trail.denied("Page", who, error)
            raise
        return Person(caller.principal.role, caller.principal.name)

    def scraper(self, certificate_der: bytes | None) -> None:
        """Raise unless the holder of this certificate is a member still. It is asked on the thread of the HTTP port."""
        self.members.check_scraper(caller_with(certificate_der), self._own_scraper)

    def _revoked(self, sessions: Sessions, relays: RelayDesk | None, member: Member) -> None:
        self._trail.revoked(member)
        self.guard.cut_off(Principal(self.members.authority.cluster, member.role, member.name))
        if member.role is Role.RELAY and relays is not None:
            relays.revoke(member.name)
        if member.role is Role.STAGE_SERVER:
            sessions.revoke(PeerId(member.name), f"it was revoked: {member.reason or 'no reason given'}")
